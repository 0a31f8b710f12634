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
