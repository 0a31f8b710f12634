"""fp8_grouped_gemm_wgrad_ in Helion: the kernel of fp8_grouped_gemm_wgrad, which adds to a tile of its output."""

from __future__ import annotations

from torch import Tensor

from mxspec.helion_kernels.fp8_grouped_gemm_wgrad import PTX, sum_tokens

__all__ = ["PTX", "RANK", "fp8_grouped_gemm_wgrad_"]

# Rates on an H200: benchmarks/results/decisions.md. Blackwell: compiled, not run.
RANK = {(9, 0): 2, (10, 0): 2}


def fp8_grouped_gemm_wgrad_(
    acc: Tensor, dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, offs: Tensor, *, check_offs: bool = False
) -> None:
    if acc.numel() and dy.shape[1]:
        sum_tokens(dy, dy_scale, x, x_scale, offs, acc, accumulate=True)
