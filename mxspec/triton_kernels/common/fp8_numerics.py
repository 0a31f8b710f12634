"""The arithmetic of an FP8 128-block in Triton: the factor that quantizes a block, and its reciprocal.

`reference/common/fp8_numerics.py` defines both. This file computes the same bits.
"""

import triton
import triton.language as tl

from mxspec.formats import E4M3FN, fp32_bits

_MANTISSA = tl.constexpr(E4M3FN.max / 2.0**E4M3FN.emax)  # 448 is 1.75 * 2^8
_INVERSE = tl.constexpr(2.0**E4M3FN.emax / E4M3FN.max)
_EXPONENT = tl.constexpr(fp32_bits(2.0**E4M3FN.emax))
_HALF = tl.constexpr(fp32_bits(E4M3FN.max / 2))
_TWO = tl.constexpr(fp32_bits(2.0))


@triton.jit
def factors(amax_bits, eps_bits, POW2: tl.constexpr):
    """`s = 448 / max(amax, eps)` and `1 / s` from the fp32 bits of amax, each rounded once; NaN for Inf and NaN.

    The kernel computes both with fused multiply-adds on the mantissas. The results are exact for each of the 2^23
    mantissas: a test tries them all. `eps` guarantees that both results are normal numbers. A division cannot assume
    that: it would be a function call, and would take more registers (benchmarks/results/decisions.md).
    """
    bits = tl.maximum(amax_bits, eps_bits)  # Inf and NaN are the largest, so they stay
    if POW2:
        # The bits of 448 minus the bits of amax: the subtraction borrows one from the exponent if the mantissa of amax
        # is above 1.75.
        s = (_HALF - (bits - _TWO)) & 0x7F800000
        back = 0x7F000000 - s
    else:
        m = (bits & 0x7FFFFF | 0x3F800000).to(tl.float32, bitcast=True)
        y = tl.fma(tl.fma(m, -32 / 99, 16 / 11), m, -70 / 33)  # -1 / m within 1%
        y = tl.fma(tl.fma(m, y, 1.0), y, y)
        y = tl.fma(tl.fma(m, y, 1.0), y, y)
        q = y * _MANTISSA
        q = tl.fma(tl.fma(m, q, _MANTISSA), y, q)  # -1.75 / m, rounded once
        z = m * _INVERSE
        error = tl.fma(q, z, 1.0)
        z = tl.fma(tl.fma(error, error, error), z, z)  # 1.75 / m: rounded once, inverted, and rounded once more
        exponent = _EXPONENT - (bits & 0x7F800000)
        s = (-q).to(tl.int32, bitcast=True) + exponent
        back = z.to(tl.int32, bitcast=True) - exponent
    finite = amax_bits < 0x7F800000
    s, back = tl.where(finite, s, 0x7FC00000), tl.where(finite, back, 0x7FC00000)
    return s.to(tl.float32, bitcast=True), back.to(tl.float32, bitcast=True)
