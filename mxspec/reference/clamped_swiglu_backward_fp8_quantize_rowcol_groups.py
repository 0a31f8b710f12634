"""clamped_swiglu_backward_fp8_quantize_rowcol_groups: the gradient of gpt-oss's activation, quantized both ways."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.reference.common import checks
from mxspec.reference.common.clamped_swiglu import check_operands, clamped_swiglu_backward, with_bias
from mxspec.reference.fp8_quantize_rowcol_groups import fp8_quantize_rowcol_groups
from mxspec.spec import per_element, spec


def check_args(
    gate_up: Tensor, bias: Tensor, dh: Tensor, offs: Tensor, *, scale_format: str = "fp32", check_offs: bool = False
) -> None:
    op = "clamped_swiglu_backward_fp8_quantize_rowcol_groups"
    checks.tensor_dtype(op, "dh", dh, (torch.bfloat16,))
    checks.rank(op, "dh", dh, (2,))
    check_operands(op, gate_up, bias, offs, scale_format, check_offs)
    needed = gate_up.shape[0], gate_up.shape[1] // 2
    checks.shape(op, "dh", dh, needed, f"for a gate_up of shape {tuple(gate_up.shape)}")
    checks.same_device(op, ("gate_up", gate_up), ("dh", dh))


@spec(
    check_args=check_args,
    flops=per_element(12),  # for each output: a share of the gradient, and a maximum and a multiply twice
)
def clamped_swiglu_backward_fp8_quantize_rowcol_groups(
    gate_up: Tensor, bias: Tensor, dh: Tensor, offs: Tensor, *, scale_format: str = "fp32", check_offs: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradient of the h of `clamped_swiglu_fp8_quantize_rowcol_groups`, and quantize it in both directions.

    gate and up are the numbers after the bias, and x and u are gate and up after their limits. `s` and `glu` are as
    there. `slope(x)` is the real number `s + 1.702 x * s * (1 - s)`, rounded to bfloat16. Each of these is rounded to
    bfloat16: `d_up = dh * glu(x)`, `d_glu = dh * (u + 1)`, where `u + 1` is rounded first, and `d_gate = d_glu *
    slope(x)`. A d_gate whose gate is above 7 is 0, and a d_up whose up is above 7 or below -7. At a limit itself, the
    gradient passes. So it is with PyTorch's `clamp`.

    Args:
        gate_up, bias: as for `clamped_swiglu_fp8_quantize_rowcol_groups`.
        dh: `(M, I)` bfloat16 on gate_up's device: the gradient of h; any strides.
        offs, scale_format, check_offs: as for `fp8_quantize_rowcol_groups`. eps is 1e-12.

    Returns:
        `(q_row, s_row, q_col, s_col, start, end)` of the gradient, `(M, 2I)`, as `fp8_quantize_rowcol_groups` returns
        them. d_gate is in the even columns, d_up in the odd columns, as in gate_up.

    Special values: a gate of NaN makes d_gate 0 and d_up NaN; an up of NaN makes d_up 0 and d_gate NaN. So it is with
        PyTorch's `clamp`. A gate of -Inf makes both NaN. A gate of Inf counts as 7, so its d_gate is 0. A finite gate
        from -51.5 down makes both 0, except beside an Inf or a NaN. A NaN or an Inf in the gradient makes the block of
        128 in its row NaN, and the block of 128 in its column.

    Raises:
        TypeError: gate_up, bias or dh is not bfloat16, or offs is not int32.
        ValueError: a rank, a shape, a device, 2I or scale_format is not as above; there would be 2^31 padded rows or
            more; or, with check_offs, offs is not in order.

    Example:
        >>> gate_up, bias, dh = (torch.zeros(1, n, dtype=torch.bfloat16) for n in (32, 32, 16))
        >>> bias[0, 1], dh[0, 0] = 6.0, 128.0  # the derivative of glu at 0 is 0.5
        >>> op = clamped_swiglu_backward_fp8_quantize_rowcol_groups
        >>> q_row, s_row, *_ = op(gate_up, bias, dh, torch.tensor([1]).int())
        >>> q_row.shape, q_row[0, 0].item(), s_row[0, 0].item()  # 448 * 1 is 128 * (6 + 1) * 0.5
        (torch.Size([1, 32]), 448.0, 1.0)

    Source: PyTorch, the gradients of `clamp` and `sigmoid`; transformers, `GptOssExperts._apply_gate`.
    """
    check_args(gate_up, bias, dh, offs, scale_format=scale_format, check_offs=check_offs)
    gradient = clamped_swiglu_backward(*with_bias(gate_up, bias, offs), dh)
    return fp8_quantize_rowcol_groups(gradient, offs, scale_format=scale_format)
