"""pad_token_groups in Helion: the kernel of `tiles/token_rows.py`. Its first program writes `start` and `end`."""

from __future__ import annotations

from torch import Tensor

from mxspec.helion_kernels.common.groups import padded_rows
from mxspec.helion_kernels.tiles import token_rows

RANK = {(9, 0): 2, (10, 0): 2}  # Blackwell: compiled, not run
PTX = (r"ld\.global\.v4\.b32", r"st\.global\.v4\.b32")


def supports(x: Tensor, offs: Tensor, alignment: int, **_: bool) -> str | None:
    return token_rows.supports(x, padded_rows(x.shape[0], offs.shape[0], alignment))


def pad_token_groups(
    x: Tensor, offs: Tensor, alignment: int, *, check_offs: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    start, end = (offs.new_empty(offs.shape) for _ in range(2))
    rows = padded_rows(x.shape[0], offs.shape[0], alignment)
    padded = token_rows.move_rows("pad", x, offs, start, end, rows, alignment)
    return padded, start, end
