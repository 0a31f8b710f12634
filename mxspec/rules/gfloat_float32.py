"""gfloat (Graphcore) with float32 arrays: its log2 is rounded, sometimes up to an integer."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.formats import ElementFormat
from mxspec.rules import _mx, gfloat

NAME = "gfloat (float32)"
RECORDED = {"mx": {"gfloat.f32in": {"scaling": "floor"}}}


def mx_quantize(
    x: Tensor,
    *,
    axis: int = -1,
    elem_dtype: torch.dtype | str = torch.float8_e4m3fn,
    scaling: str = "floor",
    scale_layout: str = "plain",
) -> tuple[Tensor, Tensor]:
    """`gfloat.mx_quantize`, except that an amax one ulp below a power of two counts as that power.

    Source: gfloat 0.5.2, block.py (`compute_scale_amax`).
    """

    def rule(blocks: Tensor, fmt: ElementFormat) -> tuple[Tensor, Tensor]:
        return gfloat.floor(blocks.float(), fmt)

    return _mx.quantize(x, axis, elem_dtype, scaling, scale_layout, rule, NAME, RECORDED["mx"])
