"""The limits that memory sets: a copy, and a quantizer's cast without scales, in the fastest plain kernels we know."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxspec import interpreters

interpreters.install()

CAST = {"BLOCK": 2048, "num_warps": 2}
COPY = {"BLOCK": 4096, "num_warps": 4}  # bytes


@triton.jit
def _bare_cast(x, out, n, BLOCK: tl.constexpr):
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + o, tl.load(x + o, mask=o < n).to(tl.float32).to(tl.float8e4nv), mask=o < n)


@triton.jit
def _copy(x, out, n, BLOCK: tl.constexpr):
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + o, tl.load(x + o, mask=o < n), mask=o < n)


def bare_cast(x: Tensor) -> Tensor:
    """Cast a contiguous tensor to float8_e4m3fn."""
    out = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    _bare_cast[(-(-x.numel() // CAST["BLOCK"]),)](x, out, x.numel(), **CAST, enable_fp_fusion=False)
    return out


def copy(x: Tensor) -> Tensor:
    """Copy a contiguous tensor.

    This is not `Tensor.copy_`, which is about as fast for most sizes. On an H200, `Tensor.copy_` in a CUDA graph is
    much slower for 512 MiB and for some larger powers of two and their multiples (see benchmarks/results/decisions.md).
    """
    out = torch.empty_like(x)
    source, target = (t.view(-1).view(torch.uint8) for t in (x, out))
    _copy[(-(-source.numel() // COPY["BLOCK"]),)](source, target, source.numel(), **COPY, enable_fp_fusion=False)
    return out
