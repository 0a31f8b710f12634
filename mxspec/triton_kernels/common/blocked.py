"""The 128x4 tiled scale layout as index arithmetic."""

import triton
import triton.language as tl


def blocked_shape(rows: int, cols: int) -> tuple[int, int]:
    """How many 128x4 tiles cover `rows x cols` scales, down and across."""
    return -(-rows // 128), -(-cols // 4)


@triton.jit
def turned(values, TILES: tl.constexpr):
    """128 rows of the scales of TILES neighbouring tiles as the bytes of those tiles, one after the other."""
    # (r // 32, r % 32, tile, c % 4) -> (tile, r % 32, r // 32, c % 4)
    return values.reshape(4, 32, TILES, 4).permute(2, 1, 0, 3).reshape(512 * TILES)


@triton.jit
def row_col_in_tile(byte):
    """The row and column of the scale at a byte of a tile: the inverse of `r % 32 * 16 + r // 32 * 4 + c`."""
    row = byte % 16 // 4 * 32 + byte // 16
    return row.to(tl.int32), byte % 4
