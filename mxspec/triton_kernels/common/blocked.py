"""The 128x4 tiled scale layout as index arithmetic."""

import triton
import triton.language as tl


def blocked_shape(rows: int, cols: int) -> tuple[int, int]:
    """The number of 128x4 tiles that cover `rows x cols` scales: rows of tiles, columns of tiles."""
    return -(-rows // 128), -(-cols // 4)


@triton.jit
def turned(values, TILES: tl.constexpr):
    """Arrange 128 rows of scales, 4 * TILES columns wide, as the bytes of TILES tiles, one tile after the other."""
    # (r // 32, r % 32, tile, c % 4) -> (tile, r % 32, r // 32, c % 4)
    return values.reshape(4, 32, TILES, 4).permute(2, 1, 0, 3).reshape(512 * TILES)


@triton.jit
def row_col_in_tile(byte):
    """The row and column of the scale that a byte of a tile holds: the inverse of `r % 32 * 16 + r // 32 * 4 + c`."""
    row = byte % 16 // 4 * 32 + byte // 16
    return row.to(tl.int32), byte % 4


@triton.jit
def part_of_tiles(part, BLOCKS: tl.constexpr, TILES: tl.constexpr, BLOCKED: tl.constexpr = True):
    """The BLOCKS scale bytes of one of the parts of TILES tiles side by side: `(place, row, col)` of each.

    The row and the column count from the corner of the first tile on. With BLOCKED, a part is BLOCKS / TILES
    consecutive bytes of each tile, and the places count from the first of these bytes on. Otherwise a part is some
    rows, and the places have no meaning.
    """
    i = tl.arange(0, BLOCKS)
    if BLOCKED:
        OF_TILE: tl.constexpr = BLOCKS // TILES
        row, col = row_col_in_tile(part * OF_TILE + i % OF_TILE)
        return i // OF_TILE * 512 + i % OF_TILE, row, i // OF_TILE * 4 + col
    else:
        return i, part * (BLOCKS // (4 * TILES)) + i // (4 * TILES), i % (4 * TILES)


@triton.jit
def store_part(
    qdata, scale, q, byte, place, row, col, row_tile, col_tile, R, C, row_tiles,
    BLOCKED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Store the codes `(blocks, elements of qdata)` and the scale bytes of a part of tiles of token groups.

    `place`, `row` and `col` are those of `part_of_tiles`, and `col_tile` is the first tile. R rows have codes, and C
    blocks lie in a row. With BLOCKED, `scale` points to the first byte of the part in the first of all tiles, and
    `row_tiles` rows of tiles have scales, which may be more than have codes. WIDE: an offset from the corner may be
    2^31 or more.
    """
    SIZE: tl.constexpr = q.shape[1]
    there = col_tile * 4 + col < C
    owned = (row_tile * 128 + row < R) & there
    r = row.to(tl.int64) if WIDE else row
    corner = row_tile.to(tl.int64) * 128 * C + col_tile * 4
    offset = (r * (C * SIZE) + col * SIZE)[:, None] + tl.arange(0, SIZE)[None, :]
    tl.store(qdata + corner * SIZE + offset, q, mask=owned[:, None])
    if BLOCKED:
        tile = scale + (row_tile.to(tl.int64) * tl.cdiv(C, 4) + col_tile) * 512
        exists = (row_tile < row_tiles) & (col_tile * 4 + col < tl.cdiv(C, 4) * 4)
        tl.store(tile + place, tl.where(there, byte, 0).to(tl.uint8), mask=exists)
    else:
        tl.store(scale + corner + (r * C + col), byte, mask=owned)
