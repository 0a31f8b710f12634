"""mx_quantize_rowcol_groups: quantize tokens along the features and along the tokens; a kernel reads them once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mxspec.formats import MX_BLOCK_SIZE
from mxspec.reference.common import checks
from mxspec.reference.mx_quantize_groups import WITH_E2M1, check_groups, mx_quantize_groups
from mxspec.spec import per_element, spec


def check_args(
    x: Tensor,
    offs: Tensor,
    *,
    pad_to: int = 128,
    elem_dtype: torch.dtype | str = torch.float8_e4m3fn,
    scaling: str = "rceil",
    scale_layout: str = "blocked",
    check_offs: bool = False,
) -> None:
    op = "mx_quantize_rowcol_groups"
    checks.tensor_dtype(op, "x", x, checks.FLOAT_DTYPES)
    checks.rank(op, "x", x, (2,))
    checks.multiple(op, "K", x.shape[1], MX_BLOCK_SIZE)
    check_groups(op, ("x", x), offs, pad_to, elem_dtype, scaling, scale_layout, check_offs, WITH_E2M1)


@spec(
    check_args=check_args,
    flops=per_element(4),  # a maximum and a multiply, twice
)
def mx_quantize_rowcol_groups(
    x: Tensor,
    offs: Tensor,
    *,
    pad_to: int = 128,
    elem_dtype: torch.dtype | str = torch.float8_e4m3fn,
    scaling: str = "rceil",
    scale_layout: str = "blocked",
    check_offs: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Quantize token groups to MX in both directions: along the features, and along the tokens of each group.

    `(q_row, s_row, start, end) = mx_quantize_groups(x, offs, axis=-1)`, and
    `(q_col, s_col, start, end) = mx_quantize_groups(x, offs, axis=-2)`, with the options of this call. Training uses
    the tokens of an expert in two matmuls: the forward multiplies along the features, and the gradient of the expert's
    weight along the tokens.

    Args:
        x: `(M, K)`, the tokens of each group together; K a multiple of 32; bfloat16, float16 or float32; any strides.
        offs: `(G,)` int32 on x's device: the exclusive end of each group. The ends never decrease, and the last is at
            most M. Rows from the last end on belong to no group and are dropped.
        pad_to, elem_dtype, scaling, scale_layout, check_offs: as for `mx_quantize_groups`, in both directions.

    Returns:
        `(q_row, s_row, q_col, s_col, start, end)`. Below, `R` is the smallest multiple of pad_to that is at least
        `M + G*pad_to`, and `Kp` is K rounded up to a multiple of 128.

        - q_row: `(R, K)`, elem_dtype, contiguous. Codes of padding are 0.
        - s_row: float8_e8m0fnu, row-major. Blocked: `(R + 128*G, Kp/32)`. Plain: `(R, K/32)`.
        - q_col: `(R, K)`, elem_dtype, column-major with strides `(1, R)`. Codes of padding are 0, but NaN in the same
          block as a NaN or an Inf.
        - in e2m1, whose bytes hold two neighbours of a block: q_row `(R, K/2)`, and q_col `(R/2, K)` with strides
          `(1, R/2)`. Padding in the same block as a NaN or an Inf has the code 7.
        - s_col: float8_e8m0fnu, row-major. Blocked: `(Kp, R/32 + 4*G)`. Plain: `(K, R/32)`.
        - start, end: `(G,)` int32. Group g and its padding take the rows of q_row and q_col from `start[g]` up to, but
          without, `end[g]`. In both blocked scales, the bytes of group g begin at byte `start[g] * Kp/32`.

    Special values: as for `mx_quantize`, in each direction on its own. A NaN or an Inf makes its block of 32 along the
        row NaN, and its block of 32 along the column. Padding never changes a scale. Scale bytes of blocks without a
        token are 0.

    Raises:
        TypeError: x, offs or elem_dtype has a dtype that is not listed above, or pad_to is not an integer.
        ValueError: a rank, a device, pad_to, scaling or scale_layout is not as above; K is not a multiple of 32; there
            would be 2^31 padded rows or more; or, with check_offs, offs is not in order.

    Example:
        >>> x = torch.full((3, 32), 2.0)
        >>> x[2, 0] = 448.0
        >>> q_row, s_row, q_col, s_col, start, end = mx_quantize_rowcol_groups(x, torch.tensor([1, 3]).int())
        >>> q_row.shape, q_row.stride(), q_col.shape, q_col.stride(), start.tolist(), end.tolist()
        (torch.Size([384, 32]), (32, 1), torch.Size([384, 32]), (1, 384), [0, 128], [128, 256])
        >>> q_row[[0, 128, 129], 1].float().tolist(), q_col[[0, 128, 129], 1].float().tolist()
        ([256.0, 256.0, 2.0], [256.0, 256.0, 256.0])

    Source: OCP MX v1.0, section 6.3, applied to either axis; the op that it consists of.
    """
    check_args(
        x, offs, pad_to=pad_to, elem_dtype=elem_dtype, scaling=scaling, scale_layout=scale_layout, check_offs=check_offs
    )
    options: dict[str, Any] = {
        "pad_to": pad_to, "elem_dtype": elem_dtype, "scaling": scaling, "scale_layout": scale_layout,
    }  # fmt: skip
    q_row, s_row, *_ = mx_quantize_groups(x, offs, axis=-1, **options)
    return q_row, s_row, *mx_quantize_groups(x, offs, axis=-2, **options)
