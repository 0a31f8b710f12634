"""place_token_groups in Triton: `_token_rows`, the token of a row found among all groups."""

from __future__ import annotations

from torch import Tensor

from mxspec.triton_kernels import _token_rows

RANK = {(9, 0): 1, (10, 0): 1}  # Blackwell: compiled, not run
PTX = (r"ld\.global\.v4\.b32", r"st\.global\.v4\.b32")


def supports(x: Tensor, offs: Tensor, start: Tensor, num_rows: int, **_: bool) -> str | None:
    return _token_rows.supports(x, num_rows)


def place_token_groups(x: Tensor, offs: Tensor, start: Tensor, num_rows: int, *, check_offs: bool = False) -> Tensor:
    return _token_rows.move_rows("place", x, offs, start, start, num_rows)
