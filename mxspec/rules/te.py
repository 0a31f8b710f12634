"""TransformerEngine: `fmaxf` drops a NaN from amax, and Inf has its own scale.

The source was read at d0067d0 (August 2026). Nothing here was run on a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.formats import E4M3FN, E8M0FNU, ElementFormat
from mxspec.reference.common.numerics import reciprocal_scale, saturating_cast, shared_exponent
from mxspec.rules import _fp8, _mx, _nvfp4, te_reference

NAME = "TransformerEngine"
RECORDED = {
    "mx": {"te.rceil*": {"scaling": "rceil"}},
    "blk": {f"tekrn*.p2={i}": {"scale_format": scale_format} for i, scale_format in enumerate(("fp32", "pow2"))},
}
# The transcription took the amax of this block to be NaN, and so the scale to be 1. The kernels reduce with fmaxf,
# which gives amax 1.
SOURCE_DIFFERS = {"blk": ("nan+1",)}


def mx_quantize(
    x: Tensor,
    *,
    axis: int = -1,
    elem_dtype: torch.dtype | str = torch.float8_e4m3fn,
    scaling: str = "rceil",
    scale_layout: str = "plain",
) -> tuple[Tensor, Tensor]:
    """The contract's rceil on finite blocks; a NaN stays in its element, and Inf gives byte 254 and saturates.

    Source: common/cast/mxfp8/quantize_mxfp8.cuh (amax); common/util/ptx.cuh (`float_to_e8m0`, `exp2f_rcp`).
    """
    return _mx.quantize(x, axis, elem_dtype, scaling, scale_layout, _rceil, NAME, RECORDED["mx"])


def _rceil(blocks: Tensor, fmt: ElementFormat) -> tuple[Tensor, Tensor]:
    blocks = blocks.float()
    amax = _amax(blocks, (-1,))
    byte = torch.where(amax.isinf(), E8M0FNU.largest_code, shared_exponent(amax, fmt, "rceil"))
    return saturating_cast(blocks * reciprocal_scale(byte), fmt), byte


def fp8_quantize_1x128(
    x: Tensor, *, axis: int = -1, scale_format: str = "fp32", scale_major: str = "k", eps: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The contract's factor `448 / amax`, with eps 0: a block of zeros, or a block with an Inf, has the factor 1.

    A NaN stays in its element. A quotient beyond fp32 becomes the largest value of x's dtype.

    Source: common/recipe/recipe_common.cuh (`compute_scale_from_types`);
        common/transpose/quantize_transpose_vector_blockwise.cu (amax).
    """
    return _fp8.quantize_1x128(x, axis, scale_format, scale_major, eps, _factor)


def fp8_quantize_128x128(
    w: Tensor, *, scale_format: str = "fp32", eps: float = 0.0, with_transpose: bool = False
) -> tuple[Tensor, ...]:
    """The rule of `fp8_quantize_1x128`, over a square.

    Source: common/transpose/quantize_transpose_square_blockwise.cu.
    """
    return _fp8.quantize_128x128(w, scale_format, eps, with_transpose, _factor)


def _factor(blocks: Tensor, dims: tuple[int, ...], scale_format: str, eps: float) -> tuple[Tensor, Tensor]:
    amax = _amax(blocks.float(), dims).clamp(min=eps)
    s = torch.full_like(amax, E4M3FN.max) / amax
    s = torch.where(s.isinf(), torch.finfo(blocks.dtype).max, s)
    if scale_format == "pow2":
        s = (s.view(torch.int32) & 0x7F800000).view(torch.float32)
    s = torch.where(amax.isinf() | (amax == 0), 1.0, s)
    return s, s.reciprocal()


def _amax(blocks: Tensor, dims: tuple[int, ...]) -> Tensor:
    """fmaxf returns the operand that is a number, and the reduction starts at 0: a block of NaN alone has amax 0."""
    return torch.where(blocks.isnan(), 0, blocks.abs()).amax(dims, keepdim=True)


def nvfp4_quantize(
    x: Tensor,
    tensor_amax: Tensor | None = None,
    *,
    axis: int = -1,
    block: str = "1x16",
    scale_layout: str = "plain",
) -> tuple[Tensor, Tensor, Tensor]:
    """The rule of `rules.te_reference`, with hardware's cast, which keeps the sign of -0; an A of 0 has S = 1.

    The kernels' treatment of NaN is not recorded, so the preset refuses a NaN in x or in tensor_amax. The Python
    reference, which TransformerEngine's tests compare with the kernels, is proven; what differs here is read in the
    source only.

    Source: common/cast/nvfp4/core_nvfp4.cuh (`compute_global_encode_scaling_factor_FP4`,
        `compute_decoding_scaling_factor`), quantize_transpose_nvfp4.cuh, d0067d0.
    """
    return _nvfp4.quantize(x, tensor_amax, axis, block, scale_layout, _nvfp4_rule, NAME, squares=True, nan_as=0.0)


def _nvfp4_rule(blocks: Tensor, b: Tensor, A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if blocks.isnan().any() or A.isnan().any():
        raise ValueError(f"nvfp4_quantize: {NAME} has no recorded result for a NaN; needs numbers")
    S = torch.where(A == 0, 1.0, te_reference.encode_scale(A))
    return te_reference.nvfp4_numbers(blocks, b, A, S)
