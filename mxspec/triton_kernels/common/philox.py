"""Philox4x32-10 in Triton, as PyTorch has it, for a seed and an offset in memory.

Triton's own `philox` takes the upper and the lower word of each product by two instructions. Here one gives both.
"""

from __future__ import annotations

import triton
import triton.language as tl

_A, _B = tl.constexpr(0xD2511F53), tl.constexpr(0xCD9E8D57)
_KEY_A, _KEY_B = tl.constexpr(0x9E3779B9), tl.constexpr(0xBB67AE85)


@triton.jit
def _product(word, by: tl.constexpr):
    product = word.to(tl.uint64) * by
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit
def philox(state, stride, more, low, high):
    """Four random words, uint32, for each number, whose low and high words are given as uint32.

    `state` points to a seed and an offset, in int64. The counter is the number in its upper half, and the offset and
    `more` in its lower half.
    """
    seed, offset = tl.load(state), tl.load(state + stride) + more
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    c0, c1 = low * 0 + offset.to(tl.uint32), low * 0 + (offset >> 32).to(tl.uint32)
    c2, c3 = low, high
    for _ in tl.static_range(10):
        upper_a, lower_a = _product(c0, _A)
        upper_b, lower_b = _product(c2, _B)
        c0, c1 = upper_b ^ c1 ^ k0, lower_b
        c2, c3 = upper_a ^ c3 ^ k1, lower_a
        k0 = tl.add(k0, _KEY_A, sanitize_overflow=False)
        k1 = tl.add(k1, _KEY_B, sanitize_overflow=False)
    return c0, c1, c2, c3
