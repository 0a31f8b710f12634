"""MX codes of token groups along the features and along the tokens, from one read: the tiles of `mx_columns.py`.

A tile has 128 padded tokens of one group by 128 features, so that it holds whole blocks in both directions. The values
of a tile are those of x, or SwiGLU's, or the gradient of SwiGLU's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.formats import element, exponent_rule
from mxspec.triton_kernels.common.groups import padded_rows
from mxspec.triton_kernels.tiles import mx_columns
from mxspec.triton_kernels.tiles.fp8_both_ways import SWIGLU, Results


def both_ways(
    values: int, x: Tensor, dh: Tensor | None, offs: Tensor, pad_to: int, elem_dtype: torch.dtype | str, scaling: str,
    scale_layout: str,
) -> Results:  # fmt: skip
    """Launch. `values` is 0 for x, 1 for SwiGLU of x, 2 for the gradient of SwiGLU from x and dh."""
    (M, K), G, fmt, blocked = x.shape, offs.shape[0], element(elem_dtype), scale_layout == "blocked"
    if values == SWIGLU.value:
        K //= 2
    R, col_tiles = padded_rows(M, G, pad_to), -(-K // 128)
    rows = R + 128 * G if blocked else R  # the number of rows with scales
    q_row, q_col = (x.new_empty(shape, dtype=fmt.dtype) for shape in ((R, K), (K, R)))
    shapes = ((rows, 4 * col_tiles), (128 * col_tiles, rows // 32)) if blocked else ((R, K // 32), (K, R // 32))
    s_row, s_col = (x.new_empty(shape, dtype=torch.uint8) for shape in shapes)
    start, end = (offs.new_empty(G) for _ in range(2))
    constants = *exponent_rule(fmt, scaling, x.dtype), blocked
    mx_columns.launch_groups(x, q_col, s_col, start, end, offs, pad_to, rows, constants, (q_row, s_row), values, dh)
    e8m0 = torch.float8_e8m0fnu
    return q_row, s_row.view(e8m0), q_col.mT, s_col.view(e8m0), start, end
