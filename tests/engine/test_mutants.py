"""Mistakes that authors of kernels make, put into the quantizers one at a time. `check` must find each mistake.

A mutant is a copy of a backend's files with one replacement, imported as a package of its own. A mutant may
fail many cases. It names a small one of these cases, so that a reader sees which case guards against which mistake.
"""

import importlib
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import mxspec
from mxspec import cases, check, rules
from tests.helpers import only_interpreted

PACKAGE = Path(mxspec.__file__).parent


class Mutant(NamedTuple):
    mistake: str
    op: str
    case: str
    file: str
    text: str
    instead: str


def mutants(op, case, file, *changes):
    return [Mutant(mistake, op, case, file, text, instead) for mistake, text, instead in changes]


EDGE, EDGE_FLOOR = "edge blocks, rceil, e4m3fn", "edge blocks, floor, e4m3fn"
BITS = "random bit patterns, float32, rceil, e4m3fn"

TRITON = [
    *mutants("mx_quantize", EDGE, "common.numerics",
        ("amax of signed bits", "bitcast=True) & 0x7FFFFFFF", "bitcast=True)"),
        ("exponent off by one", ">> 23) - EMAX, 0)", ">> 23) - EMAX + 1, 0)"),
        ("scale not rounded up", "((amax_bits + ROUND) >> 23)", "(amax_bits >> 23)"),
        ("Inf is a number", "amax_bits < 0x7F800000", "amax_bits <= 0x7F800000"),
        ("NaN block has byte 254", "byte, 255)", "byte, 254)"),
        ("quotient just above 2^-127", "tl.where(amax_bits <= EXCEPT, 0, byte)", "byte"),
        ("reciprocal off by one", "(254 - byte) << 23", "(253 - byte) << 23"),
        ("reciprocal of byte 255", "tl.where(byte == 255, 0x7FC00000, (254 - byte) << 23)", "((254 - byte) << 23)"),
        ("subnormals flushed",
         "        return x.to(tl.float32)",
         "        return tl.where(tl.abs(x.to(tl.float32)) < 2.0**-126, 0.0, x.to(tl.float32))"),
        ("codes truncated",
         "return x.to(DTYPE)",
         "return (x.to(tl.int32, bitcast=True) & -0x100000).to(tl.float32, bitcast=True).to(DTYPE)"),
        ("ties away from zero",
         "return x.to(DTYPE)",
         "return ((x.to(tl.int32, bitcast=True) + 0x80000) & -0x100000).to(tl.float32, bitcast=True).to(DTYPE)"),
        ("sign of zero lost", "return x.to(DTYPE)", "return (x + 0.0).to(DTYPE)")),
    *mutants("mx_quantize", "every code and tie, e2m3", "common.numerics",
        ("ties of FP6 away from even", "((BIAS - 128) << MANTISSA) & MASK", "(((BIAS - 128) << MANTISSA) & MASK) + 1"),
        ("FP6 subnormals lost", "power_of_two(magnitude, (128 - BIAS) << 23)", "power_of_two(magnitude, 0)")),
    *mutants("mx_quantize", "every code and tie, e2m3", "common.fp6",
        ("four codes in another order", "% 4 * 6", "% 4 * -6 + 18"),
        ("the sign of FP6 lies one bit too high", ">> 26) & 0x20", ">> 25) & 0x40"),
        ("the middle word lacks its high byte", "((low >> 16) | (high << 8))", "(low >> 16)")),
    *mutants("mx_quantize", "every code and tie, e3m2", "common.fp6",
        ("e3m2 has the bias of e2m3", "BIAS: tl.constexpr = _E2M3_BIAS if MANTISSA == 3 else _E3M2_BIAS\n    code",
         "BIAS: tl.constexpr = _E2M3_BIAS\n    code")),
    *mutants("mx_quantize", "edge blocks, floor, e2m3", "common.numerics",
        ("FP6 does not saturate", "tl.minimum(magnitude, MAX)", "magnitude")),
    *mutants("mx_quantize", "edge blocks, rceil, e2m3", "common.fp6",
        ("NaN keeps its sign in FP6", "tl.where(x == x, ", "tl.where(True, ")),
    *mutants("mx_quantize", "ragged, e2m3, axis -2", "common.fp6",
        ("the second word of 16 lacks its high half", "(w1 >> 8) | (w2 << 16)", "(w1 >> 8)"),
        ("the words of 16 in another order",
         "tl.join(tl.join(a, c), tl.join(b, c))", "tl.join(tl.join(a, b), tl.join(c, c))")),
    *mutants("mx_quantize", "ragged, e2m3, axis -2", "tiles.mx_columns",
        ("the third word is not written", "(tl.arange(0, 4) < 3)", "(tl.arange(0, 4) < 2)")),
    *mutants("mx_quantize_rowcol", "random bit patterns, bfloat16, e2m3, floor", "common.fp6",
        ("the words of a row exchanged",
         "tl.store(to + 1, second, mask=mask[:, None])", "tl.store(to + 1, third, mask=mask[:, None])")),
    *mutants("mx_dequantize", "every e2m3 code under every scale, float32", "common.fp6",
        ("the sign of FP6 is lost", "| ((code & 0x20) << 10)", ""),
        ("bytes of FP6 in another order", "low | (middle << 8) | (high << 16)", "high | (middle << 8) | (low << 16)")),
    *mutants("mx_dequantize", "every other element, e2m3, axis -1, plain", "common.fp6",
        ("the stride of FP6 is ignored", "tl.load(at + stride, ", "tl.load(at + 1, ")),
    *mutants("mx_dequantize", "every int8 code under every scale, float32", "common.numerics",
        ("int8 counts ones", "q.to(tl.float32) * _INT8_STEP", "q.to(tl.float32)")),
    *mutants("mx_quantize", "every exponent, ceil, int8", "common.numerics",
        ("a byte of int8 above 254", "byte = tl.minimum(byte, 254)", "byte = byte"),
        ("no reciprocal of byte 254", "bits = tl.maximum(bits, 0x400000)", "bits = bits")),
    *mutants("mx_quantize", "subnormal amaxes, rceil, int8", "common.numerics",
        ("one subnormal amax has byte 0", "amax_bits <= EXCEPT, 0, byte", "amax_bits == EXCEPT, 0, byte")),
    *mutants("mx_quantize", "edge blocks, floor, int8", "common.numerics",
        ("int8 reaches -128", "-_INT8_MAX)", "-2.0)"),
        ("a NaN of int8 is 0",
         "tl.minimum(x, _INT8_MAX)", "tl.where(x < _INT8_MAX, x, tl.where(x == x, _INT8_MAX, 0.0))")),
    *mutants("mx_quantize", "every exponent, floor, e4m3fn", "common.numerics",
        ("byte below 0 wraps",
         "tl.maximum(((amax_bits + ROUND) >> 23) - EMAX, 0)", "((amax_bits + ROUND) >> 23) - EMAX")),
    *mutants("mx_quantize", BITS, "common.numerics",
        ("rounded twice", "return x.to(DTYPE)", "return x.to(tl.float16).to(DTYPE)")),
    *mutants("mx_quantize", EDGE_FLOOR, "common.numerics",
        ("cast does not saturate",
         "return x.to(DTYPE)", "return tl.where(tl.abs(x) > 448, float('nan'), x).to(DTYPE)")),
    *mutants("mx_quantize", "96x160, axis -1, blocked", "common.blocked",
        ("tile in row-major order", "byte % 16 // 4 * 32 + byte // 16", "byte // 4")),
    *mutants("mx_quantize", "one block", "mx_quantize",
        ("last block not written", "(start + i < R * C)", "(start + i < R * C - 1)")),
    *mutants("mx_quantize", "every second column, axis -1, plain", "mx_quantize",
        ("stride of columns ignored",
         "[:, None] * stride_r + k.to(tl.int64) * stride_k\n        q_offset = n",
         "[:, None] * stride_r + k.to(tl.int64)\n        q_offset = n")),
    *mutants("mx_quantize", "ragged rows, floor, blocked", "mx_quantize",
        ("first expert only", "x += e * stride_e + row_tile", "x += row_tile"),
        ("stale padding of scales", "owned = row_tile < tl.cdiv(R, 128)", "owned = in_matrix")),
    *mutants("mx_quantize", "96x160, axis -2, plain", "tiles.mx_columns",
        ("runs of rows exchanged", "(2, 3, 0, 1, 4).reshape(COLS, ROWS)", "(2, 3, 1, 0, 4).reshape(COLS, ROWS)")),
    *mutants("mx_quantize", "3x160x32, axis -2, plain", "tiles.mx_columns",
        ("scales along the wrong axis",
         "m0 // 32 + (k[:, None] * M32 + c[None, :])", "m0 // 32 + (c[None, :] * K + k[:, None])")),
    *mutants("mx_quantize", "96x160, axis -2, blocked", "tiles.mx_columns",
        ("tile of the transpose not turned",
         ".permute(0, 3, 2, 1).reshape(BLOCKS * 128)", ".permute(0, 3, 1, 2).reshape(BLOCKS * 128)")),
    *mutants("mx_quantize_rowcol", "2x96x160, blocked", "tiles.mx_columns",
        ("tile of the rows not turned",
         ".permute(0, 2, 1, 3).reshape(ROWS // 128, 512)", ".reshape(ROWS // 128, 512)")),
    *mutants("mx_quantize_rowcol_groups", "three groups", "tiles.mx_columns",
        ("scale bytes past the padded rows stay unwritten", "row_tiles + G, 0)", "row_tiles, 0)")),
    *mutants("swiglu_backward_mx_quantize_rowcol_groups", "2I = 320", "tiles.mx_columns",
        ("a tile of both gradients taken as one", "of_up = k0 + b >= half", "of_up = k0 + 0 * b >= half")),
    *mutants("swiglu_backward_mx_quantize_rowcol_groups", "2I = 320", "tiles.swiglu_runs",
        ("d_up in place of d_gate", "tl.where(of_up, d_up, d_gate)", "tl.where(of_up, d_gate, d_up)")),
    *mutants("swiglu_mx_quantize_rowcol_groups", "2I = 320", "tiles.mx_columns",
        ("up read half a tile before its place", "up = x_rows + tl.cast(half, tl.int64) * stride_k\n        values",
         "up = x_rows + tl.cast(half // 2, tl.int64) * stride_k\n        values")),
    *mutants("mx_quantize_groups", "three groups, axis -1", "mx_quantize_groups",
        ("next group read as padding", "token + row < tl.minimum(stop, tokens)", "token + row < tokens")),
    *mutants("mx_quantize_groups", "edge blocks, axis -1", "common.blocked",
        ("last block of a row left out", "there = col_tile * 4 + col < C", "there = col_tile * 4 + col < C - 1")),
    *mutants("mx_quantize_groups", "three groups, axis -1", "common.groups",
        ("row of the next group", "there & (ends <= row)", "there & (ends < row)")),
    *mutants("mx_requantize_groups", "three groups", "tiles.mx_columns",
        ("scale of the first of 16 tokens", "load16(scale, scale_stride,", "load16(scale, 0 * scale_stride,")),
    *mutants("mx_requantize_groups", "every code under near scales, e4m3fn, bfloat16", "tiles.mx_columns",
        ("products of MX codes not rounded", "values.to(tl.bfloat16) if BF16 else values", "values")),
    *mutants("fp8_requantize_k_groups", "mn-major, bfloat16, fp32", "fp8_quantize_k_groups",
        ("scale of the first of 16 rows", "load16(scales, row_scale_stride_m,",
         "load16(scales, 0 * row_scale_stride_m,"),
        ("products of FP8 codes not rounded", "if BF16:", "if False:")),
    *mutants("fp8_transpose_128x128", "272x256", "fp8_transpose_128x128",
        ("words of the tile not turned", ".reshape(8, 128, 16).permute(1, 0, 2).reshape(128, 128)",
         ".reshape(128, 128)"),
        ("scales not turned", "(e * tl.num_programs(0) + c) * tl.num_programs(1) + b",
         "(e * tl.num_programs(1) + b) * tl.num_programs(0) + c")),
    *mutants("nvfp4_fake_quantize", "600 experts", "nvfp4_fake_quantize",
        ("values of a tile that lies further on", "tl.where(writes, 0, lead)", "lead")),
    *mutants("nvfp4_fake_quantize", "96x160, bfloat16, axis -1, 16x16", "common.nvfp4_values",
        ("a scale for 16 rows of a column", 'if BLOCK == "16x16":', "if False:")),
    *mutants("nvfp4_fake_quantize", "3x48x80, bfloat16, axis -1, 1x16", "nvfp4_fake_quantize",
        ("magnitudes of the first matrix", "tl.load(found + e, cache", "tl.load(found, cache")),
    *mutants("nvfp4_fake_quantize_rowcol_groups", "three groups", "nvfp4_fake_quantize_rowcol_groups",
        ("rows of the next group", "tl.where(grouped, stop, tokens), tokens)", "tokens, tokens)")),
    *mutants("nvfp4_fake_quantize_rowcol_groups", "33, 0 and 67 tokens, bfloat16, signs 0xd7e8, random none",
        "nvfp4_fake_quantize_rowcol_groups",
        ("one magnitude for both directions", "tl.load(found + of_columns + group)", "tl.load(found + group)")),
    *mutants("nvfp4_fake_quantize_rowcol_groups", "every scale and tie, random none", "common.nvfp4_values",
        ("values do not saturate", "minus_d, reciprocal, None), 6.0)", "minus_d, reciprocal, None), 8.0)")),
    *mutants("nvfp4_fake_quantize_rowcol_groups", "just below each 512th, random small", "common.nvfp4_values",
        ("small sums rounded up", "1.0 - 2.0**-24", "1.0")),
    *mutants("nvfp4_fake_quantize_rowcol_groups", "every code and tie, random none", "common.nvfp4_values",
        ("steps of normal numbers below 1", "power_of_two(magnitude, 0x3F800000)", "power_of_two(magnitude, 0)")),
    *mutants("nvfp4_fake_quantize_rowcol_groups", "every code and tie, random small", "common.nvfp4_values",
        ("bytes not cut off", "bits & -0x400000", "bits & -0x200000")),
    *mutants("nvfp4_fake_quantize_rowcol_groups", "33, 0 and 67 tokens, bfloat16, signs 0xd7e8, random large",
        "common.nvfp4_values",
        ("words in another order", "tl.join(tl.join(w0, w2), tl.join(w1, w3))",
         "tl.join(tl.join(w0, w1), tl.join(w2, w3))"),
        ("one sign of the transform", "(SIGNS >> tl.arange(0, 16)) & 1", "(SIGNS >> tl.arange(0, 16)) & 0")),
    *mutants("nvfp4_fake_quantize_rowcol_groups", "33, 0 and 67 tokens, bfloat16, signs 0xd7e8, random large",
        "common.philox",
        ("no high word of the offset", "low * 0 + (offset >> 32).to(tl.uint32)", "low * 0"),
        ("a key that stays", "k0 = tl.add(k0, _KEY_A, sanitize_overflow=False)", "k0 = k0")),
    *mutants("nvfp4_fake_quantize_rowcol_groups", "33, 0 and 67 tokens, bfloat16, signs 0xd7e8, random none",
        "common.nvfp4_numerics",
        ("a product that is not rounded first", "tl.fma(x, r, 96.0) - 96.0", "x * r")),
    *mutants("mx_quantize", "every code and tie, e2m1", "common.numerics",
        ("ties of e2m1 away from even", "tl.fma(t, slope, constant)", "tl.fma(t * 1.0000002, slope, constant)"),
        ("codes below 2 as those above", "tl.minimum(tl.minimum(two, one), half)", "tl.minimum(one, half)"),
        ("sign of e2m1 lost", " | ((x.to(tl.int32, bitcast=True) >> 28) & 8)", "")),
    *mutants("mx_quantize_groups", "random bit patterns, bfloat16, e2m1, floor, axis -1", "common.numerics",
        ("a word of NaN has other codes", "tl.where(wrong, 0x77777777, ", "tl.where(False, 0x77777777, ")),
    *mutants("mx_quantize_rowcol_groups", "random bit patterns, bfloat16, e2m1, floor", "common.numerics",
        ("nibbles exchanged", "code = low | (high << 4)", "code = high | (low << 4)"),
        ("NaN of e2m1 is another code", "return tl.where(x == x, number", "return tl.where(True, number")),
    *mutants("mx_quantize_groups", "three groups, e2m1, axis -2, plain", "tiles.mx_columns",
        ("packed columns overlap", "* (M // 8) + word_of_column", "* (M // 16) + word_of_column")),
    *mutants("mx_quantize", "random bit patterns, 96x160, bfloat16, e2m1, floor, axis -1, plain scales",
        "common.numerics",
        ("codes of a narrow dtype do not saturate", "factor, _LEAST), 0.0, 1.0)", "factor, _LEAST), 0.0, 2.0)")),
    *mutants("mx_quantize_groups", "random bit patterns, bfloat16, e2m1, ceil, axis -2", "tiles.mx_columns",
        ("odd columns with the scales of even ones", "reciprocal_scale(odd, EMAX)", "reciprocal_scale(even, EMAX)"),
        ("codes of a NaN block of even columns", "e2m1_words(e0, e0_signs, even_r, even == 255",
         "e2m1_words(e0, e0_signs, even_r, odd == 255")),
    *mutants("nvfp4_quantize", "every code and tie, float32", "common.numerics",
        ("halves of a word exchanged", "low, high = n[3], n[7]", "high, low = n[3], n[7]"),
        ("signs of a word reversed", "| (s[7 - i] >> 28)", "| (s[i] >> 28)"),
        ("sign of codes lost", "bitcast=True) << 16) | signs", "bitcast=True) << 16)"),
        ("codes from 4 on as those below", "tl.minimum(tl.minimum(two, one), half)", "tl.minimum(two, one)"),
        ("codes from 2 on as those below", "tl.minimum(tl.minimum(two, one), half)", "tl.minimum(two, half)")),
    *mutants("nvfp4_quantize", "every code and tie, float32", "common.runs",
        ("the second four numbers of a row are the first", "tl.cast(stride, tl.int64) * 4", "stride * 0")),
    *mutants("nvfp4_quantize", "ties, an amax just above, bfloat16", "common.nvfp4_numerics",
        ("a long magnitude taken for a short one", "& 0x1FFF == 0", "& 0 == 0")),
    *mutants("nvfp4_quantize", "ties of codes, large numbers, bfloat16", "common.nvfp4_numerics",
        ("a large magnitude taken for a short one", " & (A < _LARGE)", "")),
    *mutants("nvfp4_quantize", "every second column, float32", "common.runs",
        ("the second four columns without their stride", "tl.cast(stride, tl.int64) * 4", "4")),
    *mutants("nvfp4_quantize", "every scale and tie, bfloat16", "common.nvfp4_numerics",
        ("codes of a scale of 0", "tl.where(number == 0, 0.0,", "tl.where(number < 0, 0.0,")),
    *mutants("nvfp4_quantize", "a smaller amax, float32", "common.nvfp4_numerics",
        ("codes do not saturate", "6.0 * PART)", "12.0 * PART)")),
    *mutants("nvfp4_quantize", "inf in a block, float32, 1x16", "common.nvfp4_numerics",
        ("codes of a NaN block with signs", "return tl.where(wrong, 0x77777777, word)", "return word"),
        ("Inf is a number", "wrong = wrong | (bits >= 0x7F800000)", "wrong = wrong | (bits > 0x7F800000)")),
    *mutants("nvfp4_quantize", "amax 0.0, float32", "common.nvfp4_numerics",
        ("a scale under an h of 0", "tl.where(h == 0, 1.0, h * up)", "h * up")),
    *mutants("nvfp4_quantize", "amax -1.0, float32", "common.nvfp4_numerics",
        ("a negative amax counts", "wrong = (bits < 0) |", "wrong =")),
    *mutants("nvfp4_quantize", "magnitudes near 2^-126", "common.nvfp4_numerics",
        ("inexact remainders", "tl.where(A < _SMALL, _UP, 1.0)", "tl.where(A < _SMALL, 1.0, 1.0)")),
    *mutants("nvfp4_quantize", "ties of codes under every scale, float32", "common.nvfp4_numerics",
        ("uncorrected quotient", "return tl.fma(tl.fma(q, minus_d, n), reciprocal, q)", "return q")),
    *mutants("nvfp4_quantize", "nan in the matrix, float32", "tiles.largest",
        ("a maximum that ignores NaN", "magnitude_bits(widened(values)))",
         "tl.where(widened(values) == widened(values), magnitude_bits(widened(values)), 0))")),
    *mutants("nvfp4_quantize", "3x48x80, bfloat16, axis -1, 1x16, plain scales", "tiles.largest",
        ("amax of the first matrix", "tl.load(found + e * count + i", "tl.load(found + i")),
    *mutants("nvfp4_quantize", "ragged, axis -1, 16x16, blocked", "nvfp4_quantize",
        ("scale of a row in place of a square", "if SQUARE:  # the 16 bytes", "if False:  # the 16 bytes"),
        ("padding of scales not zero", "stored = tl.where(in_matrix, stored, 0)",
         "stored = tl.where(in_matrix, stored, 0x38)")),
    *mutants("nvfp4_quantize", "ragged, axis -1, 1x16, blocked", "common.blocked",
        ("the scales of the second tile at the first", "i // OF_TILE * 512", "i // OF_TILE * 0")),
    *mutants("nvfp4_quantize", "ragged, axis -1, 1x16, blocked", "nvfp4_quantize",
        ("padding of the last tile unwritten", "col < tl.cdiv(C, 4) * 4", "col < C"),
        ("a program reads its first part again", "x += tl.cast(stride_k, tl.int64) * (16 * blocks)", "x += 0"),
        ("the codes of parts overlap", "qdata += 2 * blocks", "qdata += blocks"),
        ("the scales of parts overlap", 'scale += BLOCKS if LAYOUT == "flat" else 512', "scale += BLOCKS")),
    *mutants("nvfp4_quantize", "random bit patterns, bfloat16, axis -1, 1x16, plain scales", "common.pairs",
        ("neighbours in a row exchanged", "reshape(shape))\n    return even | (odd << 16)",
         "reshape(shape))\n    return odd | (even << 16)"),
        ("odd numbers of a block have no magnitude", "return tl.maximum(even, odd)", "return even")),
    *mutants("nvfp4_quantize", "every code and tie, bfloat16", "common.pairs",
        ("signs of a row exchanged", "_sign_bytes(w[0], w[1], ASM), _sign_bytes(w[2], w[3], ASM)",
         "_sign_bytes(w[2], w[3], ASM), _sign_bytes(w[0], w[1], ASM)")),
    *mutants("nvfp4_quantize", "random bit patterns, bfloat16, axis -2, 1x16, blocked scales", "common.pairs",
        ("signs of columns exchanged", "_sign_bytes(w[1], w[3], ASM), _sign_bytes(w[5], w[7], ASM)",
         "_sign_bytes(w[0], w[2], ASM), _sign_bytes(w[4], w[6], ASM)")),
    *mutants("mx_quantize", "random bit patterns, 96x160, bfloat16, e2m1, floor, axis -1, plain scales", "common.pairs",
        ("quarters of a block exchanged", "tl.join(tl.join(a, c), tl.join(b, d))",
         "tl.join(tl.join(a, b), tl.join(c, d))"),
        ("one half of a block has no magnitude", "largest_of_rows(c, d, DTYPE, ASM))", "0)")),
    *mutants("nvfp4_quantize", "ragged, axis -2, 1x16, blocked", "tiles.nvfp4_columns",
        ("a program reads its first tile again", "x + m0.to(tl.int64) * stride_m + x_offset", "x + x_offset")),
    *mutants("nvfp4_quantize", "every second amax", "nvfp4_quantize",
        ("stride of amax ignored", "tl.load(amax + e * amax_stride)", "tl.load(amax + e)")),
    *mutants("nvfp4_quantize", "ragged, axis -2, 16x16, plain", "tiles.nvfp4_columns",
        ("scale of a column in place of a square", "    if SQUARE:", "    if False:")),
    *mutants("nvfp4_quantize", "ragged, axis -2, 1x16, plain", "tiles.nvfp4_columns",
        ("codes not transposed", "return columns_of_halves(e0, e1, o0, o1).permute(1, 0, 2).reshape",
         "return columns_of_halves(e0, e1, o0, o1).reshape"),
        ("scales of every tile at those of the first", "* M16 + m0 // 16\n", "* M16\n")),
    *mutants("nvfp4_quantize", "3x48x80, bfloat16, axis -2, 1x16, blocked scales", "common.pairs",
        ("neighbouring columns exchanged", "to(tl.uint32))\n    return even | (odd << 16)",
         "to(tl.uint32))\n    return odd | (even << 16)"),
        ("halves of a block exchanged", "tl.join(tl.join(e0, o0), tl.join(e1, o1))",
         "tl.join(tl.join(e1, o1), tl.join(e0, o0))"),
        ("the last row of a half has no magnitude", "_larger(word, b[3], ASM)", "word"),
        ("signs in a magnitude", "eight(pairs & MAGNITUDES)", "eight(pairs)")),
    *mutants("nvfp4_quantize", "96x160, float16, axis -2, 1x16, blocked scales", "common.pairs",
        ("float16 as bfloat16", "if tl.bfloat16 == DTYPE:", "if True:")),
    *mutants("nvfp4_quantize_stochastic", "every step, float32", "common.nvfp4_numerics",
        ("a byte added one bit too high", "((parts + byte) >> 8)", "((parts + 2 * byte) >> 8)"),
        ("rounded to nearest before the byte", "(-e + _PARTS)).to(tl.int32)", "(-e + _PARTS) + 0.5).to(tl.int32)"),
        ("numbers below 1 as if normal", "power_of_two(magnitude, 0x3F800000)",
         "power_of_two(magnitude, 0x3F000000)")),
    *mutants("nvfp4_quantize_stochastic", "a smaller amax, float32", "common.nvfp4_numerics",
        ("codes drawn without a limit", "6.0 * PART)", "24.0 * PART)")),
    *mutants("nvfp4_quantize_stochastic", "seed 5, offset 4294967303, axis -1", "common.nvfp4_numerics",
        ("bytes of a word reversed", "(tl.arange(0, 4) * 8)", "(24 - tl.arange(0, 4) * 8)")),
    *mutants("nvfp4_quantize_stochastic", "3x48x80, bfloat16, axis -1, seed, plain scales", "nvfp4_quantize",
        ("the same bytes for every matrix", "number + (e * R * C).to(tl.int32)", "number + (e * 0).to(tl.int32)"),
        ("words of the halves exchanged", "bytes_of_words(tl.join(w0, w1)), bytes_of_words(tl.join(w2, w3))",
         "bytes_of_words(tl.join(w2, w3)), bytes_of_words(tl.join(w0, w1))")),
    *mutants("nvfp4_quantize_stochastic", "ragged, axis -2, seed, plain", "tiles.nvfp4_columns",
        ("words of a column exchanged", "tl.join(tl.join(w0, w2), tl.join(w1, w3))",
         "tl.join(tl.join(w0, w1), tl.join(w2, w3))"),
        ("blocks of a column counted down the rows", "(k[None, :] * M16 + run[:, None])",
         "(k[None, :] + run[:, None] * K)")),
    *mutants("nvfp4_quantize_groups", "three groups, amax given, axis -1", "nvfp4_quantize_groups",
        ("amax of the first group", "tl.load(amax + group * amax_stride", "tl.load(amax + group * 0"),
        ("next group read as padding", "token + row < tl.minimum(stop, tokens)", "token + row < tokens")),
    *mutants("nvfp4_quantize_groups", "pad_to 384, axis -1, plain", "common.blocked",
        ("the rows of a part as those of the first", "part * (BLOCKS // (4 * TILES)) +", "part * 0 +")),
    *mutants("nvfp4_quantize_groups", "pad_to 384, axis -1, blocked", "nvfp4_quantize_groups",
        ("a tile between two programs left out", "// parts * span,", "// parts * (span + 1),")),
    *mutants("nvfp4_quantize_groups", "three groups, axis -2", "tiles.largest",
        ("largest of the next tokens too", "tl.minimum(stop, tokens)", "tokens"),
        ("largest without the first rows", "range(0, 128, ROWS)", "range(ROWS, 128, ROWS)")),
    *mutants("nvfp4_quantize_groups", "pad_to 384, axis -2, blocked", "tiles.nvfp4_columns_of_groups",
        ("tiles of groups as those of one matrix", "grouped_tile(m0 // 64, k_tile, group, begin // 64,",
         "grouped_tile(m0 // 64, k_tile, group * 0 + G, begin * 0,")),
    *mutants("nvfp4_quantize_groups", "three groups, 256 columns, axis -2, plain", "tiles.nvfp4_columns_of_groups",
        ("every tile read as a whole one", "tokens_left(token, stop, tokens) >= ROWS",
         "tokens_left(token, stop, tokens) > 0"),
        ("codes of every tile at those of the first", "qdata + k0.to(tl.int64) * R8", "qdata + 0 * R8")),
    *mutants("nvfp4_quantize_groups", "every second amax, axis -1", "common.nvfp4_numerics",
        ("tensor scales of the wrong groups", "tl.load(amax + g * stride", "tl.load(amax + g")),
    *mutants("hadamard_16", "the order of the sums, float32, axis -1", "hadamard_16",
        ("halves added first", "    for _ in tl.static_range(3):  # the distances 1, 2 and 4\n"
         "        low, high = _stage(low), _stage(high)\n",
         "    low, high = low + high, low - high\n    for _ in tl.static_range(3):\n"
         "        low, high = _stage(low), _stage(high)\n    low, high = (low + high) / 2, (low - high) / 2\n")),
    *mutants("hadamard_16", "the matrix with signs, bfloat16, axis -1", "hadamard_16",
        ("signs of the first half twice", "signs, j[None, :] + 8)", "signs, j[None, :])"),
        ("differences reversed", "tl.join(a + b, a - b)", "tl.join(a + b, b - a)")),
    *mutants("hadamard_16", "the matrix itself, float32, axis -2", "hadamard_16",
        ("rows in the wrong order", "return v.permute(0, 1, 5, 2, 3, 4)", "return v.permute(0, 1, 5, 4, 3, 2)")),
    *mutants("hadamard_16", "3x48x80, bfloat16, axis -1", "hadamard_16",
        ("sums not divided by 4", "((low + high) * 0.25)", "((low + high) * 0.5)")),
    *mutants("nvfp4_dequantize", "every code under every scale, times 0.16666666666666666, float32",
        "common.nvfp4_numerics",
        ("scales multiplied first", "(odd * s * T)", "(odd * (s * T))"),
        ("halves of a byte exchanged", "tl.join((even * s", "tl.join((odd * s")),
    *mutants("nvfp4_dequantize", "32x32, axis -2, blocked, float32", "nvfp4_dequantize",
        ("rows of the transpose exchanged", "tl.join(tl.join(x0, x2), tl.join(x1, x3))",
         "tl.join(tl.join(x0, x1), tl.join(x2, x3))")),
    *mutants("nvfp4_gemm", "tensor scales -0.5 and 3.0, float32", "tiles.nvfp4_matmul",
        ("a tensor scale left out", "number *= tl.load(b_number + group * b_number_stride, mask=in_group, other=0.0)",
         "number *= 1.0")),
    *mutants("nvfp4_gemm", "values, K = 129", "tiles.nvfp4_matmul",
        ("the last columns of K dropped", "range(0, columns, 64)", "range(0, columns // 64 * 64, 64)")),
    *mutants("nvfp4_gemm", "64x128x256, plain, float32", "common.nvfp4_numerics",
        ("nibbles of a matmul exchanged", "tl.join((even * factor)", "tl.join((odd * factor)")),
    *mutants("nvfp4_gemm", "64x128x256, blocked, float32", "tiles.nvfp4_matmul",
        ("the first tile of scales alone", "(STEP // 64 * 512 if BLOCKED", "(0 if BLOCKED")),
    *mutants("nvfp4_grouped_gemm", "three groups, blocked, float32", "tiles.nvfp4_matmul",
        ("the tensor scale of the first group", "a_number + group * a_number_stride", "a_number"),
        ("the scales of the first expert", "b_scale += group.to(tl.int64) * b_scale_stride_e", "b_scale += 0")),
    *mutants("nvfp4_grouped_gemm", "rows past the last group, blocked", "tiles.nvfp4_matmul",
        ("rows of no group not written", "end = tl.where(group < E, tl.minimum(stop, M), M)",
         "end = tl.minimum(stop, M)")),
    *mutants("nvfp4_grouped_gemm_wgrad", "groups of 16, blocked", "tiles.nvfp4_matmul",
        ("groups not tiled alone", "rows_before(group, offs, offs_stride, 64, CHUNK) // 64", "first // 64")),
    *mutants("nvfp4_grouped_gemm_wgrad", "values of ragged groups, float32", "tiles.nvfp4_matmul",
        ("groups begin at blocks", "if A_CODES or B_CODES:  # whole blocks", "if True:  # whole blocks")),
    *mutants("fp8_quantize_1x128", "random bit patterns, float32, fp32", "common.fp8_numerics",
        ("approximate division", "q = tl.fma(tl.fma(m, q, _MANTISSA), y, q)", "q = q")),
    *mutants("fp8_quantize_1x128", "zeros, bf16", "common.fp8_numerics",
        ("no eps", "tl.maximum(amax_bits, eps_bits)", "amax_bits")),
    *mutants("fp8_quantize_1x128", "128x384, axis -1, mn-major scale", "fp8_quantize_1x128",
        ("scale_major ignored", '(C, 1) if scale_major == "k" else (1, R)', "(C, 1)")),
]  # fmt: skip

HELION = [
    *mutants("mx_quantize", EDGE, "common.numerics",
        ("scale not rounded up", "(amax_bits + added)", "amax_bits"),
        ("Inf is a number", "amax_bits < 0x7F800000", "amax_bits <= 0x7F800000"),
        ("quotient just above 2^-127", "amax_bits <= exception, 0, byte", "amax_bits <= exception, 1, byte"),
        ("reciprocal of byte 255",
         "torch.where(byte == 255, 0x7FC00000, (254 - byte) << 23)",
         "torch.where(byte == 255, 0x7F800000, (254 - byte) << 23)"),
        ("sign of zero lost", "return x.to(fmt.dtype)", "return (x + 0.0).to(fmt.dtype)"),
        ("codes truncated",
         "return x.to(fmt.dtype)", "return (x.view(torch.int32) & -0x100000).view(torch.float32).to(fmt.dtype)")),
    *mutants("mx_quantize", "every exponent, floor, e4m3fn", "common.numerics",
        ("byte below 0 wraps", ".clamp(min=0)", "")),
    *mutants("mx_quantize", "edge blocks, floor, e5m2", "common.numerics",
        ("cast does not saturate", "if _CLAMP:", "if False:")),
    *mutants("mx_quantize", "96x160, axis -1, blocked", "common.blocked",
        ("tile in row-major order", "((byte >> 2) & 3) * 32 + ((byte >> 4) & 31)", "((byte >> 2) & 127)")),
    *mutants("mx_quantize", "96x160, axis -2, plain", "tiles.mx_columns",
        ("amax of half a block", ".amax(-1).amax(1)", ".amax(-1)[:, 0]")),
    *mutants("mx_quantize_groups", "three groups, axis -1", "mx_quantize_groups",
        ("next group read as padding", "(token >= 0) & (token < stop) &", "(token >= 0) &")),
    *mutants("mx_quantize_rowcol_groups", "rows past the last group", "tiles.mx_rowcol_groups",
        ("next tokens read as padding", "tokens_left(token, stop, tokens_2 - 2)",
         "tokens_left(token, tokens_2 - 2 + 0 * stop, tokens_2 - 2)")),
    *mutants("clamped_swiglu_backward_fp8_quantize_rowcol_groups", "at the limits", "common.clamped_swiglu",
        ("no gradient at the limit itself", "u.abs() <= 7.0", "u.abs() < 7.0"),
        ("gradient of a gate past its limit", "torch.where(g <= 7.0, d_gate, 0.0)", "d_gate"),
        ("d_up in place of d_gate", "hl.join(*both)", "hl.join(*both[::-1])")),
    *mutants("mx_requantize_groups", "three groups", "mx_quantize_groups",
        ("scale of the neighbouring features", "(unit >> 5)", "(unit >> 6)")),
    *mutants("fp8_requantize_k_groups", "mn-major, bfloat16, fp32", "fp8_quantize_k_groups",
        ("products of FP8 codes not rounded", "if bf16 else wide", "if False else wide")),
    *mutants("fp8_transpose_128x128", "3x256x128", "fp8_transpose_128x128",
        ("words of the tile not turned", ".reshape(8, 128, 16).permute(1, 0, 2).reshape(128, 128)",
         ".reshape(128, 128)"),
        ("scales of the first expert", "place = e * scale_stride_e +", "place =")),
    *mutants("mx_quantize", "every code and tie, e2m3", "common.numerics",
        ("ties of FP6 away from even", "((fmt.bias - 128) << m) & 31", "(((fmt.bias - 128) << m) & 31) + 1"),
        ("FP6 subnormals lost", ".clamp(min=(128 - fmt.bias) << 23)", ".clamp(min=1 << 23)"),
        ("four codes in another order", "even | (odd << 6)", "odd | (even << 6)"),
        ("the sign of FP6 lies one bit too high", ">> 26) & 32", ">> 25) & 64"),
        ("the middle word lacks its high byte", "((low >> 16) | (high << 8))", "(low >> 16)")),
    *mutants("mx_quantize", "edge blocks, floor, e2m3", "common.numerics",
        ("FP6 does not saturate", "x.abs().clamp(max=fmt.max)", "x.abs()")),
    *mutants("mx_quantize", "edge blocks, rceil, e2m3", "common.numerics",
        ("NaN keeps its sign in FP6", "torch.where(x == x, code, 31)", "code")),
    *mutants("mx_quantize", "ragged, e2m3, axis -2", "tiles.mx_columns",
        ("the words of a column overlap", "m_tile * rows + 3 * hl.arange", "m_tile * rows + hl.arange")),
    *mutants("mx_quantize_rowcol", "random bit patterns, bfloat16, e2m3, floor", "common.runs",
        ("the words of a row in one place", "hl.store(qdata, [place + i], third", "hl.store(qdata, [place], third")),
    *mutants("mx_grouped_gemm_wgrad", "300 groups", "tiles.k_groups",
        ("the scales of the groups after the first 256 are sought from the start",
         "g, _begins, ends, before = padded_ends(offs", "g, _begins, ends, _ = padded_ends(offs")),
    *mutants("mx_gemm", "scales from 2^-127 to 2^127, bfloat16 by e2m1, plain", "mx_gemm",
        ("the largest weights become Inf", "(even * 2.0**122 * of_pair)", "(even * 2.0**126 * of_pair / 16.0)")),
    *mutants("mx_dequantize", "every e2m3 code under every scale, float32", "common.numerics",
        ("the sign of FP6 is lost", " | (code & 32) << 10", "")),
    *mutants("mx_dequantize", "every other element, e2m3, axis -1, plain", "mx_dequantize",
        ("the stride of FP6 is ignored", "place + i * stride", "place + i")),
    *mutants("mx_dequantize", "every int8 code under every scale, float32", "common.numerics",
        ("int8 counts ones", "q.to(torch.float32) * INT8.smallest_subnormal", "q.to(torch.float32)")),
    *mutants("mx_quantize", "every exponent, ceil, int8", "common.numerics",
        ("a byte of int8 above 254", "byte = byte.clamp(max=254)", "byte = byte"),
        ("no reciprocal of byte 254", "bits = bits.clamp(min=0x400000)", "bits = bits")),
    *mutants("mx_quantize", "edge blocks, floor, int8", "common.numerics",
        ("int8 reaches -128", "x.clamp(-fmt.max, fmt.max) + 1.5", "x.clamp(-2.0, fmt.max) + 1.5"),
        ("a NaN of int8 is 0", "torch.where(x == x, code, 127)", "torch.where(x == x, code, 0)")),
    *mutants("mx_quantize", "every code and tie, e2m1", "common.numerics",
        ("ties of e2m1 away from even", "((22 << 23) + 2)", "((22 << 23) + 3)"),
        ("e2m1 subnormals lost", ".clamp(min=0x3F800000)", ".clamp(min=0x40000000)"),
        ("sign of e2m1 lost", " | ((sign.view(torch.int32) >> 28) & 8)", "")),
    *mutants("mx_quantize_groups", "random bit patterns, bfloat16, e2m1, floor, axis -1", "common.numerics",
        ("NaN of e2m1 is another code", "torch.where(x == x, e2m1_code(x.abs().clamp(max=6.0), x), 7)",
         "e2m1_code(x.abs().clamp(max=6.0), x)")),
    *mutants("mx_quantize_groups", "three groups, e2m1, axis -2, plain", "tiles.mx_columns",
        ("packed columns overlap", "* width + m], codes", "* (width // 2) + m], codes")),
    *mutants("mx_quantize_rowcol", "random bit patterns, bfloat16, e2m1, floor", "tiles.mx_columns",
        ("packed rows overlap", "(e * M + m) * width + k, width", "(e * M + m) * width + k, width // 2")),
    *mutants("mx_dequantize", "every e2m1 code under every scale, float32", "common.numerics",
        ("halves of a byte exchanged", "hl.join(even * 2.0**126, odd", "hl.join(odd * 2.0**126, odd"),
        ("smallest codes lost", "(pairs << 22) & 0x01C00000", "(pairs << 22) & 0x01800000")),
    *mutants("nvfp4_quantize", "every code and tie, float32", "common.numerics",
        ("nibbles exchanged", "(even | (odd << 4))", "(odd | (even << 4))")),
    *mutants("nvfp4_quantize", "inf in a block, float32, 1x16", "common.nvfp4_numerics",
        ("codes of a NaN block with signs",
         "torch.where(wrong.unsqueeze(2), 7, e2m1_code(magnitude.clamp(max=6.0), x, byte))",
         "e2m1_code(magnitude.clamp(max=6.0), x, byte)")),
    *mutants("nvfp4_quantize", "amax 0.0, float32", "common.nvfp4_numerics",
        ("a scale under an h of 0", " | (h == 0)", "")),
    *mutants("nvfp4_quantize", "ragged, axis -1, 16x16, blocked", "nvfp4_quantize",
        ("scale of a row in place of a square", "if square:", "if False:"),
        ("padding of scales not zero", "torch.where(inside, byte, 0)", "torch.where(inside, byte, 0x38)")),
    *mutants("nvfp4_quantize", "every second amax", "nvfp4_quantize",
        ("stride of amax ignored", "e * amax_stride + hl", "e + hl")),
    *mutants("nvfp4_quantize_stochastic", "every step, float32", "common.numerics",
        ("a byte added one bit too high", "((parts + byte) >> 8)", "((parts + 2 * byte) >> 8)")),
    *mutants("nvfp4_quantize_stochastic", "seed 5, offset 4294967303, axis -1", "common.nvfp4_numerics",
        ("bytes of a word reversed", "(hl.arange(4) * 8)", "(24 - hl.arange(4) * 8)")),
    *mutants("nvfp4_quantize_stochastic", "3x48x80, bfloat16, axis -1, seed, plain scales", "nvfp4_quantize",
        ("the same bytes for every matrix", "((e * R + r) * C + c).to", "(r * C + c).to")),
    *mutants("nvfp4_quantize_groups", "three groups, amax given, axis -1", "nvfp4_quantize_groups",
        ("next group read as padding", "(token < last) &", ""),
        ("amax of the first group", "[group * amax_stride]", "[group * 0]")),
    *mutants("hadamard_16", "the matrix with signs, bfloat16, axis -1", "hadamard_16",
        ("differences reversed", "hl.join(a + b, a - b)", "hl.join(a + b, b - a)"),
        ("no signs", "(element * 0 + signs)", "(element * 0)")),
    *mutants("nvfp4_dequantize", "every code under every scale, times 0.16666666666666666, float32",
        "common.nvfp4_numerics",
        ("scales multiplied first", "odd = even * T.unsqueeze(2), odd * T.unsqueeze(2)",
         "odd = even * T.unsqueeze(2), (odd / s) * (s * T.unsqueeze(2))")),
    *mutants("nvfp4_gemm", "values by values, bfloat16", "nvfp4_gemm",
        ("the tensor scale of b left out", "hl.load(first, [place + one]) * hl.load(second, [place + one])",
         "hl.load(first, [place + one])")),
    *mutants("nvfp4_grouped_gemm", "three groups, plain, bfloat16", "nvfp4_grouped_gemm",
        ("the tensor scales of the first group", "torch.where(expert < G, expert, 0))", "expert * 0)")),
    *mutants("nvfp4_grouped_gemm", "three groups, blocked, bfloat16", "tiles.nvfp4_values",
        ("codes of the first block for all", "(r * stride + c * 8).unsqueeze(1)", "(r * stride + c * 0).unsqueeze(1)")),
    *mutants("nvfp4_grouped_gemm_wgrad", "three groups, blocked, bfloat16", "tiles.k_groups",
        ("scales of the first group", "plan[block, 1] = begin", "plan[block, 1] = begin * 0")),
    *mutants("nvfp4_fake_quantize", "96x160, bfloat16, axis -1, 16x16", "nvfp4_fake_quantize",
        ("scale of a row in place of a square", "if square:", "if False:")),
    *mutants("nvfp4_fake_quantize_rowcol_groups", "33, 0 and 67 tokens, bfloat16, signs 0xd7e8, random small",
        "nvfp4_fake_quantize_rowcol_groups",
        ("the same random bytes for columns", "offset + 1))", "offset))"),
        ("columns under the amax of rows", "[of_columns + group]", "[group]")),
    *mutants("nvfp4_fake_quantize_rowcol_groups", "inf in a group, bfloat16, signs none", "common.nvfp4_numerics",
        ("a NaN block as numbers", 'torch.where(wrong, float("nan"), s.to(torch.float32))', "s.to(torch.float32)")),
    *mutants("fp8_quantize_1x128", "zeros, bf16", "common.fp8_numerics",
        ("no eps", "amax_bits.clamp(min=eps_bits)", "amax_bits")),
    *mutants("fp8_quantize_1x128", "128x384, axis -1, k-major scale", "common.fp8_numerics",
        ("reciprocal times 448", "torch.full_like(amax, E4M3FN.max) / amax", "E4M3FN.max / amax")),
    *mutants("fp8_quantize_1x128", "every second column, axis -1", "fp8_quantize_1x128",
        ("stride of columns ignored", "place = r * stride_r + k * stride_k\n", "place = r * stride_r + k\n")),
]  # fmt: skip

INTERPRETED = [
    pytest.param(backend, mutant, id=f"{backend}: {mutant.mistake}")
    for backend, mutants in (("triton", TRITON), ("helion", HELION))
    if os.environ.get(f"{backend.upper()}_INTERPRET") == "1"
    for mutant in mutants
]
_packages = itertools.count()


def write(folder, backend, mutant):
    """Write a backend's files under another package name, with one file changed if there is a mutant.

    Returns that name.
    """
    name = f"mutant_{backend}_{next(_packages)}"
    (folder / name).mkdir()
    for path in (PACKAGE / f"{backend}_kernels").rglob("*.py"):
        text, part = path.read_text(), path.relative_to(PACKAGE / f"{backend}_kernels")
        if mutant and ".".join(part.with_suffix("").parts) == mutant.file:
            assert text.count(mutant.text) == 1, f"{part} has {mutant.text!r} {text.count(mutant.text)} times"
            text = text.replace(mutant.text, mutant.instead)
        (folder / name / part).parent.mkdir(exist_ok=True)
        (folder / name / part).write_text(text.replace(f"mxspec.{backend}_kernels", name))
    return name


def checked(folder, backend, mutant, op, case):
    name = write(folder, backend, mutant)
    fn = getattr(importlib.import_module(f"{name}.{op}"), op)
    [case] = [c for c in cases.of(op).cases() if c.name == case]  # a mutant names a case that is written by hand
    return check.check_case(op, case, fn)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder for packages. To say whose rule a mutant follows takes a hundred calls, and other tests prove it."""
    monkeypatch.setattr(rules, "report", lambda *_: None)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_there_are_thirty_and_each_is_another():
    for mutants in (TRITON, HELION):
        assert len({(m.file, m.text, m.instead) for m in mutants}) == len(mutants)
    assert len(TRITON) + len(HELION) >= 30


def test_each_changes_a_text_that_its_file_has_once():
    for backend, mutants in (("triton", TRITON), ("helion", HELION)):
        for m in mutants:
            file = PACKAGE / f"{backend}_kernels" / f"{m.file.replace('.', '/')}.py"
            assert file.read_text().count(m.text) == 1, f"{file} has {m.text!r} not once"
            assert any(case.name == m.case for case in cases.of(m.op).cases()), f"{m.op} has no case {m.case!r}"


@pytest.mark.turns(8)
@pytest.mark.parametrize(("backend", "mutant"), INTERPRETED)
def test_a_mutant_is_caught(folder, backend, mutant):
    result = checked(folder, backend, mutant, mutant.op, mutant.case)
    assert result.status == "failed"
    assert any(words in result.message for words in ("elements differ", "are further off", "NaN or Inf differ"))


@pytest.mark.turns(8)
@pytest.mark.parametrize(
    ("backend", "op", "case"), list(dict.fromkeys((p.values[0], p.values[1].op, p.values[1].case) for p in INTERPRETED))
)
def test_the_kernel_as_it_is_passes_in_the_same_harness(folder, backend, op, case):
    assert checked(folder, backend, None, op, case).status == "passed"


@only_interpreted
def test_an_index_that_passes_2_to_the_31_is_caught(tmp_path):
    """Runs in a process of its own: an index that wraps may read any address, and may end the process."""
    narrow = Mutant("", op := "mx_quantize_groups", case := "rows far apart, axis -1", op,
                    "offset = (r * stride_m)[:, None]",
                    "offset = ((row + token) * stride_m - token.to(tl.int64) * stride_m)[:, None]")  # fmt: skip

    def run(mutant):
        target = f"{write(tmp_path, 'triton', mutant)}.{op}:{op}"
        command = [sys.executable, "-m", "mxspec", "check", target, "--op", op, "--case", case]
        environment = {**os.environ, "PYTHONPATH": f"{PACKAGE.parent}{os.pathsep}{tmp_path}"}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    assert run(None).returncode == 0
    done = run(narrow)
    # A report, or the signal that ended the process. An exception in the kernel also gives exit code 1, but proves
    # nothing.
    assert done.returncode < 0 or "elements differ" in done.stdout, done.stdout + done.stderr
