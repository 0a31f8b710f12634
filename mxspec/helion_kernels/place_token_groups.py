"""place_token_groups in Helion: the kernel of `tiles/token_rows.py`. It searches all groups for the token of a row."""

from __future__ import annotations

from torch import Tensor

from mxspec.helion_kernels.tiles import token_rows

RANK = {(9, 0): 2, (10, 0): 2}  # Blackwell: compiled, not run
PTX = (r"ld\.global\.v4\.b32", r"st\.global\.v4\.b32")


def supports(x: Tensor, offs: Tensor, start: Tensor, num_rows: int, **_: bool) -> str | None:
    return token_rows.supports(x, num_rows)


def place_token_groups(x: Tensor, offs: Tensor, start: Tensor, num_rows: int, *, check_offs: bool = False) -> Tensor:
    return token_rows.move_rows("place", x, offs, start, start, num_rows)
