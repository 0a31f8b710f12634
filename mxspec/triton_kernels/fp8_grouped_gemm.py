"""fp8_grouped_gemm in Triton: the kernels of fp8_gemm. The rows of a tile belong to one token group."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.triton_kernels.fp8_gemm import PTX, note
from mxspec.triton_kernels.hopper.fp8.launch import fp8_sm90, reads
from mxspec.triton_kernels.hopper.fp8.measured import grouped as measured
from mxspec.triton_kernels.tiles.fp8_matmul import fp8_tiles

__all__ = ["BATCH_INVARIANT", "PTX", "RANK", "fp8_grouped_gemm", "measured", "note"]

# The race against DeepGEMM and bf16: benchmarks/results/decisions.md. Blackwell: compiled, not run.
RANK = {(9, 0): 1, (10, 0): 1}
BATCH_INVARIANT = True


def fp8_grouped_gemm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    offs: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    alignment: int = 1,
    check_offs: bool = False,
) -> Tensor:
    out = torch.empty((a.shape[0], b.shape[1]), dtype=out_dtype, device=a.device)
    if not b.numel():  # there are no experts, or the sums have no terms
        return out.zero_()
    if out.numel():
        if reads(a, b, out):
            fp8_sm90(a, a_scale, b, b_scale, out, offs=offs, grouped="M", alignment=alignment)
        else:
            fp8_tiles(a, a_scale, b, b_scale, out, offs=offs, grouped="M")
    return out
