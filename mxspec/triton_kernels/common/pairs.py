"""Numbers of bfloat16 and float16 in registers, two neighbours in a word, as the memory has them.

A thread of columns holds 16 rows of a column in a tile `(RUNS, COLS)` of `runs.load16`. A thread of rows holds a block.
Kept as words, the numbers take half of the registers that they take in fp32. One instruction compares two of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mxspec.triton_kernels.common.launch import capability
from mxspec.triton_kernels.common.numerics import (
    COMPARES,
    CONVERTS,
    e2m1_words,
    eight,
    largest_of_eight,
    reciprocal_scale,
    shared_exponent,
    signs_of,
)

MAGNITUDES = tl.constexpr(0x7FFF7FFF)  # of a word of two numbers


def instructions(device: torch.device) -> int:
    """Which instructions a kernel may name: COMPARES, CONVERTS, or 0 for none. An interpreter has none.

    COMPARES: `max.u16x2` and `prmt`, of Hopper and later. CONVERTS: also `cvt` to e2m1, of sm_100 and sm_103. It has
    not been run.
    """
    if device.type == "cpu" or torch.version.hip is not None or capability(device) < (9, 0):
        return 0
    return CONVERTS.value if capability(device)[0] == 10 else COMPARES.value


def in_words(x: torch.Tensor) -> bool:
    """Whether a thread loads eight numbers of two bytes of a row at once. Else their addresses take registers."""
    apart = all(stride % 8 == 0 for stride in x.stride()[:-1])
    return x.element_size() == 2 and x.stride(-1) == 1 and apart and x.data_ptr() % 16 == 0


@triton.jit
def parted(x):
    """The even and the odd columns, `(RUNS, COLS / 2, 16)`, of `(RUNS, COLS, ...)`. The dots are 16 rows."""
    return tl.split(x.reshape(x.shape[0], x.shape[1] // 2, 2, 16).permute(0, 1, 3, 2))


@triton.jit
def halves(x):
    """The first and the last 8 rows, `(RUNS, COLS / 2, 8)`, of `(RUNS, COLS / 2, 16)`."""
    return tl.split(x.reshape(x.shape[0], x.shape[1], 2, 8).permute(0, 1, 3, 2))


@triton.jit
def paired(x):
    """Words of an even and an odd column, uint32 `(RUNS, COLS / 2, 16)`, from numbers of 2 bytes `(RUNS, COLS, ...)`.

    If the columns lie side by side in memory, the loaded registers are these words, and this takes no instruction.
    """
    even, odd = parted(x.to(tl.uint16, bitcast=True).to(tl.uint32))
    return even | (odd << 16)


@triton.jit
def unpaired(word, DTYPE: tl.constexpr):
    """The numbers of the even and of the odd column, in fp32."""
    if tl.bfloat16 == DTYPE:  # the upper half of an fp32
        return (word << 16).to(tl.float32, bitcast=True), (word & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        even, odd = word.to(tl.uint16).to(DTYPE, bitcast=True), (word >> 16).to(tl.uint16).to(DTYPE, bitcast=True)
        return even.to(tl.float32), odd.to(tl.float32)


@triton.jit
def _larger(a, b, ASM: tl.constexpr):
    """The larger of two magnitudes in both halves of a word. Their bits have the order of the magnitudes."""
    if ASM:
        return tl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.uint32, is_pure=True, pack=1)
    else:
        return tl.maximum(a & 0xFFFF0000, b & 0xFFFF0000) | tl.maximum(a & 0xFFFF, b & 0xFFFF)


@triton.jit
def _largest_of_words(a, b, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """The bits of the largest of the lower and of the upper halves of eight words of magnitudes, four in each tuple."""
    word = _larger(_larger(a[0], a[1], ASM), a[2], ASM)
    word = _larger(_larger(word, a[3], ASM), b[0], ASM)
    word = _larger(_larger(word, b[1], ASM), b[2], ASM)
    even, odd = unpaired(_larger(word, b[3], ASM), DTYPE)
    return even.to(tl.int32, bitcast=True), odd.to(tl.int32, bitcast=True)


@triton.jit
def largest_of_pairs(pairs, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """The bits of the largest magnitudes of the even and of the odd columns, as `magnitude_bits`, from `(..., 8)`."""
    n = eight(pairs & MAGNITUDES)
    return _largest_of_words(n[:4], n[4:], DTYPE, ASM)


@triton.jit
def _four(x):
    """The 4 numbers of the last dimension, as a tuple."""
    even, odd = tl.split(x.reshape(x.shape[:-1] + (2, 2)))  # noqa: RUF005  # Triton has no `*`
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def in_rows(x):
    """Words of two neighbours in a row, uint32 `(..., K / 2)`, from numbers of 2 bytes `(..., K)`.

    If the numbers lie side by side in memory, the loaded registers are these words, and this takes no instruction.
    """
    shape: tl.constexpr = x.shape[:-1] + (x.shape[-1] // 2, 2)  # noqa: RUF005
    even, odd = tl.split(x.to(tl.uint16, bitcast=True).to(tl.uint32).reshape(shape))
    return even | (odd << 16)


@triton.jit
def of_rows(pairs, DTYPE: tl.constexpr):
    """The numbers of `in_rows` in fp32, `(..., K)`."""
    shape: tl.constexpr = pairs.shape[:-1] + (pairs.shape[-1] * 2,)  # noqa: RUF005
    even, odd = unpaired(pairs, DTYPE)
    return tl.join(even, odd).reshape(shape)


@triton.jit
def largest_of_rows(first, second, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """The bits of the largest magnitude of 16 numbers, as `magnitude_bits`. Each half is words `(..., 4)`."""
    even, odd = _largest_of_words(_four(first & MAGNITUDES), _four(second & MAGNITUDES), DTYPE, ASM)
    return tl.maximum(even, odd)


@triton.jit
def _sign_bytes(a, b, ASM: tl.constexpr):
    """The signs of four numbers in a word, each in all bits of a byte: of the lower halves of a and b, then the upper.

    One instruction takes a byte, or the sign of a byte, from any place of two words.
    """
    if ASM:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0xFBD9;", "=r,r,r", [a, b], tl.uint32, is_pure=True, pack=1
        )
    else:
        lower = (a >> 15 & 1) * 0xFF | (b >> 15 & 1) * 0xFF00
        return lower | (a >> 31) * 0xFF0000 | (b >> 31) * 0xFF000000


@triton.jit
def _lower(a, b):
    """The lower halves of two words."""
    return (a & 0xFFFF) | (b << 16)


@triton.jit
def _upper(a, b):
    """The upper halves of two words."""
    return (a >> 16) | (b & 0xFFFF0000)


@triton.jit
def signs_of_rows(pairs, ASM: tl.constexpr):
    """The signs of eight numbers of a row, for `words_of_codes`: `(...)` from words `(..., 4)`."""
    w = _four(pairs)
    a, b = _sign_bytes(w[0], w[1], ASM), _sign_bytes(w[2], w[3], ASM)
    return (_lower(a, b) & 0x08080808) | (_upper(a, b) & 0x80808080)


@triton.jit
def block_of_row(first, second, ASM: tl.constexpr):
    """What the codes of blocks of 16 numbers of a row need, from two halves `(..., 8)`.

    Returns the bits of the largest magnitude, as `magnitude_bits`. Then numbers of each half in fp32, which have the
    right magnitudes, and the signs of each half, for `words_of_codes`.
    """
    if first.dtype == tl.float32:
        bits = tl.maximum(largest_of_eight(first), largest_of_eight(second))
        return bits, first, second, signs_of(first), signs_of(second)
    else:
        a, b = in_rows(first), in_rows(second)
        x, more = of_rows(a & MAGNITUDES, first.dtype), of_rows(b & MAGNITUDES, first.dtype)
        return largest_of_rows(a, b, first.dtype, ASM), x, more, signs_of_rows(a, ASM), signs_of_rows(b, ASM)


@triton.jit
def load_mx_blocks(x, stride, mask):
    """Blocks of 32 numbers of a row, from pointers to the first 8, `(blocks, 8)`: four quarters in words `(blocks, 4)`.

    A thread has a whole block. One load would spread a block over four threads, and each would compute the scale.
    """
    step = tl.cast(stride, tl.int64) * 8
    a, b = tl.load(x, mask=mask, other=0), tl.load(x + step, mask=mask, other=0)
    c, d = tl.load(x + 2 * step, mask=mask, other=0), tl.load(x + 3 * step, mask=mask, other=0)
    return in_rows(a), in_rows(b), in_rows(c), in_rows(d)


@triton.jit
def e2m1_of_mx_blocks(
    quarters, DTYPE: tl.constexpr, EMAX: tl.constexpr, ROUND: tl.constexpr, EXCEPT: tl.constexpr, ASM: tl.constexpr
):
    """The words of eight e2m1 codes of `load_mx_blocks`, `(blocks, 4)`, and the scale bytes, int32."""
    a, b, c, d = quarters
    bits = tl.maximum(largest_of_rows(a, b, DTYPE, ASM), largest_of_rows(c, d, DTYPE, ASM))
    byte = shared_exponent(bits, EMAX, ROUND, EXCEPT)
    reciprocal, wrong = reciprocal_scale(byte, EMAX), byte == 255
    a, b = _words_of_quarter(a, reciprocal, wrong, DTYPE, ASM), _words_of_quarter(b, reciprocal, wrong, DTYPE, ASM)
    c, d = _words_of_quarter(c, reciprocal, wrong, DTYPE, ASM), _words_of_quarter(d, reciprocal, wrong, DTYPE, ASM)
    return tl.join(tl.join(a, c), tl.join(b, d)).reshape(a.shape[0], 4), byte


@triton.jit
def _words_of_quarter(pairs, reciprocal, wrong, DTYPE: tl.constexpr, ASM: tl.constexpr):
    x = of_rows(pairs if ASM == CONVERTS else pairs & MAGNITUDES, DTYPE)
    return e2m1_words(x, signs_of_rows(pairs, ASM), reciprocal, wrong, True, ASM)


@triton.jit
def signs_of_columns(pairs, ASM: tl.constexpr):
    """The signs of eight numbers of the even and of the odd columns, as `signs_of_rows`, from words `(..., 8)`."""
    w = eight(pairs)
    a, b = _sign_bytes(w[0], w[2], ASM), _sign_bytes(w[4], w[6], ASM)
    c, d = _sign_bytes(w[1], w[3], ASM), _sign_bytes(w[5], w[7], ASM)
    even = (_lower(a, b) & 0x08080808) | (_lower(c, d) & 0x80808080)
    return even, (_upper(a, b) & 0x08080808) | (_upper(c, d) & 0x80808080)


@triton.jit
def columns_of_halves(e0, e1, o0, o1):
    """`(RUNS, COLS, 2)` from numbers for each half of the even and of the odd columns, `(RUNS, COLS / 2)`."""
    return tl.join(tl.join(e0, o0), tl.join(e1, o1)).reshape(e0.shape[0], 2 * e0.shape[1], 2)


@triton.jit
def even_and_odd(x):
    """`(RUNS, COLS / 2)` of the even and of the odd columns, from `(RUNS, COLS)`."""
    return tl.split(x.reshape(x.shape[0], x.shape[1] // 2, 2))
