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
from mxspec.triton_kernels.common.numerics import (
    OF_SHORT,
    as_float,
    converted_words,
    power_of_two,
    short_magnitude,
    short_numbers,
    words_of_codes,
)
from mxspec.triton_kernels.common.philox import philox

_LARGEST = tl.constexpr(NVFP4_LARGEST)
_OF_H, OF_B, OF_X = tl.constexpr(2.0**-12), tl.constexpr(7 / 64), tl.constexpr(21 / 32)
# If A is smaller, both numbers of a quotient are multiplied by 2^100. The remainder of a division is then exact.
_SMALL, _UP = tl.constexpr(2.0**-72), tl.constexpr(2.0**100)
_LARGE = tl.constexpr(2.0**121)  # see is_short
_PARTS = tl.constexpr((263 << 23) - 2**32)  # 2^(9 - e) has the bits (263 << 23) - bits of 2^e
# How the codes are rounded: to nearest; by a byte for each element; by the bytes of Philox.
NEAREST, BYTES, SEED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


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

    A scale that is NaN is given as 0, so that the codes of its block are numbers. If h is 0, the scale is 0.
    """
    b, d = as_float(bits) * OF_B, tl.where(h == 0, 1.0, h * up)
    s = tl.minimum(quotient(b * tl.where(h == 0, 0.0, up), -d, reciprocal_of(d), 512.0), 448.0)
    wrong = wrong | (bits >= 0x7F800000)
    return tl.where(wrong, 0.0, s).to(tl.float8e4nv), wrong


@triton.jit
def scale_byte(scale, wrong):
    return tl.where(wrong, 0x7F, scale.to(tl.uint8, bitcast=True)).to(tl.uint8)


@triton.jit
def divisor(scale, h, up, wrong):
    """`(-d, 1 / d)` of blocks, for `packed_codes`. The codes of a block are 0 if d is 0. They are 7 if `wrong`."""
    d = scale.to(tl.float32) * h * up
    reciprocal = tl.where(d == 0, 0.0, reciprocal_of(d))
    return -d, tl.where(wrong, float("nan"), reciprocal)


@triton.jit
def reciprocal_of_scale(s, ASM: tl.constexpr = False):
    """`1 / s`, wrong by at most 2^-23 of it. For 0 it is Inf with ASM. Else 0 counts as 2^-9, the next scale."""
    if ASM:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [s], tl.float32, is_pure=True, pack=1)
    s = tl.maximum(s, 2.0**-9)
    r = as_float(0x7EF311C7 - s.to(tl.int32, bitcast=True))  # wrong by up to an eighth. Each step squares the error
    r = tl.fma(tl.fma(-s, r, 1.0), r, r)
    r = tl.fma(tl.fma(-s, r, 1.0), r, r)
    return tl.fma(tl.fma(-s, r, 1.0), r, r)


@triton.jit
def is_short(A, POSSIBLE: tl.constexpr):
    """Whether A has 11 bits, as the magnitude of a bfloat16 or float16 has, and all that `factors` computes is normal.

    The factor of a block is 21 / (s * A), and s is at most 448.
    """
    if POSSIBLE:
        return (A.to(tl.int32, bitcast=True) & 0x1FFF == 0) & (A >= _SMALL) & (A < _LARGE)
    else:
        return False


@triton.jit
def short_quotient(x, r):
    """`x * r`, rounded to a multiple of 2^-17. r is wrong by less than 2^-21.6 of it.

    x and the magnitude of its matrix have 11 bits. So an exact quotient that is no tie of e2m1 is 2^-17.4 or more away
    from every tie. And if the exact quotient is a tie, then this function gives the tie.
    """
    return tl.fma(x, r, 96.0) - 96.0


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
    """The bits 0 to 2 of an e2m1 code, int32: a magnitude of at most 6 rounded by a random byte.

    The magnitude is a number of 256ths of the steps of its binade, cut off. The byte is added to it.
    """
    e = power_of_two(magnitude, 0x3F800000)
    parts = (magnitude * as_float(-e + _PARTS)).to(tl.int32)
    return ((parts + byte) >> 8) + (e >> 22) + 2


@triton.jit
def factors(s, h, up, wrong, short, ASM: tl.constexpr):
    """Two factors of each block, for `packed_codes`. s is its e4m3 scale. The factors are those of `divisor`.

    If `short`, both are the factor of `short_magnitude`, which is 0 if s is 0. It rounds a quotient as `short_quotient`
    does.
    """
    if short:
        number = s.to(tl.float32)
        factor = reciprocal_of_scale(number, ASM) * (reciprocal_of(h) * (OF_X / OF_SHORT))
        factor = tl.where(number == 0, 0.0, factor)
        minus_d = factor
    else:
        minus_d, factor = divisor(s, h, up, wrong)
    return minus_d, factor


@triton.jit
def packed_codes(
    x, signs, minus_d, factor, up, wrong, short, byte,
    NARROW: tl.constexpr, BOUNDED: tl.constexpr, CONVERTS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Words of eight e2m1 codes, the first in the lowest bits: `(...)` from x `(..., 8)`. All codes are 7 if `wrong`.

    Only the magnitudes of x count. signs: those of `words_of_codes`. byte: a random byte for each element, by which the
    codes are rounded. None: to nearest, ties to even. A quotient of 2^128 or more is NaN, because its remainder is. It
    counts as 6, as all above 6.

    minus_d, factor: those of `factors`, under the same `short`, which is False with random bytes. NARROW: x is a
    widened bfloat16 or float16, so that its product with 21/32 is exact. BOUNDED: no element of x is larger than A.
    Otherwise x is multiplied by 0 if d is 0: with up, it might become Inf.
    """
    factor = tl.expand_dims(factor, -1)
    if short:
        t = short_magnitude(x, factor)
    else:
        PART: tl.constexpr = 0.5 if byte is None and not CONVERTS else 1.0  # of a magnitude, for `short_numbers`
        more = PART * (up if BOUNDED else tl.expand_dims(tl.where(minus_d == 0, 0.0, up), -1))
        n = tl.abs(x) * (OF_X * more) if NARROW else tl.abs(x) * OF_X * more
        t = tl.minimum(quotient(n, tl.expand_dims(minus_d, -1), factor, None), 6.0 * PART)
    if byte is not None:
        word = words_of_codes(_drawn_code(t, byte) & 7, signs)
    elif CONVERTS:
        magnitude = tl.fma(t, tl.where(short, OF_SHORT, 1.0), tl.where(short, 6 - OF_SHORT, 0.0))
        word = signs | converted_words(magnitude)
    else:
        word = words_of_codes(short_numbers(t, short, ASM), signs)
    return tl.where(wrong, 0x77777777, word)


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
