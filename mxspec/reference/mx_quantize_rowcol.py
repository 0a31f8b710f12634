"""mx_quantize_rowcol: quantize one tensor along its rows and along its columns; a kernel reads the tensor once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mxspec.formats import MX_BLOCK_SIZE, SCALINGS
from mxspec.reference.common import checks
from mxspec.reference.mx_quantize import ELEM_CHOICES, SCALE_LAYOUTS, mx_quantize
from mxspec.spec import per_element, spec


def check_args(
    x: Tensor,
    *,
    elem_dtype: torch.dtype | str = torch.float8_e4m3fn,
    scaling: str = "rceil",
    scale_layout: str = "plain",
) -> None:
    op = "mx_quantize_rowcol"
    checks.tensor_dtype(op, "x", x, checks.FLOAT_DTYPES)
    checks.rank(op, "x", x, (2, 3))
    checks.choice(op, "elem_dtype", elem_dtype, ELEM_CHOICES, TypeError)
    checks.choice(op, "scaling", scaling, SCALINGS)
    checks.choice(op, "scale_layout", scale_layout, SCALE_LAYOUTS)
    checks.multiple(op, "M", x.shape[-2], MX_BLOCK_SIZE)
    checks.multiple(op, "K", x.shape[-1], MX_BLOCK_SIZE)


@spec(
    check_args=check_args,
    flops=per_element(4),  # a maximum and a multiply, twice
)
def mx_quantize_rowcol(
    x: Tensor,
    *,
    elem_dtype: torch.dtype | str = torch.float8_e4m3fn,
    scaling: str = "rceil",
    scale_layout: str = "plain",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantize to MX in both directions: the results of `mx_quantize` along the rows and along the columns.

    `(q_row, s_row) = mx_quantize(x, axis=-1, ...)` and `(q_col, s_col) = mx_quantize(x, axis=-2, ...)`. Training uses
    an activation in two matmuls: the forward pass multiplies along K, and the weight gradient along the tokens.

    Args:
        x: `(M, K)` or `(E, N, K)`, the last two sizes multiples of 32; bfloat16, float16 or float32; any strides.
        elem_dtype: torch.float8_e4m3fn, torch.float8_e5m2, torch.float4_e2m1fn_x2 or torch.int8, or its name; or "e2m3"
            or "e3m2"; as for `mx_quantize`.
        scaling: `rceil`, `floor`, `ceil` or `even`, as for `mx_quantize`.
        scale_layout: layout of both scales: `plain` (row-major) or `blocked` (the 128x4 tiles of `to_blocked`).

    Returns:
        `(q_row, s_row, q_col, s_col)`.

        - q_row, q_col: x's shape, elem_dtype. q_row is contiguous; q_col is column-major per matrix, with strides
          `(1, M)` or `(N*K, 1, N)`. In e2m1 two elements share a byte, so the shapes are `(..., K/2)` and
          `(..., M/2, K)`, and in FP6, which is uint8, `(..., 3*K/4)` and `(..., 3*M/4, K)`, as for `mx_quantize`.
        - s_row, s_col: float8_e8m0fnu. Plain: s_row `(..., M, K/32)` and s_col `(..., K, M/32)`, row-major. Blocked:
          `to_blocked` of the plain scales, with padding bytes 0.

    Special values: as for `mx_quantize`, in each direction on its own. A NaN makes its block of 32 along the row NaN,
        and its block of 32 along the column.

    Raises:
        TypeError: x has a dtype that is not listed above, or elem_dtype is not in the list above.
        ValueError: x has a rank that is not listed above; scaling or scale_layout is not in the lists above; or a size
            is not a multiple of 32.

    Example:
        >>> x = torch.zeros(32, 32)
        >>> x[0, :2] = torch.tensor([500.0, 1.0])
        >>> q_row, s_row, q_col, s_col = mx_quantize_rowcol(x)
        >>> q_row[0, :2].float().tolist(), s_row[0].view(torch.uint8).tolist()
        ([256.0, 0.5], [128])
        >>> q_col[0, :2].float().tolist(), s_col[:2].view(torch.uint8).tolist()
        ([256.0, 256.0], [[128], [119]])

    Source: OCP MX v1.0, section 6.3, applied to either axis.
    """
    check_args(x, elem_dtype=elem_dtype, scaling=scaling, scale_layout=scale_layout)
    options: dict[str, Any] = {"elem_dtype": elem_dtype, "scaling": scaling, "scale_layout": scale_layout}
    return (*mx_quantize(x, axis=-1, **options), *mx_quantize(x, axis=-2, **options))
