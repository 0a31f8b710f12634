"""The arithmetic of NVFP4 on Helion tiles: the scale of a block, its packed e2m1 codes, and their values.

`reference/nvfp4_quantize.py` defines the first two by divisions. Helion's own division is an approximation, so the
quotients are Triton's source: the arithmetic of `triton_kernels/common/nvfp4_numerics.py`. Ref mode runs no Triton
source. It uses torch's division of tensors instead, which rounds once, too.
"""

from __future__ import annotations

import os

import helion.language as hl
import torch
from torch import Tensor

from mxspec.formats import E4M3FN, NVFP4_LARGEST

_REF = os.environ.get("HELION_INTERPRET") == "1"
_OF_H, _OF_B, _OF_X = 2.0**-12, 7 / 64, 21 / 32
_TENSOR_SCALE = f"""
@triton.jit
def nvfp4_tensor_scale(A):
    return tl.div_rn(A, {NVFP4_LARGEST})
"""
# If A is below 2^-72, both numbers of a quotient are multiplied by 2^100. The remainder of a division is then exact. A
# reciprocal is corrected by a step of Newton's method. The first product of a quotient is limited, because the
# remainder of an Inf would be NaN.
_SCALE = f"""
@triton.jit
def nvfp4_scale(b, A):
    up = tl.where(A < {2.0**-72}, {2.0**100}, 1.0)
    b, d = b * up, A * {_OF_H} * up
    r = 1.0 / d
    r = tl.fma(tl.fma(-r, d, 1.0), r, r)
    q = tl.minimum(b * r, 512.0)
    return tl.minimum(tl.fma(tl.fma(q, -d, b), r, q), {E4M3FN.max})
"""
_MAGNITUDE = f"""
@triton.jit
def nvfp4_magnitude(n, s, A):
    up = tl.where(A < {2.0**-72}, {2.0**100}, 1.0)
    n, d = n * up, s * (A * {_OF_H}) * up
    r = 1.0 / d
    r = tl.where(d == 0, 0.0, tl.fma(tl.fma(-r, d, 1.0), r, r))
    q = tl.minimum(n * r, 8.0)
    return tl.fma(tl.fma(q, -d, n), r, q)
"""


def of_matrix(amax: Tensor) -> tuple[Tensor, Tensor]:
    """`(A, wrong)`: wrong says that amax is NaN, Inf or negative, and A is 0 then. -0 counts as 0."""
    bits = amax.view(torch.int32)
    bits = torch.where(bits == -0x80000000, 0, bits)
    wrong = (bits < 0) | (bits >= 0x7F800000)
    return torch.where(wrong, 0, bits).view(torch.float32), wrong


def tensor_scale(amax: Tensor) -> Tensor:
    """T from the number A of a matrix."""
    A, wrong = of_matrix(amax)
    T = A / NVFP4_LARGEST if _REF else hl.triton_kernel(_TENSOR_SCALE, args=(A,), output_like=A)
    return torch.where(wrong, float("nan"), T)


def block_scale(bits: Tensor, A: Tensor, wrong: Tensor) -> tuple[Tensor, Tensor]:
    """The e4m3 scales of blocks whose largest magnitudes have these fp32 bits, and whether each is NaN.

    A scale that is NaN is given as 0, so that the codes of its block are numbers.
    """
    b, h = bits.view(torch.float32) * _OF_B, A * _OF_H
    s = (b / h).clamp(max=E4M3FN.max) if _REF else hl.triton_kernel(_SCALE, args=(b, A), output_like=b)
    wrong = wrong | (bits >= 0x7F800000)
    return torch.where(wrong | (bits == 0) | (h == 0), 0.0, s).to(torch.float8_e4m3fn), wrong


def packed_codes(x: Tensor, scale: Tensor, A: Tensor, wrong: Tensor) -> Tensor:
    """The e2m1 codes of blocks `(rows, cols, 16)`, two in a byte: `(rows, cols, 8)`. They are 7 if `wrong`."""
    n, s, A = x.abs() * _OF_X, scale.to(torch.float32).unsqueeze(2), A.unsqueeze(2)
    if _REF:
        d = s * (A * _OF_H)
        magnitude = torch.where(d == 0, 0.0, n / d)
    else:
        magnitude = hl.triton_kernel(_MAGNITUDE, args=(n, s, A), output_like=n)
    magnitude = magnitude.clamp(max=6.0)
    # e is the power of two below the magnitude, at least 1. Codes in its binade are steps of e / 2 apart. The sum with
    # e * 2^22 therefore rounds to steps, and has their number in its last bits. The code is 2 * log2(e) more, and 2
    # steps more, because 2 * 127 + 2 is a multiple of 16. An even number keeps ties to even.
    e = (magnitude.view(torch.int32) & 0x7F800000).clamp(min=0x3F800000)
    steps = (magnitude + (e + ((22 << 23) + 2)).view(torch.float32)).view(torch.int32)
    code = ((steps + (e >> 22)) & 7) | ((x.view(torch.int32) >> 28) & 8)
    code = torch.where(wrong.unsqueeze(2), 7, code)
    even, odd = hl.split(code.reshape(code.shape[0], code.shape[1], 8, 2))
    return (even | (odd << 4)).to(torch.uint8)


def values_of_pairs(q: Tensor, s: Tensor, T: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of packed codes `(rows, cols, 8)` under scales `(rows, cols)`: `(rows, cols, 16)`.

    The bits of a code become the upper bits of an fp16, which is the value times 2^-14, also if it is subnormal. The
    product with s * 2^14 is exact.
    """
    pairs, s = q.to(torch.int32), s.to(torch.float32).unsqueeze(2) * 16384.0
    even = ((pairs & 7) << 9 | (pairs & 8) << 12).to(torch.int16).view(torch.float16).to(torch.float32)
    odd = ((pairs & 0x70) << 5 | (pairs & 0x80) << 8).to(torch.int16).view(torch.float16).to(torch.float32)
    T = T.unsqueeze(2)
    return hl.join((even * s * T).to(dtype), (odd * s * T).to(dtype)).reshape(q.shape[0], q.shape[1], 16)
