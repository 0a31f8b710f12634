"""mx_gemm in Triton: `hopper/mx/by_memory.py` for large outputs on Hopper, `hopper/mx/` for small; else plain tiles."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.triton_kernels.hopper.mx.by_memory import mx_bf16, pays
from mxspec.triton_kernels.hopper.mx.launch import mx_sm90, reads
from mxspec.triton_kernels.hopper.releases import note
from mxspec.triton_kernels.tiles import mx_matmul
from mxspec.triton_kernels.tiles.mx_matmul import mx_tiles

__all__ = ["PTX", "RANK", "mx_gemm", "note"]

# H200, each by itself for 150 ms, of the rate of cuBLAS in bf16 on unquantized operands, 8192^3, 4096x4096x7168,
# 32768x2048x7168: 1.00, 0.93, 0.91; the Gluon kernel, which small outputs take, 0.84, 0.83, 0.88. Blackwell: compiled,
# not run.
RANK = {(9, 0): 1, (10, 0): 1}
PTX = mx_matmul.PTX


def mx_gemm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    scale_layout: str = "plain",
) -> Tensor:
    if a.shape[1] and pays(a.shape[0], b.shape[0], a.device):
        return mx_bf16(a, a_scale, b, b_scale, out_dtype, scale_layout)
    out = torch.empty((a.shape[0], b.shape[0]), dtype=out_dtype, device=a.device)
    if not out.numel():
        return out
    # The operand with fewer rows is turned into bf16 by a kernel of its own.
    if b.shape[0] > a.shape[0] and reads(b, a, out.mT):
        mx_sm90(b, b_scale, a, a_scale, out.mT, scale_layout)
    else:
        multiply = mx_sm90 if reads(a, b, out) else mx_tiles
        multiply(a, a_scale, b, b_scale, out, scale_layout)
    return out
