"""torchao 0.18's Triton kernels for MXFP8: e4m3 only, with the rule of bfloat16 inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.formats import ElementFormat
from mxspec.reference.common.numerics import reciprocal_scale, saturating_cast
from mxspec.rules import _mx

NAME = "torchao 0.18 (Triton)"
RECORDED = {"mx": {"aotri018.floor*": {"scaling": "floor"}}}
# The transcription took the amax of these blocks to be NaN. The kernel's tl.max does not propagate a NaN.
SOURCE_DIFFERS = {"mx": ("nan + 1", "nan + inf")}


def mx_quantize(
    x: Tensor,
    *,
    axis: int = -1,
    elem_dtype: torch.dtype | str = torch.float8_e4m3fn,
    scaling: str = "floor",
    scale_layout: str = "plain",
) -> tuple[Tensor, Tensor]:
    """The rule floor, on amax rounded to bfloat16, without NaN; Inf counts as 2^128; byte 0 leaves a block unscaled.

    rceil is left out. On a GPU it is the instruction `cvt.rp.ue8m0`, and no recorded result shows what it gives.

    Source: torchao 0.18.0, prototype/mx_formats/kernels.py (`_triton_calculate_scale_floor`,
        `_calculate_reciprocal_scale`).
    """
    return _mx.quantize(x, axis, elem_dtype, scaling, scale_layout, _floor, NAME, RECORDED["mx"])


def _floor(blocks: Tensor, fmt: ElementFormat) -> tuple[Tensor, Tensor]:
    magnitude = blocks.abs()
    number = torch.where(blocks.isnan(), 0, magnitude).amax(-1, keepdim=True)
    amax = torch.where(blocks.isnan().all(-1, keepdim=True), torch.nan, number)
    byte = _mx.floor_byte(amax.to(torch.bfloat16).float(), fmt)
    factor = torch.where(byte == 0, 1.0, reciprocal_scale(byte))
    return saturating_cast(blocks.float() * factor, fmt), byte
