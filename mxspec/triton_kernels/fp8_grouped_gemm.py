"""fp8_grouped_gemm in Triton: fp8_gemm's kernels, each tile of the tokens of one group."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.triton_kernels._fp8_gemm_tiles import fp8_tiles
from mxspec.triton_kernels._fp8_sm90 import fp8_sm90, reads
from mxspec.triton_kernels.fp8_gemm import PTX

__all__ = ["PTX", "fp8_grouped_gemm"]


def fp8_grouped_gemm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    offs: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    alignment: int = 1,
    check_offs: bool = False,
) -> Tensor:
    out = torch.empty((a.shape[0], b.shape[1]), dtype=out_dtype, device=a.device)
    if not b.numel():  # no experts, or sums of nothing
        return out.zero_()
    if out.numel():
        multiply = fp8_sm90 if reads(a, b, out) else fp8_tiles
        multiply(a, a_scale, b, b_scale, out, offs=offs, groups="M")
    return out
