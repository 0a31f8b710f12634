"""swiglu_backward: the gradient of SwiGLU of bfloat16."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.reference.common import checks
from mxspec.reference.common import swiglu as common
from mxspec.spec import per_element, spec


def check_args(gate: Tensor, up: Tensor, dh: Tensor) -> None:
    op = "swiglu_backward"
    for name, tensor in (("gate", gate), ("up", up), ("dh", dh)):
        checks.tensor_dtype(op, name, tensor, (torch.bfloat16,))
        checks.rank(op, name, tensor, (2,))
    for name, tensor in (("up", up), ("dh", dh)):
        checks.shape(op, name, tensor, tuple(gate.shape), f"for a gate of shape {tuple(gate.shape)}")
        checks.same_device(op, ("gate", gate), (name, tensor))


@spec(
    check_args=check_args,
    flops=per_element(4),  # for each output: half of a sigmoid, of two products, and of the derivative
)
def swiglu_backward(gate: Tensor, up: Tensor, dh: Tensor) -> Tensor:
    """Compute the gradient of `h = silu(gate) * up` in bfloat16, for gate and up together.

    `d_up = dh * silu(gate)` and `d_silu = dh * up`, each rounded to bfloat16, with silu and `s` as in `swiglu`.
    `d_gate = (d_silu * s) * (1 + gate * (1 - s))`: each operation is rounded to fp32, and the result to bfloat16. These
    are the values that `swiglu_backward_fp8_quantize_rowcol_groups` quantizes.

    Args:
        gate, up: `(M, I)` bfloat16, as for `swiglu`.
        dh: `(M, I)` bfloat16 on gate's device: the gradient of h; any strides.

    Returns:
        `(M, 2I)` bfloat16, contiguous: `d_gate` in the columns `0 .. I`, `d_up` in the columns `I .. 2I`.

    Special values: NaN and Inf follow the arithmetic of IEEE 754. A gate of NaN or -Inf makes both gradients NaN. A
        gate of Inf makes d_gate NaN, because it is `Inf * 0`. Its d_up is an Inf with the sign of dh, or NaN beside a
        dh of 0. A finite gate from -87.5 down makes both gradients 0, except that d_gate is NaN beside a d_silu that
        is Inf or NaN, and d_up is NaN beside a dh that is. Subnormal numbers keep their values.

    Raises:
        TypeError: gate, up or dh is not bfloat16.
        ValueError: gate is not 2-D, up or dh does not have gate's shape, or they are on two devices.

    Example:
        >>> gate, up, dh = (torch.tensor([row]).bfloat16() for row in ([0.0, 128.0], [6.0, 5.0], [2.0, 3.0]))
        >>> swiglu_backward(gate, up, dh).tolist()  # the derivative of silu is 0.5 at 0, and 1 at 128
        [[6.0, 15.0, 0.0, 384.0]]

    Source: PyTorch, `silu_backward` of bfloat16; Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    check_args(gate, up, dh)
    return common.swiglu_backward(gate, up, dh)
