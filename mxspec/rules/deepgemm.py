"""DeepGEMM's own quantizers in Python: they store `amax / 448`, and raise a smaller amax to 1e-4."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.formats import E4M3FN
from mxspec.reference.common.numerics import divided
from mxspec.rules import _fp8

NAME = "DeepGEMM"
RECORDED = {"blk": {f"dgemm.ue8m0={i}": {"scale_format": name} for i, name in enumerate(("fp32", "pow2"))}}


def fp8_quantize_1x128(
    x: Tensor, *, axis: int = -1, scale_format: str = "fp32", scale_major: str = "k", eps: float = 1e-4
) -> tuple[Tensor, Tensor]:
    """Stores `amax / 448`, rounded, and multiplies by its rounded reciprocal. The contract rounds `448 / amax` first.

    pow2 rounds the stored scale up to an exponent field from 1 to 254: a block with an Inf has the finite scale 2^127
    and saturates, and a NaN stays in its element. Under fp32 a block with an Inf stores the scale Inf, and its finite
    elements become zeros. On a GPU, torch divides by a Python number by multiplying with its reciprocal. DeepGEMM's
    scale there may therefore differ in the last bit from the division here.

    Source: deep_gemm/utils/math.py (`per_token_cast_to_fp8`, `ceil_to_ue8m0`).
    """
    return _fp8.quantize_1x128(x, axis, scale_format, scale_major, eps, _factor)


def fp8_quantize_128x128(
    w: Tensor, *, scale_format: str = "fp32", eps: float = 1e-4, with_transpose: bool = False
) -> tuple[Tensor, ...]:
    """The rule of `fp8_quantize_1x128`, over a square.

    Source: deep_gemm/utils/math.py (`per_block_cast_to_fp8`).
    """
    return _fp8.quantize_128x128(w, scale_format, eps, with_transpose, _factor)


def _factor(blocks: Tensor, dims: tuple[int, ...], scale_format: str, eps: float) -> tuple[Tensor, Tensor]:
    amax = blocks.float().abs().amax(dims, keepdim=True).clamp(min=eps)
    stored = divided(amax, E4M3FN.max)
    if scale_format == "pow2":
        bits = stored.view(torch.int32)
        stored = (((bits >> 23) + ((bits & 0x7FFFFF) != 0)).clamp(1, 254) << 23).view(torch.float32)
    return stored.reciprocal(), stored
