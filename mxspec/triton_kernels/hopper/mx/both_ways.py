"""MX codes of token groups in both directions for Hopper, at the memory's speed, in Gluon.

`tiles/mx_both_ways.py` computes the same bytes in plain Triton. A program holds a tile of 128 padded tokens by 128
features in the words of `hopper/words.py`. Whole blocks lie inside a warp. Most steps serve two values:

- A word holds the largest magnitudes of the blocks of two columns, as bf16 bits, or twice that of a block of a row. A
  few instructions on the word compute the scales.
- The reciprocal of a scale is a bf16 number, so `mul.bf16x2` scales two values. The product is exact, or it is so small
  that its code is 0.
- `cvt.e4m3x2` or `cvt.e5m2x2` makes two codes: of two neighbouring columns for the row codes, of two neighbouring rows
  for the column codes.

A small kernel first writes a table of the blocks of 128 padded tokens. A row of the table holds the block's first
token, the end of the group's tokens, the group's first block, and the group's number of blocks.

The last tile of features may be narrower (TAIL). Then each access to codes has a mask. If the gradient of the gate ends
inside a tile of the output, a program computes one tile of the output (APART). Otherwise a program computes a tile of
both gradients, from one read.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mxspec.triton_kernels.common.groups import group_of
from mxspec.triton_kernels.hopper.words import BACKWARD, FORWARD, TURNED, WORD, addresses, larger, loaded, one_gradient
from mxspec.triton_kernels.tiles.fp8_both_ways import GRADIENT, SWIGLU, TOKENS

# The scales of two blocks, from the bf16 bits of their largest magnitudes in the word $2. $0 has the reciprocals as
# bf16. $1 has the E8M0 bytes in the exponent fields of bf16. $3 and $4 hold 16 bits twice: the number that rounds an
# exponent up, and emax as an exponent field. f is 1 for a block with Inf or NaN: its reciprocal is NaN, its byte 255.
_SCALES = gl.constexpr(
    "{ .reg .b32 t, f, g; add.u32 t, $2, $3; and.b32 t, t, 0x7f807f80; max.u16x2 t, t, $4; sub.u32 t, t, $4;"
    " mov.b32 g, 0x7f7f7f7f; max.u16x2 f, $2, g; sub.u32 f, f, g; mov.b32 g, 0x00010001; min.u16x2 f, f, g;"
    " mul.lo.u32 f, f, 0x7fc0; sub.u32 g, 0x7f007f00, t; or.b32 $0, g, f; and.b32 f, f, 0x7f807f80; or.b32 $1, t, f; }"
)
# $0 has the codes of the four values in the words $1 and $2 of a row. $3 and $4 are both the factor of the block.
_ROW_CODES = (
    "{ .reg .b32 a, b, c; .reg .f32 x, y; .reg .b16 h, k;"
    " mul.rn.bf16x2 c, $1, $3; shl.b32 a, c, 16; and.b32 b, c, 0xffff0000; mov.b32 x, a; mov.b32 y, b;"
    " cvt.rn.satfinite.e4m3x2.f32 h, y, x;"
    " mul.rn.bf16x2 c, $2, $4; shl.b32 a, c, 16; and.b32 b, c, 0xffff0000; mov.b32 x, a; mov.b32 y, b;"
    " cvt.rn.satfinite.e4m3x2.f32 k, y, x; mov.b32 $0, {h, k}; }"
)
# $0 and $1 have the codes of the lower and of the upper column in the words $2 to $5 of four rows. $6 to $9 are all
# the factors of the two columns.
_COLUMN_CODES = (
    "{ .reg .b32 a, c, d; .reg .f32 x, y, u, v; .reg .b16 h, k, m, n;"
    " mul.rn.bf16x2 c, $2, $6; mul.rn.bf16x2 d, $3, $7;"
    " shl.b32 a, c, 16; mov.b32 x, a; shl.b32 a, d, 16; mov.b32 y, a;"
    " and.b32 a, c, 0xffff0000; mov.b32 u, a; and.b32 a, d, 0xffff0000; mov.b32 v, a;"
    " cvt.rn.satfinite.e4m3x2.f32 h, y, x; cvt.rn.satfinite.e4m3x2.f32 m, v, u;"
    " mul.rn.bf16x2 c, $4, $8; mul.rn.bf16x2 d, $5, $9;"
    " shl.b32 a, c, 16; mov.b32 x, a; shl.b32 a, d, 16; mov.b32 y, a;"
    " and.b32 a, c, 0xffff0000; mov.b32 u, a; and.b32 a, d, 0xffff0000; mov.b32 v, a;"
    " cvt.rn.satfinite.e4m3x2.f32 k, y, x; cvt.rn.satfinite.e4m3x2.f32 n, v, u;"
    " mov.b32 $0, {h, k}; mov.b32 $1, {m, n}; }"
)
_E4M3 = gl.constexpr((_ROW_CODES, _COLUMN_CODES))
_E5M2 = gl.constexpr(tuple(codes.replace("e4m3x2", "e5m2x2") for codes in (_ROW_CODES, _COLUMN_CODES)))


@triton.jit(do_not_specialize=["tokens"])
def places_of_blocks(
    table, start, end, offs, stride_offs, tokens, G, blocks, scaled, ALIGN: tl.constexpr, CHUNK: tl.constexpr
):
    """Write four numbers for each block of 128 padded tokens.

    They are the block's first token, the end of the group's tokens, the group's first block, and the group's number of
    blocks. The blocks past the last group have no tokens, and count as one more group. The first `blocks` blocks have
    codes, the first `scaled` blocks have scales. A place of the grid past them gets -1 as number.
    """
    block = tl.program_id(0)
    group, token0, stop, begin = group_of(block * 128, offs, stride_offs, G, start, end, block == 0, ALIGN, CHUNK)
    first = begin // 128
    count = tl.where(group < G, (stop - token0 + (ALIGN - 1)) // ALIGN * (ALIGN // 128), scaled - first)
    token = token0 + (block - first) * 128
    # If offs is out of order, a place may be invalid: such a block has no tokens and no scales of columns.
    wrong = (first < 0) | (first > block) | (first + count > scaled) | (count <= block - first) | (token < 0)
    tl.store(table + block * 4, tl.where(wrong, 0, token))
    tl.store(table + block * 4 + 1, tl.where(wrong | (block >= blocks), 0, tl.minimum(stop, tokens)))
    tl.store(table + block * 4 + 2, first)
    tl.store(table + block * 4 + 3, tl.where(block >= scaled, -1, tl.where(wrong, 0, count)))


@gluon.jit
def _scales(magnitudes, rounding, emax):
    """The reciprocals and the E8M0 bytes of two blocks for each word."""
    of_two = gl.full(magnitudes.shape, rounding, gl.int32, magnitudes.type.layout)
    least = gl.full(magnitudes.shape, emax, gl.int32, magnitudes.type.layout)
    return gl.inline_asm_elementwise(
        _SCALES, "=&r,=&r,r,r,r", [magnitudes, of_two, least], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )


@gluon.jit
def _store_row_scales(bytes_, d0, D, s_row, block, BLOCKED: gl.constexpr, TAIL: gl.constexpr):
    """Store the scale bytes of a tile's rows, (128, 4)."""
    FOUR: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [8, 1], [1, 0])  # a thread has the four bytes of a row
    bytes_ = gl.convert_layout(bytes_, FOUR)
    r = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(1, FOUR)), 1)
    c = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, FOUR)), 0)
    if BLOCKED:
        tile = block.to(gl.int64) * ((D + 127) // 128) + d0 // 128
        gl.store(s_row + tile * 512 + (r % 32 * 16 + r // 32 * 4 + c), bytes_)
    else:
        to = s_row + block.to(gl.int64) * 128 * (D // 32) + d0 // 32 + (r * (D // 32) + c)
        gl.store(to, bytes_, mask=d0 // 32 + c < D // 32 if TAIL else None)


@gluon.jit
def _store_column_scales(bytes_, d0, D, s_col, first, count, block, blocks, BLOCKED: gl.constexpr, TAIL: gl.constexpr):
    """Store the scale bytes of a tile's columns, (128, 4)."""
    FOUR: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [8, 1], [1, 0])
    bytes_ = gl.convert_layout(bytes_, FOUR)
    d = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(1, FOUR)), 1)
    c = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, FOUR)), 0)
    if BLOCKED:  # the tiles of a group are stored together, row by row
        tile = first.to(gl.int64) * ((D + 127) // 128) + (d0 // 128).to(gl.int64) * count + (block - first)
        if count > 0:
            gl.store(s_col + tile * 512 + (d % 32 * 16 + d // 32 * 4 + c), bytes_)
    else:
        to = s_col + d0.to(gl.int64) * (blocks * 4) + block * 4 + (d * (blocks * 4) + c)
        gl.store(to, bytes_, mask=d0 + d < D if TAIL else None)


@gluon.jit
def _store_row_codes(q, d0, D, q_row, block, TAIL: gl.constexpr):
    r = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(1, WORD)), 1)
    d = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, WORD)), 0)
    to = q_row + (block.to(gl.int64) * 128 * D + d0) // 2 + (r * (D // 2) + d)
    gl.store(to, q, mask=d0 // 2 + d < D // 2 if TAIL else None)


@gluon.jit
def _store_column_codes(lower, upper, d0, D, q_col, block, blocks, TAIL: gl.constexpr):
    r = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(1, TURNED)), 1)
    d = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, TURNED)), 0)
    to = q_col + (d0.to(gl.int64) * blocks + block) * 128 + (d * (blocks * 256) + r)
    there = d0 // 2 + d < D // 2 if TAIL else None
    gl.store(to, lower, mask=there)
    gl.store(to + blocks * 128, upper, mask=there)


@gluon.jit
def _emit(
    w, d0, D, q_row, s_row, q_col, s_col, first, count, block, blocks, rounding, emax,
    E5M2: gl.constexpr, BLOCKED: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    """Store the codes and the scales of a tile of words in both directions."""
    CODES: gl.constexpr = _E5M2 if E5M2 else _E4M3
    largest = w & 0x7FFF7FFF
    # Both maxima come first, so that `largest` needs registers for a short time only.
    of_columns = gl.reduce(largest.reshape([4, 32, 64]), 1, larger)
    of_rows = gl.reduce(largest.reshape([128, 4, 16]), 2, larger)

    factor, field = _scales(of_columns, rounding, emax)
    bytes_ = gl.join((field >> 7).to(gl.int8), (field >> 23).to(gl.int8)).reshape([4, 128]).permute([1, 0])
    _store_column_scales(bytes_, d0, D, s_col, first, count, block, blocks, BLOCKED, TAIL)
    factor = gl.expand_dims(factor, 1).broadcast_to(4, 32, 64).reshape([128, 64])
    turned = gl.convert_layout(w, TURNED)  # the same registers in another order
    lower, upper = gl.inline_asm_elementwise(
        CODES[1], "=r,=r,r,r,r,r,r,r,r,r", [turned, gl.convert_layout(factor, TURNED)], dtype=(gl.int8, gl.int8),
        is_pure=False, pack=4,
    )  # fmt: skip
    _store_column_codes(lower, upper, d0, D, q_col, block, blocks, TAIL)

    of_rows = larger(of_rows, of_rows >> 16 | of_rows << 16)  # the largest magnitude of a block, twice
    factor, field = _scales(of_rows, rounding, emax)
    factor = gl.convert_layout(gl.expand_dims(factor, 2).broadcast_to(128, 4, 16).reshape([128, 64]), WORD)
    q = gl.inline_asm_elementwise(CODES[0], "=r,r,r,r,r", [w, factor], dtype=gl.int16, is_pure=False, pack=2)
    _store_row_codes(q, d0, D, q_row, block, TAIL)
    _store_row_scales((field >> 23).to(gl.int8), d0, D, s_row, block, BLOCKED, TAIL)


@gluon.jit
def _zeros(
    d0, D, q_row, s_row, q_col, s_col, first, count, block, blocks, with_codes,
    BLOCKED: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    """Store zeros: the codes and the scales of a block without tokens. The scales may have more rows than the codes."""
    if with_codes:
        zero = gl.zeros((128, 64), gl.int8, TURNED)
        _store_column_codes(zero, zero, d0, D, q_col, block, blocks, TAIL)
        _store_row_codes(gl.zeros((128, 64), gl.int16, WORD), d0, D, q_row, block, TAIL)
    zero = gl.zeros((128, 4), gl.int8, gl.BlockedLayout([1, 4], [32, 1], [8, 1], [1, 0]))
    _store_column_scales(zero, d0, D, s_col, first, count, block, blocks, BLOCKED, TAIL)
    _store_row_scales(zero, d0, D, s_row, block, BLOCKED, TAIL)


# `blocks` counts the blocks of 128 padded tokens with codes. Blocked scales have more blocks.
@gluon.jit
def mx_both_ways_sm90(
    x, stride_m, dh, dh_stride_m, q_row, s_row, q_col, s_col, table, blocks, D, half, rounding, emax,
    VALUES: gl.constexpr, E5M2: gl.constexpr, BLOCKED: gl.constexpr, TAIL: gl.constexpr, APART: gl.constexpr,
):  # fmt: skip
    d0, block = gl.program_id(0) * 128, gl.program_id(2) * gl.num_programs(1) + gl.program_id(1)
    token, stop = gl.load(table + block * 4), gl.load(table + block * 4 + 1)
    first, count = gl.load(table + block * 4 + 2), gl.load(table + block * 4 + 3)
    if token < stop:
        r = gl.arange(0, 128, layout=gl.SliceLayout(1, WORD))
        there = gl.expand_dims(token + r < stop, 1)
        if APART:
            w = one_gradient(x, stride_m, dh, dh_stride_m, token, d0, half, there)
            _emit(
                w, d0, D, q_row, s_row, q_col, s_col, first, count, block, blocks, rounding, emax, E5M2, BLOCKED, TAIL
            )
        else:
            if TAIL:
                there = there & gl.expand_dims(d0 // 2 + gl.arange(0, 64, layout=gl.SliceLayout(0, WORD)) < D // 2, 0)
            at = addresses(x, stride_m, token, d0)
            w = gl.load(at, mask=there, other=0)
            if VALUES == TOKENS:
                _emit(
                    w, d0, D, q_row, s_row, q_col, s_col, first, count, block, blocks, rounding, emax,
                    E5M2, BLOCKED, TAIL,
                )  # fmt: skip
            else:
                up = gl.load(at + half // 2, mask=there, other=0)
                if VALUES == SWIGLU:
                    h = gl.inline_asm_elementwise(FORWARD, "=r,r,r", [w, up], dtype=gl.int32, is_pure=True, pack=1)
                    _emit(
                        h, d0, D, q_row, s_row, q_col, s_col, first, count, block, blocks, rounding, emax,
                        E5M2, BLOCKED, TAIL,
                    )  # fmt: skip
                else:
                    d_gate, d_up = gl.inline_asm_elementwise(
                        BACKWARD, "=&r,=&r,r,r,r", [w, up, loaded(dh, dh_stride_m, token, d0, there)],
                        dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
                    )  # fmt: skip
                    _emit(
                        d_gate, d0, D, q_row, s_row, q_col, s_col, first, count, block, blocks, rounding, emax,
                        E5M2, BLOCKED, TAIL,
                    )  # fmt: skip
                    _emit(
                        d_up, d0 + half, D, q_row, s_row, q_col, s_col, first, count, block, blocks, rounding, emax,
                        E5M2, BLOCKED, TAIL,
                    )  # fmt: skip
    elif count >= 0:
        _zeros(
            d0, D, q_row, s_row, q_col, s_col, first, count, block, blocks, block < blocks, BLOCKED, TAIL
        )  # fmt: skip
        if VALUES == GRADIENT and not APART:
            _zeros(
                d0 + half, D, q_row, s_row, q_col, s_col, first, count, block, blocks, block < blocks, BLOCKED, TAIL
            )  # fmt: skip
