"""unpad_token_groups in Helion: the kernel of `tiles/token_rows.py`. It finds the group of a token among the ends."""

from __future__ import annotations

from torch import Tensor

from mxspec.helion_kernels.tiles import token_rows

RANK = {(9, 0): 2, (10, 0): 2}  # Blackwell: compiled, not run
PTX = (r"ld\.global\.v4\.b32", r"st\.global\.v4\.b32")


def supports(padded: Tensor, offs: Tensor, start: Tensor, num_tokens: int, **_: bool) -> str | None:
    return token_rows.supports(padded, num_tokens)


def unpad_token_groups(
    padded: Tensor, offs: Tensor, start: Tensor, num_tokens: int, *, check_offs: bool = False
) -> Tensor:
    return token_rows.move_rows("unpad", padded, offs, start, start, num_tokens)
