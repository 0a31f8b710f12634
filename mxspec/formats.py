"""Element and scale formats: the constants that every op, kernel and notebook reads.

A value of an element format is `(-1)^sign * 2^(exponent - bias) * 1.mantissa`, or `2^(1 - bias) * 0.mantissa` if the
exponent field is 0. The field widths and the meaning of the top codes determine every constant of a format, so only
these are written here. int8 is such a format too: its magnitudes are those of one exponent bit and 6 mantissa bits.
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
    "FP8_SCALE_FORMATS",
    "INT8",
    "SCALINGS",
    "ElementFormat",
    "ScaleFormat",
    "element",
    "exponent_rule",
    "fp32_bits",
    "may_be_nan",
    "same_bits",
]

FP8_SCALE_FORMATS = ("fp32", "pow2")  # whether the scale of an FP8 block is any number or a power of two
SCALINGS = ("floor", "rceil", "ceil", "even")  # the rules that give the scale of an MX block from its largest magnitude

MX_BLOCK_SIZE = 32  # OCP MX v1.0, section 5.2, table 1: every MX format shares one scale among k = 32
NVFP4_BLOCK_SIZE = 16  # PTX ISA, tcgen05.mma `.kind::mxf4nvf4.block_scale.scale_vec::4X`: a scale for 16 elements
NVFP4_LARGEST = 2688.0  # 448 * 6: the largest e4m3fn scale times the largest e2m1 element
FP8_BLOCK_SIZE = 128  # DeepSeek-V3 technical report, section 3.3.2: 1x128 activations, 128x128 weights
# TMA reads rows whose distance is a multiple of 16 bytes: CUDA Driver API, cuTensorMapEncodeTiled
FP8_SIZE_MULTIPLE = 16

# The integer dtypes in which bytes are moved and compared, by width.
INT_OF_BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class ElementFormat:
    """A narrow float, or int8. `largest_code` is the code of the largest finite positive value."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    largest_code: int
    inf_code: int | None
    nan_code: int | None  # a positive NaN; the sign and the payload of a NaN are free
    dtype: torch.dtype | None  # None if torch has no such dtype; tensors of its codes are then uint8
    # Elements that share whole bytes: 2 of 4 bits in one, 4 of 6 bits in three. The first lies lowest.
    together: int = 1
    twos_complement: bool = False  # whether a negative code is 2^bits minus the magnitude, and not a sign bit beside it

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def per_byte(self) -> int:
        """Elements in a byte, for the formats whose elements do not cross bytes."""
        count, rest = divmod(8, self.bits)
        if rest:
            raise TypeError(f"{self.name} elements cross bytes: {self.together} share {self.stored(self.together)}")
        return count

    def stored(self, size: int) -> int:
        """The bytes that hold `size` elements."""
        return size * self.bits // 8

    def held(self, stored: int) -> int:
        """The elements that lie in `stored` bytes."""
        return stored * 8 // self.bits

    def value(self, code: int) -> float:
        """The exact value of a code; `nan` and `inf` if the format has them."""
        sign = -1.0 if code >> (self.bits - 1) else 1.0
        magnitude = code & ((1 << (self.bits - 1)) - 1)
        if self.twos_complement:  # code 0x80 of int8 has the magnitude 0x80
            return sign * ((1 << self.bits) - code if sign < 0 else code) * self.smallest_subnormal
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
        """Exponent of the largest finite value, which the scale rule `floor` subtracts."""
        return (self.largest_code >> self.mantissa_bits) - self.bias

    @cached_property
    def max(self) -> float:
        """The largest finite value."""
        return self.value(self.largest_code)

    @property
    def storage_dtype(self) -> torch.dtype:
        """The dtype in which a kernel stores codes: uint8 if a byte holds several."""
        return torch.uint8 if self.dtype is None or self.per_byte > 1 else self.dtype

    def as_codes(self, bits: Tensor) -> Tensor:
        """A tensor that a kernel wrote, in the dtype of the codes."""
        return bits if self.dtype is None else bits.view(self.dtype)

    @property
    def smallest_normal(self) -> float:
        return self.value(1 << self.mantissa_bits)

    @property
    def smallest_subnormal(self) -> float:
        return 2.0 ** (1 - self.bias - self.mantissa_bits)


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


# OCP 8-bit Floating Point Specification (OFP8) v1.0, section 5, table 1. E4M3 has no infinity, and only the code
# S.1111.111 is NaN, so its largest value is 448 and not 240. torch, JAX and LLVM mark this with the suffix `fn`
# (finite, NaN).
E4M3FN = ElementFormat("e4m3fn", 4, 3, 7, 0x7E, None, 0x7F, torch.float8_e4m3fn)
# The same table: E5M2 follows IEEE 754, with infinity.
E5M2 = ElementFormat("e5m2", 5, 2, 15, 0x7B, 0x7C, 0x7F, torch.float8_e5m2)
# OCP MX v1.0, section 5.3.2 (FP6) and 5.3.3 (FP4): neither Inf nor NaN, every code is a number.
E2M3 = ElementFormat("e2m3", 2, 3, 1, 0x1F, None, None, None, together=4)
E3M2 = ElementFormat("e3m2", 3, 2, 3, 0x1F, None, None, None, together=4)
E2M1 = ElementFormat("e2m1", 2, 1, 1, 0x7, None, None, torch.float4_e2m1fn_x2, together=2)
# OCP MX v1.0, section 5.3.4: an integer times 2^-6, in two's complement. The code 0x80 is -2, and no cast gives it: the
# standard lets it be unused, so that the range is symmetric. microxcaling has the same largest magnitude, 127 / 64.
INT8 = ElementFormat("int8", 1, 6, 1, 0x7F, None, None, torch.int8, twos_complement=True)
# OCP MX v1.0, section 5.4.1. `fnu`: finite, NaN, unsigned.
E8M0FNU = ScaleFormat("e8m0fnu", 8, 127, 254, 255, torch.float8_e8m0fnu)

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)  # for ops that take no other element formats
ELEMENTS = {f.name: f for f in (E4M3FN, E5M2, E2M3, E3M2, E2M1, INT8)}
BY_DTYPE = {f.dtype: f for f in ELEMENTS.values() if f.dtype is not None}


def element(elem_dtype: torch.dtype | str) -> ElementFormat:
    """The format of a torch dtype or of a name.

    >>> element(torch.float8_e4m3fn).max, element("e2m1").max
    (448.0, 6.0)
    """
    found = ELEMENTS.get(elem_dtype) if isinstance(elem_dtype, str) else BY_DTYPE.get(elem_dtype)
    if found is None:
        known = ", ".join([*map(str, BY_DTYPE), *(repr(f.name) for f in ELEMENTS.values())])
        raise TypeError(f"elem_dtype {elem_dtype!r} is no element format; known: {known}")
    return found


def may_be_nan(dtype: torch.dtype) -> bool:
    """Whether a number of this dtype can be NaN.

    >>> may_be_nan(torch.float8_e4m3fn), may_be_nan(torch.float4_e2m1fn_x2), may_be_nan(torch.int32)
    (True, False, False)
    """
    fmt = BY_DTYPE.get(dtype)
    return dtype.is_floating_point and (fmt is None or fmt.nan_code is not None)


def same_bits(a: Tensor, b: Tensor) -> Tensor:
    """Where two tensors of the same shape and dtype hold the same bits; any NaN equals any NaN.

    >>> same_bits(torch.tensor([0.0, 1.0, torch.nan]), torch.tensor([-0.0, 1.0, -torch.nan]))
    tensor([False,  True,  True])
    """
    bits = INT_OF_BYTES[a.element_size()]
    same = a.view(bits) == b.view(bits)
    if may_be_nan(a.dtype) and not same.all():
        same |= a.float().isnan() & b.float().isnan()
    return same


def exponent_rule(fmt: ElementFormat, scaling: str, dtype: torch.dtype) -> tuple[int, int, int]:
    """A scaling rule as integer arithmetic on the fp32 bits of amax.

    The E8M0 byte is the exponent field of `bits + added` minus `emax`, at least 0. For int8, whose emax is 0, it is
    also at most 254. The addition rounds up if it carries into the exponent field. rceil rounds amax / max up to a
    power of two: the byte rises by 1 exactly if the mantissa of amax exceeds the mantissa of max.

    rceil has an exception, at the smallest scale. A quotient just above 2^-127 is itself rounded down to 2^-127, so the
    byte of its amax is 0. Among the input dtypes, only fp32 can hold this amax. int8 has another exception, because its
    amaxes at the smallest scale are subnormal: the byte is 0 up to 127/64 * 2^-127. float16 cannot hold these amaxes.

    Args:
        fmt: the element format.
        scaling: a rule in `SCALINGS`.
        dtype: the dtype of the tensor that is quantized.

    Returns:
        `(emax, added, exception)`: the number to subtract, the number to add, and the bits of the largest amax whose
        byte is 0 by an exception, or -1 if there is no such amax. The bytes of all smaller amaxes are 0, too.
    """
    max_mantissa = int((fmt.max / 2.0**fmt.emax - 1) * 2**23)
    added = {"floor": 0, "even": 1 << (22 - fmt.mantissa_bits), "ceil": 0x7FFFFF, "rceil": 0x7FFFFF - max_mantissa}
    exception = -1
    if scaling == "rceil" and fmt == INT8 and dtype != torch.float16:
        exception = fp32_bits(fmt.max * 2.0**-127)
    elif scaling == "rceil" and fmt != INT8 and dtype == torch.float32:
        exception = (fmt.emax << 23) + max_mantissa + 1
    return fmt.emax, added[scaling], exception


def fp32_bits(value: float) -> int:
    """The bits of a positive number rounded to fp32. Kernels compare magnitudes as such integers.

    >>> hex(fp32_bits(1.0))
    '0x3f800000'
    """
    return int.from_bytes(struct.pack("<f", value), "little")
