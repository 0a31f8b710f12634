"""mx_gemm in cuBLAS, through `torch.nn.functional.scaled_mm`, on Blackwell.

This backend never copies an operand. If cuBLAS cannot read the layout of an operand, `supports` refuses the call and
names the layout that it needs. The results of `mx_quantize(..., scale_layout="blocked")` in e4m3fn fit if N is a
multiple of 16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.cublas_kernels._mx import absent, multiple_of_16, operands_reason, recipe

PTX = "no: cuBLAS comes compiled"
INTERPRETABLE = "no: cuBLAS has no kernels for a CPU"


def supports(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    scale_layout: str = "plain",
) -> str | None:
    return (
        absent("scaled_mm", a.device)
        or operands_reason(scale_layout, (("a", a), ("b", b)), (("a_scale", a_scale), ("b_scale", b_scale)))
        or multiple_of_16("N", b.shape[0])
    )


def mx_gemm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    scale_layout: str = "plain",
) -> Tensor:
    from torch.nn.functional import scaled_mm

    return scaled_mm(a, b.t(), **recipe(a_scale, b_scale), output_dtype=out_dtype)
