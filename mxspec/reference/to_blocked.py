"""to_blocked: MX scales in the 128x4 tiled layout that tcgen05.mma and cuBLAS read."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from mxspec.formats import MX_BLOCK_SIZE
from mxspec.reference import _checks
from mxspec.spec import Case, Shapes, given, random_bits, spec

DTYPES = (torch.float8_e8m0fnu, torch.uint8)


def blocked_bytes(rows: int, cols: int) -> int:
    """How many bytes the tiles that cover `rows x cols` scales take."""
    return 512 * -(-rows // 128) * -(-cols // 4)


def check_args(scale: Tensor) -> None:
    _checks.tensor_dtype("to_blocked", "scale", scale, DTYPES)
    _checks.rank("to_blocked", "scale", scale, (2, 3))


def cases() -> Iterator[Case]:
    ragged = [(128, 4), (1, 1), (127, 3), (129, 5), (32, 4), (33, 9), (256, 12), (300, 70), (1, 257), (1025, 1)]
    for R, C in [*ragged, (130, 64), (257, 208)]:  # the last two have rows of whole 16-byte words
        yield Case(f"{R}x{C}", given(random_bits, R, C, dtype=torch.uint8))
    yield Case("3-D 3x130x6", given(random_bits, 3, 130, 6, dtype=torch.uint8))
    yield Case("3-D 2x130x80", given(random_bits, 2, 130, 80, dtype=torch.uint8))
    yield Case("3-D 1x128x4", given(random_bits, 1, 128, 4, dtype=torch.uint8))
    yield Case("3-D e8m0fnu", given(random_bits, 3, 130, 6, dtype=torch.float8_e8m0fnu))
    yield Case("e8m0fnu", given(random_bits, 130, 6, dtype=torch.float8_e8m0fnu))
    yield Case("transposed input", lambda: (random_bits(6, 130, dtype=torch.uint8).mT,), flags={"edge"})
    yield Case("rows far apart", _far_apart, flags={"edge"})
    yield Case("no rows", given(torch.zeros, 0, 8, dtype=torch.uint8), flags={"edge"})
    yield Case("no columns", given(torch.zeros, 8, 0, dtype=torch.uint8), flags={"edge"})
    yield Case("no experts", given(torch.zeros, 0, 8, 8, dtype=torch.uint8), flags={"edge"})
    yield Case(
        "2^31 bytes and more", lambda: (random_bits(1, 8, dtype=torch.uint8).expand(2**28 + 1, 8),), flags={"large"}
    )
    yield Case("1-D", given(torch.zeros, 128, dtype=torch.uint8), raises=ValueError, match="2-D or 3-D")
    yield Case("int32", given(torch.zeros, 128, 4, dtype=torch.int32), raises=TypeError, match="int32")


def _far_apart() -> tuple[Tensor]:
    """Two rows 2^31 bytes apart. Pages in between are never touched."""
    rows = torch.empty(2**31 + 64, dtype=torch.uint8).as_strided((2, 8), (2**31, 1))
    return (rows.copy_(random_bits(2, 8, dtype=torch.uint8)),)


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    for *E, R, K in (*shapes.matrices, *shapes.experts):
        shape = (*E, R, -(-K // MX_BLOCK_SIZE))  # the scales of a quantized R x K
        yield Case("x".join(map(str, shape)), given(torch.randint, 0, 256, shape, dtype=torch.uint8))


@spec(cases=cases, check_args=check_args, bench_cases=bench_cases)
def to_blocked(scale: Tensor) -> Tensor:
    """Rearrange scales from row-major into 128x4 tiles.

    With `Cp = 4*ceil(C/4)`, scale `(r, c)` goes to the byte
    `(r // 128) * 128 * Cp + (c // 4) * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4`.
    A tile is 512 consecutive bytes: 128 rows and 4 columns, the four groups of 32 rows side by side.

    Args:
        scale: `(R, C)`, or `(E, R, C)` for one matrix an expert; float8_e8m0fnu or uint8; any strides.

    Returns:
        `(Rp*Cp,)`, or `(E, Rp*Cp)`, contiguous, of scale's dtype, with `Rp = 128*ceil(R/128)`. Bytes that
        belong to no scale are 0.

    Special values: bytes are moved, never read as numbers; an empty scale gives an empty result.

    Raises:
        TypeError: scale is neither float8_e8m0fnu nor uint8.
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
