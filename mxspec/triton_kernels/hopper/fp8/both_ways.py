"""FP8 codes of token groups in both directions for Hopper, at the memory's speed, in Gluon.

`tiles/fp8_both_ways.py` computes the same bytes in plain Triton. A program holds a tile of 128 tokens by 128 features
in the words of `hopper/words.py`. `cvt.e4m3x2` makes two codes: of two neighbouring columns for the row codes, of two
neighbouring rows for the column codes.

A small kernel first writes a table of the blocks of 128 padded tokens. A row of the table holds the block's first
token, the end of the group's tokens, the group's first block, and the group's number of blocks.

The last tile of features may be narrower (TAIL). Then each access has a mask. If the gradient of the gate ends inside a
tile of the output, a program computes one tile of the output (APART). The tile in the middle holds the end of the
gate's gradient and the start of up's. Otherwise a program computes a tile of both gradients, from one read.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mxspec.formats import E4M3FN, fp32_bits
from mxspec.triton_kernels.common.groups import group_of
from mxspec.triton_kernels.hopper.words import BACKWARD, FORWARD, TURNED, WORD, addresses, larger, loaded, one_gradient
from mxspec.triton_kernels.tiles.fp8_both_ways import GRADIENT, SWIGLU, TOKENS

_MANTISSA = gl.constexpr(E4M3FN.max / 2.0**E4M3FN.emax)  # 448 is 1.75 * 2^8
_INVERSE = gl.constexpr(2.0**E4M3FN.emax / E4M3FN.max)
_EXPONENT = gl.constexpr(fp32_bits(2.0**E4M3FN.emax))
_HALF = gl.constexpr(fp32_bits(E4M3FN.max / 2))
_TWO = gl.constexpr(fp32_bits(2.0))
# $0 has the codes of the four values in the words $1 and $2 of a row. $3 and $4 are both the factor of the row.
_ROW_CODES = gl.constexpr(
    "{ .reg .b32 a, b; .reg .f32 x, y; .reg .b16 h, k;"
    " shl.b32 a, $1, 16; and.b32 b, $1, 0xffff0000; mov.b32 x, a; mov.b32 y, b;"
    " mul.rn.f32 x, x, $3; mul.rn.f32 y, y, $3; cvt.rn.satfinite.e4m3x2.f32 h, y, x;"
    " shl.b32 a, $2, 16; and.b32 b, $2, 0xffff0000; mov.b32 x, a; mov.b32 y, b;"
    " mul.rn.f32 x, x, $4; mul.rn.f32 y, y, $4; cvt.rn.satfinite.e4m3x2.f32 k, y, x; mov.b32 $0, {h, k}; }"
)
# $0 and $1 have the codes of the lower and of the upper column in the words $2 to $5 of four rows. $6 and $10 are the
# factors of the two columns.
_COLUMN_CODES = gl.constexpr(
    "{ .reg .b32 a; .reg .f32 x, y, u, v; .reg .b16 h, k, m, n;"
    " shl.b32 a, $2, 16; mov.b32 x, a; shl.b32 a, $3, 16; mov.b32 y, a;"
    " and.b32 a, $2, 0xffff0000; mov.b32 u, a; and.b32 a, $3, 0xffff0000; mov.b32 v, a;"
    " mul.rn.f32 x, x, $6; mul.rn.f32 y, y, $6; mul.rn.f32 u, u, $10; mul.rn.f32 v, v, $10;"
    " cvt.rn.satfinite.e4m3x2.f32 h, y, x; cvt.rn.satfinite.e4m3x2.f32 m, v, u;"
    " shl.b32 a, $4, 16; mov.b32 x, a; shl.b32 a, $5, 16; mov.b32 y, a;"
    " and.b32 a, $4, 0xffff0000; mov.b32 u, a; and.b32 a, $5, 0xffff0000; mov.b32 v, a;"
    " mul.rn.f32 x, x, $6; mul.rn.f32 y, y, $6; mul.rn.f32 u, u, $10; mul.rn.f32 v, v, $10;"
    " cvt.rn.satfinite.e4m3x2.f32 k, y, x; cvt.rn.satfinite.e4m3x2.f32 n, v, u;"
    " mov.b32 $0, {h, k}; mov.b32 $1, {m, n}; }"
)


@triton.jit(do_not_specialize=["tokens"])
def blocks_of_tokens(table, start, end, offs, stride_offs, tokens, G, blocks, CHUNK: tl.constexpr):
    """Write four numbers for each block of padded tokens.

    They are the block's first token, the end of the group's tokens, the group's first block, and the group's number of
    blocks. The blocks past the last group hold rows without a group, and count as one more group. Its number of blocks
    is written as -1 - number.
    """
    block = tl.program_id(0)
    group, token0, stop, begin = group_of(block * 128, offs, stride_offs, G, start, end, block == 0, 128, CHUNK)
    first = begin // 128
    grouped = group < G
    count = (stop - token0 + 127) // 128
    last = tl.load(offs + (G - 1) * stride_offs, mask=G > 0, other=0)
    token0, stop = tl.where(grouped, token0, last), tl.where(grouped, tl.minimum(stop, tokens), tokens)
    token = token0 + (block - first) * 128
    # If offs is out of order, a place may be invalid: such a block has no rows and no columns.
    wrong = (first < 0) | (first > block) | (first + count > blocks) | (grouped & (count <= block - first))
    wrong = grouped & wrong | (token < 0) | (block >= blocks)  # the grid may have places past the last block
    tl.store(table + block * 4, tl.where(wrong, 0, token))
    tl.store(table + block * 4 + 1, tl.where(wrong, 0, stop))
    tl.store(table + block * 4 + 2, first)
    tl.store(table + block * 4 + 3, tl.where(wrong, 0, tl.where(grouped, count, -1 - (blocks - first))))


@gluon.jit
def _factors(amax_bits, eps_bits, POW2: gl.constexpr):
    """`common/fp8_numerics.factors`, with Gluon's functions."""
    bits = gl.maximum(amax_bits, eps_bits)
    if POW2:
        s = (_HALF - (bits - _TWO)) & 0x7F800000
        back = 0x7F000000 - s
    else:
        m = (bits & 0x7FFFFF | 0x3F800000).to(gl.float32, bitcast=True)
        y = gl.fma(gl.fma(m, -32 / 99, 16 / 11), m, -70 / 33)
        y = gl.fma(gl.fma(m, y, 1.0), y, y)
        y = gl.fma(gl.fma(m, y, 1.0), y, y)
        q = y * _MANTISSA
        q = gl.fma(gl.fma(m, q, _MANTISSA), y, q)
        z = m * _INVERSE
        error = gl.fma(q, z, 1.0)
        z = gl.fma(gl.fma(error, error, error), z, z)
        exponent = _EXPONENT - (bits & 0x7F800000)
        s = (-q).to(gl.int32, bitcast=True) + exponent
        back = z.to(gl.int32, bitcast=True) - exponent
    finite = amax_bits < 0x7F800000
    s, back = gl.where(finite, s, 0x7FC00000), gl.where(finite, back, 0x7FC00000)
    return s.to(gl.float32, bitcast=True), back.to(gl.float32, bitcast=True)


@gluon.jit
def _store_rows(
    w, of_rows, token, stop, d0, D, tokens, q_row, s_row, eps_bits,
    POW2: gl.constexpr, FLAT: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    """Store the row codes and the row scales of a tile of words."""
    of_rows = gl.convert_layout(of_rows, FLAT)
    s, back = _factors(gl.maximum((of_rows & 0xFFFF) << 16, of_rows & 0x7FFF0000), eps_bits, POW2)
    flat = gl.arange(0, 128, layout=FLAT)
    gl.store(s_row + (d0 // 128).to(gl.int64) * tokens + token + flat, back, mask=token + flat < stop)
    s = gl.expand_dims(gl.convert_layout(s, gl.SliceLayout(1, WORD)), 1)
    s, _ = gl.broadcast(s, w)
    q = gl.inline_asm_elementwise(_ROW_CODES, "=r,r,r,f,f", [w, s], dtype=gl.int16, is_pure=False, pack=2)
    r = gl.arange(0, 128, layout=gl.SliceLayout(1, WORD))
    d = gl.arange(0, 64, layout=gl.SliceLayout(0, WORD))
    to = q_row + (token.to(gl.int64) * D + d0) // 2 + (gl.expand_dims(r, 1) * (D // 2) + gl.expand_dims(d, 0))
    there = gl.expand_dims(token + r < stop, 1)
    if TAIL:
        there = there & gl.expand_dims(d0 // 2 + d < D // 2, 0)
    gl.store(to, q, mask=there)


@gluon.jit
def _store_columns(
    w, of_columns, d0, D, q_col, s_col, first, count, block, eps_bits,
    POW2: gl.constexpr, FLAT: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    """Store the column codes and the column scales of a tile of words."""
    lower = gl.convert_layout((of_columns & 0xFFFF) << 16, FLAT)
    upper = gl.convert_layout(of_columns & 0x7FFF0000, FLAT)
    s, back = _factors(gl.join(lower, upper), eps_bits, POW2)  # (64, 2)
    pair = gl.arange(0, 64, layout=gl.SliceLayout(1, s.type.layout))
    which = gl.arange(0, 2, layout=gl.SliceLayout(0, s.type.layout))
    column = gl.expand_dims(pair, 1) * 2 + gl.expand_dims(which, 0)
    gl.store(s_col + block.to(gl.int64) * D + d0 + column, back, mask=d0 + column < D if TAIL else None)
    s_lower, s_upper = gl.split(s)
    w = gl.convert_layout(w, TURNED)  # the same registers in another order
    s_lower = gl.expand_dims(gl.convert_layout(s_lower, gl.SliceLayout(0, TURNED)), 0)
    s_upper = gl.expand_dims(gl.convert_layout(s_upper, gl.SliceLayout(0, TURNED)), 0)
    s_lower, _ = gl.broadcast(s_lower, w)
    s_upper, _ = gl.broadcast(s_upper, w)
    lower, upper = gl.inline_asm_elementwise(
        _COLUMN_CODES, "=r,=r,r,r,r,r,f,f,f,f,f,f,f,f", [w, s_lower, s_upper], dtype=(gl.int8, gl.int8),
        is_pure=False, pack=4,
    )  # fmt: skip
    _store_turned(lower, upper, d0, D, q_col, first, count, block, TAIL)


@gluon.jit
def _store_turned(lower, upper, d0, D, q_col, first, count, block, TAIL: gl.constexpr):
    r = gl.arange(0, 128, layout=gl.SliceLayout(1, TURNED))
    d = gl.arange(0, 64, layout=gl.SliceLayout(0, TURNED))
    to = q_col + (first.to(gl.int64) * D + d0.to(gl.int64) * count + (block - first)) * 128
    to = to + (gl.expand_dims(d, 0) * (count * 256) + gl.expand_dims(r, 1))
    there = gl.expand_dims(d0 // 2 + d < D // 2, 0) if TAIL else None
    gl.store(to, lower, mask=there)
    gl.store(to + count * 128, upper, mask=there)


@gluon.jit
def _emit(
    w, token, stop, d0, D, tokens, q_row, s_row, q_col, s_col, first, count, block, eps_bits,
    POW2: gl.constexpr, FLAT: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    largest = w & 0x7FFF7FFF
    # Both maxima come first, so that `largest` needs registers for a short time only.
    of_rows, of_columns = gl.reduce(largest, 1, larger), gl.reduce(largest, 0, larger)
    if count > 0:
        _store_columns(w, of_columns, d0, D, q_col, s_col, first, count, block, eps_bits, POW2, FLAT, TAIL)
    _store_rows(w, of_rows, token, stop, d0, D, tokens, q_row, s_row, eps_bits, POW2, FLAT, TAIL)


@gluon.jit
def _zeros(
    d0, D, q_col, s_col, first, count, block, FLAT: gl.constexpr, TAIL: gl.constexpr
):  # fmt: skip
    """Store zeros as column codes and column scales of a block past the last group."""
    zero = gl.zeros((128, 64), gl.int8, TURNED)
    _store_turned(zero, zero, d0, D, q_col, first, count, block, TAIL)
    flat = gl.arange(0, 128, layout=FLAT)
    at = s_col + block.to(gl.int64) * D + d0 + flat
    gl.store(at, gl.zeros((128,), gl.float32, FLAT), mask=d0 + flat < D if TAIL else None)


@gluon.jit(do_not_specialize=["tokens", "eps_bits"])
def fp8_both_ways_sm90(
    x, stride_m, dh, dh_stride_m, q_row, s_row, q_col, s_col, table, tokens, D, half, eps_bits,
    VALUES: gl.constexpr, POW2: gl.constexpr, TAIL: gl.constexpr, APART: gl.constexpr,
):  # fmt: skip
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    d0, block = gl.program_id(0) * 128, gl.program_id(2) * gl.num_programs(1) + gl.program_id(1)
    token, stop = gl.load(table + block * 4), gl.load(table + block * 4 + 1)
    first, count = gl.load(table + block * 4 + 2), gl.load(table + block * 4 + 3)
    if token < stop:
        r = gl.arange(0, 128, layout=gl.SliceLayout(1, WORD))
        there = gl.expand_dims(token + r < stop, 1)
        if APART:
            w = one_gradient(x, stride_m, dh, dh_stride_m, token, d0, half, there)
            _emit(
                w, token, stop, d0, D, tokens, q_row, s_row, q_col, s_col, first, count, block, eps_bits,
                POW2, FLAT, TAIL,
            )  # fmt: skip
        else:
            if TAIL:
                there = there & gl.expand_dims(d0 // 2 + gl.arange(0, 64, layout=gl.SliceLayout(0, WORD)) < D // 2, 0)
            at = addresses(x, stride_m, token, d0)
            w = gl.load(at, mask=there, other=0)
            if VALUES == TOKENS:
                _emit(
                    w, token, stop, d0, D, tokens, q_row, s_row, q_col, s_col, first, count, block, eps_bits,
                    POW2, FLAT, TAIL,
                )  # fmt: skip
            else:
                # The gradient spills registers if up has addresses of its own, under Triton 3.6.
                up = gl.load(at + half // 2, mask=there, other=0)
                if VALUES == SWIGLU:
                    h = gl.inline_asm_elementwise(FORWARD, "=r,r,r", [w, up], dtype=gl.int32, is_pure=True, pack=1)
                    _emit(
                        h, token, stop, d0, D, tokens, q_row, s_row, q_col, s_col, first, count, block, eps_bits,
                        POW2, FLAT, TAIL,
                    )  # fmt: skip
                else:
                    d_gate, d_up = gl.inline_asm_elementwise(
                        BACKWARD, "=&r,=&r,r,r,r", [w, up, loaded(dh, dh_stride_m, token, d0, there)],
                        dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
                    )  # fmt: skip
                    _emit(
                        d_gate, token, stop, d0, D, tokens, q_row, s_row, q_col, s_col, first, count, block, eps_bits,
                        POW2, FLAT, TAIL,
                    )  # fmt: skip
                    _emit(
                        d_up, token, stop, d0 + half, D, tokens, q_row, s_row, q_col, s_col, first, count, block,
                        eps_bits, POW2, FLAT, TAIL,
                    )  # fmt: skip
    if count < 0:
        _zeros(d0, D, q_col, s_col, first, -1 - count, block, FLAT, TAIL)
        if VALUES == GRADIENT and not APART:
            _zeros(d0 + half, D, q_col, s_col, first, -1 - count, block, FLAT, TAIL)
