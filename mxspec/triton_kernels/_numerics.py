"""The arithmetic of an MX block in Triton: shared exponent, reciprocal scale, saturating cast.

Lay it next to `reference/_numerics.py`: the same functions on the same bits. A kernel passes a format as two
constants, `max` and `emax`, and for `even` its mantissa width.
"""

import triton
import triton.language as tl


@triton.jit
def magnitude_bits(x):
    """The bits of x without the sign, in x's own width.

    As integers they have the order of the magnitudes, Inf and then NaN largest, and an integer maximum cannot drop a
    NaN, as `max.f32` does.
    """
    if x.dtype == tl.float32:
        return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:  # not after a return: Triton compiles what follows a static `if` that returns
        return x.to(tl.int16, bitcast=True) & 0x7FFF


@triton.jit
def fp32_bits(magnitude, DTYPE: tl.constexpr):
    """The fp32 bits, as int32, of magnitudes that are given by their bits in DTYPE."""
    if tl.float32 == DTYPE:
        return magnitude
    else:
        return magnitude.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def block_amax(x):
    """The fp32 bits of the largest |x| along axis 1."""
    return fp32_bits(tl.max(magnitude_bits(x), axis=1), x.dtype)


@triton.jit
def shared_exponent(amax_bits, MAX: tl.constexpr, EMAX: tl.constexpr, MANTISSA: tl.constexpr, SCALING: tl.constexpr):
    """The E8M0 byte, as int32, of a block whose largest magnitude has these fp32 bits; 255 for Inf and NaN."""
    if SCALING == "rceil":
        # Times fp32(1 / max) and divided by max round up to the same power of two for every fp32.
        bits = (amax_bits.to(tl.float32, bitcast=True) * (1.0 / MAX)).to(tl.int32, bitcast=True)
        field = bits >> 23
        mantissa = bits & 0x7FFFFF
        byte = field + tl.where(field == 0, mantissa > 0x400000, mantissa != 0).to(tl.int32)
    else:
        bits = amax_bits
        if SCALING == "even":
            bits = amax_bits + (1 << (22 - MANTISSA))
        byte = (bits >> 23) - EMAX
        if SCALING == "ceil":
            byte += (bits & 0x7FFFFF != 0).to(tl.int32)
        byte = tl.maximum(byte, 0)
    return tl.where(amax_bits < 0x7F800000, byte, 255)


@triton.jit
def reciprocal_scale(byte):
    """2^(127 - byte) as fp32; byte 255 gives NaN.

    Byte 254, whose reciprocal is subnormal, does not occur: an fp32 exponent field less emax is at most 253.
    """
    return tl.where(byte == 255, 0x7FC00000, (254 - byte) << 23).to(tl.float32, bitcast=True)


@triton.jit
def scale_value(byte):
    """2^(byte - 127) as fp32, from int32; byte 255 gives NaN.

    The byte is the exponent field. Both ends need the mantissa's top bit as well: 0x00400000 is 2^-127, a subnormal,
    and 0x7FC00000 is NaN.
    """
    mantissa = tl.where((byte == 0) | (byte == 255), 0x400000, 0)
    return (byte << 23 | mantissa).to(tl.float32, bitcast=True)


@triton.jit
def saturating_cast(x, DTYPE: tl.constexpr):
    """Round to nearest, ties to even, saturating: `cvt.rn.satfinite`, which needs no clamp and keeps NaN."""
    return x.to(DTYPE)
