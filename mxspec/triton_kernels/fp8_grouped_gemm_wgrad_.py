"""fp8_grouped_gemm_wgrad_ in Triton: the kernels of fp8_grouped_gemm_wgrad, which add to their output."""

from __future__ import annotations

from torch import Tensor

from mxspec.triton_kernels.fp8_grouped_gemm_wgrad import PTX, multiply, note

__all__ = ["PTX", "RANK", "fp8_grouped_gemm_wgrad_", "note"]

# Rates on an H200: benchmarks/results/decisions.md. Blackwell: compiled, not run.
RANK = {(9, 0): 1, (10, 0): 1}


def fp8_grouped_gemm_wgrad_(
    acc: Tensor, dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, offs: Tensor, *, check_offs: bool = False
) -> None:
    if acc.numel() and dy.shape[1]:
        multiply(dy, dy_scale, x, x_scale, offs, acc, accumulate=True)
