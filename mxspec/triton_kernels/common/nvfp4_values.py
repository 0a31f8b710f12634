"""NVFP4 in Triton without codes: the Hadamard transform of 16 rows, random bytes, and the values of the codes.

A tile is held as that of `tiles/nvfp4_columns.py`: `(columns, 16)`, with the 16 rows of a column in one thread. The
transform and the rounding of a column then need no other thread.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mxspec.triton_kernels.common.numerics import as_float, power_of_two
from mxspec.triton_kernels.common.nvfp4_numerics import (
    OF_B,
    OF_X,
    block_scale,
    divisor,
    of_matrix,
    quotient,
    reciprocal_of,
    reciprocal_of_scale,
    short_quotient,
)
from mxspec.triton_kernels.common.philox import philox


@triton.jit
def _sums(v):
    """`(a + b, a - b)` of each pair in the last dimension, which becomes the second one."""
    a, b = tl.split(v)
    return tl.join(a + b, a - b).permute(0, 4, 1, 2, 3)


@triton.jit
def transformed_sums(v, SIGNS: tl.constexpr):
    """4 times `transformed`."""
    negated = ((SIGNS >> tl.arange(0, 16)) & 1) << 31
    v = (v.to(tl.int32, bitcast=True) ^ negated[None, :]).to(tl.float32, bitcast=True)
    return _sums(_sums(_sums(_sums(v.reshape(v.shape[0], 2, 2, 2, 2))))).reshape(v.shape)


@triton.jit
def transformed(v, SIGNS: tl.constexpr):
    """`hadamard_16` of the 16 fp32 numbers of each row of v, before it is rounded: `(columns, 16)`."""
    return transformed_sums(v, SIGNS) * 0.25


@triton.jit
def random_bytes(random, stride, n, STREAM: tl.constexpr):
    """16 bytes for each number of n, as int32: `(columns, 16)`. The offset counts from STREAM on."""
    w0, w1, w2, w3 = philox(random, stride, STREAM, n.to(tl.uint32), (n >> 32).to(tl.uint32))
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(n.shape[0], 4)
    return ((words[:, :, None] >> (8 * tl.arange(0, 4))[None, None, :]) & 0xFF).to(tl.int32).reshape(n.shape[0], 16)


@triton.jit
def _nearest(magnitude):
    """Magnitudes of at most 6 rounded to e2m1, ties to even."""
    e = as_float(power_of_two(magnitude, 0x3F800000))  # codes in a binade are steps of e / 2 apart
    return tl.fma(e, -(2.0**22), tl.fma(e, 2.0**22, magnitude))


@triton.jit
def of_group(amax):
    """`(d, reciprocal, up)` of a group: d is `h * up`. The reciprocal is 0 if d is 0.

    It is NaN if the magnitude is wrong. The NaN becomes the scale of each block, and then each value.
    """
    _, h, up, wrong = of_matrix(amax)
    d = h * up
    reciprocal = tl.where(d == 0, 0.0, reciprocal_of(d))
    return d, tl.where(wrong, float("nan"), reciprocal), up


@triton.jit
def scale_of(b, d, reciprocal):
    """The e4m3 scales of blocks with the largest magnitudes b, in fp32. None is larger than 448."""
    s = quotient(b * OF_B, -d, reciprocal, None)
    e = as_float(power_of_two(s, 0x3C800000))  # at least 2^-6. Scales in a binade are steps of e / 8 apart
    return tl.fma(e, -(2.0**20), tl.fma(e, 2.0**20, s))


@triton.jit
def nearest_of_narrow(x, r):
    """`x * r` rounded to e2m1, with its sign or as +0. See `short_quotient`."""
    q = tl.clamp(short_quotient(x, r), -6.0, 6.0)
    e = as_float(power_of_two(q, 0x3F800000))  # Values in a binade are steps of e / 2 apart
    return tl.fma(e, -1.5 * 2.0**22, tl.fma(e, 1.5 * 2.0**22, q))


@triton.jit
def stochastic(magnitude, byte, FEW: tl.constexpr):
    """Magnitudes of at most 6 rounded to e2m1 by a random byte for each.

    The byte is added to the 8 bits below the only mantissa bit that e2m1 keeps, and these bits are cut off. Magnitudes
    below 1 are subnormal: if they are increased by 1, the same bits are cut off. This sum must not be rounded up to a
    number with other bits. So 2^-24 less is added: half of the last bit. The sum of a number with 9 bits is then a tie,
    which becomes even, and the sum of a number just below becomes smaller.

    FEW: the magnitudes are those of bfloat16 numbers. If such a magnitude is below 1 and is no 512th, it is 2^-21.4 or
    more away from every 512th. So the sum with 1 may be rounded.
    """
    small = magnitude < 1.0
    one = tl.where(small, 1.0, 0.0)
    more = magnitude + one if FEW else tl.maximum(magnitude + tl.where(small, 1.0 - 2.0**-24, 0.0), 1.0)
    bits = more.to(tl.int32, bitcast=True) + (byte << 14)
    return as_float(bits & -0x400000) - one


@triton.jit
def narrow_values_of(x, b, d, reciprocal, byte, FEW: tl.constexpr):
    """As `values_of`, with fewer instructions, for x of a narrow dtype that is widened and multiplied by `up`.

    FEW: the dtype is bfloat16, whose numbers have 8 bits. up, d and reciprocal are those of `of_group`.
    """
    s = scale_of(b, d, reciprocal)
    r = reciprocal_of_scale(s)
    if byte is None:
        magnitude = nearest_of_narrow(x, r * (reciprocal * OF_X))
    else:
        n = tl.abs(x) * OF_X
        q = tl.minimum(quotient(n, -(tl.maximum(s, 2.0**-9) * d), r * reciprocal, None), 6.0)
        magnitude = stochastic(q, byte, FEW)
    value = (magnitude * s).to(tl.int32, bitcast=True)
    return as_float(value | (x.to(tl.int32, bitcast=True) & -0x80000000))


@triton.jit
def values_of(x, b, h, up, wrong, byte):
    """The values `q * s` of x, in fp32. b has the magnitude of each element's block, in a shape that broadcasts.

    byte: None rounds to nearest even. The others are as for `nvfp4_numerics`.
    """
    s, wrong = block_scale(b.to(tl.int32, bitcast=True), h, up, wrong)
    minus_d, reciprocal = divisor(s, h, up, wrong)
    n = tl.abs(x) * OF_X * up
    magnitude = tl.minimum(quotient(n, minus_d, reciprocal, None), 6.0)
    magnitude = _nearest(magnitude) if byte is None else stochastic(magnitude, byte, False)
    value = magnitude * tl.where(wrong, float("nan"), s.to(tl.float32))
    return as_float(value.to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & -0x80000000))


@triton.jit
def largest_of_blocks(values, BLOCK: tl.constexpr):
    """The largest magnitude of each element's block. values: `(columns, 16)`, with the 16 rows of a column.

    BLOCK: `rows`, 16 columns of a row; `columns`, 16 rows of a column; or `16x16`. A float maximum may lose a NaN. But
    a NaN makes its whole matrix NaN, by way of the matrix's magnitude.
    """
    COLS: tl.constexpr = values.shape[0]
    if BLOCK == "rows":
        b = tl.max(tl.abs(values).reshape(COLS // 16, 16, 16), axis=1)
        return tl.broadcast_to(b[:, None, :], (COLS // 16, 16, 16)).reshape(COLS, 16)
    else:
        b = tl.max(tl.abs(values), axis=1)
        if BLOCK == "16x16":
            b = tl.max(b.reshape(COLS // 16, 16), axis=1)
            b = tl.broadcast_to(b[:, None], (COLS // 16, 16)).reshape(COLS)
        return b[:, None]


@triton.jit
def matrix_values(values, amax, dtype: tl.constexpr, BLOCK: tl.constexpr, byte=None):
    """The values of the codes of 16 rows, which were widened from a dtype. amax: the magnitude of their matrix."""
    if dtype == tl.float32:
        _, h, up, wrong = of_matrix(amax)
        return values_of(values, largest_of_blocks(values, BLOCK), h, up, wrong, byte)
    else:
        d, reciprocal, up = of_group(amax)
        if up != 1.0:  # rare, so that most tiles take no product
            values = values * up
        return narrow_values_of(values, largest_of_blocks(values, BLOCK), d, reciprocal, byte, dtype == tl.bfloat16)
