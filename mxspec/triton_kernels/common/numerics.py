"""The arithmetic of an MX block in Triton: shared exponent, reciprocal scale, saturating cast.

`reference/common/numerics.py` has the same functions, on the same bits. A kernel passes an element format and a
rounding rule as the three constants of `formats.exponent_rule`.
"""

import triton
import triton.language as tl

from mxspec.formats import E2M1, INT8

_INT8_MAX, _INT8_STEP = tl.constexpr(INT8.max), tl.constexpr(INT8.smallest_subnormal)
_E2M1_MAX = tl.constexpr(E2M1.max)
_SMALLEST = tl.constexpr("{ .reg .s32 t; min.s32 t, $1, $2; min.s32 $0, t, $3; }")
COMPARES, CONVERTS = tl.constexpr(1), tl.constexpr(2)  # see pairs.instructions
OF_SHORT, _LEAST = tl.constexpr(128), tl.constexpr(1 - 6 / 128)  # see short_magnitude


@triton.jit
def widened(x):
    """x as fp32, exactly.

    A bf16 is the upper half of an fp32, so one shift is enough. A conversion takes two instructions.
    """
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:  # an `else`, because Triton also compiles the code after a static `if` that returns
        return x.to(tl.float32)


@triton.jit
def magnitude_bits(x):
    """The bits of |x|, as fp32.

    As integers, the bits have the order of the magnitudes: Inf is larger than all numbers, and NaN is larger than Inf.
    An integer maximum therefore cannot lose a NaN. `max.f32` can.
    """
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def shared_exponent(amax_bits, EMAX: tl.constexpr, ROUND: tl.constexpr, EXCEPT: tl.constexpr):
    """The E8M0 byte, as int32, of a block whose largest magnitude has these fp32 bits. It is 255 for Inf and NaN."""
    byte = tl.maximum(((amax_bits + ROUND) >> 23) - EMAX, 0)
    if EMAX == 0:  # int8
        byte = tl.minimum(byte, 254)
    if EXCEPT >= 0:
        byte = tl.where(amax_bits <= EXCEPT, 0, byte)
    return tl.where(amax_bits < 0x7F800000, byte, 255)


@triton.jit
def reciprocal_scale(byte, EMAX: tl.constexpr):
    """2^(127 - byte) as fp32. Byte 255 gives NaN.

    Byte 254 has a subnormal reciprocal, 2^-127. It occurs only in int8, whose EMAX is 0: an fp32 exponent field minus
    EMAX is otherwise at most 253.
    """
    bits = tl.where(byte == 255, 0x7FC00000, (254 - byte) << 23)
    if EMAX == 0:
        bits = tl.maximum(bits, 0x400000)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def scale_value(byte):
    """2^(byte - 127) as fp32, from int32. Byte 255 gives NaN.

    The byte becomes the exponent field. The bytes 0 and 255 also need the top bit of the mantissa: 0x00400000 is
    2^-127, a subnormal, and 0x7FC00000 is NaN.
    """
    mantissa = tl.where((byte == 0) | (byte == 255), 0x400000, 0)
    return (byte << 23 | mantissa).to(tl.float32, bitcast=True)


@triton.jit
def scale_factors(amax_bits, EMAX: tl.constexpr, ROUND: tl.constexpr, EXCEPT: tl.constexpr):
    """`reciprocal_scale` and `scale_value` of the block's byte, with fewer instructions than by way of the byte.

    The byte stays in the exponent field. For Inf and NaN the first factor is NaN, and the second is any number: a
    product with both is NaN.
    """
    field = tl.maximum(((amax_bits + ROUND) & -0x800000) - (EMAX << 23), 0)  # the byte times 2^23
    if EXCEPT >= 0:
        field = tl.where(amax_bits <= EXCEPT, 0, field)
    reciprocal = tl.where(amax_bits >= 0x7F800000, 0x7FC00000, 0x7F000000 - field)
    return reciprocal.to(tl.float32, bitcast=True), tl.maximum(field, 0x400000).to(tl.float32, bitcast=True)


@triton.jit
def saturating_cast(x, DTYPE: tl.constexpr):
    """Round to nearest, ties to even, and saturate.

    `cvt.rn.satfinite` does all of it and keeps NaN, so no clamp is needed. A code of int8 counts 64ths. The sum with
    1.5 * 2^17 rounds to 64ths, and its last bits are their number. A NaN becomes 127: the minimum is the other operand.
    """
    if tl.int8 == DTYPE:
        x = tl.maximum(tl.minimum(x, _INT8_MAX), -_INT8_MAX)
        return (x + 1.5 * 2.0**23 * _INT8_STEP).to(tl.int32, bitcast=True).to(tl.int8)
    else:
        return x.to(DTYPE)


@triton.jit
def code_values(q):
    """The values of codes that do not share bytes, in fp32."""
    if q.dtype == tl.int8:
        return q.to(tl.float32) * _INT8_STEP
    else:
        return q.to(tl.float32)


@triton.jit
def as_float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def power_of_two(x, LEAST: tl.constexpr):
    """The bits of the power of two below |x|, at least LEAST. Those of Inf for Inf and NaN."""
    return tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, LEAST)


@triton.jit
def code_of(magnitude, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX: tl.constexpr):
    """The FP6 code of a magnitude, int32: rounded to nearest, ties to even, and saturated.

    NaN counts as MAX. e is the power of two below the magnitude, at least that of the smallest normal. Codes in its
    binade are steps of `e / 2^MANTISSA` apart. The sum with `e * 2^(23 - MANTISSA)` therefore rounds to steps, and has
    their number in its last bits. The exponent field of e, shifted, is the rest of the code and a constant. MORE steps
    cancel the constant in the bits of the code. Their number is even, which keeps ties to even.
    """
    MASK: tl.constexpr = 31
    MORE: tl.constexpr = ((BIAS - 128) << MANTISSA) & MASK
    magnitude = tl.minimum(magnitude, MAX)
    e = power_of_two(magnitude, (128 - BIAS) << 23)
    steps = tl.fma(as_float(e), 2.0 ** (23 - MANTISSA) + MORE * 2.0**-MANTISSA, magnitude).to(tl.int32, bitcast=True)
    return (steps + (e >> (23 - MANTISSA))) & MASK


@triton.jit
def _subnormal(n: tl.constexpr):
    """n times the smallest fp32 number, 2^-149. Its bits are |n|, and the sign."""
    BITS: tl.constexpr = n if n >= 0 else -n - 2**31
    return as_float(tl.full((), BITS, tl.int32))


@triton.jit
def _line(t, other, S: tl.constexpr, C: tl.constexpr, SLOPE: tl.constexpr, CONSTANT: tl.constexpr):
    """`SLOPE * t + CONSTANT`, rounded to an integer, int32. If `other`, `S * t + C`.

    The result must be at least 0 and below 2^23.
    """
    slope = tl.where(other, _subnormal(S), _subnormal(SLOPE))
    constant = tl.where(other, _subnormal(C), _subnormal(CONSTANT))
    return tl.fma(t, slope, constant).to(tl.int32, bitcast=True)


@triton.jit
def e2m1_numbers(t, other, SCALE: tl.constexpr, OFFSET: tl.constexpr, ASM: tl.constexpr = False):
    """The e2m1 codes of magnitudes `2 * t` of at most 6, int32. Nearest, ties to even.

    If `other`, the magnitudes are `SCALE * t + OFFSET`. SCALE is a power of two of at least 2, and OFFSET is an even
    integer.

    Codes of magnitudes below 2 are 1/2 apart, below 4 they are 1 apart, then 2. So the codes lie on three lines:
    `2 * m`, `m + 2` and `m / 2 + 4`. The code of m is the smallest of these numbers, each rounded to an integer. A
    line counts multiples of 2^-149, the smallest fp32 number. The fused addition rounds to such a multiple, and the
    bits of the result are the integer. All is exact but this rounding.
    """
    two = _line(t, other, 2 * SCALE, 2 * OFFSET, 4, 0)
    one = _line(t, other, SCALE, OFFSET + 2, 2, 2)
    half = _line(t, other, SCALE // 2, OFFSET // 2 + 4, 1, 4)
    if ASM:  # side by side, both minima become one instruction of Hopper
        return tl.inline_asm_elementwise(_SMALLEST, "=r,r,r,r", [two, one, half], tl.int32, is_pure=True, pack=1)
    else:
        return tl.minimum(tl.minimum(two, one), half)


@triton.jit
def eight(x):
    """The 8 numbers of the last dimension, as a tuple."""
    x = x.reshape(x.shape[:-1] + (2, 2, 2))  # noqa: RUF005  # Triton has no `*`
    even, odd = tl.split(x)
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    x0, x4 = tl.split(x0)
    x1, x5 = tl.split(x1)
    x2, x6 = tl.split(x2)
    x3, x7 = tl.split(x3)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def largest_of_eight(x):
    """The bits of the largest magnitude of the 8 fp32 numbers of the last dimension, as `magnitude_bits`. NaN stays."""
    n = eight(magnitude_bits(x))
    a, b = _largest_of_three(n[0], n[1], n[2]), _largest_of_three(n[3], n[4], n[5])
    return _largest_of_three(a, b, tl.maximum(n[6], n[7]))


@triton.jit
def _largest_of_three(a, b, c):
    """One instruction of Hopper, for integers."""
    return tl.maximum(tl.maximum(a, b), c)


@triton.jit
def signs_of(x):
    """The signs of eight fp32 numbers, for `words_of_codes`: `(...)` from `(..., 8)`.

    A shift that takes in the highest bits of another number is one instruction.
    """
    s = eight(x.to(tl.uint32, bitcast=True))
    signs = s[7] >> 28
    for i in tl.static_range(1, 8):
        signs = (signs << 4) | (s[7 - i] >> 28)
    return signs & 0x88888888


@triton.jit
def words_of_codes(number, signs):
    """Words of eight e2m1 codes, the first in the lowest bits: `(...)` from `(..., 8)`.

    number: a code without its sign, int32. signs: the signs, in the words' bits 3, 7 and so on.

    The bits of a code are those of a subnormal fp32 number. So a fused addition appends a code to others. The codes of
    half a word are 16 bits, which fp32 holds exactly. A shift and an integer addition would take more cycles.
    """
    n = eight(as_float(number))
    low, high = n[3], n[7]
    for i in tl.static_range(1, 4):
        low, high = tl.fma(low, 16.0, n[3 - i]), tl.fma(high, 16.0, n[7 - i])
    return low.to(tl.uint32, bitcast=True) | (high.to(tl.uint32, bitcast=True) << 16) | signs


@triton.jit
def e2m1_code(x):
    """The e2m1 codes of fp32, int32. NaN gives 7."""
    number = e2m1_numbers(0.5 * tl.minimum(tl.abs(x), _E2M1_MAX), False, 2, 0)
    return tl.where(x == x, number | ((x.to(tl.int32, bitcast=True) >> 28) & 8), 7)


@triton.jit
def short_magnitude(x, factor):
    """`m / 128 + 61 / 64` for the magnitude `m = |x| * 128 * factor`, at most 6.

    The result lies between 61/64 and 1. fp32 numbers there are 2^-24 apart, which is 2^-17 in m. NaN becomes any
    number. The limits take no instruction of their own.
    """
    return tl.clamp(tl.fma(tl.abs(x), factor, _LEAST), 0.0, 1.0)


@triton.jit
def short_numbers(t, short, ASM: tl.constexpr):
    """`e2m1_numbers` of magnitudes `2 * t`. If `short`, t is the result of `short_magnitude`."""
    return e2m1_numbers(t, short, OF_SHORT, 6 - OF_SHORT, ASM)


@triton.jit
def converted_words(x):
    """The words of e2m1 codes of fp32, by Blackwell's instruction: `(...)` from x `(..., 8)`. NaN gives 7."""
    n = eight(x)
    return tl.inline_asm_elementwise(
        "{ .reg .b8 a, b, c, d; cvt.rn.satfinite.e2m1x2.f32 a, $2, $1; cvt.rn.satfinite.e2m1x2.f32 b, $4, $3;"
        " cvt.rn.satfinite.e2m1x2.f32 c, $6, $5; cvt.rn.satfinite.e2m1x2.f32 d, $8, $7; mov.b32 $0, {a, b, c, d}; }",
        "=r,f,f,f,f,f,f,f,f", [n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7]], tl.uint32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def e2m1_words(x, signs, reciprocal, wrong, NARROW: tl.constexpr, ASM: tl.constexpr):
    """Words of the e2m1 codes of `x * reciprocal`, fp32: `(...)` from x `(..., 8)`. All codes are 7 if `wrong`.

    If ASM is CONVERTS, the signs of x count, and `signs` are not read. Else the magnitudes of x count alone, and signs
    are those of `words_of_codes`. reciprocal: powers of two. NARROW: x is a widened bfloat16 or float16. It has at most
    11 bits, and so has the product. A product of 2^-7 or more is a multiple of 2^-17. So `short_magnitude` rounds only
    products whose codes are 0. The factor may be subnormal, and is exact.
    """
    reciprocal = tl.expand_dims(reciprocal, -1)
    if ASM == CONVERTS:
        words = converted_words(x * reciprocal)
    elif NARROW:
        number = short_numbers(short_magnitude(x, reciprocal * (1 / OF_SHORT)), True, ASM)
        words = words_of_codes(number, signs)
    else:
        number = e2m1_numbers(tl.minimum(tl.abs(x * (0.5 * reciprocal)), 0.5 * _E2M1_MAX), False, 2, 0)
        words = words_of_codes(number, signs)
    return tl.where(wrong, 0x77777777, words)


@triton.jit
def e2m1_pairs(x, ASM: tl.constexpr):
    """The e2m1 codes of fp32, two neighbours along the last dimension in a byte, the first in the low half."""
    pairs: tl.constexpr = x.shape[:-1] + (x.shape[-1] // 2, 2)  # noqa: RUF005  # Triton has no `*`
    if ASM == CONVERTS:
        even, odd = tl.split(x.reshape(pairs))
        code = tl.inline_asm_elementwise(
            "{ .reg .b8 a; cvt.rn.satfinite.e2m1x2.f32 a, $2, $1; mov.b32 $0, {a, a, a, a}; }",
            "=r,f,f", [even, odd], tl.uint32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        low, high = tl.split(e2m1_code(x).reshape(pairs))
        code = low | (high << 4)
    return code.to(tl.uint8)
