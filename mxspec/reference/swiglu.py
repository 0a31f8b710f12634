"""swiglu: SwiGLU of bfloat16."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.reference.common import checks
from mxspec.reference.common import swiglu as common
from mxspec.spec import per_element, spec


def check_args(gate: Tensor, up: Tensor) -> None:
    op = "swiglu"
    for name, tensor in (("gate", gate), ("up", up)):
        checks.tensor_dtype(op, name, tensor, (torch.bfloat16,))
        checks.rank(op, name, tensor, (2,))
    checks.shape(op, "up", up, tuple(gate.shape), f"for a gate of shape {tuple(gate.shape)}")
    checks.same_device(op, ("gate", gate), ("up", up))


@spec(
    check_args=check_args,
    flops=per_element(3),  # a sigmoid and two products
)
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute `h = silu(gate) * up` in bfloat16.

    `s` is the real number `1 / (1 + e^-gate)`, rounded to fp32; an s below 2^-126 is 0. `silu(gate)` is
    `fp32(gate * s)`, rounded to bfloat16. `h` is `silu(gate) * up`, rounded to bfloat16. These are the values that
    `swiglu_fp8_quantize_rowcol_groups` quantizes. PyTorch's own `silu` in bfloat16 gives the same bits for every gate
    except -87.5, -88 and -88.5. There PyTorch gives numbers around -6e-37, and this op gives -0.

    Args:
        gate: `(M, I)` bfloat16, M and I any size; any strides. Kernels are fastest if each row is contiguous and begins
            at a multiple of 16 bytes, as in the two halves of one `(M, 2I)` tensor whose I is a multiple of 16.
        up: `(M, I)` bfloat16 on gate's device; any strides.

    Returns:
        `(M, I)` bfloat16, contiguous.

    Special values: NaN gives NaN. A gate of -Inf gives NaN, because it is `-Inf * 0`. A gate of Inf gives an Inf with
        the sign of up, and NaN beside an up of 0. A finite gate from -87.5 down counts as -0. A product beyond
        bfloat16's range is Inf. Subnormal numbers keep their values.

    Raises:
        TypeError: gate or up is not bfloat16.
        ValueError: gate is not 2-D, up does not have gate's shape, or they are on two devices.

    Example:
        >>> gate, up = torch.tensor([[0.0, 128.0, -128.0]]).bfloat16(), torch.tensor([[5.0, 7.0, 7.0]]).bfloat16()
        >>> swiglu(gate, up).tolist()  # silu(128) is 128, and silu(-128) is -0
        [[0.0, 896.0, -0.0]]

    Source: Shazeer, "GLU Variants Improve Transformer", 2020; PyTorch, `silu` of bfloat16.
    """
    check_args(gate, up)
    return common.swiglu(gate, up).contiguous()
