"""The arithmetic of an MX block on Helion tiles: shared exponent, reciprocal scale, saturating cast.

`reference/common/numerics.py` has the same functions, on the same bits.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from mxspec.formats import E4M3FN, E5M2, ElementFormat, element, exponent_rule

# Ref mode uses torch's cast instead of the hardware's saturating conversion, and that cast gives Inf in e5m2.
_CLAMP = os.environ.get("HELION_INTERPRET") == "1"


def supports(elem_dtype: torch.dtype | str) -> str | None:
    """Why the kernels cannot write or read an element format, or None. They are tested for these two formats."""
    fmt = element(elem_dtype)
    return None if fmt in (E4M3FN, E5M2) else f"takes e4m3fn and e5m2 elements, not {fmt.name}"


def widened(x: Tensor) -> Tensor:
    """x as fp32, exactly.

    A bf16 is the upper half of an fp32, so one shift is enough. A conversion takes two instructions.
    """
    if x.dtype != torch.bfloat16:
        return x.to(torch.float32)
    return (x.view(torch.int16).to(torch.int32) << 16).view(torch.float32)


def magnitude_bits(x: Tensor) -> Tensor:
    """The bits of |x|, as fp32.

    As integers, the bits have the order of the magnitudes: Inf is larger than all numbers, and NaN is larger than Inf.
    An integer maximum therefore cannot lose a NaN.
    """
    return x.view(torch.int32) & 0x7FFFFFFF


def shared_exponent(amax_bits: Tensor, fmt: ElementFormat, scaling: str, dtype: torch.dtype) -> Tensor:
    """The E8M0 byte, as int32, of a block of `dtype` whose amax has these fp32 bits. It is 255 for Inf and NaN."""
    emax, added, exception = exponent_rule(fmt, scaling, dtype)
    byte = (((amax_bits + added) >> 23) - emax).clamp(min=0)
    if exception >= 0:
        byte = torch.where(amax_bits == exception, 0, byte)
    return torch.where(amax_bits < 0x7F800000, byte, 255)


def reciprocal_scale(byte: Tensor) -> Tensor:
    """`2^(127 - byte)` as fp32. Byte 255 gives NaN.

    Byte 254 would have a subnormal reciprocal, but it does not occur: an fp32 exponent field minus emax is at most 253.
    """
    return torch.where(byte == 255, 0x7FC00000, (254 - byte) << 23).view(torch.float32)


def scale_value(byte: Tensor) -> Tensor:
    """`2^(byte - 127)` as fp32, from uint8. Byte 255 gives NaN.

    The byte becomes the exponent field. The bytes 0 and 255 also need the top bit of the mantissa: 0x00400000 is
    2^-127, a subnormal, and 0x7FC00000 is NaN.
    """
    bits = byte.to(torch.int32) << 23
    return torch.where((byte == 0) | (byte == 255), bits | 0x400000, bits).view(torch.float32)


def saturating_cast(x: Tensor, fmt: ElementFormat) -> Tensor:
    """Round to nearest, ties to even, and saturate.

    `cvt.rn.satfinite` does all of it and keeps NaN, so no clamp is needed.

    With a clamp that keeps NaN, the clamp would be more than half of the kernel's instructions.
    """
    assert fmt.dtype is not None
    if _CLAMP:
        x = x.clamp(-fmt.max, fmt.max)
    return x.to(fmt.dtype)
