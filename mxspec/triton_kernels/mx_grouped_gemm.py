"""mx_grouped_gemm in Triton: the kernels of mx_gemm.

In the kernels for Hopper, a plan in memory holds the rows of each tile. In plain tiles and in the kernel for Blackwell,
each program finds its group by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.triton_kernels.blackwell import mx_matmul as blackwell
from mxspec.triton_kernels.hopper import releases
from mxspec.triton_kernels.hopper.mx.by_memory import mx_bf16, pays_for_groups
from mxspec.triton_kernels.hopper.mx.launch import mx_few, mx_sm90, reads, takes_few
from mxspec.triton_kernels.hopper.mx.measured import grouped as measured
from mxspec.triton_kernels.hopper.releases import note
from mxspec.triton_kernels.tiles import mx_matmul
from mxspec.triton_kernels.tiles.mx_matmul import mx_tiles

__all__ = ["BATCH_INVARIANT", "PTX", "RANK", "measured", "mx_grouped_gemm", "note"]

# The race against torch._grouped_mm in bf16 on an H200: benchmarks/results/decisions.md. Blackwell: no GPU has run the
# tiles, nor the kernel with TMA, which `auto` takes on sm_100 for blocked scales. Both were compiled and interpreted.
RANK = {(9, 0): 1, (10, 0): 1}
BATCH_INVARIANT = releases.refusal() is None  # without Gluon, the tiles sum in another order than cuBLAS
PTX = mx_matmul.PTX


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
    (M, K), (E, N, _) = a.shape, b.shape
    if K and E and pays_for_groups(M, N, E, out_dtype, a.device):
        return mx_bf16(a, a_scale, b, b_scale, out_dtype, scale_layout, offs)
    out = torch.empty((M, N), dtype=out_dtype, device=a.device)
    if blackwell.reads(a, a_scale, b, b_scale, out, scale_layout):
        blackwell.mx_sm100(a, a_scale, b, b_scale, out, offs=offs, grouped="M")
    elif out.numel() and takes_few(a, b, b_scale, out, scale_layout):
        mx_few(a, a_scale, b, b_scale, out, scale_layout, offs=offs)
    elif out.numel():
        multiply = mx_sm90 if reads(a, b, out) else mx_tiles
        multiply(a, a_scale, b, b_scale, out, scale_layout, offs=offs, grouped="M")
    return out
