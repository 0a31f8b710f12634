"""mx_grouped_gemm_wgrad in Triton: the kernels of mx_gemm. Each tile is a sum over the tokens of one group."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.triton_kernels.blackwell import mx_matmul as blackwell
from mxspec.triton_kernels.hopper.mx.launch import WIDEST_TILE, mx_sm90, reads
from mxspec.triton_kernels.hopper.mx.measured import wgrad as measured
from mxspec.triton_kernels.hopper.releases import note
from mxspec.triton_kernels.tiles import mx_matmul
from mxspec.triton_kernels.tiles.mx_matmul import mx_tiles

__all__ = ["PTX", "RANK", "measured", "mx_grouped_gemm_wgrad", "note"]

# The race against torch._grouped_mm in bf16 on an H200: benchmarks/results/decisions.md. Blackwell: no GPU has run the
# tiles, nor the kernel with TMA, which `auto` takes on sm_100 for blocked scales. Both were compiled and interpreted.
RANK = {(9, 0): 1, (10, 0): 1}
PTX = mx_matmul.PTX


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
    out = torch.empty((offs.shape[0], dy.shape[1], x.shape[1]), dtype=out_dtype, device=dy.device)
    if not out.numel():
        return out
    of_dy, of_x = (dy.mT, dy_scale), (x.mT, x_scale)
    if blackwell.reads(*of_dy, *of_x, out, scale_layout):
        blackwell.mx_sm100(*of_dy, *of_x, out, offs=offs, grouped="K")
        return out
    # `mx_sm90` runs a separate kernel that turns its second operand into bf16. So the operand with fewer features is
    # second. The output is then written transposed, and no tile may hold columns of two experts' matrices.
    if x.shape[1] > dy.shape[1] and dy.shape[1] % WIDEST_TILE == 0 and reads(x.mT, dy.mT, out.mT):
        mx_sm90(*of_x, *of_dy, out.mT, scale_layout, offs=offs, grouped="K")
    else:
        multiply = mx_sm90 if reads(dy.mT, x.mT, out) else mx_tiles
        multiply(*of_dy, *of_x, out, scale_layout, offs=offs, grouped="K")
    return out
