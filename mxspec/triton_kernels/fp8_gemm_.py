"""fp8_gemm_ in Triton: the kernels of fp8_gemm, which add to their output instead of writing it."""

from __future__ import annotations

from torch import Tensor

from mxspec.triton_kernels.fp8_gemm import PTX, multiply, note

__all__ = ["BATCH_INVARIANT", "PTX", "RANK", "fp8_gemm_", "note"]

# DeepGEMM adds in place, too. The race on an H200: benchmarks/results/decisions.md. Blackwell: compiled, not run.
RANK = {(9, 0): 1, (10, 0): 1}
BATCH_INVARIANT = True


def fp8_gemm_(acc: Tensor, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> None:
    if acc.numel() and a.shape[1]:
        multiply(a, a_scale, b, b_scale, acc, accumulate=True)
