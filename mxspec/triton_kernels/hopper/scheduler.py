"""Which tile is where: the order in which Hopper's persistent programs take the tiles of an output, and its groups."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def place(tile, M_tiles, N_tiles, GROUP: gl.constexpr):
    """Tiles run down GROUP tiles of M, then along N: what runs at a time shares rows of a and of b in the L2."""
    of_group = GROUP * N_tiles
    first = tile // of_group * GROUP
    rows = gl.minimum(M_tiles - first, GROUP)
    inside = tile % of_group
    return first + inside % rows, inside // rows


@gluon.jit
def next_group(tile, at, offs, offs_stride, G, M, N_tiles, BLOCK_M: gl.constexpr):
    """The group of rows that has a tile, from that of an earlier one: its number, its first tile, its rows.

    The rows of no group are one more, G; past them there is G + 1, which has none. Whatever offs holds, no row is
    outside of a.
    """
    group, first, begin, end = at
    while (group <= G) & (tile >= first + gl.cdiv(end - begin, BLOCK_M) * N_tiles):
        first += gl.cdiv(end - begin, BLOCK_M) * N_tiles
        group += 1
        begin = end
        end = gl.minimum(gl.maximum(gl.load(offs + group * offs_stride, mask=group < G, other=M), begin), M)
    return group, first, begin, end


@gluon.jit
def blocks_of_group(group, offs, offs_stride, K_blocks):
    """The first block of K of a group, and how many it has: none outside of a and b, whatever offs holds."""
    begin = gl.load(offs + (group - 1) * offs_stride, mask=group > 0, other=0) // 128
    end = gl.load(offs + group * offs_stride) // 128
    begin = gl.minimum(gl.maximum(begin, 0), K_blocks)
    return begin, gl.maximum(gl.minimum(end, K_blocks) - begin, 0)


@gluon.jit
def geometry(
    tile, at, offs, offs_stride, G, M, M_tiles, N_tiles, K_blocks,
    BLOCK_M: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """Of a tile: its group, its first row and the end of the group's, its column among tiles, its blocks of K."""
    if GROUPS == "M":
        group, first, begin, end = at
        m, n = place(tile - first, gl.maximum(gl.cdiv(end - begin, BLOCK_M), 1), N_tiles, GROUP)
        return group, begin + m * BLOCK_M, end, n, 0, K_blocks * (group < G)
    elif GROUPS == "K":
        group = tile // (M_tiles * N_tiles)
        m, n = place(tile % (M_tiles * N_tiles), M_tiles, N_tiles, GROUP)
        begin, blocks = blocks_of_group(group, offs, offs_stride, K_blocks)
        return group, m * BLOCK_M, M, n, begin, blocks
    else:
        m, n = place(tile, M_tiles, N_tiles, GROUP)
        return 0, m * BLOCK_M, M, n, 0, K_blocks
