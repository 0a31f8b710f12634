"""fp8_grouped_gemm in Triton: fp8_gemm's kernels, each tile of the tokens of one group."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.triton_kernels.fp8_gemm import PTX, note
from mxspec.triton_kernels.hopper.fp8.launch import fp8_sm90, reads
from mxspec.triton_kernels.tiles.fp8_matmul import fp8_tiles

__all__ = ["PTX", "RANK", "fp8_grouped_gemm", "note"]

# H200, 32768 tokens of 8 experts, of DeepGEMM's rate, each by itself for 150 ms: N 2048, K 7168 0.93, N 7168, K 2048
# 0.95, 64 experts 0.93, ragged 0.85; of bf16's 1.66. Groups that end anywhere 0.93 of DeepGEMM on padded ones.
# Blackwell: compiled, not run.
RANK = {(9, 0): 1, (10, 0): 1}


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
    if not b.numel():  # no experts, or sums of nothing
        return out.zero_()
    if out.numel():
        multiply = fp8_sm90 if reads(a, b, out) else fp8_tiles
        multiply(a, a_scale, b, b_scale, out, offs=offs, grouped="M")
    return out
