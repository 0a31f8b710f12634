"""nvfp4_grouped_gemm in Triton: the kernels of nvfp4_gemm.

In the kernel for few tokens, a plan in memory holds the rows of each tile. In the others, each program finds its group
by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.triton_kernels.hopper.nvfp4.launch import by_memory, few, pays, reads, takes_few
from mxspec.triton_kernels.hopper.nvfp4.measured import grouped as measured
from mxspec.triton_kernels.tiles import nvfp4_matmul
from mxspec.triton_kernels.tiles.nvfp4_matmul import nvfp4_tiles

__all__ = ["BATCH_INVARIANT", "PTX", "RANK", "measured", "nvfp4_grouped_gemm"]

# Beside grouped_mm on an H100: benchmarks/results/decisions.md. Blackwell: compiled and interpreted, not run.
RANK = {(9, 0): 1, (10, 0): 1}
BATCH_INVARIANT = True
PTX = nvfp4_matmul.PTX


def nvfp4_grouped_gemm(
    a: Tensor,
    a_scale: Tensor | None,
    a_tensor_scale: Tensor,
    b: Tensor,
    b_scale: Tensor | None,
    b_tensor_scale: Tensor,
    offs: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    scale_layout: str = "blocked",
    check_offs: bool = False,
) -> Tensor:
    out = torch.empty((a.shape[0], b.shape[1]), dtype=out_dtype, device=a.device)
    if out.numel():
        operands = a, a_scale, a_tensor_scale, b, b_scale, b_tensor_scale
        if takes_few(a, a_scale, b, b_scale):
            assert b_scale is not None
            few(a, a_scale, a_tensor_scale, b, b_scale, b_tensor_scale, out, scale_layout, offs=offs)
        else:
            multiply = by_memory if pays(a, b_scale) and reads(a, a_scale, b, b_scale, out, "M") else nvfp4_tiles
            multiply(*operands, out, scale_layout, offs=offs, grouped="M")
    return out
