"""TransformerEngine's Python reference. Its kernels are tested against it, but differ on Inf, NaN and zero."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.formats import E2M1, E4M3FN, NVFP4_LARGEST
from mxspec.rules import _fp8, _nvfp4

NAME = "TransformerEngine's reference"
RECORDED: dict[str, dict[str, dict[str, str]]] = {
    "blk": {f"teref.p2={i}": {"scale_format": name} for i, name in enumerate(("fp32", "pow2"))},
    "nvfp4": {"teref": {}},
}


def fp8_quantize_1x128(
    x: Tensor, *, axis: int = -1, scale_format: str = "fp32", scale_major: str = "k", eps: float = 0.0
) -> tuple[Tensor, Tensor]:
    """`448 / amax` with eps 0; a block of zeros has the factor 1, an Inf the factor 0 and the stored scale Inf.

    A NaN makes the block and its scale NaN. Under pow2, `frexp` gives NaN the exponent 0, so the scale is 2 and the
    other elements are numbers.

    Source: tests/pytorch/references/quantize_scale_calc.py (`scale_from_amax_tensor`), d0067d0.
    """
    return _fp8.quantize_1x128(x, axis, scale_format, scale_major, eps, _factor)


def fp8_quantize_128x128(
    w: Tensor, *, scale_format: str = "fp32", eps: float = 0.0, with_transpose: bool = False
) -> tuple[Tensor, ...]:
    """The rule of `fp8_quantize_1x128`, over a square.

    Source: tests/pytorch/references/blockwise_quantizer_reference.py (`_quantize_square_block_tiling`).
    """
    return _fp8.quantize_128x128(w, scale_format, eps, with_transpose, _factor)


def _factor(blocks: Tensor, dims: tuple[int, ...], scale_format: str, eps: float) -> tuple[Tensor, Tensor]:
    amax = blocks.float().abs().amax(dims, keepdim=True).clamp(min=eps)
    s = torch.full_like(amax, E4M3FN.max) / amax
    s = torch.where(s.isinf(), torch.finfo(blocks.dtype).max, s)
    if scale_format == "pow2":
        s = torch.ldexp(torch.ones_like(s), torch.frexp(s).exponent - 1)
        s = torch.where(amax.isinf(), 0.0, s)
    s = torch.where(amax == 0, 1.0, s)
    return s, s.reciprocal()


def nvfp4_quantize(
    x: Tensor,
    tensor_amax: Tensor | None = None,
    *,
    axis: int = -1,
    block: str = "1x16",
    scale_layout: str = "plain",
) -> tuple[Tensor, Tensor, Tensor]:
    """Multiplications by rounded reciprocals: the scale is `b * fl(S * fl(1/6))`, and `S = fl(2688 / A)`.

    The codes are `x * fl(1 / fl(s * fl(1 / S)))`. S and this factor are at most the largest fp32 number, and S is 1 if
    A is Inf. A block whose scale rounds to 0 has the largest factor, so its elements become codes of 6, under a scale
    of 0. The code of -0 is 0. A NaN makes the scale of its block NaN and its codes 0. 16x16 blocks have the same rule.

    TransformerEngine stores A. The tensor scale here is `fl(A * fl(1/2688))`. Its reader computes
    `fl(fl(s * A) * fl(1/2688))`, so it may differ in the last bit of fp32.

    Source: transformer_engine/pytorch/custom_recipes/reference_nvfp4.py (`_quantize_blockwise_reference`), d0067d0;
        common/cast/nvfp4/dequantize_nvfp4.cuh (the reader).
    """
    return _nvfp4.quantize(x, tensor_amax, axis, block, scale_layout, _nvfp4_rule, NAME, squares=True, nan_as=0.0)


def _nvfp4_rule(blocks: Tensor, b: Tensor, A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y, s, multiplier = nvfp4_numbers(blocks, b, A, encode_scale(A))
    return y + 0.0, s, multiplier  # -0 becomes +0


def encode_scale(A: Tensor) -> Tensor:
    """`2688 / A`, at most the largest fp32 number; 1 if A is Inf."""
    S = (torch.full_like(A, NVFP4_LARGEST, dtype=torch.float32) / A.float()).clamp(max=torch.finfo(torch.float32).max)
    return torch.where(S == 0, 1.0, S)


def nvfp4_numbers(blocks: Tensor, b: Tensor, A: Tensor, S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What is rounded to codes and to scales, and the multiplier, from the encoding scale S of each matrix."""
    s = b.float() * (S * torch.full_like(S, E2M1.max).reciprocal())
    factor = (_nvfp4.rounded_scale(s) * S.reciprocal()).reciprocal().clamp(max=torch.finfo(torch.float32).max)
    return blocks.float() * factor.unsqueeze(-1), s, A.float() * torch.full_like(S, NVFP4_LARGEST).reciprocal()
