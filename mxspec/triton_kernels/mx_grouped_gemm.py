"""mx_grouped_gemm in Triton: as mx_gemm; a plan says which rows a tile has, or each program finds its group."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.triton_kernels import _mx_gemm_tiles
from mxspec.triton_kernels._mx_gemm_tiles import mx_tiles
from mxspec.triton_kernels._mx_sm90 import mx_sm90, reads

# H200, 32768 tokens, N 2048, K 7168, of torch._grouped_mm's rate in bf16: 8 experts 0.92, 64 experts 0.57, where the
# weights are as much to turn into bf16 as to multiply. Blackwell: compiled, not run.
RANK = {(9, 0): 1, (10, 0): 1}
PTX = _mx_gemm_tiles.PTX


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
    out = torch.empty((a.shape[0], b.shape[1]), dtype=out_dtype, device=a.device)
    if out.numel():
        multiply = mx_sm90 if reads(a, b, out) else mx_tiles
        multiply(a, a_scale, b, b_scale, out, scale_layout, offs=offs, groups="M")
    return out
