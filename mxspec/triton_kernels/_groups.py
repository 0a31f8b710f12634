"""Token groups in Triton: which group a row belongs to, found by every program for itself from `offs`.

No launch comes before, and nothing is read on the host. A program reads all ends, a chunk at a time, which the L2
holds, sums up the padded sizes and picks the group by comparison: a few hundred cycles, which other programs hide.
"""

from __future__ import annotations

import triton
import triton.language as tl


def padded_rows(M: int, G: int, alignment: int) -> int:
    """The rows that hold M tokens of G groups, however they are distributed."""
    return -(-(M + G * alignment) // alignment) * alignment


def chunk(groups: int) -> int:
    """How many ends a program reads at a time."""
    return min(256, triton.next_power_of_2(max(1, groups)))


@triton.jit
def group_of(row, offs, stride, G, start, end, writes, ALIGN: tl.constexpr, CHUNK: tl.constexpr):
    """Of the groups that hold each padded row (N,): their first token, end, and first and last rows, padded.

    A row past the last group is in one more, without tokens, which begins where that ends; its end is not known here
    and comes as 0. The program that `writes` also stores the first and last rows of all groups; with `start` None,
    `end` has G + 1 places, of which the first holds 0: the starts of all groups and then the end.
    """
    token0, stop, begin, until = row * 0, row * 0, row * 0, row * 0
    before = tl.sum(token0, 0)
    if start is None:
        tl.store(end, before, mask=writes)
    for i in range(0, G, CHUNK):
        g = i + tl.arange(0, CHUNK)
        first = tl.load(offs + (g - 1) * stride, mask=(g > 0) & (g < G), other=0)
        last = tl.load(offs + g * stride, mask=g < G, other=0)
        rows = (last - first + (ALIGN - 1)) // ALIGN * ALIGN  # 0 past the last group, where both are
        ends = before + tl.cumsum(rows, 0)
        begins = ends - rows
        if start is None:
            tl.store(end + 1 + g, ends, mask=(g < G) & writes)
        else:
            tl.store(start + g, begins, mask=(g < G) & writes)
            tl.store(end + g, ends, mask=(g < G) & writes)
        mine = (begins[None, :] <= row[:, None]) & (row[:, None] < ends[None, :])  # at most one: empty ones hold none
        token0 += tl.sum(tl.where(mine, first[None, :], 0), 1)
        stop += tl.sum(tl.where(mine, last[None, :], 0), 1)
        begin += tl.sum(tl.where(mine, begins[None, :], 0), 1)
        until += tl.sum(tl.where(mine, ends[None, :], 0), 1)
        before = tl.max(ends, 0)
    return token0, stop, tl.where(until > 0, begin, before), until


@triton.jit
def grouped_tile(tile, row_tile, begin, end, row_tiles, col_tiles):
    """Where a tile of K-groups' scales lies among all, and whether it is one: a group's are together, row by row.

    `tile` is its column among `col_tiles` padded ones, of which its group has `begin .. end`; an end of 0 is that of
    what lies past the last group, which counts as one group more. Where offs is out of order the place may be none.
    """
    width = tl.where(end > 0, end, col_tiles) - begin
    place = begin.to(tl.int64) * row_tiles + row_tile.to(tl.int64) * width + tile - begin
    there = (tile < col_tiles) & (row_tile < row_tiles)
    return place, there & (place >= 0) & (place < col_tiles.to(tl.int64) * row_tiles)
