"""The arithmetic of an FP8 128-block on tensors: its quantization factor, and the values of its codes."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.formats import E4M3FN, FP8_BLOCK_SIZE

SCALE_FORMATS = ("fp32", "pow2")


def quantization_scale(amax: Tensor, scale_format: str, eps: float) -> Tensor:
    """`448 / max(amax, eps)` as fp32, rounded once; NaN where amax is NaN or Inf.

    Tensor by tensor, because `448.0 / tensor` is a reciprocal times 448 in PyTorch: two roundings, wrong for
    33 of the 128 bfloat16 mantissas.
    """
    s = torch.full_like(amax, E4M3FN.max) / amax.clamp(min=eps)
    if scale_format == "pow2":
        s = (s.view(torch.int32) & 0x7F800000).view(torch.float32)  # drop the mantissa: round down
    return torch.where(amax.isfinite(), s, torch.nan)


def values(codes: Tensor, scale: Tensor) -> Tensor:
    """`code * scale`, exactly, in fp64: blocks of 128 along the last dimension, a scale for each of their rows."""
    return codes.double() * scale.double().repeat_interleave(FP8_BLOCK_SIZE, -1)


def square_values(codes: Tensor, scale: Tensor) -> Tensor:
    """The same with a scale for every 128 rows; the last may serve fewer."""
    return values(codes, scale.repeat_interleave(FP8_BLOCK_SIZE, -2)[..., : codes.shape[-2], :])
