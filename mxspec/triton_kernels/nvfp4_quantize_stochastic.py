"""nvfp4_quantize_stochastic in Triton: the kernels of nvfp4_quantize, with a random byte for each element.

A thread has whole blocks. One call of Philox gives the 16 bytes of a block, so no random bits are read from memory.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mxspec.triton_kernels import nvfp4_quantize

# An H200 gave the reference's bytes. Times: benchmarks/results/decisions.md.
RANK = {(9, 0): 1, (10, 0): 1}
CONFIGS = nvfp4_quantize.CONFIGS  # not measured for this op
# Without .ftz, which would lose subnormals. The conversion to an integer cuts the lower bits off.
PTX = (r"st\.global\.(v[24]\.)?b32", r"fma\.rn\.f32", r"cvt\.rzi\.s32\.f32")


def supports(x: Tensor, random: Tensor, tensor_amax: Tensor | None = None, *, axis: int = -1, **_: Any) -> str | None:
    return nvfp4_quantize.supports(x, axis=axis)


def nvfp4_quantize_stochastic(
    x: Tensor, random: Tensor, tensor_amax: Tensor | None = None, *, axis: int = -1, scale_layout: str = "plain"
) -> tuple[Tensor, Tensor, Tensor]:
    return nvfp4_quantize.quantized(x, tensor_amax, axis, False, scale_layout == "blocked", random)
