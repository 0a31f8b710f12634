"""microxcaling (Microsoft) with rounding to nearest even: an emulation that returns dequantized numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.formats import E8M0FNU, ElementFormat
from mxspec.reference.common.numerics import saturating_cast
from mxspec.rules import _mx

NAME = "microxcaling"
RECORDED = {"mx": {f"mxms.even{given}": {"scaling": "floor"} for given in ("", ".bf16in")}}


def mx_quantize(
    x: Tensor,
    *,
    axis: int = -1,
    elem_dtype: torch.dtype | str = torch.float8_e4m3fn,
    scaling: str = "floor",
    scale_layout: str = "plain",
) -> tuple[Tensor, Tensor]:
    """The rule floor, by log2, with all arithmetic in x's dtype: in bfloat16 an amax of 510 counts as 512.

    Zeros lose their signs. microxcaling returns numbers, and the codes here are read from them: a number that overflows
    x's dtype reads as Inf, or as NaN if the format has no Inf. A block with an Inf or a NaN is NaN.

    Source: mx/mx_ops.py (`_shared_exponents`, `_quantize_mx`), mx/elemwise_ops.py (`_quantize_elemwise_core`,
        `_round_mantissa`).
    """
    return _mx.quantize(x, axis, elem_dtype, scaling, scale_layout, floor_even, NAME, RECORDED["mx"])


def floor_even(blocks: Tensor, fmt: ElementFormat, ties_to_even: bool = True) -> tuple[Tensor, Tensor]:
    amax = blocks.abs().amax(-1, keepdim=True)
    exponent = torch.log2(torch.where(amax == 0, 2.0**-126, amax)).floor() - fmt.emax
    exponent = torch.where(exponent > 127, torch.nan, exponent.clamp(min=-127))
    scaled = blocks / 2**exponent

    own = torch.log2(scaled.abs() + (scaled == 0)).floor().clamp(min=1 - fmt.bias)  # the exponent of each element
    steps = scaled / 2**own * 2**fmt.mantissa_bits
    rounded = (steps.abs() + 0.5).floor()
    if ties_to_even:
        rounded = rounded - ((steps.abs() - 0.5) % 2 == 0).to(rounded.dtype)
    elements = (steps.sign() * rounded / 2**fmt.mantissa_bits * 2**own).clamp(-fmt.max, fmt.max)

    overflow = (elements * 2**exponent).isinf()
    codes = saturating_cast(elements.float(), fmt).view(torch.uint8)
    past = fmt.inf_code if fmt.inf_code is not None else fmt.nan_code
    if past is not None:
        codes = torch.where(overflow, past | (codes & 0x80), codes)
    byte = torch.where(exponent.isnan(), E8M0FNU.nan_code, exponent.float() + E8M0FNU.bias)
    return codes.view(fmt.dtype or torch.uint8), byte
