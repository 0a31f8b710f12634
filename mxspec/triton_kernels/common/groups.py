"""Token groups in Triton: each program finds by itself, from `offs`, which group its rows belong to.

No other kernel runs before, and the host reads nothing. A program reads all ends in chunks, sums the padded sizes, and
finds its group by comparison. The ends stay in the L2 cache. The search takes a few hundred cycles, and other programs
run during that time.
"""

from __future__ import annotations

import triton
import triton.language as tl


def padded_rows(M: int, G: int, alignment: int) -> int:
    """The number of rows that hold M tokens of G groups, however the tokens are distributed."""
    return -(-(M + G * alignment) // alignment) * alignment


def chunk(groups: int) -> int:
    """The number of ends that a program reads at a time. There are only two sizes, so that few kernels are compiled."""
    return 32 if groups <= 32 else 256


@triton.jit
def _padded_ends(i, before, offs, stride, G, start, end, writes, ALIGN: tl.constexpr, CHUNK: tl.constexpr):
    """For the groups i .. i + CHUNK: a validity mask, and each group's padded end row, counted from `before`.

    The program with `writes` also stores the first padded row and the padded end row of these groups. If `start` is
    None, `end` has G + 1 places: the caller stores a 0, which is the first start, and this function stores the ends
    after it. If both are None, nothing is stored.
    """
    g = i + tl.arange(0, CHUNK)
    first = tl.load(offs + (g - 1) * stride, mask=(g > 0) & (g < G), other=0)
    stop = tl.load(offs + g * stride, mask=g < G, other=0)
    rows = (stop - first + (ALIGN - 1)) // ALIGN * ALIGN  # 0 past the last group: `stop` and `first` are both 0 there
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
    """The first token of a group and the token after its last. Both are 0 past the last group."""
    first = tl.load(offs + (group - 1) * stride, mask=(group > 0) & (group < G), other=0)
    return first, tl.load(offs + group * stride, mask=group < G, other=0)


@triton.jit
def tokens_left(token, stop, tokens):
    """The number of tokens from `token` to the end of a group that ends at `stop`.

    The result is safe for any `offs`, because `tokens`, the number of all tokens, limits it.
    """
    return tl.where(token >= 0, tl.maximum(tl.minimum(stop, tokens), 0) - token, 0)


@triton.jit
def group_of(row, offs, stride, G, start, end, writes, ALIGN: tl.constexpr, CHUNK: tl.constexpr):
    """The group of one padded row, the group's first token and end, and its first padded row.

    A row past the last group belongs to group G, which has no tokens. The function returns scalars, so that masks of
    any layout can use them without a conversion through shared memory.
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
    """The groups of TILES tiles of ALIGN padded rows, from `tile` on, and the first padded row of each group.

    A histogram counts how many groups end at each tile. Without it, each tile would be compared with each end.
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
    """The place of a tile among all tiles of K-groups' scales, and whether the tile exists.

    The tiles of a group are stored together, row by row. `tile` is the tile's column among `col_tiles` padded columns.
    Its group has `size` of these columns, and the first is `begin`. The columns past the last group count as one more
    group. If offs is out of order, the place may be invalid: the second result is then False.
    """
    width = tl.where(group < G, size, col_tiles - begin)
    place = begin.to(tl.int64) * row_tiles + row_tile.to(tl.int64) * width + tile - begin
    there = (tile < col_tiles) & (row_tile < row_tiles)
    # `tl.cast`, because Triton makes a constant of an argument that is 1, and a constant has no `to`.
    return place, there & (place >= 0) & (place < tl.cast(col_tiles, tl.int64) * row_tiles)


@triton.jit
def store_in_order(offs, stride, G, M, ends, CHUNK: tl.constexpr):
    """Write offs to `ends`, clamped to be in order and between 0 and M. Offs that is in order stays as it is."""
    last = 0
    for i in range(0, G, CHUNK):
        g = i + tl.arange(0, CHUNK)
        end = tl.load(offs + g * stride, mask=g < G, other=0)
        end = tl.maximum(tl.associative_scan(end, 0, _later), last)
        tl.store(ends + g, tl.minimum(end, M), mask=g < G)
        last = tl.max(end, 0)


@triton.jit
def group_among(row, offs, stride, G, ALIGN: tl.constexpr, CHUNK: tl.constexpr):
    """`group_of` for at most CHUNK groups, without a loop: two loops around it can then be fused."""
    there, ends = _padded_ends(row * 0, row * 0, offs, stride, G, None, None, False, ALIGN, CHUNK)
    ended = (ends <= row) & there
    group = tl.sum(ended.to(tl.int32), 0)
    first, stop = tokens_of(group, offs, stride, G)
    return group, first, stop, tl.max(tl.where(ended, ends, 0), 0)
