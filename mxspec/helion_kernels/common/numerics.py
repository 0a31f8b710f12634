"""The arithmetic of an MX block on Helion tiles: shared exponent, reciprocal scale, saturating cast.

Lay it next to `reference/common/numerics.py`: the same functions on the same bits.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from mxspec.formats import E4M3FN, E5M2, ElementFormat, element, exponent_rule

# Ref mode stands in for the hardware's saturating conversion with torch's cast, which gives Inf in e5m2.
_CLAMP = os.environ.get("HELION_INTERPRET") == "1"


def supports(elem_dtype: torch.dtype | str) -> str | None:
    """Why no kernel here writes or reads an element format: they are proven for these two."""
    fmt = element(elem_dtype)
    return None if fmt in (E4M3FN, E5M2) else f"takes e4m3fn and e5m2 elements, not {fmt.name}"


def widened(x: Tensor) -> Tensor:
    """x as fp32, exactly. A bf16 is the upper half of one: a shift, where a conversion is two instructions."""
    if x.dtype != torch.bfloat16:
        return x.to(torch.float32)
    return (x.view(torch.int16).to(torch.int32) << 16).view(torch.float32)


def magnitude_bits(x: Tensor) -> Tensor:
    """The bits of |x|, fp32.

    As integers they have the order of the magnitudes, Inf and then NaN largest, and an integer maximum cannot drop a
    NaN.
    """
    return x.view(torch.int32) & 0x7FFFFFFF


def shared_exponent(amax_bits: Tensor, fmt: ElementFormat, scaling: str, dtype: torch.dtype) -> Tensor:
    """The E8M0 byte, as int32, of a block of dtype whose largest magnitude has these fp32 bits; 255 for Inf and NaN."""
    emax, added, exception = exponent_rule(fmt, scaling, dtype)
    byte = (((amax_bits + added) >> 23) - emax).clamp(min=0)
    if exception >= 0:
        byte = torch.where(amax_bits == exception, 0, byte)
    return torch.where(amax_bits < 0x7F800000, byte, 255)


def reciprocal_scale(byte: Tensor) -> Tensor:
    """`2^(127 - byte)` as fp32; byte 255 gives NaN.

    Byte 254, whose reciprocal is subnormal, does not occur: an fp32 exponent field less emax is at most 253.
    """
    return torch.where(byte == 255, 0x7FC00000, (254 - byte) << 23).view(torch.float32)


def scale_value(byte: Tensor) -> Tensor:
    """`2^(byte - 127)` as fp32, from uint8; byte 255 gives NaN.

    The byte is the exponent field. Both ends need the mantissa's top bit as well: 0x00400000 is 2^-127, a subnormal,
    and 0x7FC00000 is NaN.
    """
    bits = byte.to(torch.int32) << 23
    return torch.where((byte == 0) | (byte == 255), bits | 0x400000, bits).view(torch.float32)


def saturating_cast(x: Tensor, fmt: ElementFormat) -> Tensor:
    """Round to nearest, ties to even, saturating: `cvt.rn.satfinite`, which needs no clamp and keeps NaN.

    A clamp that keeps NaN would cost more than half of the kernel's instructions.
    """
    assert fmt.dtype is not None
    if _CLAMP:
        x = x.clamp(-fmt.max, fmt.max)
    return x.to(fmt.dtype)
