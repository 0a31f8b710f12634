"""fp8_gemm_ in Helion: the kernel of fp8_gemm, which reads a tile of its output and adds to it."""

from __future__ import annotations

from torch import Tensor

from mxspec.helion_kernels.fp8_gemm import PTX, multiply

__all__ = ["BATCH_INVARIANT", "PTX", "RANK", "fp8_gemm_"]

RANK = {(9, 0): 2, (10, 0): 2}  # Blackwell: compiled, not run
BATCH_INVARIANT = True


def fp8_gemm_(acc: Tensor, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> None:
    if acc.numel() and a.shape[1]:
        multiply(a, a_scale, b, b_scale, acc, accumulate=True)
