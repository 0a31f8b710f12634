"""NVFP4 in Triton without codes: the Hadamard transform of 16 rows, random bytes, and the values of the codes.

A tile is held as that of `tiles/nvfp4_columns.py`: `(columns, 16)`, with the 16 rows of a column in one thread. The
transform and the rounding of a column then need no other thread.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mxspec.triton_kernels.common.nvfp4_numerics import block_scale, divisor, quotient

_OF_X = tl.constexpr(21 / 32)


@triton.jit
def _sums(v):
    """`(a + b, a - b)` of each pair in the last dimension, which becomes the second one."""
    a, b = tl.split(v)
    return tl.join(a + b, a - b).permute(0, 4, 1, 2, 3)


@triton.jit
def transformed(v, SIGNS: tl.constexpr):
    """`hadamard_16` of the 16 fp32 numbers of each row of v, before it is rounded: `(columns, 16)`."""
    negated = ((SIGNS >> tl.arange(0, 16)) & 1) << 31
    v = (v.to(tl.int32, bitcast=True) ^ negated[None, :]).to(tl.float32, bitcast=True)
    v = _sums(_sums(_sums(_sums(v.reshape(v.shape[0], 2, 2, 2, 2))))).reshape(v.shape)
    return v * 0.25


@triton.jit
def random_bytes(random, stride, n, STREAM: tl.constexpr):
    """16 bytes for each number of n, as int32: `(columns, 16)`. The offset counts from STREAM on."""
    seed, offset = tl.load(random), tl.load(random + stride) + STREAM
    low, high = (offset & 0xFFFFFFFF).to(tl.uint32), (offset >> 32).to(tl.uint32)
    word = n.to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, word * 0 + low, word * 0 + high, word, (n >> 32).to(tl.uint32))
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(n.shape[0], 4)
    return ((words[:, :, None] >> (8 * tl.arange(0, 4))[None, None, :]) & 0xFF).to(tl.int32).reshape(n.shape[0], 16)


@triton.jit
def _nearest(magnitude):
    """Magnitudes of at most 6 rounded to e2m1, ties to even."""
    # e is the power of two below the magnitude, at least 1. Codes in its binade are steps of e / 2 apart. The sum with
    # e * 2^22 rounds to such steps.
    e = tl.maximum(magnitude.to(tl.int32, bitcast=True) & 0x7F800000, 0x3F800000)
    large = (e + (22 << 23)).to(tl.float32, bitcast=True)
    return magnitude + large - large


@triton.jit
def _stochastic(magnitude, byte):
    """Magnitudes of at most 6 rounded to e2m1 by a random byte for each.

    The byte is added to the 8 bits below the only mantissa bit that e2m1 keeps, and these bits are cut off. Magnitudes
    below 1 are subnormal: if they are increased by 1, the same bits are cut off. This sum must not be rounded up to a
    number with other bits. So 2^-24 less is added: half of the last bit. The sum of a number with 9 bits is then a tie,
    which becomes even, and the sum of a number just below becomes smaller.
    """
    small = magnitude < 1.0
    more = tl.maximum(magnitude + tl.where(small, 1.0 - 2.0**-24, 0.0), 1.0)
    bits = more.to(tl.int32, bitcast=True) + (byte << 14)
    return (bits & -0x400000).to(tl.float32, bitcast=True) - tl.where(small, 1.0, 0.0)


@triton.jit
def values_of(x, b, h, up, wrong, byte, NARROW: tl.constexpr):
    """The values `q * s` of x, in fp32. b has the magnitude of each element's block, in a shape that broadcasts.

    byte: None rounds to nearest even. The others are as for `nvfp4_numerics`.
    """
    s, wrong = block_scale(b.to(tl.int32, bitcast=True), h, up, wrong)
    minus_d, reciprocal = divisor(s, h, up, wrong)
    n = tl.abs(x) * (_OF_X * up) if NARROW else tl.abs(x) * _OF_X * up
    magnitude = tl.minimum(quotient(n, minus_d, reciprocal, None), 6.0)
    magnitude = _nearest(magnitude) if byte is None else _stochastic(magnitude, byte)
    value = magnitude * tl.where(wrong, float("nan"), s.to(tl.float32))
    return (value.to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & -0x80000000)).to(
        tl.float32, bitcast=True
    )
