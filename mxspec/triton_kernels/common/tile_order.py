"""The order in which the programs of a matmul take the blocks of its output."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def swizzle(block, m_blocks, n_blocks, SWIZZLE: tl.constexpr):
    """The row and the column of a block. The order goes down SWIZZLE rows of blocks, then to the next column.

    Programs that run at the same time then share rows of a and of b in the L2 cache.
    """
    in_band = SWIZZLE * n_blocks
    first = block // in_band * SWIZZLE
    rows = tl.minimum(m_blocks - first, SWIZZLE)
    inside = block % in_band
    return first + inside % rows, inside // rows
