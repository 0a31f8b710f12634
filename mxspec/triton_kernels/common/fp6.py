"""The codes of FP6 in Triton: rounding by one fp32 addition, and four codes in three bytes.

A GPU before Blackwell has no instruction that converts to FP6. An H100 ran this code, but its bytes were compared in
the interpreter only.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mxspec.formats import E2M3, E3M2, ElementFormat, fp32_bits

FORMATS = (E2M3, E3M2)
SHORTS = tl.constexpr(12)  # a block of 32 codes takes 24 bytes


def constants(fmt: ElementFormat) -> tuple[int, int, int]:
    """The mantissa bits, the bias and the fp32 bits of the largest value; zeros for formats that are not FP6."""
    return (fmt.mantissa_bits, fmt.bias, fp32_bits(fmt.max)) if fmt in FORMATS else (0, 0, 0)


@triton.jit
def encoded(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr):
    """The codes of fp32 numbers, one in an int32. A NaN becomes the code of the largest value.

    The sum of a magnitude and `2^(23 - MANTISSA)` times its power of two has no bits below the last bit of the code.
    So the addition rounds to nearest even, and the difference of the bits is the number of steps.
    """
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    sign = tl.where(magnitude > 0x7F800000, 0, (bits >> 26) & 0x20)
    magnitude = tl.minimum(magnitude, LARGEST)
    power = tl.maximum(magnitude & 0x7F800000, (128 - BIAS) << 23)
    one = power + ((23 - MANTISSA) << 23)
    total = magnitude.to(tl.float32, bitcast=True) + one.to(tl.float32, bitcast=True)
    steps = total.to(tl.int32, bitcast=True) - one
    return (power >> (23 - MANTISSA)) - ((128 - BIAS) << MANTISSA) + steps + sign


@triton.jit
def store_blocks(qdata, place, codes, mask, BLOCKS: tl.constexpr):
    """Store codes `(BLOCKS, 32)` as the blocks with these places. qdata points to int16.

    Eight neighbouring codes are three int16. A thread that loads 16 bytes of x has eight elements.
    """
    shift = tl.arange(0, 32) % 4 * 6
    words = tl.sum((codes << shift[None, :]).reshape(BLOCKS, 8, 4), axis=2)  # 24 bits each
    low, high = tl.split(words.reshape(BLOCKS, 4, 2))
    to = qdata + place[:, None] * SHORTS + tl.arange(0, 4)[None, :] * 3
    tl.store(to, low.to(tl.int16), mask=mask[:, None])
    tl.store(to + 1, ((low >> 16) | (high << 8)).to(tl.int16), mask=mask[:, None])
    tl.store(to + 2, (high >> 8).to(tl.int16), mask=mask[:, None])
