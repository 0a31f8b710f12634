"""mx_quantize_rowcol in Triton: the tiles of `tiles/mx_columns.py`. Elements of 4 and 6 bits take two launches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mxspec.formats import element
from mxspec.triton_kernels.mx_quantize import mx_quantize
from mxspec.triton_kernels.mx_quantize import supports as rows_are_supported
from mxspec.triton_kernels.tiles import mx_columns

RANK = {(9, 0): 1, (10, 0): 1}  # Blackwell: compiled, not run
PTX = mx_columns.PTX


def supports(x: Tensor, *, elem_dtype: torch.dtype | str = torch.float8_e4m3fn, **_: Any) -> str | None:
    if element(elem_dtype).bits < 8 and (reason := rows_are_supported(x)):
        return reason
    return mx_columns.supports(x)


def mx_quantize_rowcol(
    x: Tensor,
    *,
    elem_dtype: torch.dtype | str = torch.float8_e4m3fn,
    scaling: str = "rceil",
    scale_layout: str = "plain",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    fmt = element(elem_dtype)
    if fmt.bits < 8:  # one launch for both took 1.6 to 1.9 times as long on an H200: benchmarks/results/decisions.md
        rows, columns = (
            mx_quantize(x, axis=axis, elem_dtype=elem_dtype, scaling=scaling, scale_layout=scale_layout)
            for axis in (-1, -2)
        )
        return *rows, *columns
    # If the columns of x are contiguous, quantize the transpose: the two halves of the result change places.
    turned = x.stride(-1) != 1 and x.stride(-2) == 1
    tiles = mx_columns.mx_tile(x.mT if turned else x, fmt, scaling, scale_layout, with_rows=True)
    q_row, s_row, q_col, s_col = (*tiles[2:], *tiles[:2]) if turned else tiles
    return q_row, s_row, q_col.mT, s_col
