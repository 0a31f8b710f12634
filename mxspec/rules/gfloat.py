"""gfloat (Graphcore) with float64 arrays: OCP's rule, computed with log2."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.formats import E8M0FNU, ElementFormat
from mxspec.reference.common.numerics import saturating_cast
from mxspec.rules import _mx

NAME = "gfloat"
RECORDED = {"mx": {"gfloat": {"scaling": "floor"}}}


def mx_quantize(
    x: Tensor,
    *,
    axis: int = -1,
    elem_dtype: torch.dtype | str = torch.float8_e4m3fn,
    scaling: str = "floor",
    scale_layout: str = "plain",
) -> tuple[Tensor, Tensor]:
    """The contract's floor, except that Inf gives byte 254 and saturates, and that formats without NaN refuse a NaN.

    int8 has the code -128 for what is nearer to -2 than to -127/64. A log2 in float64 is exact enough: the log2 of any
    narrower float falls on the right side of an integer.

    Source: gfloat 0.5.2, block.py (`compute_scale_amax`, `quantize_block`).
    """

    def rule(blocks: Tensor, fmt: ElementFormat) -> tuple[Tensor, Tensor]:
        return floor(blocks.double(), fmt)

    return _mx.quantize(x, axis, elem_dtype, scaling, scale_layout, rule, NAME, RECORDED["mx"])


def floor(blocks: Tensor, fmt: ElementFormat) -> tuple[Tensor, Tensor]:
    """The rule, in the dtype of the blocks."""
    amax = blocks.abs().amax(-1, keepdim=True)
    if fmt.nan_code is None and amax.isnan().any():
        raise ValueError(f"mx_quantize: {NAME} has no NaN in {fmt.name}; needs numbers")
    exponent = (torch.log2(amax).floor() - fmt.emax).clamp(-127, 127)  # amax 0 gives -127
    byte = torch.where(amax.isnan(), E8M0FNU.nan_code, exponent + E8M0FNU.bias)
    scaled = (blocks * (-exponent).exp2()).float()
    if fmt.twos_complement:
        return (scaled / fmt.smallest_subnormal).round().clamp(-128, 127).to(torch.int8), byte
    return saturating_cast(scaled, fmt), byte
