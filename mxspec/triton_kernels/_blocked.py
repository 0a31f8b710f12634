"""The 128x4 tiled scale layout as index arithmetic."""

import triton
import triton.language as tl


def blocked_shape(rows: int, cols: int) -> tuple[int, int]:
    """How many 128x4 tiles cover `rows x cols` scales, down and across."""
    return -(-rows // 128), -(-cols // 4)


@triton.jit
def blocked_to_row_col(offset, C):
    """The scale `(r, c)` that the byte at `offset` belongs to, in the layout of a matrix with C columns.

    The inverse of `(r // 128) * 128 * Cp + (c // 4) * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4`.
    r and c may lie past the matrix: then the byte is padding.
    """
    tile = offset // 512
    within = offset % 512
    col_tiles = tl.cdiv(C, 4)
    r = tile // col_tiles * 128 + within % 16 // 4 * 32 + within // 16
    c = tile % col_tiles * 4 + within % 4
    return r, c
