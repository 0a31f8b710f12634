"""swiglu_backward_fp8_quantize_rowcol_groups: the gradient of SwiGLU, quantized in both directions."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.formats import FP8_SIZE_MULTIPLE
from mxspec.reference.common import checks
from mxspec.reference.common.swiglu import halves, swiglu_backward
from mxspec.reference.fp8_quantize_rowcol_groups import fp8_quantize_rowcol_groups
from mxspec.spec import per_element, spec


def check_args(
    gate_up: Tensor, dh: Tensor, offs: Tensor, *, scale_format: str = "fp32", check_offs: bool = False
) -> None:
    op = "swiglu_backward_fp8_quantize_rowcol_groups"
    for name, tensor in (("gate_up", gate_up), ("dh", dh)):
        checks.tensor_dtype(op, name, tensor, (torch.bfloat16,))
        checks.rank(op, name, tensor, (2,))
    checks.multiple(op, "2I", gate_up.shape[1], 2 * FP8_SIZE_MULTIPLE, of="")
    needed = gate_up.shape[0], gate_up.shape[1] // 2
    checks.shape(op, "dh", dh, needed, f"for a gate_up of shape {tuple(gate_up.shape)}")
    checks.same_device(op, ("gate_up", gate_up), ("dh", dh))
    checks.fp8_groups(op, ("gate_up", gate_up), offs, scale_format, check_offs)


@spec(
    check_args=check_args,
    flops=per_element(9),  # for each output: a share of the gradient, and a maximum and a multiply twice
)
def swiglu_backward_fp8_quantize_rowcol_groups(
    gate_up: Tensor, dh: Tensor, offs: Tensor, *, scale_format: str = "fp32", check_offs: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradient of `h = silu(gate) * up` in bfloat16, and quantize it as `fp8_quantize_rowcol_groups` does.

    `d_up = dh * silu(gate)` and `d_silu = dh * up`, each rounded to bfloat16, with silu and `s` as in
    `swiglu_fp8_quantize_rowcol_groups`. `d_gate = (d_silu * s) * (1 + gate * (1 - s))`: each operation is rounded to
    fp32, and the result to bfloat16. The gradient is `d_gate` in the columns `0 .. I` and `d_up` in the columns
    `I .. 2I`. PyTorch's own bfloat16 kernels give the same bits for every gate and every mantissa of d_silu, with these
    exceptions: the gates -87.5, -88 and -88.5, where `s` is 0 here; and on an H200 two pairs of a gate and a mantissa,
    (-2.09375, 1.171875) and (-24.625, 1.0859375), where PyTorch's GPU kernel rounds otherwise than its CPU kernel.

    Args:
        gate_up: `(M, 2I)` bfloat16, as for `swiglu_fp8_quantize_rowcol_groups`.
        dh: `(M, I)` bfloat16 on gate_up's device: the gradient of h; any strides.
        offs, scale_format, check_offs: as for `fp8_quantize_rowcol_groups`. eps is 1e-12.

    Returns:
        `(q_row, s_row, q_col, s_col, start, end)` of the gradient, `(M, 2I)`, as `fp8_quantize_rowcol_groups` returns
        them. A block is 128 columns of the gradient, because the matmul that reads it sums over its 2I columns. So if I
        is no multiple of 128, one block holds the last columns of d_gate and the first columns of d_up.

    Special values: as for `swiglu_fp8_quantize_rowcol_groups`.

    Raises:
        TypeError: gate_up or dh is not bfloat16, or offs is not int32.
        ValueError: a rank, a shape, a device or scale_format is not as above; there would be 2^31 padded rows or more;
            or, with check_offs, offs is not in order.

    Example:
        >>> gate_up, dh = torch.zeros(1, 256, dtype=torch.bfloat16), torch.zeros(1, 128, dtype=torch.bfloat16)
        >>> gate_up[0, 128], dh[0, 0] = 896.0, 2.0  # the derivative of silu at 0 is 0.5
        >>> q_row, s_row, *_ = swiglu_backward_fp8_quantize_rowcol_groups(gate_up, dh, torch.tensor([1]).int())
        >>> q_row.shape, q_row[0, 0].item(), s_row[0, 0].item()
        (torch.Size([1, 256]), 448.0, 2.0)

    Source: PyTorch, `silu_backward` of bfloat16; DeepSeek-V3 technical report, section 3.3.2.
    """
    check_args(gate_up, dh, offs, scale_format=scale_format, check_offs=check_offs)
    return fp8_quantize_rowcol_groups(swiglu_backward(*halves(gate_up), dh), offs, scale_format=scale_format)
