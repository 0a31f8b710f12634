"""The codes of FP6 in Triton: four codes in three bytes, and their values.

A GPU before Blackwell has no instruction that converts to FP6. A kernel knows a format by its mantissa bits, which are
0 for every other format. An H200 gave the reference's bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxspec.formats import E2M3, E3M2, ElementFormat
from mxspec.triton_kernels.common.numerics import code_of

FORMATS = (E2M3, E3M2)
SHORTS = tl.constexpr(12)  # a block of 32 codes takes 24 bytes
_E2M3_MAX, _E3M2_MAX = tl.constexpr(E2M3.max), tl.constexpr(E3M2.max)
_E2M3_BIAS, _E3M2_BIAS = tl.constexpr(E2M3.bias), tl.constexpr(E3M2.bias)


def mantissa_bits(fmt: ElementFormat) -> int:
    """The mantissa bits: 2 or 3; 0 for formats that are not FP6."""
    return fmt.mantissa_bits if fmt in FORMATS else 0


def empty(x: Tensor, shape: tuple[int, ...], word: torch.dtype) -> Tensor:
    """Memory for codes of this shape, in words that a kernel stores. The last size is a multiple of 32."""
    *lead, size = shape
    return x.new_empty((*lead, size * 6 // (8 * word.itemsize)), dtype=word)


@triton.jit
def encoded(x, MANTISSA: tl.constexpr):
    """The codes of fp32 numbers, one in an int32. A NaN becomes the code of the largest value."""
    BIAS: tl.constexpr = _E2M3_BIAS if MANTISSA == 3 else _E3M2_BIAS
    code = code_of(tl.abs(x), MANTISSA, BIAS, _E2M3_MAX if MANTISSA == 3 else _E3M2_MAX)
    return tl.where(x == x, code | ((x.to(tl.int32, bitcast=True) >> 26) & 0x20), 31)


@triton.jit
def _words(codes):
    """Four neighbours along the last dimension in 24 bits of an int32, the first in the low bits."""
    shape: tl.constexpr = codes.shape[:-1] + (codes.shape[-1] // 4, 4)  # noqa: RUF005  # Triton has no `*`
    return tl.sum((codes << (tl.arange(0, codes.shape[-1]) % 4 * 6)).reshape(shape), axis=-1)


@triton.jit
def thirds_of_8(codes):
    """Eight neighbours along the last dimension as three int16, the first in the low bits of the first."""
    words = _words(codes)
    pairs: tl.constexpr = words.shape[:-1] + (words.shape[-1] // 2, 2)  # noqa: RUF005  # Triton has no `*`
    low, high = tl.split(words.reshape(pairs))
    return low.to(tl.int16), ((low >> 16) | (high << 8)).to(tl.int16), (high >> 8).to(tl.int16)


@triton.jit
def _thirds_of_16(codes):
    """Sixteen codes, which are the last dimension, as three int32."""
    words = _words(codes)
    pairs: tl.constexpr = words.shape[:-1] + (2, 2)  # noqa: RUF005  # Triton has no `*`
    even, odd = tl.split(words.reshape(pairs))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0 | (w1 << 24), (w1 >> 8) | (w2 << 16), (w2 >> 16) | (w3 << 8)


@triton.jit
def in_threes(codes):
    """The last dimension, 8 or 16 codes, as three words of 16 or 32 bits. A fourth word has no meaning.

    With the three words as a dimension, neighbouring threads store neighbouring words.
    """
    shape: tl.constexpr = codes.shape[:-1] + (4,)  # noqa: RUF005  # Triton has no `*`
    if codes.shape[-1] == 16:
        a, b, c = _thirds_of_16(codes)
    else:
        a, b, c = thirds_of_8(codes)
        a, b, c = a.reshape(codes.shape[:-1]), b.reshape(codes.shape[:-1]), c.reshape(codes.shape[:-1])
    return tl.join(tl.join(a, c), tl.join(b, c)).reshape(shape)


@triton.jit
def store_blocks(qdata, place, codes, mask):
    """Store codes `(blocks, 32)` as the blocks with these places. qdata points to int16.

    A thread that loads 16 bytes of x has eight elements.
    """
    first, second, third = thirds_of_8(codes)
    to = qdata + place[:, None] * SHORTS + tl.arange(0, 4)[None, :] * 3
    tl.store(to, first, mask=mask[:, None])
    tl.store(to + 1, second, mask=mask[:, None])
    tl.store(to + 2, third, mask=mask[:, None])


@triton.jit
def load_words(at, stride, mask):
    """Three bytes from each pointer on, a stride apart, as a number: the first byte is the lowest."""
    low = tl.load(at, mask=mask, other=0).to(tl.int32)
    middle = tl.load(at + stride, mask=mask, other=0).to(tl.int32)
    high = tl.load(at + 2 * stride, mask=mask, other=0).to(tl.int32)
    return low | (middle << 8) | (high << 16)


@triton.jit
def values(words, MANTISSA: tl.constexpr):
    """The values of the four codes in each word, in fp32. The last dimension becomes 4 times as large.

    The bits of a code become the upper bits of a float16, which is the value times a power of two, also if it is
    subnormal.
    """
    shape: tl.constexpr = words.shape[:-1] + (words.shape[-1] * 4,)  # noqa: RUF005  # Triton has no `*`
    code = (tl.expand_dims(words, -1) >> (tl.arange(0, 4) * 6)).reshape(shape)
    half = ((code & 0x1F) << (10 - MANTISSA)) | ((code & 0x20) << 10)
    BIAS: tl.constexpr = _E2M3_BIAS if MANTISSA == 3 else _E3M2_BIAS
    return half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 2.0 ** (15 - BIAS)
