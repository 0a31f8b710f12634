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
    """How many ends a program reads at a time: one of two sizes, or each number of groups would be another kernel."""
    return 32 if groups <= 32 else 256


@triton.jit
def _padded_ends(i, before, offs, stride, G, start, end, writes, ALIGN: tl.constexpr, CHUNK: tl.constexpr):
    """Of a chunk of the groups, from i on, which there are, and the last rows of those, padded, counted from `before`.

    The program that `writes` also stores the first and last rows of all groups; with `start` None, `end` has G + 1
    places: 0, which a caller stores, is the first start, then the ends follow; with both None nothing is stored.
    """
    g = i + tl.arange(0, CHUNK)
    first = tl.load(offs + (g - 1) * stride, mask=(g > 0) & (g < G), other=0)
    stop = tl.load(offs + g * stride, mask=g < G, other=0)
    rows = (stop - first + (ALIGN - 1)) // ALIGN * ALIGN  # 0 past the last group, where both are
    ends = before + tl.cumsum(rows, 0)
    if start is None:
        if end is not None:
            tl.store(end + 1 + g, ends, mask=(g < G) & writes)
    else:
        tl.store(start + g, ends - rows, mask=(g < G) & writes)
        tl.store(end + g, ends, mask=(g < G) & writes)
    return g < G, ends


@triton.jit
def tokens_of(group, offs, stride, G):
    """The first token of a group and the one after its last; none past the last group."""
    first = tl.load(offs + (group - 1) * stride, mask=(group > 0) & (group < G), other=0)
    return first, tl.load(offs + group * stride, mask=group < G, other=0)


@triton.jit
def tokens_left(token, stop, tokens):
    """How many tokens of a group that ends at `stop` there are from each on, of `tokens` in all; for any offs."""
    return tl.where(token >= 0, tl.maximum(tl.minimum(stop, tokens), 0) - token, 0)


@triton.jit
def group_of(row, offs, stride, G, start, end, writes, ALIGN: tl.constexpr, CHUNK: tl.constexpr):
    """The group that holds one padded row, its first token and its end, and its first padded row.

    Past the last group, G, which has no tokens. Numbers, no tensors: a mask in any layout takes them without a turn
    through shared memory.
    """
    group, begin, before = row * 0, row * 0, row * 0
    if start is None and end is not None:
        tl.store(end, before, mask=writes)
    for i in range(0, G, CHUNK):
        there, ends = _padded_ends(i, before, offs, stride, G, start, end, writes, ALIGN, CHUNK)
        ended = there & (ends <= row)
        group += tl.sum(ended.to(tl.int32), 0)
        begin = tl.maximum(begin, tl.max(tl.where(ended, ends, 0), 0))
        before = tl.max(ends, 0)
    first, stop = tokens_of(group, offs, stride, G)
    return group, first, stop, begin


@triton.jit
def rows_before(group, offs, stride, ALIGN: tl.constexpr, CHUNK: tl.constexpr):
    """The first padded row of a group."""
    before = group * 0
    for i in range(0, group, CHUNK):
        _, ends = _padded_ends(i, before, offs, stride, group, None, None, False, ALIGN, CHUNK)
        before = tl.max(ends, 0)
    return before


@triton.jit
def _later(a, b):
    return tl.maximum(a, b)


@triton.jit
def groups_of(tile, offs, stride, G, start, end, writes, ALIGN: tl.constexpr, CHUNK: tl.constexpr, TILES: tl.constexpr):
    """The groups that hold TILES tiles of ALIGN padded rows from `tile` on, and the first padded row of each.

    A histogram says at which of the tiles how many groups end, where each tile compared with each end would be 16
    times the work.
    """
    ended, begin, before = tl.zeros((TILES,), tl.int32), tile * 0, tile * 0
    if start is None:
        tl.store(end, before, mask=writes)
    for i in range(0, G, CHUNK):
        there, ends = _padded_ends(i, before, offs, stride, G, start, end, writes, ALIGN, CHUNK)
        at = ends // ALIGN - tile
        ended += tl.histogram(tl.maximum(at, 0), TILES, mask=there & (at < TILES))
        begin = tl.maximum(begin, tl.max(tl.where(there & (at <= 0), ends, 0), 0))
        before = tl.max(ends, 0)
    last = tl.associative_scan(tl.where(ended > 0, tl.arange(0, TILES), 0), 0, _later)
    return tl.cumsum(ended, 0), tl.where(last > 0, (tile + last) * ALIGN, begin)


@triton.jit
def grouped_tile(tile, row_tile, group, begin, size, G, row_tiles, col_tiles):
    """Where a tile of K-groups' scales lies among all, and whether it is one: a group's are together, row by row.

    `tile` is its column among `col_tiles` padded ones, of which its group has `size`, from `begin` on; what lies past
    the last group counts as one group more. Where offs is out of order the place may be none.
    """
    width = tl.where(group < G, size, col_tiles - begin)
    place = begin.to(tl.int64) * row_tiles + row_tile.to(tl.int64) * width + tile - begin
    there = (tile < col_tiles) & (row_tile < row_tiles)
    # A number that is 1 is a constant, which has no `to`.
    return place, there & (place >= 0) & (place < tl.cast(col_tiles, tl.int64) * row_tiles)


@triton.jit
def store_in_order(offs, stride, G, M, ends, CHUNK: tl.constexpr):
    """Write offs to `ends`, each at least the one before, 0 and at most M: as it is, where offs is in order."""
    last = 0
    for i in range(0, G, CHUNK):
        g = i + tl.arange(0, CHUNK)
        end = tl.load(offs + g * stride, mask=g < G, other=0)
        end = tl.maximum(tl.associative_scan(end, 0, _later), last)
        tl.store(ends + g, tl.minimum(end, M), mask=g < G)
        last = tl.max(end, 0)
