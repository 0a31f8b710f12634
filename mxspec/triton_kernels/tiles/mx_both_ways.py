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
    G, K, fmt, blocked = offs.shape[0], x.shape[1], element(elem_dtype), scale_layout == "blocked"
    if values == SWIGLU.value:
        K //= 2
    results = allocated(x, offs, K, pad_to, fmt.dtype, blocked)
    q_row, s_row, q_col, s_col, start, end = results
    if fmt.per_byte > 1:
        # See mx_columns.empty_codes. Without elements, a dimension may have a stride that no word has.
        words = q_col.mT.view(torch.int32) if q_col.numel() else mx_columns.empty_codes(x, (K, 2 * q_col.shape[0]), fmt)
        q_row, q_col = q_row.view(torch.uint8), words.mT
    rows = q_row.shape[0] + 128 * G if blocked else q_row.shape[0]  # the number of rows with scales
    constants = *exponent_rule(fmt, scaling, x.dtype), blocked
    of_rows, of_columns = (s.view(torch.uint8) for s in (s_row, s_col))
    mx_columns.launch_groups(
        x, q_col.mT, of_columns, start, end, offs, pad_to, rows, constants, (q_row, of_rows), values, dh
    )
    return results


def allocated(x: Tensor, offs: Tensor, K: int, pad_to: int, elem_dtype: torch.dtype | None, blocked: bool) -> Results:
    """The tensors of the results for the tokens of x with K features."""
    G, col_tiles = offs.shape[0], -(-K // 128)
    R = padded_rows(x.shape[0], G, pad_to)
    rows = R + 128 * G if blocked else R
    of_byte = 2 if elem_dtype == torch.float4_e2m1fn_x2 else 1
    q_row, q_col = (x.new_empty(shape, dtype=elem_dtype) for shape in ((R, K // of_byte), (K, R // of_byte)))
    shapes = ((rows, 4 * col_tiles), (128 * col_tiles, rows // 32)) if blocked else ((R, K // 32), (K, R // 32))
    s_row, s_col = (x.new_empty(shape, dtype=torch.float8_e8m0fnu) for shape in shapes)
    start, end = (offs.new_empty(G) for _ in range(2))
    return q_row, s_row, q_col.mT, s_col, start, end
