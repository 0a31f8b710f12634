"""The arithmetic of an MX block on Helion tiles: shared exponent, reciprocal scale, saturating cast.

Lay it next to `reference/_numerics.py`: the same functions on the same bits.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from mxspec.formats import ElementFormat

# Ref mode stands in for the hardware's saturating conversion with torch's cast, which gives Inf in e5m2.
_CLAMP = os.environ.get("HELION_INTERPRET") == "1"


def magnitude_bits(x: Tensor) -> Tensor:
    """The bits of x without the sign, in x's own width.

    As integers they have the order of the magnitudes, Inf and then NaN largest, and an integer maximum cannot drop a
    NaN.
    """
    return x.view(torch.int32) & 0x7FFFFFFF if x.dtype == torch.float32 else x.view(torch.int16) & 0x7FFF


def fp32_bits(magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """The fp32 bits, as int32, of magnitudes that are given by their bits in `dtype`."""
    return magnitude if dtype == torch.float32 else magnitude.view(dtype).to(torch.float32).view(torch.int32)


def block_amax(x: Tensor) -> Tensor:
    """The fp32 bits of the largest |x| along the last dimension."""
    return fp32_bits(magnitude_bits(x).amax(-1), x.dtype)


def shared_exponent(amax_bits: Tensor, fmt: ElementFormat, scaling: str) -> Tensor:
    """The E8M0 byte, as int32, of a block whose largest magnitude has these fp32 bits; 255 for Inf and NaN."""
    if scaling == "rceil":
        # Helion multiplies by fp32(1 / max): rounded up, the same power of two as the quotient for every fp32.
        bits = (amax_bits.view(torch.float32) / fmt.max).view(torch.int32)
        field, mantissa = bits >> 23, bits & 0x7FFFFF
        byte = field + torch.where(field == 0, mantissa > 0x400000, mantissa != 0).to(torch.int32)
    else:
        bits = amax_bits
        if scaling == "even":
            bits = bits + (1 << (22 - fmt.mantissa_bits))
        byte = (bits >> 23) - fmt.emax
        if scaling == "ceil":
            byte = byte + ((bits & 0x7FFFFF) != 0).to(torch.int32)
        byte = byte.clamp(min=0)
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
