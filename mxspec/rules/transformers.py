"""transformers' writer of FP8 checkpoints: it stores `1 / (448 * (1 / amax))`, so the scale is rounded three times."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.formats import E4M3FN
from mxspec.rules import _fp8

NAME = "transformers"
RECORDED = {"blk": {f"hf523.ue8m0={i}": {"scale_format": name} for i, name in enumerate(("fp32", "pow2"))}}


def fp8_quantize_1x128(
    x: Tensor, *, axis: int = -1, scale_format: str = "fp32", scale_major: str = "k", eps: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The factor `448 / amax`, computed as `448 * fp32(1 / amax)`; a block of zeros, or with a NaN, has the factor 1.

    torch divides a Python number by a tensor in that way. An amax below 448 / fp32 max has an infinite factor; its
    stored scale is 0. pow2 rounds the stored scale up to a power of two by log2 in fp32, and multiplies by its
    reciprocal. transformers has no eps; eps here raises amax.

    Source: transformers 5.23.0, integrations/finegrained_fp8.py (`Fp8Quantize._quantize_one`).
    """
    return _fp8.quantize_1x128(x, axis, scale_format, scale_major, eps, _factor)


def fp8_quantize_128x128(
    w: Tensor, *, scale_format: str = "fp32", eps: float = 0.0, with_transpose: bool = False
) -> tuple[Tensor, ...]:
    """The rule of `fp8_quantize_1x128`, over a square. transformers leaves a weight with a partial block as it is.

    Source: transformers 5.23.0, integrations/finegrained_fp8.py (`Fp8Quantize._quantize_one`).
    """
    return _fp8.quantize_128x128(w, scale_format, eps, with_transpose, _factor)


def _factor(blocks: Tensor, dims: tuple[int, ...], scale_format: str, eps: float) -> tuple[Tensor, Tensor]:
    amax = blocks.float().abs().amax(dims, keepdim=True).clamp(min=eps)
    factor = torch.where(amax > 0, amax.reciprocal() * E4M3FN.max, 1.0)  # a NaN is not above 0
    stored = factor.reciprocal()
    if scale_format == "pow2":
        stored = stored.clamp(min=torch.finfo(torch.float32).tiny).log2().ceil().exp2()
        stored = stored.to(torch.float8_e8m0fnu).float()
        factor = stored.reciprocal()
    return factor, stored
