"""The arithmetic of an MX block on tensors: shared exponent, reciprocal scale, saturating cast.

Lay it next to `triton_kernels/_numerics.py` and `helion_kernels/_numerics.py`, which do the same.
fp32 is read by its bits (sign 1, exponent field 8, mantissa 23) because `log2` in fp32 is wrong by one
near powers of two: `ceil(log2(0x48e00001 / 448))` gives the exponent 10 where 11 is right.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.formats import E8M0FNU, ElementFormat

SCALINGS = ("floor", "rceil", "ceil", "even")


def shared_exponent(amax: Tensor, fmt: ElementFormat, scaling: str) -> Tensor:
    """The E8M0 byte of a block whose largest magnitude is `amax` (fp32, not negative): uint8, same shape.

    Inf and NaN give 255 (NaN), zero gives 0.
    """
    if scaling == "rceil":
        # amax / max rounded up to a power of two. In the subnormal range 2^-127 is mantissa 0x400000.
        bits = (amax / fmt.max).view(torch.int32)
        field, mantissa = bits >> 23, bits & 0x7FFFFF
        byte = field + torch.where(field == 0, mantissa > 0x400000, mantissa != 0)
    else:
        bits = amax.view(torch.int32)
        if scaling == "even":  # round to the element's mantissa width first; the carry may reach the exponent
            bits = bits + (1 << (22 - fmt.mantissa_bits))
        byte = (bits >> 23) - fmt.emax
        if scaling == "ceil":
            byte = byte + ((bits & 0x7FFFFF) != 0)
        byte = byte.clamp(0, E8M0FNU.largest_code)
    return torch.where(amax.isfinite(), byte, E8M0FNU.nan_code).to(torch.uint8)


def reciprocal_scale(byte: Tensor) -> Tensor:
    """`2^(127 - byte)` as fp32, from uint8; byte 254 gives the subnormal 2^-127, byte 255 NaN."""
    byte = byte.to(torch.int32)
    bits = torch.where(byte == 254, 0x00400000, (254 - byte) << 23)
    return torch.where(byte == E8M0FNU.nan_code, 0x7FC00000, bits).view(torch.float32)


def saturating_cast(x: Tensor, fmt: ElementFormat) -> Tensor:
    """Round to nearest, ties to even, once; beyond the finite range take its end; NaN stays NaN.

    The clamp is explicit because torch's own cast gives Inf for e5m2 and, up to torch 2.11, NaN for e4m3fn.
    """
    assert fmt.dtype is not None
    return x.clamp(-fmt.max, fmt.max).to(fmt.dtype)


def round_once(x: Tensor, dtype: torch.dtype) -> Tensor:
    """fp64 to bfloat16 or fp32, to nearest, ties to even.

    torch's own cast goes by way of fp32, and rounds twice for bfloat16: 1 + 2^-8 + 2^-40 would become 1. Rounding to
    odd in fp32, where the inexact ones get their last bit set, keeps what the second rounding needs to know.
    """
    nearest = x.to(torch.float32)
    if dtype == torch.float32:
        return nearest
    widened = nearest.double()
    truncated = nearest.view(torch.int32) - (widened.abs() > x.abs()).to(torch.int32)
    inexact = (widened != x) & nearest.isfinite()
    return torch.where(inexact, (truncated | 1).view(torch.float32), nearest).to(dtype)
