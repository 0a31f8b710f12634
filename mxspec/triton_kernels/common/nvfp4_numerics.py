"""The arithmetic of NVFP4 in Triton: the scale of a block, and its packed e2m1 codes.

`reference/nvfp4_quantize.py` defines both by divisions. A kernel multiplies by a reciprocal and corrects the product,
which takes fewer instructions and gives the same scales and codes. A test tries each mantissa of a divisor with the
numbers beside every place at which a scale or a code changes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxspec.formats import NVFP4_LARGEST
from mxspec.triton_kernels.common.launch import capability
from mxspec.triton_kernels.common.numerics import as_float, e2m1_code_of, power_of_two
from mxspec.triton_kernels.common.philox import philox

_LARGEST = tl.constexpr(NVFP4_LARGEST)
_OF_H, OF_B, OF_X = tl.constexpr(2.0**-12), tl.constexpr(7 / 64), tl.constexpr(21 / 32)
# If A is smaller, both numbers of a quotient are multiplied by 2^100. The remainder of a division is then exact.
_SMALL, _UP = tl.constexpr(2.0**-72), tl.constexpr(2.0**100)
_PARTS = tl.constexpr((263 << 23) - 2**32)  # 2^(9 - e) has the bits (263 << 23) - bits of 2^e
# How the codes are rounded: to nearest; by a byte for each element; by the bytes of Philox.
NEAREST, BYTES, SEED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_CVT = tl.constexpr(
    "{ .reg .b8 a, b, c, d; cvt.rn.satfinite.e2m1x2.f32 a, $5, $1; cvt.rn.satfinite.e2m1x2.f32 b, $6, $2;"
    " cvt.rn.satfinite.e2m1x2.f32 c, $7, $3; cvt.rn.satfinite.e2m1x2.f32 d, $8, $4; mov.b32 $0, {a, b, c, d}; }"
)


def converts(device: torch.device) -> bool:
    """Whether the GPU has the instruction that converts to e2m1: Blackwell, sm_100 and sm_103. It has not been run."""
    return capability(device)[0] == 10


def random_of(random: Tensor | None) -> dict[str, Any]:
    """The arguments of a kernel that say how the codes are rounded."""
    if random is None:
        return {}
    if random.dtype == torch.int64:
        return {"random": random, "random_e": 0, "random_r": 0, "random_k": random.stride(0), "RANDOM": SEED.value}
    stride_e = random.stride(0) if random.ndim == 3 else 0
    strides = {"random_e": stride_e, "random_r": random.stride(-2), "random_k": random.stride(-1)}
    return {"random": random, **strides, "RANDOM": BYTES.value}


@triton.jit
def of_matrix(amax):
    """`(A, h, up, wrong)` of a matrix: up is a power of two, and wrong says that amax is NaN, Inf or negative.

    -0 counts as 0. A is 0 if it is wrong.
    """
    bits = amax.to(tl.int32, bitcast=True)
    bits = tl.where(bits == -0x80000000, 0, bits)
    wrong = (bits < 0) | (bits >= 0x7F800000)
    A = tl.where(wrong, 0.0, as_float(bits))
    return A, A * _OF_H, tl.where(A < _SMALL, _UP, 1.0), wrong


@triton.jit
def store_tensor_scale(to, A, wrong, e, stores):
    """One program of a matrix stores T."""
    if stores:
        T = tl.div_rn(A, _LARGEST)
        tl.store(to + e, tl.where(wrong, float("nan"), T))


@triton.jit
def store_tensor_scales(to, amax, stride, G, CHUNK: tl.constexpr):
    """Store T of every group."""
    for i in range(0, G, CHUNK):
        g = i + tl.arange(0, CHUNK)
        A, _h, _up, wrong = of_matrix(tl.load(amax + g * stride, mask=g < G, other=0))
        tl.store(to + g, tl.where(wrong, float("nan"), tl.div_rn(A, _LARGEST)), mask=g < G)


@triton.jit
def reciprocal_of(d):
    """`1 / d` rounded once, for d between 2^-120 and 2^126. Inf or NaN for 0.

    The last bits of a quotient may be wrong on a GPU. A step of Newton's method corrects them. `div_rn` takes a branch
    for all other d.
    """
    r = 1.0 / d
    return tl.fma(tl.fma(-r, d, 1.0), r, r)


@triton.jit
def quotient(n, minus_d, reciprocal, most):
    """`n / d` of numbers that are not negative, rounded once beside every tie of e4m3 and e2m1.

    minus_d is -d. `most` limits the first product, because the remainder of an Inf would be NaN. With None, an Inf
    becomes NaN.
    """
    q = n * reciprocal
    if most is not None:
        q = tl.minimum(q, most)
    return tl.fma(tl.fma(q, minus_d, n), reciprocal, q)


@triton.jit
def block_scale(bits, h, up, wrong):
    """The e4m3 scales of blocks whose largest magnitudes have these fp32 bits, and whether each is NaN.

    A scale that is NaN is given as 0, so that the codes of its block are numbers.
    """
    b, d = as_float(bits) * OF_B, h * up
    s = tl.minimum(quotient(b * up, -d, reciprocal_of(d), 512.0), 448.0)
    wrong = wrong | (bits >= 0x7F800000)
    return tl.where(wrong | (bits == 0) | (h == 0), 0.0, s).to(tl.float8e4nv), wrong


@triton.jit
def scale_byte(scale, wrong):
    return tl.where(wrong, 0x7F, scale.to(tl.uint8, bitcast=True)).to(tl.uint8)


@triton.jit
def divisor(scale, h, up, wrong):
    """`(-d, 1 / d)` of blocks, for `magnitudes`. The codes of a block are 0 if d is 0. They are 7 if `wrong`."""
    d = scale.to(tl.float32) * h * up
    reciprocal = tl.where(d == 0, 0.0, reciprocal_of(d))
    return -d, tl.where(wrong, float("nan"), reciprocal)


@triton.jit
def reciprocal_of_scale(s):
    """`1 / s`, wrong by less than 2^-23 of it. A scale of 0 counts as 2^-9, its next: all values of its block are 0."""
    s = tl.maximum(s, 2.0**-9)
    r = as_float(0x7EF311C7 - s.to(tl.int32, bitcast=True))  # wrong by up to an eighth. Each step squares the error
    r = tl.fma(tl.fma(-s, r, 1.0), r, r)
    r = tl.fma(tl.fma(-s, r, 1.0), r, r)
    return tl.fma(tl.fma(-s, r, 1.0), r, r)


@triton.jit
def is_short(A, POSSIBLE: tl.constexpr):
    """Whether A has 11 bits, as the magnitude of a bfloat16 or float16 has, and products with it are normal numbers."""
    if POSSIBLE:
        return (A.to(tl.int32, bitcast=True) & 0x1FFF == 0) & (A >= _SMALL)
    else:
        return False


@triton.jit
def short_quotient(x, r):
    """`x * r`, rounded to a multiple of 2^-17. r is wrong by less than 2^-22 of it.

    x and the magnitude of its matrix have 11 bits. So an exact quotient that is no tie of e2m1 is 2^-17.4 or more away
    from every tie. And if the exact quotient is a tie, then this function gives the tie.
    """
    return tl.fma(x, r, 96.0) - 96.0


@triton.jit
def factors(s, h, up, wrong, short):
    """Two factors of each block, for `magnitudes`. s is its e4m3 scale. The factors are those of `divisor`.

    If `short`, both are the factor of an element. It is wrong by less than 2^-22 of it, and 0 if s is 0.
    """
    if short:
        number = s.to(tl.float32)
        factor = tl.where(number == 0, 0.0, reciprocal_of_scale(number) * (reciprocal_of(h) * OF_X))
        minus_d = factor
    else:
        minus_d, factor = divisor(s, h, up, wrong)
    return minus_d, factor


@triton.jit
def magnitudes(x, minus_d, reciprocal, up, short, NARROW: tl.constexpr, BOUNDED: tl.constexpr):
    """The numbers whose casts are the codes, without their signs. x has one dimension more: the elements of a block.

    A quotient of 2^128 or more is NaN, because its remainder is. `packed_codes` makes 6 of it, as of all above 6.

    short: see `is_short`. The quotients are then those of `short_quotient`.

    NARROW: x is a widened bfloat16 or float16, so that its product with 21/32 is exact. BOUNDED: no element of x is
    larger than A. Otherwise x is multiplied by 0 if d is 0: with up, it might become Inf.
    """
    reciprocal = tl.expand_dims(reciprocal, -1)
    if short:
        magnitude = short_quotient(tl.abs(x), reciprocal)
    else:
        more = up if BOUNDED else tl.expand_dims(tl.where(minus_d == 0, 0.0, up), -1)
        n = tl.abs(x) * (OF_X * more) if NARROW else tl.abs(x) * OF_X * more
        magnitude = quotient(n, tl.expand_dims(minus_d, -1), reciprocal, None)
    return magnitude


@triton.jit
def random_words(state, stride, number):
    """Four random words for each block, by Philox4x32-10. `state` holds a seed and an offset, in int64.

    number: the number of each block, int32. The high word of the number is 0, because `supports` limits the elements.
    """
    low = number.to(tl.uint32, bitcast=True)
    return philox(state, stride, 0, low, low * 0)


@triton.jit
def bytes_of_words(words):
    """The bytes of words, each in an int32, the lowest first. The last dimension becomes 4 times as large."""
    shape: tl.constexpr = words.shape[:-1] + (words.shape[-1] * 4,)  # noqa: RUF005  # Triton has no `*`
    byte = tl.expand_dims(words, -1) >> (tl.arange(0, 4) * 8).to(tl.uint32)
    return (byte & 0xFF).to(tl.int32, bitcast=True).reshape(shape)


@triton.jit
def _drawn_code(magnitude, byte):
    """The bits 0 to 2 of an e2m1 code, int32: a magnitude rounded by a random byte. NaN counts as 6.

    The magnitude is a number of 256ths of the steps of its binade, cut off. The byte is added to it.
    """
    y = tl.minimum(magnitude, 6.0)
    e = power_of_two(y, 0x3F800000)
    parts = (y * as_float(-e + _PARTS)).to(tl.int32)
    return ((parts + byte) >> 8) + (e >> 22) + 2


@triton.jit
def _packed(code, x):
    """Two neighbouring codes in a byte, the first in the low half, with the signs of x. code: bits 0 to 2 count."""
    pairs: tl.constexpr = code.shape[:-1] + (code.shape[-1] // 2, 2)  # noqa: RUF005  # Triton has no `*`
    sign = (x.to(tl.uint32, bitcast=True) >> 28).to(tl.int32, bitcast=True)
    code = (code & 7) | (sign & -8)  # one instruction
    even, odd = tl.split(code.reshape(pairs))
    return (even | (odd << 4)).to(tl.uint8)


@triton.jit
def packed_codes(magnitude, x, wrong, byte, CONVERTS: tl.constexpr):
    """e2m1 codes with the signs of x. The last dimension is elements of a block. A magnitude that is NaN counts as 6.

    byte: a random byte for each element, by which the codes are rounded. None: to nearest, ties to even. Two neighbours
    share a byte of the result, the first in the low half. All codes are 7 if `wrong`.
    """
    if byte is not None:
        q = _packed(_drawn_code(magnitude, byte), x)
    elif CONVERTS:
        pairs: tl.constexpr = magnitude.shape[:-1] + (magnitude.shape[-1] // 2, 2)  # noqa: RUF005  # see above
        most = tl.minimum(magnitude, 6.0)  # a conversion of NaN would lose the sign
        signed = as_float(most.to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & -0x80000000))
        even, odd = tl.split(signed.reshape(pairs))
        q = tl.inline_asm_elementwise(_CVT, "=r,f,f,f,f,f,f,f,f", [even, odd], dtype=tl.uint8, is_pure=True, pack=4)
    else:
        q = _packed(e2m1_code_of(magnitude), x)
    return tl.where(tl.expand_dims(wrong, -1), 0x77, q).to(tl.uint8)


@triton.jit
def values_of_pairs(q, s, T, DTYPE: tl.constexpr):
    """The values of packed codes: `(rows, 2 * bytes)` from bytes `(rows, bytes)`, their scales s in fp32, and T.

    The bits of a code become the upper bits of a float16, which is the value times 2^-14, also if it is subnormal.
    The product with s * 2^14 is exact.
    """
    pairs = q.to(tl.uint16)
    even = ((pairs & 7) << 9 | (pairs & 8) << 12).to(tl.float16, bitcast=True).to(tl.float32)
    odd = ((pairs & 0x70) << 5 | (pairs & 0x80) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    s = s * 16384.0
    values = tl.join((even * s * T).to(DTYPE), (odd * s * T).to(DTYPE))
    return values.reshape(q.shape[0], 2 * q.shape[1])


@triton.jit
def exact_values(q, s):
    """The bfloat16 values `q * s` of packed codes, without a tensor scale. s is an e4m3 scale in fp32.

    All bits of a product but its first 6 are 0, so nothing is rounded. `values_of_pairs` has the same steps.
    """
    pairs = q.to(tl.uint16)
    even = ((pairs & 7) << 9 | (pairs & 8) << 12).to(tl.float16, bitcast=True).to(tl.float32)
    odd = ((pairs & 0x70) << 5 | (pairs & 0x80) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    factor = s * 16384.0
    values = tl.join((even * factor).to(tl.bfloat16), (odd * factor).to(tl.bfloat16))
    return values.reshape(q.shape[0], 2 * q.shape[1])
