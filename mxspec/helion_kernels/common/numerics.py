"""The arithmetic of an MX block on Helion tiles: shared exponent, reciprocal scale, saturating cast.

`reference/common/numerics.py` has the same functions, on the same bits.
"""

from __future__ import annotations

import os

import helion.language as hl
import torch
from torch import Tensor

from mxspec.formats import E2M1, E4M3FN, E5M2, ElementFormat, element, exponent_rule

# Ref mode uses torch's cast instead of the hardware's saturating conversion, and that cast gives Inf in e5m2.
_CLAMP = os.environ.get("HELION_INTERPRET") == "1"


def supports(elem_dtype: torch.dtype | str, packed: bool = False) -> str | None:
    """Why the kernels cannot write or read an element format, or None. They are tested for these formats.

    packed: whether they take e2m1, too.
    """
    fmt = element(elem_dtype)
    if fmt in (E4M3FN, E5M2) or (packed and fmt == E2M1):
        return None
    return f"takes e4m3fn{', e5m2 and e2m1' if packed else ' and e5m2'} elements, not {fmt.name}"


def stored(dtype: torch.dtype) -> ElementFormat:
    """The format of the codes in a tensor of this dtype, inside a kernel. There, pairs of e2m1 are uint8."""
    return E2M1 if dtype == torch.uint8 else element(dtype)


def per_byte(dtype: torch.dtype) -> int:
    """The codes in an element of a tensor of this dtype, inside a kernel. Helion's kernels do not read a format."""
    return stored(dtype).per_byte


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


def packed_cast(x: Tensor, fmt: ElementFormat) -> Tensor:
    """`saturating_cast`, with the codes as they are stored: two codes of e2m1 in a byte.

    A NaN becomes the code 7 of e2m1.
    """
    if fmt != E2M1:
        return saturating_cast(x, fmt)
    return in_pairs(torch.where(x == x, e2m1_code(x.abs().clamp(max=6.0), x), 7))


def e2m1_code(magnitude: Tensor, sign: Tensor, byte: Tensor | None = None) -> Tensor:
    """The e2m1 codes, int32, of magnitudes up to 6 with the signs of other numbers. All are fp32.

    byte: a random byte for each element, by which its code is rounded. None: to nearest, ties to even.
    """
    # e is the power of two below the magnitude, at least 1. Codes in its binade are steps of e / 2 apart. The sum with
    # e * 2^22 therefore rounds to steps, and has their number in its last bits. The code is 2 * log2(e) more, and 2
    # steps more, because 2 * 127 + 2 is a multiple of 16. An even number keeps ties to even.
    e = (magnitude.view(torch.int32) & 0x7F800000).clamp(min=0x3F800000)
    if byte is None:
        steps = (magnitude + (e + ((22 << 23) + 2)).view(torch.float32)).view(torch.int32)
    else:  # the magnitude is a number of 256ths of a step, cut off; 2^(9 - log2(e)) has the bits (263 << 23) - e
        parts = (magnitude * (((263 << 23) - 2**32) - e).view(torch.float32)).to(torch.int32)
        steps = ((parts + byte) >> 8) + 2
    return ((steps + (e >> 22)) & 7) | ((sign.view(torch.int32) >> 28) & 8)


def in_pairs(code: Tensor) -> Tensor:
    """Neighbours along the last dimension in a byte, the first in the low half."""
    even, odd = hl.split(code.reshape(*code.shape[:-1], code.shape[-1] // 2, 2))
    return (even | (odd << 4)).to(torch.uint8)


def e2m1_pairs(pairs: Tensor) -> tuple[Tensor, Tensor]:
    """The values of the low and the high codes of bytes, times 2^-14, as fp32.

    The bits of a code become the upper bits of an fp16, which is the value times 2^-14, also if it is subnormal.
    """
    pairs = pairs.to(torch.int32)
    even = ((pairs & 7) << 9 | (pairs & 8) << 12).to(torch.int16).view(torch.float16).to(torch.float32)
    odd = ((pairs & 0x70) << 5 | (pairs & 0x80) << 8).to(torch.int16).view(torch.float16).to(torch.float32)
    return even, odd


def code_values(q: Tensor) -> Tensor:
    """The values of codes as fp32. A byte of e2m1 gives two values, along the last dimension."""
    if q.dtype != torch.uint8:
        return q.to(torch.float32)
    even, odd = e2m1_pairs(q)
    return hl.join(even * 16384.0, odd * 16384.0).reshape(*q.shape[:-1], q.shape[-1] * 2)
