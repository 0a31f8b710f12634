"""Element and scale formats: the constants that every op, kernel and notebook reads.

A value of an element format is `(-1)^sign * 2^(exponent - bias) * 1.mantissa`, or
`2^(1 - bias) * 0.mantissa` where the exponent field is 0. Every constant of a format follows from its
field widths and from what its top codes mean, so those are all that is written down here.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

__all__ = [
    "BY_DTYPE",
    "E2M1",
    "E2M3",
    "E3M2",
    "E4M3FN",
    "E5M2",
    "E8M0FNU",
    "ELEMENTS",
    "SCALINGS",
    "ElementFormat",
    "ScaleFormat",
    "element",
    "exponent_rule",
    "fp32_bits",
    "may_be_nan",
    "same_bits",
]

SCALINGS = ("floor", "rceil", "ceil", "even")  # the rules by which an MX block's amax becomes its scale

MX_BLOCK_SIZE = 32  # OCP MX v1.0, section 5.2, table 1: every MX format shares one scale among k = 32
FP8_BLOCK_SIZE = 128  # DeepSeek-V3 technical report, section 3.3.2: 1x128 activations, 128x128 weights

# The integers that bytes are moved and compared as, by their width.
INT_OF_BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class ElementFormat:
    """A narrow float. `largest_code` is the code of the largest finite positive value."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    largest_code: int
    inf_code: int | None
    nan_code: int | None  # one positive NaN; the payload of a NaN is no part of any contract here
    dtype: torch.dtype | None  # None where torch has none: its codes are uint8 then
    per_byte: int = 1  # elements in a byte of storage, the first in the lowest bits

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    def value(self, code: int) -> float:
        """The value of a code, exactly; `nan` and `inf` where the format has them."""
        sign = -1.0 if code >> (self.bits - 1) else 1.0
        magnitude = code & ((1 << (self.bits - 1)) - 1)
        if magnitude == self.inf_code:
            return sign * float("inf")
        if magnitude > self.largest_code:
            return float("nan")
        exponent, mantissa = magnitude >> self.mantissa_bits, magnitude & ((1 << self.mantissa_bits) - 1)
        fraction = mantissa / (1 << self.mantissa_bits)
        if exponent == 0:
            return sign * fraction * 2.0 ** (1 - self.bias)
        return sign * (1 + fraction) * 2.0 ** (exponent - self.bias)

    @cached_property
    def emax(self) -> int:
        """Exponent of the largest finite value: what the `floor` scale rule subtracts."""
        return (self.largest_code >> self.mantissa_bits) - self.bias

    @cached_property
    def max(self) -> float:
        """The largest finite value."""
        return self.value(self.largest_code)

    @property
    def smallest_normal(self) -> float:
        return self.value(1 << self.mantissa_bits)

    @property
    def smallest_subnormal(self) -> float:
        return self.value(1)


@dataclass(frozen=True)
class ScaleFormat:
    """E8M0: an unsigned power of two, `2^(code - bias)`; no zero, no sign, no infinity, one NaN."""

    name: str
    bits: int
    bias: int
    largest_code: int
    nan_code: int
    dtype: torch.dtype

    def value(self, code: int) -> float:
        return float("nan") if code == self.nan_code else 2.0 ** (code - self.bias)


# OCP 8-bit Floating Point Specification (OFP8) v1.0, section 5, table 1. E4M3 has no infinity and gives
# up only the code S.1111.111 to NaN, so that its largest value is 448 and not 240; torch, JAX and LLVM
# mark that by the suffix `fn` (finite, NaN).
E4M3FN = ElementFormat("e4m3fn", 4, 3, 7, 0x7E, None, 0x7F, torch.float8_e4m3fn)
# The same table: E5M2 follows IEEE 754, infinity and all.
E5M2 = ElementFormat("e5m2", 5, 2, 15, 0x7B, 0x7C, 0x7F, torch.float8_e5m2)
# OCP MX v1.0, section 5.3.2 (FP6) and 5.3.3 (FP4): neither Inf nor NaN, every code is a number.
E2M3 = ElementFormat("e2m3", 2, 3, 1, 0x1F, None, None, None)
E3M2 = ElementFormat("e3m2", 3, 2, 3, 0x1F, None, None, None)
E2M1 = ElementFormat("e2m1", 2, 1, 1, 0x7, None, None, torch.float4_e2m1fn_x2, per_byte=2)
# OCP MX v1.0, section 5.4.1. `fnu`: finite, NaN, unsigned.
E8M0FNU = ScaleFormat("e8m0fnu", 8, 127, 254, 255, torch.float8_e8m0fnu)

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)  # of ops that take no other elements
ELEMENTS = {f.name: f for f in (E4M3FN, E5M2, E2M3, E3M2, E2M1)}
BY_DTYPE = {f.dtype: f for f in ELEMENTS.values() if f.dtype is not None}


def element(elem_dtype: torch.dtype | str) -> ElementFormat:
    """The format of a torch dtype, or of a name.

    >>> element(torch.float8_e4m3fn).max, element("e2m1").max
    (448.0, 6.0)
    """
    found = ELEMENTS.get(elem_dtype) if isinstance(elem_dtype, str) else BY_DTYPE.get(elem_dtype)
    if found is None:
        known = ", ".join([*map(str, BY_DTYPE), *(repr(f.name) for f in ELEMENTS.values())])
        raise TypeError(f"elem_dtype {elem_dtype!r} is no element format; known: {known}")
    return found


def may_be_nan(dtype: torch.dtype) -> bool:
    """Whether a number of this dtype may be NaN.

    >>> may_be_nan(torch.float8_e4m3fn), may_be_nan(torch.float4_e2m1fn_x2), may_be_nan(torch.int32)
    (True, False, False)
    """
    fmt = BY_DTYPE.get(dtype)
    return dtype.is_floating_point and (fmt is None or fmt.nan_code is not None)


def same_bits(a: Tensor, b: Tensor) -> Tensor:
    """Where two tensors of one shape and dtype hold the same bits; a NaN is any NaN.

    >>> same_bits(torch.tensor([0.0, 1.0, torch.nan]), torch.tensor([-0.0, 1.0, -torch.nan]))
    tensor([False,  True,  True])
    """
    bits = INT_OF_BYTES[a.element_size()]
    same = a.view(bits) == b.view(bits)
    if may_be_nan(a.dtype) and not same.all():
        same |= a.float().isnan() & b.float().isnan()
    return same


def exponent_rule(fmt: ElementFormat, scaling: str, dtype: torch.dtype) -> tuple[int, int, int]:
    """A scaling rule as integer arithmetic on the fp32 bits of amax: what to subtract, to add and to take for 0.

    The E8M0 byte is the exponent field of `bits + added` less `emax`, at least 0: what the addition carries into the
    exponent is rounded up. rceil is amax / max rounded up, and that quotient passes a power of two where the mantissa
    of amax passes the mantissa of max. One quotient alone is first rounded to a power of two itself, from just above
    2^-127 down to it; the byte of its amax, which only fp32 can hold, is 0.

    Returns:
        `(emax, added, exception)`; exception is -1 where there is none.
    """
    max_mantissa = int((fmt.max / 2.0**fmt.emax - 1) * 2**23)
    added = {"floor": 0, "even": 1 << (22 - fmt.mantissa_bits), "ceil": 0x7FFFFF, "rceil": 0x7FFFFF - max_mantissa}
    exception = (fmt.emax << 23) + max_mantissa + 1 if scaling == "rceil" and dtype == torch.float32 else -1
    return fmt.emax, added[scaling], exception


def fp32_bits(value: float) -> int:
    """The bits of a positive number rounded to fp32, as kernels compare magnitudes.

    >>> hex(fp32_bits(1.0))
    '0x3f800000'
    """
    return int.from_bytes(struct.pack("<f", value), "little")
