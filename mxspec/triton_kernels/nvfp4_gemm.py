"""nvfp4_gemm in Triton: on Hopper `hopper/nvfp4/`, which multiplies bfloat16 values; elsewhere plain tiles.

For few tokens, `hopper/weights/` reads the codes of the weights. For more tokens, the values of codes are written to
memory first. Plain tiles would read fewer bytes, but take longer. All three sum in the same order, so a row has the
same bits in each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mxspec.triton_kernels.hopper.nvfp4.launch import by_memory, few, reads, takes_few
from mxspec.triton_kernels.hopper.nvfp4.measured import dense as measured
from mxspec.triton_kernels.tiles import nvfp4_matmul
from mxspec.triton_kernels.tiles.nvfp4_matmul import nvfp4_tiles

__all__ = ["BATCH_INVARIANT", "PTX", "RANK", "measured", "nvfp4_gemm"]

# Beside torch.mm on an H100: benchmarks/results/decisions.md. Blackwell: compiled and interpreted, not run.
RANK = {(9, 0): 1, (10, 0): 1}
BATCH_INVARIANT = True
PTX = nvfp4_matmul.PTX


def nvfp4_gemm(
    a: Tensor,
    a_scale: Tensor | None,
    a_tensor_scale: Tensor,
    b: Tensor,
    b_scale: Tensor | None,
    b_tensor_scale: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    scale_layout: str = "plain",
) -> Tensor:
    out = torch.empty((a.shape[0], b.shape[0]), dtype=out_dtype, device=a.device)
    if out.numel():
        multiply: Any = nvfp4_tiles
        if takes_few(a, a_scale, b, b_scale):
            multiply = few
        elif reads(a, a_scale, b, b_scale, out):
            multiply = by_memory
        multiply(a, a_scale, a_tensor_scale, b, b_scale, b_tensor_scale, out, scale_layout)
    return out
