"""Columns of bfloat16 and float16 in registers, two neighbours in a word, as the memory has them.

A thread holds 16 rows of a column in a tile `(RUNS, COLS)` of `runs.load16`. Kept as words, the numbers take half of
the registers that they take in fp32. One instruction compares two of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mxspec.triton_kernels.common.launch import capability
from mxspec.triton_kernels.common.numerics import eight


def compares_pairs(device: torch.device) -> bool:
    """Whether the GPU has the instruction `max.u16x2`: Hopper and later. No interpreter has it."""
    return device.type != "cpu" and torch.version.hip is None and capability(device) >= (9, 0)


@triton.jit
def parted(x):
    """The even and the odd columns, `(RUNS, COLS / 2, 16)`, of `(RUNS, COLS, ...)`. The dots are 16 rows."""
    return tl.split(x.reshape(x.shape[0], x.shape[1] // 2, 2, 16).permute(0, 1, 3, 2))


@triton.jit
def halves(x):
    """The first and the last 8 rows, `(RUNS, COLS / 2, 8)`, of `(RUNS, COLS / 2, 16)`."""
    return tl.split(x.reshape(x.shape[0], x.shape[1], 2, 8).permute(0, 1, 3, 2))


@triton.jit
def paired(x):
    """Words of an even and an odd column, uint32 `(RUNS, COLS / 2, 16)`, from numbers of 2 bytes `(RUNS, COLS, ...)`.

    If the columns lie side by side in memory, the loaded registers are these words, and this takes no instruction.
    """
    even, odd = parted(x.to(tl.uint16, bitcast=True).to(tl.uint32))
    return even | (odd << 16)


@triton.jit
def unpaired(word, DTYPE: tl.constexpr):
    """The numbers of the even and of the odd column, in fp32."""
    if tl.bfloat16 == DTYPE:  # the upper half of an fp32
        return (word << 16).to(tl.float32, bitcast=True), (word & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        even, odd = word.to(tl.uint16).to(DTYPE, bitcast=True), (word >> 16).to(tl.uint16).to(DTYPE, bitcast=True)
        return even.to(tl.float32), odd.to(tl.float32)


@triton.jit
def _larger(a, b, ASM: tl.constexpr):
    """The larger of two magnitudes in both halves of a word. Their bits have the order of the magnitudes."""
    if ASM:
        return tl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.uint32, is_pure=True, pack=1)
    else:
        return tl.maximum(a & 0xFFFF0000, b & 0xFFFF0000) | tl.maximum(a & 0xFFFF, b & 0xFFFF)


@triton.jit
def largest_of_pairs(pairs, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """The bits of the largest magnitudes of the even and of the odd columns, as `magnitude_bits`, from `(..., 8)`."""
    n = eight(pairs & 0x7FFF7FFF)
    word = _larger(_larger(n[0], n[1], ASM), n[2], ASM)
    word = _larger(_larger(word, n[3], ASM), n[4], ASM)
    word = _larger(_larger(word, n[5], ASM), n[6], ASM)
    even, odd = unpaired(_larger(word, n[7], ASM), DTYPE)
    return even.to(tl.int32, bitcast=True), odd.to(tl.int32, bitcast=True)


@triton.jit
def columns_of_halves(e0, e1, o0, o1):
    """`(RUNS, COLS, 2)` from numbers for each half of the even and of the odd columns, `(RUNS, COLS / 2)`."""
    return tl.join(tl.join(e0, o0), tl.join(e1, o1)).reshape(e0.shape[0], 2 * e0.shape[1], 2)


@triton.jit
def even_and_odd(x):
    """`(RUNS, COLS / 2)` of the even and of the odd columns, from `(RUNS, COLS)`."""
    return tl.split(x.reshape(x.shape[0], x.shape[1] // 2, 2))
