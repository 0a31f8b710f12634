"""compressed-tensors (vLLM project): FP8 blocks with the scale in the weight's dtype; MX with a fold at 1.75."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.formats import E2M1, E2M3, E4M3FN, E8M0FNU, NVFP4_LARGEST, ElementFormat
from mxspec.reference.common.numerics import divided, saturating_cast
from mxspec.rules import _fp8, _mx, _nvfp4

NAME = "compressed-tensors"
RECORDED: dict[str, dict[str, dict[str, str]]] = {
    "mx": {"ct020": {"scaling": "even"}},
    "blk": {"ct020blk": {"scale_format": "fp32"}},
    "nvfp4": {"ct020": {}},
}
ZERO_SCALE = 0.125  # the epsilon of e4m3fn, which takes the place of a scale of 0


def mx_quantize(
    x: Tensor,
    *,
    axis: int = -1,
    elem_dtype: torch.dtype | str = torch.float8_e4m3fn,
    scaling: str = "even",
    scale_layout: str = "plain",
) -> tuple[Tensor, Tensor]:
    """Adds a quarter to the mantissa of amax, then takes floor's scale: from 1.75 * 2^k up, amax counts as 2^(k+1).

    That is the contract's `even` for e2m1. For e4m3fn it is another rule, because the contract's `even` rounds to the
    three mantissa bits of e4m3fn. For e2m3 a sixteenth is added, as by the contract's `even`. Minus zero becomes plus
    zero, except in e2m3, because a zero point of 0 is added. An amax that counts as 2^128, an Inf or a NaN gives byte
    127; the finite elements of its block become zeros, and the others NaN. In e2m1 and e2m3 the preset refuses an Inf
    or a NaN, because the formats have none.

    Source: compressed-tensors 0.20.0, quantization/utils/mxfp_utils.py (`generate_mx_scales`, `round_to_power_2`),
        quantization/utils/fp4_utils.py (`cast_to_fp4`), fp6_utils.py (`cast_to_fp6`), compressors/mxfp6.
    """
    return _mx.quantize(x, axis, elem_dtype, scaling, scale_layout, _rule, NAME, RECORDED["mx"])


def _rule(blocks: Tensor, fmt: ElementFormat) -> tuple[Tensor, Tensor]:
    _no_float16("mx_quantize", blocks)
    blocks = blocks.float()
    amax = blocks.abs().amax(-1, keepdim=True)
    if fmt in (E2M1, E2M3) and not amax.isfinite().all():
        raise ValueError(f"mx_quantize: {NAME} has no rule for an Inf or a NaN in {fmt.name}; needs finite numbers")
    power = (amax.view(torch.int32) + (1 << (19 if fmt is E2M3 else 21))) >> 23  # 2^21 is a quarter of the mantissa
    byte = (power - fmt.emax).clamp(min=0)
    beyond = (power == 255) | ~amax.isfinite()
    scale = torch.where(beyond, torch.inf, (byte - E8M0FNU.bias).float().exp2())
    scaled = blocks / scale
    return saturating_cast(scaled if fmt is E2M3 else scaled + 0.0, fmt), torch.where(beyond, 127, byte)


def fp8_quantize_1x128(
    x: Tensor, *, axis: int = -1, scale_format: str = "fp32", scale_major: str = "k", eps: float = 0.0
) -> tuple[Tensor, Tensor]:
    """`amax / 448` in the dtype of x, and `x / scale` in that dtype: in bfloat16 both are rounded to 8 bits.

    The scale is returned in fp32, which holds it exactly. A scale that is 0 becomes the epsilon of the dtype, and minus
    zero becomes plus zero.
    compressed-tensors has no eps; eps here raises amax.

    Source: compressed-tensors 0.20.0, quantization/utils/helpers.py (`calculate_qparams`),
        quantization/lifecycle/forward_helpers.py (`_quantize`).
    """
    return _fp8.quantize_1x128(x, axis, scale_format, scale_major, eps, _factor, _scaled)


def fp8_quantize_128x128(
    w: Tensor, *, scale_format: str = "fp32", eps: float = 0.0, with_transpose: bool = False
) -> tuple[Tensor, ...]:
    """The rule of `fp8_quantize_1x128`, over a square.

    Source: as for `fp8_quantize_1x128`.
    """
    return _fp8.quantize_128x128(w, scale_format, eps, with_transpose, _factor, _scaled)


def _factor(blocks: Tensor, dims: tuple[int, ...], scale_format: str, eps: float) -> tuple[Tensor, Tensor]:
    if scale_format != "fp32":
        raise NotImplementedError(f"fp8_quantize: {NAME} has no scale_format = {scale_format!r}; needs 'fp32'")
    _no_float16("fp8_quantize", blocks)
    amax = blocks.abs().amax(dims, keepdim=True).clamp(min=eps)
    scale = divided(amax, E4M3FN.max)
    scale = torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale)
    return scale, scale.float()


def _scaled(blocks: Tensor, factor: Tensor) -> Tensor:
    return (blocks / factor).float() + 0.0  # a zero point of 0


def _no_float16(op: str, blocks: Tensor) -> None:
    """In float16 the scales of compressed-tensors underflow, and nothing was recorded."""
    if blocks.dtype == torch.float16:
        raise NotImplementedError(f"{op}: {NAME} has no recorded result for float16; needs bfloat16 or float32")


def nvfp4_quantize(
    x: Tensor,
    tensor_amax: Tensor | None = None,
    *,
    axis: int = -1,
    block: str = "1x16",
    scale_layout: str = "plain",
) -> tuple[Tensor, Tensor, Tensor]:
    """The scale is `fl(G * (b/6))`, and 0.125 if it rounds to 0. Codes are `fl(x / fl(s / G))`.

    `b/6` is rounded to the dtype of x. The code writes `2688.0 / A`, and torch computes this as `fl(fl(1/A) * 2688)`,
    rounded twice. Both roundings are to the dtype of A. It is fp32 if tensor_amax is given. Otherwise it is the dtype
    of x, as for the extrema of llm-compressor. If G overflows, or the given A is NaN, G is 1. In float16 G overflows
    for A up to 0.04. The code of -0 is 0. A NaN that reaches a code is refused.

    compressed-tensors stores G, and its reader divides: `q * fl(s / G)`. The tensor scale here is the multiplier
    `fl(1/G)`.

    Source: compressed-tensors 0.20.0, quantization/utils/helpers.py (`generate_gparam`, `calculate_qparams`),
        compressors/nvfp4/base.py (`compress`).
    """
    return _nvfp4.quantize(x, tensor_amax, axis, block, scale_layout, _nvfp4_rule, NAME)


def global_scale(A: Tensor) -> Tensor:
    """G, which compressed-tensors stores, from the largest magnitude of a matrix; fp32, rounded in the dtype of A."""
    return torch.nan_to_num(A.reciprocal() * NVFP4_LARGEST, nan=1.0, posinf=1.0).float()


def _nvfp4_rule(blocks: Tensor, b: Tensor, A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    G = global_scale(A)
    s = G * (b / E2M1.max).float()
    s = torch.where(_nvfp4.rounded_scale(s) == 0, ZERO_SCALE, s)
    y = blocks.float() / (_nvfp4.rounded_scale(s) / G).unsqueeze(-1)
    return y + 0.0, s, G.reciprocal()
