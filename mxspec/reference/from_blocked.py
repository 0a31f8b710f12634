"""from_blocked: the inverse of to_blocked."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from mxspec.formats import MX_BLOCK_SIZE
from mxspec.reference import _checks
from mxspec.reference.to_blocked import DTYPES, blocked_bytes
from mxspec.spec import Case, Shapes, random_bits, spec, these


def check_args(blocked: Tensor, rows: int, cols: int) -> None:
    _checks.tensor_dtype("from_blocked", "blocked", blocked, DTYPES)
    _checks.rank("from_blocked", "blocked", blocked, (1, 2))
    _checks.size("from_blocked", "rows", rows)
    _checks.size("from_blocked", "cols", cols)
    needed = blocked_bytes(rows, cols)
    if blocked.shape[-1] != needed:
        raise ValueError(
            f"from_blocked: blocked has shape {tuple(blocked.shape)}; needs {needed} bytes a matrix "
            f"for rows = {rows}, cols = {cols}"
        )


def cases() -> Iterator[Case]:
    for R, C in [(128, 4), (1, 1), (127, 3), (129, 5), (300, 70)]:
        yield Case(f"{R}x{C}", these(random_bits(blocked_bytes(R, C), dtype=torch.uint8), R, C))
    yield Case("3-D 3x130x6", these(random_bits(3, 2048, dtype=torch.uint8), 130, 6))
    yield Case("3-D e8m0fnu", these(random_bits(3, 2048, dtype=torch.float8_e8m0fnu), 130, 6))
    yield Case("e8m0fnu", these(random_bits(2048, dtype=torch.float8_e8m0fnu), 130, 6))
    yield Case("no rows", these(torch.zeros(0, dtype=torch.uint8), 0, 8), flags={"edge"})
    yield Case("wrong size", these(torch.zeros(512, dtype=torch.uint8), 129, 4), raises=ValueError, match="1024")
    yield Case("negative", these(torch.zeros(512, dtype=torch.uint8), -1, 4), raises=ValueError, match=">= 0")
    float_rows = these(torch.zeros(512, dtype=torch.uint8), 64.0, 2)
    yield Case("rows of 64.0", float_rows, raises=TypeError, match="rows = 64.0")
    yield Case("int32", these(torch.zeros(512, dtype=torch.int32), 128, 4), raises=TypeError, match="int32")


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    def tiles(R: int, C: int) -> tuple[Tensor, int, int]:
        return torch.randint(0, 256, (blocked_bytes(R, C),), dtype=torch.uint8), R, C

    for M, K in shapes.matrices:
        R, C = M, -(-K // MX_BLOCK_SIZE)  # the scales of a quantized M x K
        yield Case(f"{R}x{C}", partial(tiles, R, C))


@spec(cases=cases, check_args=check_args, bench_cases=bench_cases)
def from_blocked(blocked: Tensor, rows: int, cols: int) -> Tensor:
    """Read scales out of 128x4 tiles back into row-major order.

    `out[r, c] = blocked[offset(r, c)]` with the offset that `to_blocked` states.

    Args:
        blocked: `(Rp*Cp,)`, or `(E, Rp*Cp)`; float8_e8m0fnu or uint8; any strides; `Rp = 128*ceil(rows/128)`,
            `Cp = 4*ceil(cols/4)`.
        rows, cols: of the matrix of scales, without padding; ints of at least 0.

    Returns:
        `(rows, cols)`, or `(E, rows, cols)`, contiguous, of blocked's dtype. Padding bytes are dropped unread.

    Special values: bytes are moved, never read as numbers.

    Raises:
        TypeError: blocked is neither float8_e8m0fnu nor uint8.
        ValueError: blocked is neither 1-D nor 2-D, or its size does not fit rows and cols.

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
    out = padded[..., :rows, :cols].clone(memory_format=torch.contiguous_format)  # never a view of blocked
    return out.view(blocked.dtype)
