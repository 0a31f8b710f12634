"""For `mxspec.explain`: how fast the FP8 matmuls were beside other libraries, by the size of a call.

Each range goes over shapes of one H100 in one interleaved loop of CUDA graphs: benchmarks/results/decisions.md. A
number above 1 says that this backend was faster. DeepGEMM is version 2.6.1.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mxspec.triton_kernels.common.launch import capability
from mxspec.triton_kernels.hopper import releases

# The largest number of rows, and what was measured up to there.
DENSE = (
    (128, "2 to 128 rows: 0.91 to 1.13 of the rate of DeepGEMM, 1.09 to 2.3 of cuBLAS"),
    (1024, "256 to 1024 rows: 0.75 to 1.21 of the rate of DeepGEMM, 0.94 to 1.64 of cuBLAS"),
    (None, "more than 1024 rows: 0.94 to 1.10 of the rate of DeepGEMM, 1.02 to 1.18 of cuBLAS"),
)
# The same by experts. DeepGEMM's groups were padded to multiples of 128 rows beforehand.
GROUPED = (
    (32, "8 to 32 experts: 0.95 to 1.06 of the rate of DeepGEMM on groups padded beforehand"),
    (None, "128 experts: 0.92 to 1.05 of the rate of DeepGEMM on groups padded beforehand"),
)


def _of(size: int, classes: tuple[tuple[int | None, str], ...]) -> str:
    return next(f"on an H100, {said}" for most, said in classes if most is None or size <= most)


def _was_measured(a: Tensor, b: Tensor, b_scale: Tensor) -> bool:
    """Whether the call runs the kernel that was measured: on Hopper, with a scale for 128 x 128 elements of b."""
    if a.device.type == "cpu" or capability(a.device) != (9, 0) or releases.refusal():
        return False
    return b_scale.shape[-2] < b.shape[-2]


def dense(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, **_: Any) -> str | None:
    return _of(a.shape[0], DENSE) if _was_measured(a, b, b_scale) else None


def grouped(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, offs: Tensor, **_: Any) -> str | None:
    return _of(b.shape[0], GROUPED) if _was_measured(a, b, b_scale) else None
