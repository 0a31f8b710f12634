"""fp8_gemm_ in Triton: fp8_gemm's kernels, which add to their output in place of writing it."""

from __future__ import annotations

from torch import Tensor

from mxspec.triton_kernels.fp8_gemm import PTX, multiply, note

__all__ = ["PTX", "RANK", "fp8_gemm_", "note"]

# H200, 7168x4096x4096 by 1x128: 1.02 of DeepGEMM's rate, which adds in place too. Blackwell: compiled, not run.
RANK = {(9, 0): 1, (10, 0): 1}


def fp8_gemm_(acc: Tensor, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> None:
    if acc.numel() and a.shape[1]:
        multiply(a, a_scale, b, b_scale, acc, accumulate=True)
