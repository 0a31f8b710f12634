"""swiglu_mx_quantize_rowcol_groups: SwiGLU of token groups, quantized to MX in both directions."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.formats import MX_BLOCK_SIZE
from mxspec.reference.common import checks
from mxspec.reference.common.swiglu import halves, swiglu
from mxspec.reference.mx_quantize_groups import check_groups
from mxspec.reference.mx_quantize_rowcol_groups import mx_quantize_rowcol_groups
from mxspec.spec import per_element, spec


def check_args(
    gate_up: Tensor,
    offs: Tensor,
    *,
    pad_to: int = 128,
    elem_dtype: torch.dtype | str = torch.float8_e4m3fn,
    scaling: str = "rceil",
    scale_layout: str = "blocked",
    check_offs: bool = False,
) -> None:
    op = "swiglu_mx_quantize_rowcol_groups"
    checks.tensor_dtype(op, "gate_up", gate_up, (torch.bfloat16,))
    checks.rank(op, "gate_up", gate_up, (2,))
    checks.multiple(op, "2I", gate_up.shape[1], 2 * MX_BLOCK_SIZE, of="")
    check_groups(op, ("gate_up", gate_up), offs, pad_to, elem_dtype, scaling, scale_layout, check_offs)


@spec(
    check_args=check_args,
    flops=per_element(5),  # for each output: a sigmoid, two products, and a maximum and a multiply twice
)
def swiglu_mx_quantize_rowcol_groups(
    gate_up: Tensor,
    offs: Tensor,
    *,
    pad_to: int = 128,
    elem_dtype: torch.dtype | str = torch.float8_e4m3fn,
    scaling: str = "rceil",
    scale_layout: str = "blocked",
    check_offs: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute `h = silu(gate) * up` in bfloat16, and quantize h as `mx_quantize_rowcol_groups` does.

    `h` has the bits of `swiglu(gate, up)`: the sigmoid is rounded to fp32, and is 0 below 2^-126; silu is rounded to
    bfloat16, and so is the product. A kernel writes no bfloat16 h.

    Args:
        gate_up: `(M, 2I)` bfloat16, I a multiple of 32; any strides. The columns `0 .. I` are the gate, the columns
            `I .. 2I` are up. The tokens of each group lie together.
        offs, pad_to, elem_dtype, scaling, scale_layout, check_offs: as for `mx_quantize_rowcol_groups`.

    Returns:
        `(q_row, s_row, q_col, s_col, start, end)` of `h`, `(M, I)`, as `mx_quantize_rowcol_groups` returns them.

    Special values: a NaN, an Inf or a product beyond bfloat16's range makes its block of 32 along the row NaN, and its
        block of 32 along the column. A gate of -Inf is NaN, because it is `-Inf * 0`.

    Raises:
        TypeError: gate_up is not bfloat16, offs is not int32, elem_dtype is not listed, or pad_to is not an integer.
        ValueError: a rank, a device, 2I, pad_to, scaling or scale_layout is not as above; there would be 2^31 padded
            rows or more; or, with check_offs, offs is not in order.

    Example:
        >>> gate_up = torch.zeros(2, 64, dtype=torch.bfloat16)
        >>> gate_up[0, 0], gate_up[0, 32] = 128.0, 7.0  # silu(128) is 128
        >>> q_row, s_row, *_ = swiglu_mx_quantize_rowcol_groups(gate_up, torch.tensor([2]).int(), scale_layout="plain")
        >>> q_row.shape, q_row[0, 0].item(), s_row[0].float().tolist()
        (torch.Size([256, 32]), 448.0, [2.0])

    Source: Shazeer, "GLU Variants Improve Transformer", 2020; OCP MX v1.0, section 6.3.
    """
    check_args(
        gate_up, offs, pad_to=pad_to, elem_dtype=elem_dtype, scaling=scaling, scale_layout=scale_layout,
        check_offs=check_offs,
    )  # fmt: skip
    h = swiglu(*halves(gate_up))
    return mx_quantize_rowcol_groups(
        h, offs, pad_to=pad_to, elem_dtype=elem_dtype, scaling=scaling, scale_layout=scale_layout
    )
