"""to_blocked: MX and NVFP4 scales in the layout of 128x4 tiles that tcgen05.mma and cuBLAS read."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from mxspec.reference.common import checks
from mxspec.spec import spec

DTYPES = (torch.float8_e8m0fnu, torch.float8_e4m3fn, torch.uint8)


def blocked_bytes(rows: int, cols: int) -> int:
    """Return the number of bytes of the tiles that cover `rows x cols` scales."""
    return 512 * -(-rows // 128) * -(-cols // 4)


def check_args(scale: Tensor) -> None:
    checks.tensor_dtype("to_blocked", "scale", scale, DTYPES)
    checks.rank("to_blocked", "scale", scale, (2, 3))


@spec(check_args=check_args)
def to_blocked(scale: Tensor) -> Tensor:
    """Rearrange scales from row-major order into 128x4 tiles.

    With `Cp = 4*ceil(C/4)`, scale `(r, c)` goes to the byte `(r // 128) * 128 * Cp + (c // 4) * 512 + (r % 32) * 16 +
    (r % 128) // 32 * 4 + c % 4`. A tile is 512 consecutive bytes that hold 128 rows and 4 columns. Within a tile, the
    four groups of 32 rows lie side by side.

    Args:
        scale: `(R, C)`, or `(E, R, C)` for one matrix per expert; float8_e8m0fnu, float8_e4m3fn (NVFP4) or uint8; any
            strides.

    Returns:
        `(Rp*Cp,)` or `(E, Rp*Cp)`, contiguous, of scale's dtype, with `Rp = 128*ceil(R/128)`. Bytes that belong to no
        scale are 0.

    Special values: the op moves bytes and never reads them as numbers. An empty scale gives an empty result.

    Raises:
        TypeError: scale has a dtype that is not listed above.
        ValueError: scale is neither 2-D nor 3-D.

    Example:
        >>> scale = torch.arange(8, dtype=torch.uint8).reshape(2, 4)
        >>> to_blocked(scale)[:24].tolist()
        [0, 1, 2, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 5, 6, 7, 0, 0, 0, 0]

    Source: NVIDIA cuBLAS documentation, "1D Block Scaling Factors Layout"; PTX ISA, tcgen05.mma block scaling.
    """
    check_args(scale)
    *lead, R, C = scale.shape
    row_tiles, col_tiles = -(-R // 128), -(-C // 4)
    padded = pad(scale.view(torch.uint8), (0, 4 * col_tiles - C, 0, 128 * row_tiles - R))
    tiles = padded.reshape(*lead, row_tiles, 4, 32, col_tiles, 4)  # r = (row tile, r % 128 // 32, r % 32)
    tiles = tiles.movedim((-2, -3, -4), (-4, -3, -2))  # row tile, col tile, r % 32, r % 128 // 32, c % 4
    return tiles.reshape(*lead, 512 * row_tiles * col_tiles).view(scale.dtype)
