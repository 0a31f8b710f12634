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
def store_part(
    qdata, scale, q, byte, byte_in_tile, row, col, row_tile, col_tile, R, C, row_tiles,
    BLOCKED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Store the codes `(blocks, elements of qdata)` and the scale bytes of a part of a tile of token groups.

    `row` and `col` count the blocks from the corner of the tile. R rows have codes, and C blocks lie in a row. With
    BLOCKED, `row_tiles` rows of tiles have scales, which may be more. WIDE: an offset from the corner may be 2^31 or
    more.
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
        tl.store(tile + byte_in_tile, tl.where(there, byte, 0).to(tl.uint8), mask=row_tile < row_tiles)
    else:
        tl.store(scale + corner + (r * C + col), byte, mask=owned)
