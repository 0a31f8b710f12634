"""The standard itself, OCP MX v1.0, section 6.3: one scale rule, and no rule for NaN and Inf."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.formats import ElementFormat
from mxspec.reference.common.numerics import reciprocal_scale, saturating_cast, shared_exponent
from mxspec.rules import _mx

NAME = "OCP MX v1.0"
RECORDED: dict[str, dict[str, dict[str, str]]] = {}  # a standard cannot be run


def mx_quantize(
    x: Tensor,
    *,
    axis: int = -1,
    elem_dtype: torch.dtype | str = torch.float8_e4m3fn,
    scaling: str = "floor",
    scale_layout: str = "plain",
) -> tuple[Tensor, Tensor]:
    """The contract's floor, except that a block with a NaN or an Inf is refused: the standard has no rule for it.

    The scale is the largest power of two not above amax, divided by the largest power of two of the element format.
    Elements beyond the largest element saturate. The standard requires rounding to nearest even to be supported, and
    this preset uses it.

    Source: OCP Microscaling Formats (MX) v1.0, section 6.3.
    """
    _mx.only(NAME, scaling, "floor")
    return _mx.quantize(x, axis, elem_dtype, scaling, scale_layout, _floor, NAME, None)


def _floor(blocks: Tensor, fmt: ElementFormat) -> tuple[Tensor, Tensor]:
    blocks = blocks.float()
    amax = blocks.abs().amax(-1, keepdim=True)
    if not amax.isfinite().all():
        raise ValueError("mx_quantize: OCP MX v1.0 has no rule for a block with a NaN or an Inf; needs finite numbers")
    byte = shared_exponent(amax, fmt, "floor")
    return saturating_cast(blocks * reciprocal_scale(byte), fmt), byte
