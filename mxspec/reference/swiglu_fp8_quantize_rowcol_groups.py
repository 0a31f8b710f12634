"""swiglu_fp8_quantize_rowcol_groups: SwiGLU of token groups, quantized in both directions."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.formats import FP8_SIZE_MULTIPLE
from mxspec.reference.common import checks
from mxspec.reference.common.swiglu import halves, swiglu
from mxspec.reference.fp8_quantize_rowcol_groups import fp8_quantize_rowcol_groups
from mxspec.spec import per_element, spec


def check_args(gate_up: Tensor, offs: Tensor, *, scale_format: str = "fp32", check_offs: bool = False) -> None:
    op = "swiglu_fp8_quantize_rowcol_groups"
    checks.tensor_dtype(op, "gate_up", gate_up, (torch.bfloat16,))
    checks.rank(op, "gate_up", gate_up, (2,))
    checks.multiple(op, "2I", gate_up.shape[1], 2 * FP8_SIZE_MULTIPLE, of="")
    checks.fp8_groups(op, ("gate_up", gate_up), offs, scale_format, check_offs)


@spec(
    check_args=check_args,
    flops=per_element(5),  # for each output: a sigmoid, two products, and a maximum and a multiply twice
)
def swiglu_fp8_quantize_rowcol_groups(
    gate_up: Tensor, offs: Tensor, *, scale_format: str = "fp32", check_offs: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute `h = silu(gate) * up` in bfloat16, and quantize h as `fp8_quantize_rowcol_groups` does.

    `s = 1 / (1 + e^-gate)`, computed in float64 and rounded to fp32; an s below 2^-126 is 0. `silu(gate)` is
    `fp32(gate * s)`, rounded to bfloat16. `h` is `silu(gate) * up`, rounded to bfloat16. PyTorch's own `silu` in
    bfloat16 gives the same bits for every gate except -87.5, -88 and -88.5. There PyTorch gives numbers around -6e-37,
    and this op gives -0.

    Args:
        gate_up: `(M, 2I)` bfloat16, I a multiple of 16; any strides. The columns `0 .. I` are the gate, the columns
            `I .. 2I` are up. The tokens of each group lie together.
        offs, scale_format, check_offs: as for `fp8_quantize_rowcol_groups`. eps is 1e-12.

    Returns:
        `(q_row, s_row, q_col, s_col, start, end)` of `h`, `(M, I)`, as `fp8_quantize_rowcol_groups` returns them.

    Special values: a NaN, an Inf or a product beyond bfloat16's range makes the block of 128 in its row NaN, and the
        block of 128 in its column. A gate of -Inf is NaN, because it is `-Inf * 0`.

    Raises:
        TypeError: gate_up is not bfloat16, or offs is not int32.
        ValueError: a rank, a device, 2I or scale_format is not as above; there would be 2^31 padded rows or more; or,
            with check_offs, offs is not in order.

    Example:
        >>> gate_up = torch.zeros(2, 256, dtype=torch.bfloat16)
        >>> gate_up[0, 0], gate_up[0, 128] = 128.0, 7.0  # silu(128) is 128
        >>> q_row, s_row, *_ = swiglu_fp8_quantize_rowcol_groups(gate_up, torch.tensor([2]).int())
        >>> q_row.shape, q_row[0, 0].item(), s_row[0].tolist()
        (torch.Size([2, 128]), 448.0, [2.0])

    Source: Shazeer, "GLU Variants Improve Transformer", 2020; PyTorch, `silu` of bfloat16.
    """
    check_args(gate_up, offs, scale_format=scale_format, check_offs=check_offs)
    return fp8_quantize_rowcol_groups(swiglu(*halves(gate_up)), offs, scale_format=scale_format)
