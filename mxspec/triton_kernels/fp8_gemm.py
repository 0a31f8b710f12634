"""fp8_gemm in Triton: the Gluon kernel of `hopper/fp8/` if TMA can read the operands, otherwise plain tiles."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.triton_kernels.hopper.fp8.launch import fp8_sm90, reads
from mxspec.triton_kernels.hopper.fp8.measured import dense as measured
from mxspec.triton_kernels.hopper.releases import note
from mxspec.triton_kernels.tiles.fp8_matmul import fp8_tiles

__all__ = ["BATCH_INVARIANT", "PTX", "RANK", "fp8_gemm", "measured", "multiply", "note"]

# Triton is first, because it takes every call, and DeepGEMM compiles for seconds at the first call of each shape. The
# race against DeepGEMM and cuBLAS: benchmarks/results/decisions.md. Blackwell: compiled, not run.
RANK = {(9, 0): 1, (10, 0): 1}
BATCH_INVARIANT = True
PTX = {"sm90": (r"wgmma\.mma_async.*\.f32\.e4m3\.e4m3",), "sm100": (r"tcgen05\.mma",)}


def multiply(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, accumulate: bool) -> None:
    """Write the product to `out`, or add it to `out`. The rows of `out` may lie apart."""
    by = fp8_sm90 if reads(a, b, out) else fp8_tiles
    by(a, a_scale, b, b_scale, out, accumulate=accumulate)


def fp8_gemm(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    out = torch.empty((a.shape[0], b.shape[0]), dtype=out_dtype, device=a.device)
    if out.numel():
        multiply(a, a_scale, b, b_scale, out, accumulate=False)
    return out
