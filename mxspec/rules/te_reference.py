"""TransformerEngine's Python reference. Its kernels are tested against it, but differ on Inf, NaN and zero."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.formats import E4M3FN
from mxspec.rules import _fp8

NAME = "TransformerEngine's reference"
RECORDED = {"blk": {f"teref.p2={i}": {"scale_format": name} for i, name in enumerate(("fp32", "pow2"))}}


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
