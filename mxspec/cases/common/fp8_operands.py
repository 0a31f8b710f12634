"""Codes and fp32 scales of matmul operands."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.spec import normal


def codes(rows: int, K: int, seed: int = 0) -> Tensor:
    """Normally distributed e4m3fn codes without NaN."""
    return (normal(rows, K, seed=seed) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)


def scales(rows: int, cols: int, spread: int = 3, major: str = "k", seed: int = 1) -> Tensor:
    """Scales with random mantissas within 2^-spread .. 2^spread, K-major or MN-major."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint((127 - spread) << 23, (127 + spread) << 23, (rows, cols), generator=generator)  # fp32 bits
    values = bits.to(torch.int32).view(torch.float32)
    return values if major == "k" else values.t().contiguous().t()
