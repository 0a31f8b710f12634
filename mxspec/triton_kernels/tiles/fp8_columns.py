"""FP8 blocks that lie across memory. The kernel transposes them in registers and stores the codes along the blocks.

A thread has 16 elements of each of 8 neighbouring rows, which are columns of memory. It loads 16 bytes of memory 16
times, and stores 16 bytes of a row 8 times. A warp is 8 threads along a block by 4 threads across, so that shuffles
compute amax.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mxspec.triton_kernels.common.fp8_numerics import factors
from mxspec.triton_kernels.common.numerics import magnitude_bits, saturating_cast, widened
from mxspec.triton_kernels.common.runs import load16


@triton.jit
def turned_index(WIDE: tl.constexpr, BLOCKS: tl.constexpr, COLS: tl.constexpr):
    """The indices of a tile of BLOCKS blocks of each of COLS rows: row, start of a block, start of a run in a block.

    Their shapes are `(4, COLS // 32, 1, 8)`, `(1, 1, BLOCKS, 1)` and `(1, 8, 1, 1, 1)`. A run is the 16
    elements of a row that one thread has.
    """
    thread, warp, row = tl.arange(0, 4) * 8, tl.arange(0, COLS // 32) * 32, tl.arange(0, 8)
    r = thread[:, None, None, None] + warp[None, :, None, None] + row[None, None, None, :]
    k, run = (tl.arange(0, BLOCKS) * 128)[None, None, :, None], tl.arange(0, 8)[None, :, None, None, None] * 16
    if WIDE:  # the products with strides are above 2^31
        r, k, run = r.to(tl.int64), k.to(tl.int64), run.to(tl.int64)
    return r, k, run


@triton.jit
def turn(
    x, qdata, r, k, run, stride_r, stride_k, K, inside, owned, left, eps_bits,
    POW2: tl.constexpr, BLOCKS: tl.constexpr, COLS: tl.constexpr, runs=None,
):  # fmt: skip
    """Quantize a tile that begins at x, store its codes, and return the reciprocal factors.

    The codes are stored from `qdata` on, in rows of length K.

    `inside` says which blocks are read, and `owned` which blocks are stored. `left`, if given, is the number of
    elements that exist from the start of each run on. `runs`, if given, says which runs of a block exist.
    """
    there, stored = inside[:, None, :, :, :], owned[:, None, :, :, :]
    if runs is not None:
        there, stored = there & runs, stored & runs
    if run.dtype == tl.int64:  # also the products in load16
        stride_k = tl.cast(stride_k, tl.int64)
    x += (r * stride_r + k * stride_k)[:, None, :, :, :] + run * stride_k
    wide = widened(load16(x, stride_k, there, left)).reshape(4, 8, COLS // 32, BLOCKS, 8, 16)
    return store_turned(wide, qdata, r, k, run, K, stored, eps_bits, POW2)


@triton.jit
def store_turned(wide, qdata, r, k, run, K, stored, eps_bits, POW2: tl.constexpr):
    """Quantize the fp32 values of a tile, store the codes, and return the reciprocal factors, as `turn` does."""
    s, back = factors(tl.max(tl.max(magnitude_bits(wide), axis=5), axis=1), eps_bits, POW2)
    q = saturating_cast(wide * s[:, None, :, :, :, None], qdata.dtype.element_ty)
    qdata += ((r * K + k)[:, None, :, :, :] + run)[:, :, :, :, :, None] + tl.arange(0, 16)
    tl.store(qdata, q, mask=stored[:, :, :, :, :, None])
    return back
