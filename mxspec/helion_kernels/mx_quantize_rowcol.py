"""mx_quantize_rowcol in Helion: the tiles of `tiles/mx_columns.py`. Each tile is read once."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.formats import element
from mxspec.helion_kernels.tiles.mx_columns import mx_tile

RANK = {(9, 0): 2, (10, 0): 2}  # second after Triton: benchmarks/results/decisions.md
# Loads are 8 bytes wide if tiles reach past x. e2m1, FP6 and int8 have a minimum with the largest value. The narrower
# codes are stored in shorter words.
PTX = (
    r"ld\.global\.v[24]\.b32",
    r"st\.global\.(v4\.b32|b16)|0f40C00000",
    r"cvt\.rn\.satfinite\.e[45]m[32]x2\.f32|0f(40C00000|40F00000|41E00000|3FFE0000)",
)


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
