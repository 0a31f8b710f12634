"""mx_quantize_rowcol: one tensor quantized along its rows and along its columns, which a kernel does in one read."""

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
    """Quantize to MX in both directions: what `mx_quantize` gives along the rows, and what it gives along the columns.

    `(q_row, s_row) = mx_quantize(x, axis=-1, ...)` and `(q_col, s_col) = mx_quantize(x, axis=-2, ...)`. In training an
    activation is an operand twice: along K in the forward pass, along the tokens in the weight gradient.

    Args:
        x: `(M, K)` or `(E, N, K)`, the last two multiples of 32; bfloat16, float16 or float32; any strides.
        elem_dtype: torch.float8_e4m3fn, torch.float8_e5m2 or torch.float4_e2m1fn_x2, or the name, as for
            `mx_quantize`.
        scaling: `rceil`, `floor`, `ceil` or `even`, as for `mx_quantize`.
        scale_layout: `plain` or `blocked`, the 128x4 tiles of `to_blocked`; of both scales.

    Returns:
        `(q_row, s_row, q_col, s_col)`. q_row and q_col: x's shape, elem_dtype; q_row contiguous, q_col column-major
        per matrix (strides `(1, M)` or `(N*K, 1, N)`); of e2m1, two elements to a byte, `(..., K/2)` and
        `(..., M/2, K)`, as for `mx_quantize`. Scales: float8_e8m0fnu; plain, s_row `(..., M, K/32)` and s_col
        `(..., K, M/32)`, row-major; blocked, `to_blocked` of those, padding bytes 0.

    Special values: as for `mx_quantize`, in each direction by itself: a NaN takes its row's block of 32 and its
        column's.

    Raises:
        TypeError: the dtype of x, or elem_dtype.
        ValueError: rank, scaling, scale_layout, or a size that is not a multiple of 32.

    Example:
        >>> x = torch.zeros(32, 32)
        >>> x[0, :2] = torch.tensor([500.0, 1.0])
        >>> q_row, s_row, q_col, s_col = mx_quantize_rowcol(x)
        >>> q_row[0, :2].float().tolist(), s_row[0].view(torch.uint8).tolist()
        ([256.0, 0.5], [128])
        >>> q_col[0, :2].float().tolist(), s_col[:2].view(torch.uint8).tolist()
        ([256.0, 256.0], [[128], [119]])

    Source: OCP MX v1.0, section 6.3, along either axis.
    """
    check_args(x, elem_dtype=elem_dtype, scaling=scaling, scale_layout=scale_layout)
    options: dict[str, Any] = {"elem_dtype": elem_dtype, "scaling": scaling, "scale_layout": scale_layout}
    return (*mx_quantize(x, axis=-1, **options), *mx_quantize(x, axis=-2, **options))
