"""from_blocked: the inverse of to_blocked."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.reference.common import checks
from mxspec.reference.to_blocked import DTYPES, blocked_bytes
from mxspec.spec import spec


def check_args(blocked: Tensor, rows: int, cols: int) -> None:
    checks.tensor_dtype("from_blocked", "blocked", blocked, DTYPES)
    checks.rank("from_blocked", "blocked", blocked, (1, 2))
    checks.size("from_blocked", "rows", rows)
    checks.size("from_blocked", "cols", cols)
    needed = blocked_bytes(rows, cols)
    if blocked.shape[-1] != needed:
        raise ValueError(
            f"from_blocked: blocked has shape {tuple(blocked.shape)}; needs {needed} bytes a matrix "
            f"for rows = {rows}, cols = {cols}"
        )


@spec(check_args=check_args)
def from_blocked(blocked: Tensor, rows: int, cols: int) -> Tensor:
    """Rearrange scales from 128x4 tiles into row-major order.

    `out[r, c] = blocked[place(r, c)]`. `place(r, c)` is the number of the byte to which `to_blocked` moves scale
    `(r, c)`.

    Args:
        blocked: `(Rp*Cp,)` or `(E, Rp*Cp)`, with `Rp = 128*ceil(rows/128)` and `Cp = 4*ceil(cols/4)`; float8_e8m0fnu,
            float8_e4m3fn or uint8; any strides.
        rows, cols: the size of the matrix of scales without padding; ints of at least 0.

    Returns:
        `(rows, cols)` or `(E, rows, cols)`, contiguous, of blocked's dtype. The op drops padding bytes unread.

    Special values: the op moves bytes and never reads them as numbers.

    Raises:
        TypeError: blocked has a dtype that is not listed above, or rows or cols is not an integer.
        ValueError: blocked is neither 1-D nor 2-D, its size does not fit rows and cols, or rows or cols is below 0.

    Example:
        >>> blocked = torch.arange(512).to(torch.uint8)
        >>> from_blocked(blocked, 34, 2)[[0, 1, 32, 33]].tolist()
        [[0, 1], [16, 17], [4, 5], [20, 21]]

    Source: as for `to_blocked`.
    """
    check_args(blocked, rows, cols)
    *lead, _ = blocked.shape
    row_tiles, col_tiles = -(-rows // 128), -(-cols // 4)
    tiles = blocked.view(torch.uint8).reshape(*lead, row_tiles, col_tiles, 32, 4, 4)
    tiles = tiles.movedim((-4, -3, -2), (-2, -3, -4))  # row tile, r % 128 // 32, r % 32, col tile, c % 4
    padded = tiles.reshape(*lead, 128 * row_tiles, 4 * col_tiles)
    # a copy, so that the result is never a view of blocked
    out = padded[..., :rows, :cols].clone(memory_format=torch.contiguous_format)
    return out.view(blocked.dtype)
