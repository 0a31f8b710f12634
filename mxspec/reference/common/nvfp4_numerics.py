"""The arithmetic of NVFP4 on tensors: the magnitude of a matrix, the scale of a block, the quotients, the codes.

Compare it with `triton_kernels/common/nvfp4_numerics.py` and `helion_kernels/common/nvfp4_numerics.py`, which compute
the same. `reference/nvfp4_quantize.py` has the formulas. Blocks lie along the last dimension here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.formats import E2M1, E4M3FN, NVFP4_BLOCK_SIZE, NVFP4_LARGEST, ElementFormat
from mxspec.reference.common.numerics import divided, packed, saturating_cast, steps_of


def blocks_of(x: Tensor) -> Tensor:
    """The blocks of `(..., R, C)` in fp32, which is exact: `(..., R, C/16, 16)`."""
    return x.contiguous().to(torch.float32).unflatten(-1, (x.shape[-1] // NVFP4_BLOCK_SIZE, NVFP4_BLOCK_SIZE))


def magnitude_of(b: Tensor, tensor_amax: Tensor | None) -> Tensor:
    """A of each matrix, from the largest magnitudes of its blocks, `(..., R, C/16)`, or from tensor_amax."""
    if tensor_amax is not None:
        return magnitude(tensor_amax)
    return magnitude(b.flatten(-2).amax(-1)) if b.numel() else b.new_zeros(b.shape[:-2])


def magnitude(A: Tensor) -> Tensor:
    """A, or NaN if A is NaN, Inf or negative. -0 counts as 0."""
    return torch.where(A.isfinite() & (A >= 0), A.abs(), torch.nan)


def scales_and_quotients(blocks: Tensor, b: Tensor, A: Tensor) -> tuple[Tensor, Tensor]:
    """The e4m3 scales of blocks `(..., 16)`, and the quotients whose casts are their codes.

    b: the largest magnitude of each block.
    A: the magnitude of the matrix, in a shape that broadcasts with b.
    """
    b, h = torch.where(b.isfinite(), b, torch.nan), A * 2.0**-12
    s = torch.where((b == 0) | (h == 0), b * 0 + h * 0, b * (7 / 64) / h)  # the sum of zeros is NaN if b or h is
    scale = saturating_cast(s, E4M3FN)
    d = (scale.to(torch.float32) * h).unsqueeze(-1)
    return scale, torch.where(d == 0, blocks * 0, blocks * (21 / 32) / d)


def tensor_scale(A: Tensor) -> Tensor:
    return divided(A, NVFP4_LARGEST)


def stochastic_cast(y: Tensor, byte: Tensor, fmt: ElementFormat = E2M1) -> Tensor:
    """Round fp32 to a neighbouring code by a random byte for each number: uint8, packed along the last dimension.

    The magnitude is a number of steps of its binade. The byte is added to the 8 bits below the last bit that the format
    keeps, and all of these bits are cut off. So a number that is `k/256` of a step above the lower code, or a little
    more, becomes the upper code for k of the 256 bytes. Values beyond the largest become the largest, and so does NaN.
    """
    steps, first = steps_of(y.abs().clamp(max=fmt.max), fmt, 8)
    code = first + (steps.floor().to(torch.int32) + byte >> 8) + (y.signbit().to(torch.int32) << (fmt.bits - 1))
    return packed(torch.where(y.isnan(), fmt.largest_code, code).to(torch.uint8), fmt)
