"""mx_quantize_rowcol in Triton: the tiles of `tiles/mx_columns.py`. Each tile is read once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mxspec.formats import element
from mxspec.triton_kernels.tiles import mx_columns

RANK = {(9, 0): 1, (10, 0): 1}  # Blackwell: compiled, not run
PTX = mx_columns.PTX


def supports(x: Tensor, **_: Any) -> str | None:
    return mx_columns.supports(x)


def mx_quantize_rowcol(
    x: Tensor,
    *,
    elem_dtype: torch.dtype | str = torch.float8_e4m3fn,
    scaling: str = "rceil",
    scale_layout: str = "plain",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    # If the columns of x are contiguous, quantize the transpose: the two halves of the result change places.
    turned = x.stride(-1) != 1 and x.stride(-2) == 1
    tiles = mx_columns.mx_tile(x.mT if turned else x, element(elem_dtype), scaling, scale_layout, with_rows=True)
    q_row, s_row, q_col, s_col = (*tiles[2:], *tiles[:2]) if turned else tiles
    return q_row, s_row, q_col.mT, s_col
