"""The arithmetic of an FP8 128-block on Helion tiles: the factor that quantizes a block, and its reciprocal.

`reference/common/fp8_numerics.py` defines both. This file computes the same bits.
"""

from __future__ import annotations

import os

import helion.language as hl
import torch
from torch import Tensor

from mxspec.formats import E4M3FN, fp32_bits

# Ref mode runs no Triton source. It uses torch's own division of tensors instead, which rounds once, too.
_REF = os.environ.get("HELION_INTERPRET") == "1"
# 448 / amax and its inverse, from the bits of max(amax, eps). The arithmetic is that of Triton's kernels. Helion's own
# division is an approximation, and may be wrong in the last bit.
_FACTORS = f"""
@triton.jit
def fp8_factors(bits):
    m = (bits & 0x7FFFFF | 0x3F800000).to(tl.float32, bitcast=True)
    y = tl.fma(tl.fma(m, -32 / 99, 16 / 11), m, -70 / 33)  # -1 / m within 1%
    y = tl.fma(tl.fma(m, y, 1.0), y, y)
    y = tl.fma(tl.fma(m, y, 1.0), y, y)
    q = y * {E4M3FN.max / 2.0**E4M3FN.emax}
    q = tl.fma(tl.fma(m, q, {E4M3FN.max / 2.0**E4M3FN.emax}), y, q)  # -1.75 / m, rounded once
    z = m * {2.0**E4M3FN.emax / E4M3FN.max}
    error = tl.fma(q, z, 1.0)
    z = tl.fma(tl.fma(error, error, error), z, z)  # 1.75 / m, rounded once, inverted and rounded once
    exponent = {fp32_bits(2.0**E4M3FN.emax)} - (bits & 0x7F800000)
    return (-q).to(tl.int32, bitcast=True) + exponent, z.to(tl.int32, bitcast=True) - exponent
"""


def factors(amax_bits: Tensor, eps_bits: int, pow2: bool) -> tuple[Tensor, Tensor]:
    """`s = 448 / max(amax, eps)` and `1 / s` from the fp32 bits of amax, each rounded once.

    Both are NaN for Inf and NaN.
    """
    bits = amax_bits.clamp(min=eps_bits)  # Inf and NaN are the largest, so they stay
    if pow2:
        # The bits of 448 minus the bits of amax: the subtraction borrows one from the exponent if the mantissa of amax
        # is above 1.75.
        s = (fp32_bits(E4M3FN.max / 2) - (bits - fp32_bits(2.0))) & 0x7F800000
        back = 0x7F000000 - s
    elif _REF:
        amax = bits.view(torch.float32)
        factor = torch.full_like(amax, E4M3FN.max) / amax
        s, back = factor.view(torch.int32), factor.reciprocal().view(torch.int32)
    else:
        s, back = hl.triton_kernel(_FACTORS, args=(bits,), output_like=(bits, bits))
    finite = amax_bits < 0x7F800000
    s, back = torch.where(finite, s, 0x7FC00000), torch.where(finite, back, 0x7FC00000)
    return s.view(torch.float32), back.view(torch.float32)
