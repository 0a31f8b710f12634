"""The arithmetic of an MX block on Helion tiles: shared exponent, reciprocal scale, saturating cast.

`reference/common/numerics.py` has the same functions, on the same bits.
"""

from __future__ import annotations

import os

import helion.language as hl
import torch
from torch import Tensor

from mxspec.formats import E2M1, E2M3, E3M2, FP8_DTYPES, INT8, ElementFormat, element, exponent_rule

# Ref mode uses torch's cast instead of the hardware's saturating conversion, and that cast gives Inf in e5m2.
_CLAMP = os.environ.get("HELION_INTERPRET") == "1"


def takes_fp8(elem_dtype: torch.dtype | str) -> str | None:
    """Why a kernel that writes FP8 only cannot write an element format, or None."""
    fmt = element(elem_dtype)
    return None if fmt.dtype in FP8_DTYPES else f"takes e4m3fn and e5m2 elements, not {fmt.name}"


# A kernel that writes codes knows their format by the dtype of the tensor. FP6 is written in words of 16 bits.
_STORED = {torch.uint8: E2M1, torch.int16: E2M3, torch.uint16: E3M2}
_WRITTEN = {fmt: dtype for dtype, fmt in _STORED.items()}
FP6_WORDS = (torch.int16, torch.uint16)


def stored(dtype: torch.dtype) -> ElementFormat:
    """The format of the codes in a tensor of this dtype, inside a kernel that writes them."""
    return _STORED.get(dtype) or element(dtype)


def written(x: Tensor, shape: tuple[int, ...], fmt: ElementFormat) -> Tensor:
    """Memory for codes of this shape. The kernel knows the format by the dtype."""
    dtype = _WRITTEN.get(fmt, fmt.storage_dtype)
    return torch.empty((*shape[:-1], held(dtype, shape[-1])), dtype=dtype, device=x.device)


def held(dtype: torch.dtype, size: int) -> int:
    """The elements of a tensor of this dtype that hold `size` codes."""
    return size * stored(dtype).bits // (8 * dtype.itemsize)


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
    if fmt == INT8:
        byte = byte.clamp(max=254)
    if exception >= 0:
        byte = torch.where(amax_bits <= exception, 0, byte)
    return torch.where(amax_bits < 0x7F800000, byte, 255)


def reciprocal_scale(byte: Tensor, fmt: ElementFormat) -> Tensor:
    """`2^(127 - byte)` as fp32. Byte 255 gives NaN.

    Byte 254 has a subnormal reciprocal, 2^-127. It occurs only in int8, whose emax is 0: an fp32 exponent field minus
    emax is otherwise at most 253.
    """
    bits = torch.where(byte == 255, 0x7FC00000, (254 - byte) << 23)
    if fmt == INT8:
        bits = bits.clamp(min=0x400000)
    return bits.view(torch.float32)


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

    A NaN becomes the code of the largest value in e2m1 and int8.
    """
    if fmt == INT8:  # the sum with 1.5 * 2^17 rounds to 64ths, and its last bits are their number
        code = (x.clamp(-fmt.max, fmt.max) + 1.5 * 2**17).view(torch.int32)
        return torch.where(x == x, code, 127).to(torch.int8)
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


def fp6_thirds(x: Tensor, fmt: ElementFormat) -> tuple[Tensor, Tensor, Tensor]:
    """The codes of eight neighbours along the last dimension as three words of 16 bits.

    A NaN becomes the code of the largest value. The codes are computed as in `e2m1_code`: the sum of a magnitude and
    `e * 2^(23 - mantissa bits)` has the number of steps in its last bits. The exponent field of e, shifted, is the rest
    of the code and a constant, which an even number of more steps cancels.
    """
    m = fmt.mantissa_bits
    more = ((fmt.bias - 128) << m) & 31
    magnitude = x.abs().clamp(max=fmt.max)
    e = (magnitude.view(torch.int32) & 0x7F800000).clamp(min=(128 - fmt.bias) << 23)
    steps = (magnitude + (e + (((23 - m) << 23) + more)).view(torch.float32)).view(torch.int32)
    code = ((steps + (e >> (23 - m))) & 31) | ((x.view(torch.int32) >> 26) & 32)
    code = torch.where(x == x, code, 31)
    even, odd = hl.split(code.reshape(*code.shape[:-1], code.shape[-1] // 2, 2))
    pairs = even | (odd << 6)
    even, odd = hl.split(pairs.reshape(*code.shape[:-1], code.shape[-1] // 4, 2))
    words = even | (odd << 12)
    low, high = hl.split(words.reshape(*code.shape[:-1], code.shape[-1] // 8, 2))
    dtype = _WRITTEN[fmt]
    return low.to(dtype), ((low >> 16) | (high << 8)).to(dtype), (high >> 8).to(dtype)


def fp6_values(words: Tensor, fmt: ElementFormat) -> Tensor:
    """The values of the four codes in each 24-bit word as fp32, along the last dimension.

    The bits of a code become the upper bits of an fp16, which is the value times a power of two, also if it is
    subnormal.
    """

    def values(code: Tensor) -> Tensor:
        half = (code & 31) << (10 - fmt.mantissa_bits) | (code & 32) << 10
        return half.to(torch.int16).view(torch.float16).to(torch.float32) * 2.0 ** (15 - fmt.bias)

    v0, v1, v2, v3 = values(words), values(words >> 6), values(words >> 12), values(words >> 18)
    return hl.join(hl.join(v0, v2), hl.join(v1, v3)).reshape(*words.shape[:-1], words.shape[-1] * 4)


def in_pairs(code: Tensor) -> Tensor:
    """Neighbours along the last dimension in a byte, the first in the low half."""
    even, odd = hl.split(code.reshape(*code.shape[:-1], code.shape[-1] // 2, 2))
    return (even | (odd << 4)).to(torch.uint8)


def e2m1_pairs(pairs: Tensor) -> tuple[Tensor, Tensor]:
    """The values of the low and the high codes of bytes, times 2^-126, as fp32.

    The three bits of a magnitude become the last two bits of the exponent and the first of the mantissa. That is the
    value times 2^-126, also if it is subnormal.
    """
    pairs = pairs.to(torch.int32)
    even = ((pairs << 22) & 0x01C00000) | ((pairs << 28) & -0x80000000)
    odd = ((pairs << 18) & 0x01C00000) | ((pairs << 24) & -0x80000000)
    return even.view(torch.float32), odd.view(torch.float32)


def code_values(q: Tensor) -> Tensor:
    """The values of codes as fp32. A byte of e2m1 gives two values, along the last dimension."""
    if q.dtype == torch.int8:
        return q.to(torch.float32) * INT8.smallest_subnormal
    if q.dtype != torch.uint8:
        return q.to(torch.float32)
    even, odd = e2m1_pairs(q)
    return hl.join(even * 2.0**126, odd * 2.0**126).reshape(*q.shape[:-1], q.shape[-1] * 2)
