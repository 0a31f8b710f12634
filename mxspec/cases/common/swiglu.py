"""Gates and ups for the cases of SwiGLU."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.spec import normal, random_normal


def gates(M: int, columns: int, seed: int = 0) -> Tensor:
    """`(M, columns)` bfloat16: gates between -12 and 12 in the first half, ups of many sizes in the second half."""
    gate_up = random_normal(M, columns, seed=seed)
    half = columns // 2
    gate_up[:, :half] = (normal(M, half, seed=seed + 7) * 4.0).bfloat16()
    return gate_up


def every_gate() -> Tensor:
    """`(512, 256)`: each of the 65536 bit patterns of bfloat16 as a gate, and its up, which is between 1 and 2."""
    gate = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).view(128, 512).mT
    up = 1 + torch.arange(512)[:, None] * torch.arange(1, 129) % 128 / 128
    return torch.cat([gate, up.bfloat16()], -1)


def least_gates() -> Tensor:
    """`(8, 256)`: gates from -86.5 to -90, where sigmoid falls below 2^-126, each beside an up of 2^120 in its row."""
    gate_up = torch.zeros(8, 256, dtype=torch.bfloat16)
    gate_up[:, 0], gate_up[:, 128] = -86.5 - torch.arange(8) / 2, 2.0**120
    return gate_up


def with_subnormal(t: Tensor) -> Tensor:
    """The same matrix with a subnormal number in its first row."""
    t[0, 1] = 2.0**-130
    return t
