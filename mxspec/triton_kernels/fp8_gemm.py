"""fp8_gemm in Triton: the Gluon kernel of `hopper/fp8/` where TMA can read the operands, else plain tiles."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.triton_kernels.hopper.fp8.launch import fp8_sm90, reads
from mxspec.triton_kernels.hopper.releases import note
from mxspec.triton_kernels.tiles.fp8_matmul import fp8_tiles

__all__ = ["PTX", "RANK", "fp8_gemm", "multiply", "note"]

# H200, of DeepGEMM's and cuBLAS's rates in a race: 4096x4096x7168 0.95, 1.05; 7168x4096x4096 by 1x128 1.06, 0.95. It is
# first since it takes every call, and DeepGEMM compiles for seconds at a shape's first. Blackwell: compiled, not run.
RANK = {(9, 0): 1, (10, 0): 1}
PTX = {"sm90": (r"wgmma\.mma_async.*\.f32\.e4m3\.e4m3",), "sm100": (r"tcgen05\.mma",)}


def multiply(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, accumulate: bool) -> None:
    """The product, written to an output whose rows may lie apart, or added to it."""
    by = fp8_sm90 if reads(a, b, out) else fp8_tiles
    by(a, a_scale, b, b_scale, out, accumulate=accumulate)


def fp8_gemm(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    out = torch.empty((a.shape[0], b.shape[0]), dtype=out_dtype, device=a.device)
    if out.numel():
        multiply(a, a_scale, b, b_scale, out, accumulate=False)
    return out
