"""mx_quantize_rowcol in Helion: the tiles of `tiles/mx_columns.py`. Each tile is read once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mxspec.formats import element
from mxspec.helion_kernels.common import numerics
from mxspec.helion_kernels.tiles.mx_columns import mx_tile

RANK = {(9, 0): 2, (10, 0): 2}  # second after Triton: benchmarks/results/decisions.md
# Loads are 8 bytes wide if tiles reach past x. e2m1 has a minimum with 6, and stores fewer bytes.
PTX = (
    r"ld\.global\.v[24]\.b32",
    r"st\.global\.v4\.b32|0f40C00000",
    r"cvt\.rn\.satfinite\.e[45]m[32]x2\.f32|0f40C00000",
)


def supports(x: Tensor, *, elem_dtype: torch.dtype | str = torch.float8_e4m3fn, **_: Any) -> str | None:
    return numerics.supports(elem_dtype, packed=True)


def mx_quantize_rowcol(
    x: Tensor,
    *,
    elem_dtype: torch.dtype | str = torch.float8_e4m3fn,
    scaling: str = "rceil",
    scale_layout: str = "plain",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    fmt = element(elem_dtype)
    # If the columns of x are contiguous, quantize the transpose: the two halves of the result change places.
    if x.stride(-1) != 1 and x.stride(-2) == 1:
        q_col, s_col, q_row, s_row = mx_tile(x.mT, fmt, scaling, scale_layout, with_rows=True)
    else:
        q_row, s_row, q_col, s_col = mx_tile(x, fmt, scaling, scale_layout, with_rows=True)
    return q_row, s_row, q_col.mT, s_col
