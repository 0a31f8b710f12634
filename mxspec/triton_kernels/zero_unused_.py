"""zero_unused_ in Triton. Usually there is nothing to zero: each program then reads one or two ends and stops."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mxspec.triton_kernels.common.launch import UNFUSED, for_device

RANK = {(9, 0): 1, (10, 0): 1}  # Blackwell: compiled, not run
PTX = (r"st\.global\.v4\.b32",)

# PROGRAMS is the number of programs for all matrices together. ELEMENTS is the number of elements that a program writes
# at a time.
_HOPPER = {"PROGRAMS": 1024, "ELEMENTS": 4096, "num_warps": 4}
CONFIGS = {(9, 0): _HOPPER, (10, 0): _HOPPER}


@triton.jit
def _zero(
    x, stride_g, stride_m, M, K, offs, stride_offs, G, programs,
    OF_GROUPS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    g, program = tl.program_id(0) // programs, tl.program_id(0) % programs
    step = tl.cast(stride_offs, tl.int64)
    if OF_GROUPS:
        begin = tl.load(offs + (g - 1) * step, mask=g > 0, other=0)
        first = tl.where(tl.load(offs + g * step) <= begin, 0, M)
    else:
        first = tl.maximum(tl.load(offs + (G - 1) * step, mask=G > 0, other=0), 0)
    x += g.to(tl.int64) * stride_g
    row0 = first.to(tl.int64) + program * ROWS
    while row0 < M:
        row = row0 + tl.arange(0, ROWS)
        for k0 in range(0, tl.cast(K, tl.int64), COLS):  # k0 + COLS may pass 2^31
            k = k0 + tl.arange(0, COLS)
            there = (row < M)[:, None] & (k < K)[None, :]
            tl.store(x + (row * stride_m)[:, None] + k[None, :], tl.zeros((ROWS, COLS), x.dtype.element_ty), mask=there)
        row0 += programs * ROWS


def zero_unused_(x: Tensor, offs: Tensor) -> None:
    if not x.numel():
        return
    matrices, (M, K) = x.shape[0] if x.ndim == 3 else 1, x.shape[-2:]
    chosen = for_device(CONFIGS, x.device)
    cols = min(triton.next_power_of_2(K), 2048)
    rows = chosen["ELEMENTS"] // cols
    programs = max(1, min(chosen["PROGRAMS"] // matrices, -(-M // rows)))
    _zero[(matrices * programs,)](
        x, x.stride(0), x.stride(-2), M, K, offs, offs.stride(0), offs.shape[0], programs,
        x.ndim == 3, rows, cols, num_warps=chosen["num_warps"], **UNFUSED,
    )  # fmt: skip
