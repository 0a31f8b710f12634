"""fp8_grouped_gemm_wgrad in Triton: the kernels of fp8_gemm. Each tile is a sum over the tokens of one group."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.triton_kernels.fp8_gemm import PTX, note
from mxspec.triton_kernels.hopper.fp8.launch import fp8_sm90, reads
from mxspec.triton_kernels.hopper.fp8.measured import wgrad as measured
from mxspec.triton_kernels.tiles.fp8_matmul import fp8_tiles

__all__ = ["PTX", "RANK", "fp8_grouped_gemm_wgrad", "measured", "multiply", "note"]

# The race against bf16 on an H200: benchmarks/results/decisions.md. Blackwell: compiled, not run.
RANK = {(9, 0): 1, (10, 0): 1}


def multiply(
    dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, offs: Tensor, out: Tensor, accumulate: bool
) -> None:
    """Write the products to the matrices of `out`, or add them. The matrices may lie apart."""
    by = fp8_sm90 if reads(dy, x, out) else fp8_tiles
    by(dy, dy_scale, x, x_scale, out, offs=offs, grouped="K", accumulate=accumulate)


def fp8_grouped_gemm_wgrad(
    dy: Tensor,
    dy_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    offs: Tensor,
    *,
    out_dtype: torch.dtype = torch.float32,
    check_offs: bool = False,
) -> Tensor:
    out = torch.empty((offs.shape[0], dy.shape[0], x.shape[0]), dtype=out_dtype, device=dy.device)
    if out.numel():
        multiply(dy, dy_scale, x, x_scale, offs, out, accumulate=False)
    return out
