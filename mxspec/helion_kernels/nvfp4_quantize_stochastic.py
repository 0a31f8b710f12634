"""nvfp4_quantize_stochastic in Helion: the kernel of nvfp4_quantize, with a random byte for each element.

Helion has no Philox of a given counter, so the random words come from Triton's source, `tl.philox`.
"""

from __future__ import annotations

from torch import Tensor

from mxspec.helion_kernels.nvfp4_quantize import quantized

RANK = {(9, 0): 2, (10, 0): 2}  # no GPU has run it: compiled for Hopper and Blackwell, and interpreted
# Without .ftz, which would lose subnormals. The conversion to an integer cuts the lower bits off.
PTX = (r"mul\.(rn\.)?f32", r"fma\.rn\.f32", r"cvt\.rzi\.s32\.f32")


def nvfp4_quantize_stochastic(
    x: Tensor, random: Tensor, tensor_amax: Tensor | None = None, *, axis: int = -1, scale_layout: str = "plain"
) -> tuple[Tensor, Tensor, Tensor]:
    return quantized(x, tensor_amax, axis, False, scale_layout == "blocked", random)
