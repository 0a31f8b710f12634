"""vLLM's reference of its NVFP4 kernels, which also emulates NVFP4 where a GPU has none."""

from __future__ import annotations

from torch import Tensor

from mxspec.formats import E2M1, NVFP4_LARGEST
from mxspec.rules import _nvfp4

NAME = "vLLM's reference"
RECORDED: dict[str, dict[str, dict[str, str]]] = {"nvfp4": {"vllm": {}}}
INSTEAD_OF_ZERO = 1e8  # `get_reciprocal`


def nvfp4_quantize(
    x: Tensor,
    tensor_amax: Tensor | None = None,
    *,
    axis: int = -1,
    block: str = "1x16",
    scale_layout: str = "plain",
) -> tuple[Tensor, Tensor, Tensor]:
    """The scale is `fl(G * fl(b * fl(1/6)))`. The codes are `x * fl(1 / fl(s * fl(1/G)))`; 1e8 replaces a divisor of 0.

    The caller gives G. vLLM's tests write `2688.0 / A`. torch computes this as `fl(fl(1/A) * 2688)`, rounded twice. The
    code of -0 is 0. Under a scale of 0 the codes of numbers up to 2.5e7 are 0. If G is Inf, for A below 7.9e-36, a NaN
    may reach the codes. The preset refuses a call in which it does, and so a NaN in x.

    The emulation divides by G, and the loaders of checkpoints keep `1/G`. The tensor scale here is `fl(1/G)`.

    Source: vLLM, model_executor/layers/quantization/utils/nvfp4_emulation_utils.py (`ref_nvfp4_quant`), 055e47c;
        tests/kernels/quantization/test_nvfp4_quant.py (G).
    """
    return _nvfp4.quantize(x, tensor_amax, axis, block, scale_layout, _nvfp4_rule, NAME)


def _nvfp4_rule(blocks: Tensor, b: Tensor, A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    G = A.float().reciprocal() * NVFP4_LARGEST
    s = G * (b.float() * (1 / E2M1.max))
    y = blocks.float() * _reciprocal(_nvfp4.rounded_scale(s) * _reciprocal(G)).unsqueeze(-1)
    return y + 0.0, s, G.reciprocal()


def _reciprocal(x: Tensor) -> Tensor:
    return (x + (x == 0) * INSTEAD_OF_ZERO).reciprocal()
