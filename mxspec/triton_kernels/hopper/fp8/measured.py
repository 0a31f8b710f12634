"""For `mxspec.explain`: how fast the FP8 matmuls were beside other libraries, by the size of a call.

Each range goes over shapes of one GPU in one interleaved loop of CUDA graphs, whose kernels share one clock:
benchmarks/results/decisions.md. For wgrad, it also goes over the newest stored run. A number above 1 says that this
backend was faster. DeepGEMM was sgl-deep-gemm 0.1.2.
At four shapes of 768 and 1024 rows it took three times as long as the op; these are left out. Triton was 3.6, and for
large outputs 3.6 to 3.9: 3.8 was the slowest. The figures beside cuBLAS are older than today's kernel.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mxspec.triton_kernels.hopper.fp8.launch import reads
from mxspec.triton_kernels.hopper.measured import Class, of_size

# By rows.
DENSE = (
    (2, 128, "on an H100, 2 to 128 rows: 0.92 to 1.15 of the rate of DeepGEMM, 1.07 to 2.3 of cuBLAS"),
    (256, 1024, "on an H100, 256 to 1024 rows: 0.77 to 1.25 of the rate of DeepGEMM, 0.94 to 1.64 of cuBLAS"),
    (1025, 10**9, "on an H100, more than 1024 rows: 0.88 to 1.16 of the rate of DeepGEMM, 1.02 to 1.18 of cuBLAS"),
)
# By experts. DeepGEMM's groups were padded to multiples of 128 rows beforehand.
GROUPED = (
    (8, 32, "on an H200, 8 to 32 experts: 0.84 to 1.12 of the rate of DeepGEMM on groups padded beforehand"),
    (64, 128, "on an H200, 64 to 128 experts: 0.94 to 1.13 of the rate of DeepGEMM on groups padded beforehand"),
)
WGRAD = ((8, 64, "on an H200, 8 to 64 experts: 1.00 to 1.36 of the rate of torch._grouped_mm in bfloat16"),)


def _of(size: int, classes: tuple[Class, ...], a: Tensor, b: Tensor, b_scale: Tensor) -> str | None:
    """What was measured for a size, if the call runs the kernel that was measured: with a scale for 128 rows of b."""
    if b_scale.shape[-2] == b.shape[-2] or not reads(a, b, a):
        return None
    return of_size(size, classes)


def dense(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, **_: Any) -> str | None:
    return _of(a.shape[0], DENSE, a, b, b_scale)


def grouped(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, offs: Tensor, **_: Any) -> str | None:
    return _of(b.shape[0], GROUPED, a, b, b_scale)


def wgrad(dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, offs: Tensor, **_: Any) -> str | None:
    return of_size(offs.shape[0], WGRAD) if reads(dy, x, dy) else None
