"""microxcaling (Microsoft) with its default rounding: to nearest, ties away from zero."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from mxspec.rules import _mx, microxcaling

NAME = "microxcaling, ties away from zero"
RECORDED = {"mx": {f"mxms.nearest{given}": {"scaling": "floor"} for given in ("", ".bf16in")}}


def mx_quantize(
    x: Tensor,
    *,
    axis: int = -1,
    elem_dtype: torch.dtype | str = torch.float8_e4m3fn,
    scaling: str = "floor",
    scale_layout: str = "plain",
) -> tuple[Tensor, Tensor]:
    """`microxcaling.mx_quantize`, except that ties round away from zero: 1.0625 becomes 1.125 in e4m3.

    Source: mx/elemwise_ops.py (`_round_mantissa`, `nearest`).
    """
    rule = functools.partial(microxcaling.floor_even, ties_to_even=False)
    return _mx.quantize(x, axis, elem_dtype, scaling, scale_layout, rule, NAME, RECORDED["mx"])
