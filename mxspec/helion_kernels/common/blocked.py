"""The 128x4 tiled scale layout as index arithmetic."""

from __future__ import annotations

from torch import Tensor


def blocked_shape(rows: int, cols: int) -> tuple[int, int]:
    """The number of 128x4 tiles that cover `rows x cols` scales: rows of tiles, columns of tiles."""
    return -(-rows // 128), -(-cols // 4)


def turned(values: Tensor, tiles: int) -> Tensor:
    """Arrange 128 rows of the scales of neighbouring tiles as the bytes of these tiles, one tile after the other."""
    # (r // 32, r % 32, tile, c % 4) -> (tile, r % 32, r // 32, c % 4)
    return values.reshape(4, 32, tiles, 4).permute(2, 1, 0, 3).reshape(512 * tiles)


def blocked_to_row_col(row_tile: Tensor, byte: Tensor) -> tuple[Tensor, Tensor]:
    """The scale `(r, c)` that a byte of a row of tiles holds. A byte of padding gives a place outside of the matrix.

    Within a tile, the byte is at `(r % 32) * 16 + (r % 128) // 32 * 4 + c % 4`. The code uses shifts and masks, because
    Helion's `//` and `%` are Python's and would need a branch on the sign.
    """
    r = row_tile * 128 + ((byte >> 2) & 3) * 32 + ((byte >> 4) & 31)
    c = (byte >> 9) * 4 + (byte & 3)
    return r, c
