"""MX blocks along the columns, or along columns and rows from one read. A program owns a tile of whole blocks.

A tile is RUNS runs of RUN rows each, by COLS columns. It is held as `(RUNS, COLS // PART, PART, RUN)`. Row
`RUN * r + i` is at `[r, ..., i]`.

- Each of the RUN rows is a load of its own, and `tl.join` leaves a loaded value in the thread that loaded it, beside
  the 8 columns of its 16-byte load. With the rows as one dimension, Triton would spread them over the threads.
- So a thread computes most of a column's maximum in its registers.
- The codes of RUN rows of a column are consecutive bytes of the result. They pass through shared memory together, where
  the tile is transposed.
- PART is small enough for a warp to hold whole 32x1 blocks. Shuffles then compute the rest of the maximum.
- Narrow numbers that become e2m1 along the columns alone stay in words of two, as `common/pairs.py` says.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxspec.formats import E2M1, ElementFormat, exponent_rule
from mxspec.triton_kernels.common import fp6
from mxspec.triton_kernels.common.blocked import blocked_shape
from mxspec.triton_kernels.common.groups import chunk, group_of, grouped_tile, tokens_left
from mxspec.triton_kernels.common.launch import UNFUSED, for_device
from mxspec.triton_kernels.common.numerics import (
    CONVERTS,
    e2m1_pairs,
    e2m1_words,
    magnitude_bits,
    reciprocal_scale,
    saturating_cast,
    scale_value,
    shared_exponent,
    signs_of,
    widened,
)
from mxspec.triton_kernels.common.pairs import (
    MAGNITUDES,
    columns_of_halves,
    even_and_odd,
    halves,
    instructions,
    largest_of_pairs,
    paired,
    signs_of_columns,
    unpaired,
)
from mxspec.triton_kernels.common.runs import load8, load16, store8
from mxspec.triton_kernels.common.swiglu import swiglu
from mxspec.triton_kernels.tiles.fp8_both_ways import GRADIENT, SWIGLU, TOKENS
from mxspec.triton_kernels.tiles.swiglu_runs import BOTH, OF_GATE, OF_UP, gradient8

# The race on an H200: benchmarks/results/decisions.md. It also measured 16 warps, 4 warps (which spill), and no strips.
_HOPPER = {
    "col, small": {"RUN": 16, "RUNS": 8, "COLS": 128, "PART": 128, "num_warps": 4},
    "col, large": {"RUN": 16, "RUNS": 16, "COLS": 128, "PART": 128, "num_warps": 8},
    "rowcol": {"RUN": 8, "RUNS": 16, "COLS": 128, "PART": 64, "num_warps": 8},
}
CONFIGS = {(9, 0): _HOPPER, (10, 0): _HOPPER}  # Blackwell: compiled, not run
# FP8 is converted. For e2m1 and FP6, a fused addition rounds a magnitude of at most the largest value, or half of it.
# For e2m1 from narrow dtypes, a fused addition limits the magnitude, too. For int8, an addition rounds. The narrower
# codes are stored in shorter words.
PTX = (
    r"ld\.global\.v4\.b32",
    r"st\.global\.(v4\.b32|b16|b32)|0f(40C00000|40400000|3F740000)",
    r"cvt\.rn\.satfinite\.(e[45]m[32]|e2m1)x2\.f32|0f(40C00000|40400000|3F740000|40F00000|41E00000|3FFE0000)",
)
CODES = tl.constexpr(3)  # beside TOKENS, SWIGLU and GRADIENT: the values of MX codes along the rows


def config(x: Tensor, with_rows: bool, fmt: ElementFormat) -> dict[str, int]:
    """The tile for a tensor.

    Programs are smaller if there are few of them, or if fp32 values or the codes of e2m1 take the registers.
    """
    large = x.dtype != torch.float32 and fmt != E2M1 and x.numel() >= 2**26
    size = "large" if large else "small"
    return for_device(CONFIGS, x.device)["rowcol" if with_rows else f"col, {size}"]


def supports(x: Tensor) -> str | None:
    if x.shape[-1] > 65535 * 32:
        return f"takes K up to {65535 * 32}, the limit of its grid; it is {x.shape[-1]}"
    if x.ndim == 3 and x.shape[0] > 65535:
        return f"takes up to 65535 experts, the limit of its grid; x has {x.shape[0]}"
    return None


@triton.jit
def values16(q, scale, stride, scale_stride, mask, scale_mask, left, E5M2: tl.constexpr, BF16: tl.constexpr):
    """The values of the codes of 16 rows from each pointer on, `(runs, parts, units, 8, 16)`.

    `q` are pointers `(runs, parts, 8 * units)`, and `scale` are pointers `(runs, parts, units)`: a thread loads a scale
    byte for the 8 neighbouring codes that it loads.
    """
    codes = load16(q, stride, mask, left).reshape(scale.shape[0], scale.shape[1], scale.shape[2], 8, 16)
    codes = codes.to(tl.float8e5 if E5M2 else tl.float8e4nv, bitcast=True)
    byte = load16(scale, scale_stride, scale_mask, left).reshape(scale.shape[0], scale.shape[1], scale.shape[2], 1, 16)
    values = codes.to(tl.float32) * scale_value(byte.to(tl.int32))
    return values.to(tl.bfloat16) if BF16 else values


@triton.jit
def _e2m1_of_columns(loaded, EMAX: tl.constexpr, ROUND: tl.constexpr, EXCEPT: tl.constexpr, ASM: tl.constexpr):
    """The words of eight codes of each column, `(COLS, 2 * RUNS)`, and the scale bytes, int32 `(RUNS / 2, COLS)`.

    loaded: `load16` of a tile `(RUNS, COLS)` of a narrow dtype. The numbers stay words, as `common/pairs.py` says.
    """
    RUNS: tl.constexpr = loaded.shape[0]
    COLS: tl.constexpr = loaded.shape[1]
    first, second = halves(paired(loaded))
    b0, c0 = largest_of_pairs(first, loaded.dtype, ASM)
    b1, c1 = largest_of_pairs(second, loaded.dtype, ASM)
    largest = tl.max(columns_of_halves(b0, b1, c0, c1), axis=2).reshape(RUNS // 2, 2, COLS)
    byte = shared_exponent(tl.max(largest, axis=1), EMAX, ROUND, EXCEPT)
    of_run = tl.broadcast_to(byte[:, None, :], (RUNS // 2, 2, COLS)).reshape(RUNS, COLS)
    even, odd = even_and_odd(of_run)
    even_r, odd_r = reciprocal_scale(even, EMAX), reciprocal_scale(odd, EMAX)
    mask: tl.constexpr = 0xFFFFFFFF if ASM == CONVERTS else MAGNITUDES
    e0, o0 = unpaired(first & mask, loaded.dtype)
    e1, o1 = unpaired(second & mask, loaded.dtype)
    e0_signs, o0_signs = signs_of_columns(first, ASM)
    e1_signs, o1_signs = signs_of_columns(second, ASM)
    e0 = e2m1_words(e0, e0_signs, even_r, even == 255, True, ASM)
    e1 = e2m1_words(e1, e1_signs, even_r, even == 255, True, ASM)
    o0 = e2m1_words(o0, o0_signs, odd_r, odd == 255, True, ASM)
    o1 = e2m1_words(o1, o1_signs, odd_r, odd == 255, True, ASM)
    return columns_of_halves(e0, e1, o0, o1).permute(1, 0, 2).reshape(COLS, 2 * RUNS), byte


# `tokens` is not specialized: with tokens == 1 ptxas 12.8 generates wrong code (see mx_quantize_groups).
@triton.jit(do_not_specialize=["tokens"])
def _mx_tile(
    x, q_col, s_col, q_row, s_row, start, end, offs,
    M, K, M32, K32, stride_e, stride_m, stride_k, tokens, G, stride_offs,
    EMAX: tl.constexpr, ROUND: tl.constexpr, EXCEPT: tl.constexpr,
    BLOCKED: tl.constexpr, WITH_ROWS: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
    RUN: tl.constexpr, RUNS: tl.constexpr, COLS: tl.constexpr, PART: tl.constexpr, STRIP: tl.constexpr = 1,
    ALIGN: tl.constexpr = 0, CHUNK: tl.constexpr = 0,
    dh=None, dh_stride_m=None, dh_stride_k=None, half=None, VALUES: tl.constexpr = TOKENS, SPLIT: tl.constexpr = False,
    row_scale=None, row_scale_stride_m=None, row_scale_stride_k=None,
    E5M2: tl.constexpr = False, BF16: tl.constexpr = False, FP6: tl.constexpr = 0, ASM: tl.constexpr = False,
):  # fmt: skip
    # M32 and K32 are M / 32 and K / 32, computed on the host so that Triton keeps its divisible-by-16 specialization.
    # With `offs`, M counts the padded rows of token groups, and `tokens` counts the rows of x.
    PACKED: tl.constexpr = not FP6 and q_col.dtype.element_ty == tl.int32  # e2m1, eight codes in a word
    ROWS: tl.constexpr = RUN * RUNS
    BLOCKS: tl.constexpr = ROWS // 32
    RUNS_OF_BLOCK: tl.constexpr = 32 // RUN
    PARTS: tl.constexpr = COLS // PART
    # Grid order: along the rows first, so that neighbouring programs write neighbouring bytes of the columns' results.
    # With STRIP, a program first runs along STRIP tiles of a row, for the bytes of the rows' results.
    k_tile = tl.program_id(1) * STRIP + tl.program_id(0) % STRIP
    if VALUES == GRADIENT and not SPLIT:  # two neighbouring programs read the same values: one has d_gate, one d_up
        k_tile = k_tile // 2 + k_tile % 2 * (half // COLS)
    m0, k0, e = tl.program_id(0) // STRIP * ROWS, k_tile * COLS, tl.program_id(2).to(tl.int64)
    g, m, k = tl.arange(0, RUNS) * RUN, tl.arange(0, ROWS), tl.arange(0, COLS)
    b = tl.arange(0, PARTS)[:, None] * PART + tl.arange(0, PART)[None, :]
    if WIDE:  # the products with strides are above 2^31, also those in load8 and load16
        g, m, k, b = g.to(tl.int64), m.to(tl.int64), k.to(tl.int64), b.to(tl.int64)
        stride_m = tl.cast(stride_m, tl.int64)
        if dh is not None:
            dh_stride_m = tl.cast(dh_stride_m, tl.int64)
        if row_scale is not None:
            row_scale_stride_m = tl.cast(row_scale_stride_m, tl.int64)
    inside = ((m0 + g < M)[:, None, None] & (k0 + b < K)[None, :, :]) | EVEN  # M is a multiple of 32
    x += e * stride_e + k0.to(tl.int64) * stride_k
    if offs is None:
        x_rows, left = x + m0.to(tl.int64) * stride_m + (g * stride_m)[:, None, None], None
    else:  # groups are padded to multiples of 128, so that these rows belong to one group
        tl.static_assert(ROWS == 128)
        writes = tl.program_id(0) + tl.program_id(1) == 0
        group, token0, stop, begin = group_of(m0, offs, stride_offs, G, start, end, writes, ALIGN, CHUNK)
        token = (token0 + m0 - begin + g)[:, None, None]
        left = tokens_left(token, stop, tokens)
        token = token.to(tl.int64)
        x_rows = x + token * stride_m
    source = b
    if VALUES == GRADIENT:  # a tile may begin in d_gate and end in d_up if SPLIT; 8 neighbours are in one half
        of_up = k0 + b >= half if SPLIT else k0 >= half
        source = b - tl.where(of_up, half, 0).to(tl.int64)
        if SPLIT:
            source = tl.max_contiguous(tl.multiple_of(source, (1, 8)), (1, 8))
        dh += token * dh_stride_m + (k0 * tl.cast(dh_stride_k, tl.int64) + source * dh_stride_k)[None, :, :]
    x_rows += (source * stride_k)[None, :, :]
    if VALUES == TOKENS:
        values = load16(x_rows, stride_m, inside, left) if RUN == 16 else load8(x_rows, stride_m, inside, left, 0, 1)
    elif VALUES == CODES:  # x holds the codes as bytes
        tl.static_assert(RUN == 16)
        unit = tl.arange(0, PARTS)[:, None] * PART + tl.arange(0, PART // 8)[None, :] * 8
        row_scale += token * row_scale_stride_m
        row_scale += ((k0 + unit) // 32).to(tl.int64)[None, :, :] * row_scale_stride_k
        values = values16(
            x_rows, row_scale, stride_m, row_scale_stride_m, inside, (k0 + unit < K)[None, :, :], left, E5M2, BF16
        )
    elif VALUES == SWIGLU:
        up = x_rows + tl.cast(half, tl.int64) * stride_k
        values = swiglu(load8(x_rows, stride_m, inside, left, 0, 1), load8(up, stride_m, inside, left, 0, 1))
    else:
        up = x_rows + tl.cast(half, tl.int64) * stride_k
        if SPLIT:
            values = gradient8(x_rows, up, dh, stride_m, dh_stride_m, inside, left, of_up[None, :, :], BOTH)
        # One branch, so that the registers of the other gradient are not needed.
        elif of_up:
            values = gradient8(x_rows, up, dh, stride_m, dh_stride_m, inside, left, of_up, OF_UP)
        else:
            values = gradient8(x_rows, up, dh, stride_m, dh_stride_m, inside, left, of_up, OF_GATE)
    PAIRED: tl.constexpr = PACKED and RUN == 16 and PARTS == 1 and values.dtype != tl.float32
    if PAIRED:
        words, byte = _e2m1_of_columns(values.reshape(RUNS, COLS, 16), EMAX, ROUND, EXCEPT, ASM)
    else:
        wide = widened(values).reshape(RUNS, PARTS, PART, RUN)  # RUN rows of a column, in the registers of one thread
        # Compute both maxima before any codes, so that the magnitudes free their registers.
        largest = tl.max(tl.max(magnitude_bits(wide).reshape(BLOCKS, RUNS_OF_BLOCK, PARTS, PART, RUN), axis=4), axis=1)
        byte = shared_exponent(largest, EMAX, ROUND, EXCEPT)  # (BLOCKS, PARTS, PART)
    # All loads come first: the compiler does not move a load past a store that may write to its address.
    if WITH_ROWS:
        tl.static_assert(RUN == 8 and not FP6)
        blocks = wide.reshape(RUNS, PARTS, PART // 32, 32, RUN)
        row_byte = shared_exponent(tl.max(magnitude_bits(blocks), axis=3), EMAX, ROUND, EXCEPT)
        q = blocks * reciprocal_scale(row_byte, EMAX)[:, :, :, None, :]
        if PACKED:
            q = e2m1_pairs(q.permute(0, 1, 2, 4, 3), ASM).permute(0, 1, 2, 4, 3)
            byte_of_row = tl.arange(0, PARTS)[:, None] * (PART // 2) + tl.arange(0, PART // 2)[None, :]
            in_row = ((m0 + g < M)[:, None, None] & (k0 + 2 * byte_of_row < K)[None, :, :]) | EVEN
            at = q_row + ((e * M + m0) * K + k0) // 2 + ((g * (K // 2))[:, None, None] + byte_of_row[None, :, :])
            store8(at, K // 2, q.reshape(RUNS, PARTS, PART // 2, 2, 2, 2), in_row, None, 0, 1)
        else:
            q = q.reshape(RUNS, PARTS, PART, 2, 2, 2)
            store8(q_row + (e * M + m0) * K + k0 + ((g * K)[:, None, None] + b[None, :, :]), K, q, inside, None, 0, 1)

    if not PACKED:
        q = wide.reshape(BLOCKS, RUNS_OF_BLOCK, PARTS, PART, RUN) * reciprocal_scale(byte, EMAX)[:, None, :, :, None]
    if FP6:  # the rows of a run are three words
        words = fp6.in_threes(fp6.encoded(q, FP6)).permute(2, 3, 0, 1, 4).reshape(COLS, RUNS, 4)
        run, width = tl.arange(0, RUNS), M // RUN * 3
        word = (3 * run)[:, None] + tl.arange(0, 4)[None, :]
        owned = ((k0 + k < K)[:, None] & (m0 + RUN * run < M)[None, :]) | EVEN
        owned = owned[:, :, None] & (tl.arange(0, 4) < 3)[None, None, :]
        at = q_col + (e * K + k0) * width + m0 // RUN * 3
        tl.store(at + ((k * width)[:, None, None] + word[None, :, :]), words, mask=owned)
    elif PACKED:
        word_of_column = tl.arange(0, ROWS // 8)
        owned = ((k0 + k < K)[:, None] & (m0 + 8 * word_of_column < M)[None, :]) | EVEN
        if not PAIRED:
            wide = wide.reshape(BLOCKS, RUNS_OF_BLOCK, PARTS, PART, RUN // 8, 8)
            of_run = byte[:, None, :, :, None]
            words = e2m1_words(
                wide, signs_of(wide), reciprocal_scale(of_run, EMAX), of_run == 255, values.dtype != tl.float32, ASM
            )
            words = words.permute(2, 3, 0, 1, 4).reshape(COLS, ROWS // 8)
        at = q_col + ((e * K + k0) * M + m0) // 8 + (k[:, None] * (M // 8) + word_of_column[None, :])
        tl.store(at, words, mask=owned)
    else:
        owned = ((k0 + k < K)[:, None] & (m0 + m < M)[None, :]) | EVEN
        q = saturating_cast(q, q_col.dtype.element_ty).permute(2, 3, 0, 1, 4).reshape(COLS, ROWS)
        tl.store(q_col + (e * K + k0) * M + m0 + (k[:, None] * M + m[None, :]), q, mask=owned)
    byte, c = byte.to(tl.uint8).reshape(BLOCKS, COLS), tl.arange(0, BLOCKS)  # c: columns of s_col, (K, M32)
    if (
        BLOCKED
    ):  # COLS is 128, the rows of one tile: (c // 4, c % 4, k // 32, k % 32) -> (c // 4, k % 32, k // 32, c % 4)
        tiles = byte.reshape(BLOCKS // 4, 4, 4, 32).permute(0, 3, 2, 1).reshape(BLOCKS * 128)
        place, col_tiles = tl.arange(0, BLOCKS * 128), tl.cdiv(M32, 4)
        if offs is None:
            s_col += ((e * tl.cdiv(K, 128) + k_tile) * col_tiles + m0 // 128) * 512
            tl.store(s_col + place, tiles, mask=(m0 // 128 + place // 512 < col_tiles) | EVEN)
        else:
            size = (stop - token0 + (ALIGN - 1)) // ALIGN * (ALIGN // 128)
            n, there = grouped_tile(m0 // 128, k_tile, group, begin // 128, size, G, tl.cdiv(K, 128), col_tiles + G)
            tl.store(s_col + n * 512 + place, tiles, mask=there)
    else:
        owned = ((k0 + k < K)[:, None] & (m0 // 32 + c < M32)[None, :]) | EVEN
        place = (e * K + k0) * M32 + m0 // 32 + (k[:, None] * M32 + c[None, :])
        tl.store(s_col + place, byte.permute(1, 0), mask=owned)

    if WITH_ROWS:
        c = tl.arange(0, COLS // 32)
        byte = row_byte.to(tl.uint8).permute(0, 3, 1, 2).reshape(ROWS, COLS // 32)
        if BLOCKED:  # (r // 128, r % 128 // 32, r % 32, c) -> (r // 128, r % 32, r % 128 // 32, c)
            tiles = byte.reshape(ROWS // 128, 4, 32, 4).permute(0, 2, 1, 3).reshape(ROWS // 128, 512)
            row_tile, row_tiles = (m0 // 128 + tl.arange(0, ROWS // 128))[:, None], tl.cdiv(M, 128)
            tile = ((e * row_tiles + row_tile) * tl.cdiv(K32, 4) + k_tile) * 512
            if offs is not None:  # the scales have up to G rows of tiles more than the codes; there may be no columns
                row_tiles = tl.where(k0 < K, row_tiles + G, 0)
            tl.store(s_row + tile + tl.arange(0, 512)[None, :], tiles, mask=(row_tile < row_tiles) | EVEN)
        else:
            owned = ((m0 + m < M)[:, None] & (k0 // 32 + c < K32)[None, :]) | EVEN
            place = (e * M + m0) * K32 + k0 // 32 + (m[:, None] * K32 + c[None, :])
            tl.store(s_row + place, byte, mask=owned)


def empty_codes(x: Tensor, shape: tuple[int, ...], fmt: ElementFormat, words: bool = True) -> Tensor:
    """Memory for codes of this shape, e2m1 in words of eight or in bytes. The last size is a multiple of 32."""
    if fmt == E2M1 and words:
        return x.new_empty((*shape[:-1], shape[-1] // 8), dtype=torch.int32)
    return x.new_empty((*shape[:-1], shape[-1] // fmt.per_byte), dtype=fmt.storage_dtype)


def mx_tile(
    x: Tensor, fmt: ElementFormat, scaling: str, scale_layout: str, with_rows: bool = False
) -> tuple[Tensor, ...]:
    """`(q_col, s_col)` of x; or `(q_row, s_row, q_col, s_col)`, if `with_rows`.

    The codes q_col are stored as those of the transpose, `(..., K, M)`.
    """
    *lead, M, K = x.shape
    E, blocked = lead[0] if lead else 1, scale_layout == "blocked"
    chosen = config(x, with_rows, fmt)
    rows, cols = chosen["RUN"] * chosen["RUNS"], chosen["COLS"]

    def outputs(R: int, C: int, words: bool) -> tuple[Tensor, Tensor]:
        row_tiles, col_tiles = blocked_shape(R, C // 32)
        scale_shape = (512 * row_tiles * col_tiles,) if blocked else (R, C // 32)
        if fmt in fp6.FORMATS:  # a word has a third of the codes of a run
            codes = fp6.empty(x, (*lead, R, C), torch.int32 if chosen["RUN"] == 16 else torch.int16)
        else:
            codes = empty_codes(x, (*lead, R, C), fmt, words)
        return codes, x.new_empty((*lead, *scale_shape), dtype=torch.uint8)

    q_col, s_col = outputs(K, M, True)
    q_row, s_row = outputs(M, K, False) if with_rows else (q_col, s_col)
    even, k_tiles = M % rows == 0 and K % cols == 0, -(-K // cols)
    strip = math.gcd(k_tiles, 8) if with_rows else 1  # 8 tiles write whole sectors of plain scales
    wide = max(rows * max(x.stride(-2), K), cols * max(x.stride(-1), M)) >= 2**31
    if x.numel():
        grid = (-(-M // rows) * strip, k_tiles // strip, E)
        _mx_tile[grid](
            x, q_col, s_col, q_row, s_row, None, None, None,
            M, K, M // 32, K // 32, x.stride(0) if lead else 0, *x.stride()[-2:], M, 0, 0,
            *exponent_rule(fmt, scaling, x.dtype), blocked, with_rows, even, wide, **chosen, STRIP=strip,
            FP6=fp6.mantissa_bits(fmt), ASM=instructions(x.device), **UNFUSED,
        )  # fmt: skip
    q_row, q_col = (fmt.as_codes(q.view(fmt.storage_dtype)) for q in (q_row, q_col))
    columns = q_col, s_col.view(torch.float8_e8m0fnu)
    return (q_row, s_row.view(torch.float8_e8m0fnu), *columns) if with_rows else columns


def launch_groups(
    x: Tensor, q_col: Tensor, s_col: Tensor, start: Tensor, end: Tensor, offs: Tensor, pad_to: int, scaled_rows: int,
    constants: tuple[int, int, int, bool], rows_too: tuple[Tensor, Tensor] | None = None, values: int = TOKENS.value,
    dh: Tensor | None = None, row_scale: Tensor | None = None, e5m2: bool = False, bf16: bool = False,
) -> None:  # fmt: skip
    """Quantize the columns of token groups, padded; with `rows_too`, the codes and scales of the rows, these too.

    `values` is 0 for x, 1 for SwiGLU of x, 2 for the gradient of SwiGLU from x and dh, 3 for the values of the codes in
    x, which are bytes, under `row_scale`. `e5m2` says which codes, and `bf16` how their values are rounded.
    `scaled_rows` counts all rows with scales, which may be more than q_col has.
    """
    tokens, K, G = x.shape[0], q_col.shape[0], offs.shape[0]
    R = q_col.shape[1] * (8 if q_col.dtype == torch.int32 else 1)  # e2m1 has eight codes in a word
    chosen = for_device(CONFIGS, x.device)["rowcol" if rows_too else "col, small"]  # its 128 rows belong to one group
    rows, cols = chosen["RUN"] * chosen["RUNS"], chosen["COLS"]
    strides = tuple(t.stride() for t in (x, dh, row_scale) if t is not None)
    wide = max(rows * max(K, *(m for m, _ in strides)), cols * max(R, *(k for _, k in strides))) >= 2**31
    more: dict[str, Any] = {}
    if row_scale is not None:
        more = {"VALUES": values, "E5M2": e5m2, "BF16": bf16, "row_scale": row_scale}
        more["row_scale_stride_m"], more["row_scale_stride_k"] = row_scale.stride()
    elif values != TOKENS.value and K:
        half = x.shape[1] // 2
        more = {"half": half, "VALUES": values}
    if dh is not None and K:
        more |= {"dh": dh, "dh_stride_m": dh.stride(0), "dh_stride_k": dh.stride(1), "SPLIT": half % cols != 0}
    if scaled_rows:
        # At least one program across: with no columns, start and end are still written.
        k_tiles = max(1, -(-K // cols))
        strip = math.gcd(k_tiles, 8) if rows_too else 1
        grid = (-(-scaled_rows // rows) * strip, k_tiles // strip, 1)
        _mx_tile[grid](
            x, q_col, s_col, *(rows_too or (q_col, s_col)), start, end, offs, R, K, R // 32, K // 32, 0, *x.stride(),
            tokens, G, offs.stride(0), *constants, rows_too is not None, False, wide, **chosen, STRIP=strip,
            ALIGN=pad_to, CHUNK=chunk(G), ASM=instructions(x.device), **more, **UNFUSED,
        )  # fmt: skip
