"""mx_grouped_gemm_wgrad in PyTorch, through `torch.nn.functional.scaled_grouped_mm`, on Blackwell.

The results of `mx_quantize_groups(..., axis=-2)` in e4m3fn fit if K is a multiple of 16, the output is bfloat16
and there are at most 1024 groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.cublas_kernels._mx import absent, groups_reason, multiple_of_16, operands_reason, recipe

PTX = "no: PyTorch's kernels come compiled"
INTERPRETABLE = "no: PyTorch has no such kernels for a CPU"


def supports(
    dy: Tensor,
    dy_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    offs: Tensor,
    *,
    out_dtype: torch.dtype = torch.float32,
    scale_layout: str = "blocked",
    check_offs: bool = False,
) -> str | None:
    operands, scales = (("dy.mT", dy.mT), ("x.mT", x.mT)), (("dy_scale", dy_scale), ("x_scale", x_scale))
    return (
        absent("scaled_grouped_mm", dy.device)
        or groups_reason(offs.shape[0], out_dtype)
        or (None if offs.shape[0] else "takes no empty matrices")
        or operands_reason(scale_layout, operands, scales)
        or multiple_of_16("K", x.shape[1])
    )


def mx_grouped_gemm_wgrad(
    dy: Tensor,
    dy_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    offs: Tensor,
    *,
    out_dtype: torch.dtype = torch.float32,
    scale_layout: str = "blocked",
    check_offs: bool = False,
) -> Tensor:
    from torch.nn.functional import scaled_grouped_mm  # type: ignore[attr-defined]  # torch's stubs lack it

    out = scaled_grouped_mm(dy.mT, x, **recipe(dy_scale, x_scale), offs=offs, output_dtype=out_dtype)
    # PyTorch's kernel does not write the matrix of a group without tokens.
    empty = torch.diff(offs, prepend=offs.new_zeros(1)) == 0
    return out.masked_fill_(empty[:, None, None], 0)
