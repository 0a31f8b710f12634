"""Philox4x32-10, the random generator of PyTorch, curand and Triton, in int64 arithmetic on 32-bit words.

A counter of four words and a key of two words give four random words. Nothing else is read, so any program can compute
the random bits of its own part of a tensor.

Source: Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011), and their Random123.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57  # Random123, philox.h: PHILOX_M4x32_0 and _1
KEY_STEPS = 0x9E3779B9, 0xBB67AE85  # Random123, philox.h: PHILOX_W32_0 and _1
_WORD = 0xFFFFFFFF

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def words_of(n: Tensor) -> tuple[Tensor, Tensor]:
    """The low and the high 32 bits of int64 numbers, each in an int64."""
    return n & _WORD, n >> 32 & _WORD


def _product(word: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """The high and the low word of a product of two words. No part of the sum for the high word passes 2^63."""
    high = (word >> 16) * number + ((word & 0xFFFF) * number >> 16) >> 16
    return high, word * number & _WORD  # the product wraps around, and its low word is right


def philox4x32(counter: Words, key: tuple[Tensor, Tensor], rounds: int = ROUNDS) -> Words:
    """The four random words of a counter under a key. Every word is an int64 from 0 to 2^32 - 1."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(rounds):
        (high0, low0), (high2, low2) = _product(c0, MULTIPLIERS[0]), _product(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + KEY_STEPS[0] & _WORD, k1 + KEY_STEPS[1] & _WORD
    return c0, c1, c2, c3


def bytes_of_blocks(state: Tensor, shape: tuple[int, ...]) -> Tensor:
    """16 random bytes for each block: int32, `(*shape, 16)`, from state, int64 `(2,)`: a seed and an offset.

    The key is the seed. The counter is the offset, then the number of the block in row-major order, each with its low
    word first. A word gives four bytes, the lowest first.
    """
    number = torch.arange(torch.Size(shape).numel(), device=state.device).reshape(shape)
    seed, offset = state.unbind()
    low, high = words_of(offset)
    counter = (low.expand_as(number), high.expand_as(number), *words_of(number))
    words = torch.stack(philox4x32(counter, words_of(seed)), -1).to(torch.int64)  # (*shape, 4)
    shifts = torch.arange(0, 32, 8, device=state.device)
    return (words.unsqueeze(-1) >> shifts & 0xFF).flatten(-2).to(torch.int32)
