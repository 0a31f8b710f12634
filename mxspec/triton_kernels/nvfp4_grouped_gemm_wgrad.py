"""nvfp4_grouped_gemm_wgrad in Triton: the kernels of nvfp4_gemm. Each tile is a sum over the tokens of one group."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.triton_kernels.hopper.nvfp4.launch import by_memory, reads
from mxspec.triton_kernels.hopper.nvfp4.measured import wgrad as measured
from mxspec.triton_kernels.tiles import nvfp4_matmul
from mxspec.triton_kernels.tiles.nvfp4_matmul import nvfp4_tiles

__all__ = ["PTX", "RANK", "measured", "nvfp4_grouped_gemm_wgrad"]

# Beside grouped_mm on an H100: benchmarks/results/decisions.md. Blackwell: compiled and interpreted, not run.
RANK = {(9, 0): 1, (10, 0): 1}
PTX = nvfp4_matmul.PTX


def nvfp4_grouped_gemm_wgrad(
    dy: Tensor,
    dy_scale: Tensor | None,
    dy_tensor_scale: Tensor,
    x: Tensor,
    x_scale: Tensor | None,
    x_tensor_scale: Tensor,
    offs: Tensor,
    *,
    out_dtype: torch.dtype = torch.float32,
    scale_layout: str = "blocked",
    check_offs: bool = False,
) -> Tensor:
    out = torch.empty((offs.shape[0], dy.shape[1], x.shape[1]), dtype=out_dtype, device=dy.device)
    if out.numel():
        operands = dy.mT, dy_scale, dy_tensor_scale, x.mT, x_scale, x_tensor_scale
        multiply = by_memory if reads(dy.mT, dy_scale, x.mT, x_scale, out, "K") else nvfp4_tiles
        multiply(*operands, out, scale_layout, offs=offs, grouped="K")
    return out
