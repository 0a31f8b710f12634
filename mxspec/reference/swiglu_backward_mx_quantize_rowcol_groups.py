"""swiglu_backward_mx_quantize_rowcol_groups: the gradient of SwiGLU, quantized to MX in both directions."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.formats import MX_BLOCK_SIZE
from mxspec.reference.common import checks
from mxspec.reference.common.swiglu import halves, swiglu_backward
from mxspec.reference.mx_quantize_groups import check_groups
from mxspec.reference.mx_quantize_rowcol_groups import mx_quantize_rowcol_groups
from mxspec.spec import per_element, spec


def check_args(
    gate_up: Tensor,
    dh: Tensor,
    offs: Tensor,
    *,
    pad_to: int = 128,
    elem_dtype: torch.dtype | str = torch.float8_e4m3fn,
    scaling: str = "rceil",
    scale_layout: str = "blocked",
    check_offs: bool = False,
) -> None:
    op = "swiglu_backward_mx_quantize_rowcol_groups"
    for name, tensor in (("gate_up", gate_up), ("dh", dh)):
        checks.tensor_dtype(op, name, tensor, (torch.bfloat16,))
        checks.rank(op, name, tensor, (2,))
    checks.multiple(op, "2I", gate_up.shape[1], 2 * MX_BLOCK_SIZE, of="")
    needed = gate_up.shape[0], gate_up.shape[1] // 2
    checks.shape(op, "dh", dh, needed, f"for a gate_up of shape {tuple(gate_up.shape)}")
    checks.same_device(op, ("gate_up", gate_up), ("dh", dh))
    check_groups(op, ("gate_up", gate_up), offs, pad_to, elem_dtype, scaling, scale_layout, check_offs)


@spec(
    check_args=check_args,
    flops=per_element(9),  # for each output: a share of the gradient, and a maximum and a multiply twice
)
def swiglu_backward_mx_quantize_rowcol_groups(
    gate_up: Tensor,
    dh: Tensor,
    offs: Tensor,
    *,
    pad_to: int = 128,
    elem_dtype: torch.dtype | str = torch.float8_e4m3fn,
    scaling: str = "rceil",
    scale_layout: str = "blocked",
    check_offs: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradient of `h = silu(gate) * up` in bfloat16, and quantize it as `mx_quantize_rowcol_groups` does.

    The gradient has the bits of `swiglu_backward(gate, up, dh)`: `d_gate` in the columns `0 .. I` and `d_up` in the
    columns `I .. 2I`. A kernel writes no bfloat16 gradient.

    Args:
        gate_up: `(M, 2I)` bfloat16, as for `swiglu_mx_quantize_rowcol_groups`.
        dh: `(M, I)` bfloat16 on gate_up's device: the gradient of h; any strides.
        offs, pad_to, elem_dtype, scaling, scale_layout, check_offs: as for `mx_quantize_rowcol_groups`.

    Returns:
        `(q_row, s_row, q_col, s_col, start, end)` of the gradient, `(M, 2I)`, as `mx_quantize_rowcol_groups` returns
        them. I is a multiple of 32, so no block holds columns of both d_gate and d_up.

    Special values: as for `swiglu_mx_quantize_rowcol_groups`.

    Raises:
        TypeError: gate_up or dh is not bfloat16, offs is not int32, elem_dtype is not listed, or pad_to is not an
            integer.
        ValueError: a rank, a shape, a device, pad_to, scaling or scale_layout is not as above; there would be 2^31
            padded rows or more; or, with check_offs, offs is not in order.

    Example:
        >>> gate_up, dh = torch.zeros(1, 64, dtype=torch.bfloat16), torch.zeros(1, 32, dtype=torch.bfloat16)
        >>> gate_up[0, 32], dh[0, 0] = 896.0, 2.0  # the derivative of silu at 0 is 0.5
        >>> offs = torch.tensor([1]).int()
        >>> q_row, s_row, *_ = swiglu_backward_mx_quantize_rowcol_groups(gate_up, dh, offs, scale_layout="plain")
        >>> q_row.shape, q_row[0, 0].item(), s_row[0, 0].item()
        (torch.Size([256, 64]), 448.0, 2.0)

    Source: PyTorch, `silu_backward` of bfloat16; OCP MX v1.0, section 6.3.
    """
    check_args(
        gate_up, dh, offs, pad_to=pad_to, elem_dtype=elem_dtype, scaling=scaling, scale_layout=scale_layout,
        check_offs=check_offs,
    )  # fmt: skip
    gradient = swiglu_backward(*halves(gate_up), dh)
    return mx_quantize_rowcol_groups(
        gradient, offs, pad_to=pad_to, elem_dtype=elem_dtype, scaling=scaling, scale_layout=scale_layout
    )
