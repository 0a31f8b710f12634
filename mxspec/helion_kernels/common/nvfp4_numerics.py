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
from mxspec.helion_kernels.common.numerics import e2m1_code, e2m1_pairs, in_pairs

_REF = os.environ.get("HELION_INTERPRET") == "1"
_OF_H, _OF_B, _OF_X = 2.0**-12, 7 / 64, 21 / 32
_TENSOR_SCALE = f"""
@triton.jit
def nvfp4_tensor_scale(A):
    return tl.div_rn(A, {NVFP4_LARGEST})
"""
# If A is below 2^-72, both numbers of a quotient are multiplied by 2^100. The remainder of a division is then exact. A
# reciprocal is corrected by a step of Newton's method. The first product of a quotient is limited, because the
# remainder of an Inf would be NaN. If d is 0, n is multiplied by 0, because with 2^100 it might become Inf.
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
    d = s * (A * {_OF_H}) * up
    n = n * tl.where(d == 0, 0.0, up)
    r = 1.0 / d
    r = tl.where(d == 0, 0.0, tl.fma(tl.fma(-r, d, 1.0), r, r))
    q = tl.minimum(n * r, 8.0)
    return tl.fma(tl.fma(q, -d, n), r, q)
"""


_RANDOM = """
@triton.jit
def nvfp4_random(number, seed, offset):
    low, high = offset.to(tl.uint32), (offset >> 32).to(tl.uint32)
    a, b, c, d = tl.philox(seed, low, high, number.to(tl.uint32, bitcast=True), 0)
    a, b = a.to(tl.int32, bitcast=True), b.to(tl.int32, bitcast=True)
    return a, b, c.to(tl.int32, bitcast=True), d.to(tl.int32, bitcast=True)
"""
_WORD = 0xFFFFFFFF


def _ref_product(word: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """The high and the low word of a product of two 32-bit words."""
    return (word >> 16) * number + ((word & 0xFFFF) * number >> 16) >> 16, word * number & _WORD


def _ref_random(number: Tensor, seed: Tensor, offset: Tensor) -> tuple[Tensor, ...]:
    """Philox4x32-10 in int64, for ref mode."""
    a, b, c, d = offset & _WORD, offset >> 32 & _WORD, number.to(torch.int64), number.to(torch.int64) * 0
    first, second = seed & _WORD, seed >> 32 & _WORD
    for _ in range(10):
        (high_a, low_a), (high_c, low_c) = _ref_product(a, 0xD2511F53), _ref_product(c, 0xCD9E8D57)
        a, b, c, d = high_c ^ b ^ first, low_c, high_a ^ d ^ second, low_a
        first, second = first + 0x9E3779B9 & _WORD, second + 0xBB67AE85 & _WORD
    return tuple((word - (word >> 31 << 32)).to(torch.int32).expand_as(number) for word in (a, b, c, d))


def random_bytes(number: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
    """16 random bytes for each block `(rows, cols)`, int32, by Philox4x32-10, from the number of the block, int32."""
    if _REF:
        words = _ref_random(number, seed, offset)
    else:
        words = hl.triton_kernel(_RANDOM, args=(number, seed, offset), output_like=(number, number, number, number))
    w0, w1, w2, w3 = words
    word = hl.join(hl.join(w0, w2), hl.join(w1, w3)).reshape(number.shape[0], number.shape[1], 4, 1)
    shift = (hl.arange(4) * 8).unsqueeze(0).unsqueeze(0).unsqueeze(0)
    return ((word >> shift) & 0xFF).reshape(number.shape[0], number.shape[1], 16)


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


def _codes(x: Tensor, scale: Tensor, A: Tensor, wrong: Tensor, byte: Tensor | None) -> Tensor:
    """The e2m1 codes of blocks `(rows, cols, 16)`, int32. They are 7 if `wrong`.

    byte: a random byte for each element, by which its code is rounded. None: to nearest, ties to even.
    """
    n, s, A = x.abs() * _OF_X, scale.to(torch.float32).unsqueeze(2), A.unsqueeze(2)
    if _REF:
        d = s * (A * _OF_H)
        magnitude = torch.where(d == 0, 0.0, n / d)
    else:
        magnitude = hl.triton_kernel(_MAGNITUDE, args=(n, s, A), output_like=n)
    return torch.where(wrong.unsqueeze(2), 7, e2m1_code(magnitude.clamp(max=6.0), x, byte))


def packed_codes(x: Tensor, scale: Tensor, A: Tensor, wrong: Tensor, byte: Tensor | None = None) -> Tensor:
    """The codes of `_codes`, two in a byte: `(rows, cols, 8)`."""
    return in_pairs(_codes(x, scale, A, wrong, byte))


def fake_values(x: Tensor, bits: Tensor, A: Tensor, wrong: Tensor, byte: Tensor | None = None) -> Tensor:
    """The bf16 values of the codes of blocks `(rows, cols, 16)`. `bits` are the blocks' largest magnitudes."""
    s, wrong = block_scale(bits, A, wrong)
    value, _ = e2m1_pairs(_codes(x, s, A, wrong, byte))
    return (value * 2.0**126 * torch.where(wrong, float("nan"), s.to(torch.float32)).unsqueeze(2)).to(torch.bfloat16)


def values_of_pairs(q: Tensor, s: Tensor, T: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The values of packed codes `(rows, cols, 8)` under scales `(rows, cols)`: `(rows, cols, 16)`.

    The product of a code's value with s is exact. T: None for a tensor scale of 1.
    """
    even, odd = (half * 2.0**126 for half in e2m1_pairs(q))
    s = s.to(torch.float32).unsqueeze(2)
    even, odd = even * s, odd * s
    if T is not None:
        even, odd = even * T.unsqueeze(2), odd * T.unsqueeze(2)
    return hl.join(even.to(dtype), odd.to(dtype)).reshape(q.shape[0], q.shape[1], 16)
