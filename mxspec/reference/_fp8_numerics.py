"""The arithmetic of an FP8 128-block on tensors: its quantization factor."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.formats import E4M3FN

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
