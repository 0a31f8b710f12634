"""The arithmetic of MX blocks on tensors: shared exponent, reciprocal scale, saturating cast.

Compare it with `triton_kernels/common/numerics.py` and `helion_kernels/common/numerics.py`, which compute the same. The
functions read fp32 by its bits (sign 1, exponent field 8, mantissa 23), because `log2` in fp32 is wrong by one near
powers of two. For the number with the bits 0x48e00001, `ceil(log2(a / 448))` gives the exponent 10, but 11 is right.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.formats import E8M0FNU, ElementFormat


def divided(x: Tensor, number: float) -> Tensor:
    """`x / number`, rounded once on every device.

    The divisor is a tensor: on a GPU, PyTorch computes `tensor / number` as a product with a rounded reciprocal.
    """
    return x / torch.full_like(x, number)


def shared_exponent(amax: Tensor, fmt: ElementFormat, scaling: str) -> Tensor:
    """Return the E8M0 byte of each block from its largest magnitude `amax` (fp32, not negative): uint8, same shape.

    Inf and NaN give 255 (NaN). Zero gives 0.
    """
    if scaling == "rceil":
        # Round amax / max up to a power of two. In the subnormal range, 2^-127 has the mantissa 0x400000.
        bits = divided(amax, fmt.max).view(torch.int32)
        field, mantissa = bits >> 23, bits & 0x7FFFFF
        byte = field + torch.where(field == 0, mantissa > 0x400000, mantissa != 0)
        byte = byte.clamp(max=E8M0FNU.largest_code)  # only int8, whose max is below 2, can have a larger number
    else:
        bits = amax.view(torch.int32)
        if scaling == "even":  # first round to the mantissa width of the element; the carry may reach the exponent
            bits = bits + (1 << (22 - fmt.mantissa_bits))
        byte = (bits >> 23) - fmt.emax
        if scaling == "ceil":
            byte = byte + ((bits & 0x7FFFFF) != 0)
        byte = byte.clamp(0, E8M0FNU.largest_code)
    return torch.where(amax.isfinite(), byte, E8M0FNU.nan_code).to(torch.uint8)


def reciprocal_scale(byte: Tensor) -> Tensor:
    """Return `2^(127 - byte)` in fp32, from uint8. Byte 254 gives the subnormal 2^-127, byte 255 gives NaN."""
    byte = byte.to(torch.int32)
    bits = torch.where(byte == 254, 0x00400000, (254 - byte) << 23)
    return torch.where(byte == E8M0FNU.nan_code, 0x7FC00000, bits).view(torch.float32)


def saturating_cast(x: Tensor, fmt: ElementFormat) -> Tensor:
    """Round fp32 once, to nearest even. Values beyond the finite range become its nearest end; NaN stays NaN.

    Codes narrower than a byte are packed along the last dimension, whose size must be a multiple of `fmt.together`. The
    clamp is explicit because torch's own cast gives Inf for e5m2 and, up to torch 2.11, NaN for e4m3fn.
    """
    if not _torch_casts(fmt):
        return packed(encoded(x, fmt), fmt)
    return x.clamp(-fmt.max, fmt.max).to(fmt.dtype)


def widened(q: Tensor, fmt: ElementFormat) -> Tensor:
    """Return the values of the codes that `saturating_cast` gave, exact in fp32."""
    if not _torch_casts(fmt):
        return decoded(unpacked(q, fmt), fmt)
    return q.to(torch.float32)


def _torch_casts(fmt: ElementFormat) -> bool:
    """Whether torch casts to and from the format. torch's cast to int8 has no scale of 2^-6."""
    return fmt.dtype is not None and fmt.together == 1 and not fmt.twos_complement


# A magnitude is n * 2^(e - mantissa_bits). Here e is its exponent, but at least the exponent of the smallest normal,
# and n counts the steps of that binade from 0. Its code is `((e + bias - 1) << mantissa_bits) + n`, for two reasons:
# subnormals end at n = 2^mantissa_bits, where the binade of the smallest normal begins; and an n that rounds up to the
# next power of two gives the code of that power.


def steps_of(magnitude: Tensor, fmt: ElementFormat, more: int = 0) -> tuple[Tensor, Tensor]:
    """Return n before it is rounded, times `2^more`, and the code from which n counts. Both are exact."""
    e = ((magnitude.view(torch.int32) >> 23) - 127).clamp(min=1 - fmt.bias)
    return magnitude * _power_of_two(fmt.mantissa_bits + more - e), (e + fmt.bias - 1) << fmt.mantissa_bits


def encoded(x: Tensor, fmt: ElementFormat) -> Tensor:
    """Return the codes of fp32 values, uint8, one per byte. Rounds once, to nearest even, and saturates.

    It serves formats without NaN. A NaN becomes the code of the largest value, as `cvt.rn.satfinite` gives it.
    """
    n, first = steps_of(x.abs().clamp(max=fmt.max), fmt)
    code = first + n.round().to(torch.int32)
    negative = (1 << fmt.bits) - code if fmt.twos_complement else code + (1 << (fmt.bits - 1))
    code = torch.where(x.signbit(), negative, code) & ((1 << fmt.bits) - 1)  # two's complement has no minus zero
    return torch.where(x.isnan(), fmt.largest_code, code).to(torch.uint8)


def decoded(codes: Tensor, fmt: ElementFormat) -> Tensor:
    """Return the values of codes (one per byte) in fp32: the inverse of `encoded`."""
    codes = codes.to(torch.int32)
    sign = 1 << (fmt.bits - 1)
    magnitude = codes & (sign - 1)
    if fmt.twos_complement:
        magnitude = torch.where(codes < sign, codes, 2 * sign - codes)
    e = (magnitude >> fmt.mantissa_bits).clamp(min=1) - fmt.bias
    n = magnitude - ((e + fmt.bias - 1) << fmt.mantissa_bits)
    value = n * _power_of_two(e - fmt.mantissa_bits)
    return torch.where(codes < sign, value, -value)


def packed(codes: Tensor, fmt: ElementFormat) -> Tensor:
    """Return codes (one per byte) as they are stored: `together` neighbours in a word, the first in its low bits.

    The word has one byte, or for FP6 three, the lowest first.
    """
    words = codes[..., :: fmt.together].to(torch.int32)
    for i in range(1, fmt.together):
        words = words | codes[..., i :: fmt.together].to(torch.int32) << (i * fmt.bits)
    stored = [words >> shift & 0xFF for shift in range(0, fmt.bits * fmt.together, 8)]
    return torch.stack(stored, -1).flatten(-2).to(torch.uint8).view(fmt.dtype or torch.uint8)


def unpacked(q: Tensor, fmt: ElementFormat) -> Tensor:
    """Return the codes, uint8, one per byte: the inverse of `packed`."""
    total, mask = fmt.bits * fmt.together, (1 << fmt.bits) - 1
    stored = q.view(torch.uint8)
    stored = stored.unflatten(-1, (stored.shape[-1] * 8 // total, total // 8)).to(torch.int32)
    words = sum(stored[..., i] << (8 * i) for i in range(total // 8))
    codes = [words >> shift & mask for shift in range(0, total, fmt.bits)]
    return torch.stack(codes, -1).flatten(-2).to(torch.uint8)


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return 2^exponent in fp32, from int32; the result must be a normal number."""
    return ((exponent + 127) << 23).view(torch.float32)


def round_once(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round fp64 once to bfloat16 or fp32, to nearest even.

    torch's own cast to bfloat16 goes through fp32 and rounds twice: 1 + 2^-8 + 2^-40 would become 1. This function
    rounds to odd in fp32: it truncates and sets the last bit of every inexact number. The second rounding then sees
    that the number was inexact.
    """
    nearest = x.to(torch.float32)
    if dtype == torch.float32:
        return nearest
    widened = nearest.double()
    truncated = nearest.view(torch.int32) - (widened.abs() > x.abs()).to(torch.int32)
    inexact = (widened != x) & nearest.isfinite()
    return torch.where(inexact, (truncated | 1).view(torch.float32), nearest).to(dtype)
