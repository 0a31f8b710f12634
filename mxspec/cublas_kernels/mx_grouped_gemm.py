"""mx_grouped_gemm in PyTorch, through `torch.nn.functional.scaled_grouped_mm`, on Blackwell.

The results of `mx_quantize_groups` and `mx_quantize(..., scale_layout="blocked")` in e4m3fn fit if N is a multiple of
16, the output is bfloat16 and there are at most 1024 groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.cublas_kernels._mx import absent, groups_reason, multiple_of_16, operands_reason, recipe

PTX = "no: PyTorch's kernels come compiled"
INTERPRETABLE = "no: PyTorch has no such kernels for a CPU"


def supports(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    offs: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    scale_layout: str = "blocked",
    check_offs: bool = False,
) -> str | None:
    return (
        absent("scaled_grouped_mm", a.device)
        or groups_reason(offs.shape[0], out_dtype)
        or operands_reason(scale_layout, (("a", a), ("b", b)), (("a_scale", a_scale), ("b_scale", b_scale)))
        or multiple_of_16("N", b.shape[1])
    )


def mx_grouped_gemm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    offs: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    scale_layout: str = "blocked",
    check_offs: bool = False,
) -> Tensor:
    from torch.nn.functional import scaled_grouped_mm  # type: ignore[attr-defined]  # torch's stubs lack it

    out = scaled_grouped_mm(a, b.mT, **recipe(a_scale, b_scale), offs=offs, output_dtype=out_dtype)
    # PyTorch's kernel does not write the rows that belong to no group.
    of_none = torch.arange(a.shape[0], device=a.device) >= offs[-1]
    return out.masked_fill_(of_none[:, None], 0)
