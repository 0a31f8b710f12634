"""MX along the columns, or along columns and rows from one read: a program owns a tile of whole blocks.

A tile is 16 * GROUPS rows by COLS columns, held as `(16, GROUPS, COLS)`: row `16 * group + i` at `[i, group]`. With the
16 rows first, Triton gives them to one thread, beside the 8 columns of its 16-byte loads; with the rows in their own
order it would spread them over the threads. So most of a column's maximum is taken in registers, and the codes of
16 rows of a column, which are consecutive bytes of the result, turn through shared memory 16 bytes at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxspec.formats import ElementFormat
from mxspec.triton_kernels._blocked import blocked_shape
from mxspec.triton_kernels._groups import chunk, group_of, grouped_tile
from mxspec.triton_kernels._launch import for_device
from mxspec.triton_kernels._numerics import (
    fp32_bits,
    magnitude_bits,
    reciprocal_scale,
    saturating_cast,
    shared_exponent,
)

# RUN rows of a column in one thread's registers, GROUPS of those, COLS columns. H200, plain and blocked scales, as
# fractions of a bare cast's rate: col, small at 8192 x 2048 0.87, 0.90 (large 0.85, 0.87), large at 32768 x 7168 0.94,
# 0.96 (small 0.93, 0.95); of a copy's: rowcol at 8192 x 2048 0.75, 0.78, at 32768 x 7168 0.72, 0.81. With 4 warps and
# 168 registers the last would be 0.84, and spill 24 bytes.
_HOPPER = {
    "col, small": {"RUN": 16, "GROUPS": 8, "COLS": 128, "num_warps": 4},
    "col, large": {"RUN": 16, "GROUPS": 16, "COLS": 128, "num_warps": 8},
    "rowcol": {"RUN": 8, "GROUPS": 16, "COLS": 128, "num_warps": 8},
}
CONFIGS = {(9, 0): _HOPPER, (10, 0): _HOPPER}  # Blackwell: compiled, not run


def config(x: Tensor, with_rows: bool) -> dict[str, int]:
    """The tile for a tensor: smaller programs where there are few of them, or where fp32 takes the registers."""
    large = x.numel() >= 2**26 and x.dtype != torch.float32
    return for_device(CONFIGS, x.device)["rowcol" if with_rows else "col, large" if large else "col, small"]


def supports(x: Tensor) -> str | None:
    if x.shape[-1] > 65535 * 32:
        return f"has a grid of up to 65535 tiles along K, which may be up to {65535 * 32}; it is {x.shape[-1]}"
    if x.ndim == 3 and x.shape[0] > 65535:
        return f"has a grid of up to 65535 experts; x has {x.shape[0]}"
    return None


@triton.jit
def _load1(x, mask, left, ROW: tl.constexpr):
    if left is None:
        return tl.load(x, mask=mask, other=0)
    else:  # of the rows from each pointer on only so many are there
        return tl.load(x, mask=mask & (left > ROW)[:, None], other=0)


@triton.jit
def _load2(x, stride, mask, left, ROW: tl.constexpr, STEP: tl.constexpr):
    return tl.join(_load1(x, mask, left, ROW), _load1(x + stride, mask, left, ROW + STEP))


@triton.jit
def _load4(x, stride, mask, left, ROW: tl.constexpr, STEP: tl.constexpr):
    even = _load2(x, 2 * stride, mask, left, ROW, 2 * STEP)
    return tl.join(even, _load2(x + stride, 2 * stride, mask, left, ROW + STEP, 2 * STEP))


@triton.jit
def _load8(x, stride, mask, left, ROW: tl.constexpr, STEP: tl.constexpr):
    even = _load4(x, 2 * stride, mask, left, ROW, 2 * STEP)
    return tl.join(even, _load4(x + stride, 2 * stride, mask, left, ROW + STEP, 2 * STEP))


@triton.jit
def _load16(x, stride, mask, left):
    """The 16 rows from each pointer on, `(GROUPS, COLS, 2, 2, 2, 2)`, in the registers of the thread of the pointer."""
    return tl.join(_load8(x, 2 * stride, mask, left, 0, 2), _load8(x + stride, 2 * stride, mask, left, 1, 2))


@triton.jit
def _quantize1(values, q, mask, MAX: tl.constexpr, EMAX: tl.constexpr, MANTISSA: tl.constexpr, SCALING: tl.constexpr):
    """Quantize and store one row of each group as 1x32 blocks; its scale bytes."""
    blocks = values.reshape(values.shape[0], values.shape[1] // 32, 32)
    largest = tl.max(magnitude_bits(blocks), axis=2)
    byte = shared_exponent(fp32_bits(largest, values.dtype), MAX, EMAX, MANTISSA, SCALING)
    codes = saturating_cast(blocks.to(tl.float32) * reciprocal_scale(byte)[:, :, None], q.dtype.element_ty)
    tl.store(q, codes.reshape(values.shape[0], values.shape[1]), mask=mask)
    return byte.to(tl.uint8)


@triton.jit
def _quantize2(values, q, stride, mask, MAX: tl.constexpr, EMAX: tl.constexpr, MANTISSA: tl.constexpr,
               SCALING: tl.constexpr):  # fmt: skip
    even, odd = tl.split(values)
    b0 = _quantize1(even, q, mask, MAX, EMAX, MANTISSA, SCALING)
    return tl.join(b0, _quantize1(odd, q + stride, mask, MAX, EMAX, MANTISSA, SCALING))


@triton.jit
def _quantize4(values, q, stride, mask, MAX: tl.constexpr, EMAX: tl.constexpr, MANTISSA: tl.constexpr,
               SCALING: tl.constexpr):  # fmt: skip
    even, odd = tl.split(values)
    b0 = _quantize2(even, q, 2 * stride, mask, MAX, EMAX, MANTISSA, SCALING)
    return tl.join(b0, _quantize2(odd, q + stride, 2 * stride, mask, MAX, EMAX, MANTISSA, SCALING))


@triton.jit
def _quantize8(values, q, stride, mask, MAX: tl.constexpr, EMAX: tl.constexpr, MANTISSA: tl.constexpr,
               SCALING: tl.constexpr):  # fmt: skip
    even, odd = tl.split(values)
    b0 = _quantize4(even, q, 2 * stride, mask, MAX, EMAX, MANTISSA, SCALING)
    return tl.join(b0, _quantize4(odd, q + stride, 2 * stride, mask, MAX, EMAX, MANTISSA, SCALING))


@triton.jit
def _quantize16(values, q, stride, mask, MAX: tl.constexpr, EMAX: tl.constexpr, MANTISSA: tl.constexpr,
                SCALING: tl.constexpr):  # fmt: skip
    even, odd = tl.split(values)
    b0 = _quantize8(even, q, 2 * stride, mask, MAX, EMAX, MANTISSA, SCALING)
    return tl.join(b0, _quantize8(odd, q + stride, 2 * stride, mask, MAX, EMAX, MANTISSA, SCALING))


@triton.jit
def _mx_tile(
    x, q_col, s_col, q_row, s_row, start, end, offs,
    M, K, stride_e, stride_m, stride_k, tokens, G, stride_offs,
    MAX: tl.constexpr, EMAX: tl.constexpr, MANTISSA: tl.constexpr, SCALING: tl.constexpr,
    BLOCKED: tl.constexpr, WITH_ROWS: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
    RUN: tl.constexpr, GROUPS: tl.constexpr, COLS: tl.constexpr,
    ALIGN: tl.constexpr = 0, CHUNK: tl.constexpr = 0,
):  # fmt: skip
    # With `offs`, M counts the padded rows of token groups and `tokens` those of x.
    ROWS: tl.constexpr = RUN * GROUPS
    BLOCKS: tl.constexpr = ROWS // 32
    # Along the rows first: neighbouring programs then write neighbouring bytes of the columns' results.
    m0, k0, e = tl.program_id(0) * ROWS, tl.program_id(1) * COLS, tl.program_id(2).to(tl.int64)
    g, b, m = tl.arange(0, GROUPS) * RUN, tl.arange(0, COLS), tl.arange(0, ROWS)
    if WIDE:  # the products with strides pass 2^31
        g, b, m = g.to(tl.int64), b.to(tl.int64), m.to(tl.int64)
    inside = ((m0 + g < M)[:, None] & (k0 + b < K)[None, :]) | EVEN  # M is a multiple of 32
    x += e * stride_e + k0.to(tl.int64) * stride_k
    if offs is None:
        x_rows, left = x + m0.to(tl.int64) * stride_m + g[:, None] * stride_m + (b * stride_k)[None, :], None
    else:  # groups are padded to multiples of 128, so that 128 rows are in one
        unit = m0 + tl.arange(0, ROWS // 128) * 128
        writes = tl.program_id(0) + tl.program_id(1) == 0
        token0, stop, begin, until = group_of(unit, offs, stride_offs, G, start, end, writes, ALIGN, CHUNK)
        token = (token0 + unit - begin)[:, None] + (tl.arange(0, 128 // RUN) * RUN)[None, :]
        left = tl.where(token >= 0, tl.minimum(stop, tokens)[:, None] - token, 0).reshape(GROUPS)
        x_rows = x + (token.reshape(GROUPS).to(tl.int64) * stride_m)[:, None] + (b * stride_k)[None, :]
    rows = _load16(x_rows, stride_m, inside, left) if RUN == 16 else _load8(x_rows, stride_m, inside, left, 0, 1)
    if WITH_ROWS:  # after all loads: a load does not pass a store that may change what it reads
        q_rows = q_row + (e * M + m0) * K + k0 + g[:, None] * K + b[None, :]
        if RUN == 16:
            row_byte = _quantize16(rows, q_rows, K, inside, MAX, EMAX, MANTISSA, SCALING)
        else:
            row_byte = _quantize8(rows, q_rows, K, inside, MAX, EMAX, MANTISSA, SCALING)
    values = rows.reshape(GROUPS, COLS, RUN)  # RUN rows of a column, in the registers of one thread

    # 32x1: 32 // RUN groups are a block.
    C, c = M // 32, tl.arange(0, BLOCKS)  # the scale of the transpose: (K, C)
    PARTS: tl.constexpr = 32 // RUN
    largest = tl.max(tl.max(magnitude_bits(values), axis=2).reshape(BLOCKS, PARTS, COLS), axis=1)
    byte = shared_exponent(fp32_bits(largest, values.dtype), MAX, EMAX, MANTISSA, SCALING)  # (c, b)
    factor = tl.broadcast_to(reciprocal_scale(byte)[:, None, :], (BLOCKS, PARTS, COLS)).reshape(GROUPS, COLS, 1)
    q = saturating_cast(values.to(tl.float32) * factor, q_col.dtype.element_ty)
    q = q.permute(1, 0, 2).reshape(COLS, ROWS)
    owned = ((k0 + b < K)[:, None] & (m0 + m < M)[None, :]) | EVEN
    tl.store(q_col + (e * K + k0) * M + m0 + (b[:, None] * M + m[None, :]), q, mask=owned)
    if (
        BLOCKED
    ):  # COLS is 128, the rows of one tile: (c // 4, c % 4, b // 32, b % 32) -> (c // 4, b % 32, b // 32, c % 4)
        tiles = byte.to(tl.uint8).reshape(BLOCKS // 4, 4, 4, 32).permute(0, 3, 2, 1).reshape(BLOCKS * 128)
        place, col_tiles = tl.arange(0, BLOCKS * 128), tl.cdiv(C, 4)
        if offs is None:
            s_col += ((e * tl.cdiv(K, 128) + tl.program_id(1)) * col_tiles + m0 // 128) * 512
            tl.store(s_col + place, tiles, mask=(m0 // 128 + place // 512 < col_tiles) | EVEN)
        else:
            n, there = grouped_tile(
                unit // 128, tl.program_id(1), begin // 128, until // 128, tl.cdiv(K, 128), col_tiles + G
            )
            s_cols = s_col + (n * 512)[:, None] + tl.arange(0, 512)[None, :]
            tl.store(s_cols, tiles.reshape(BLOCKS // 4, 512), mask=there[:, None])
    else:
        owned = ((k0 + b < K)[:, None] & (m0 // 32 + c < C)[None, :]) | EVEN
        place = (e * K + k0) * C + m0 // 32 + (b[:, None] * C + c[None, :])
        tl.store(s_col + place, byte.to(tl.uint8).permute(1, 0), mask=owned)

    if WITH_ROWS:
        C, c = K // 32, tl.arange(0, COLS // 32)
        byte = row_byte.reshape(GROUPS, COLS // 32, RUN)
        if BLOCKED:  # row RUN * g + i is (r // 128, r % 128 // 32, r % 32) -> (r // 128, r % 32, r % 128 // 32, c)
            tiles = byte.permute(0, 2, 1).reshape(ROWS // 128, 4, 32, 4).permute(0, 2, 1, 3).reshape(ROWS // 128, 512)
            row_tile = (m0 // 128 + tl.arange(0, ROWS // 128))[:, None]
            tile = ((e * tl.cdiv(M, 128) + row_tile) * tl.cdiv(C, 4) + tl.program_id(1)) * 512
            tl.store(s_row + tile + tl.arange(0, 512)[None, :], tiles, mask=(row_tile < tl.cdiv(M, 128)) | EVEN)
        else:
            owned = ((m0 + m < M)[:, None] & (k0 // 32 + c < C)[None, :]) | EVEN
            place = (e * M + m0) * C + k0 // 32 + (m[:, None] * C + c[None, :])
            tl.store(s_row + place, byte.permute(0, 2, 1).reshape(ROWS, COLS // 32), mask=owned)


def mx_tile(
    x: Tensor, fmt: ElementFormat, scaling: str, scale_layout: str, with_rows: bool = False
) -> tuple[Tensor, ...]:
    """`(q_col, s_col)` of x, its codes as those of the transpose, `(..., K, M)`; or `(q_row, s_row, q_col, s_col)`."""
    *lead, M, K = x.shape
    E, blocked = lead[0] if lead else 1, scale_layout == "blocked"
    chosen = config(x, with_rows)
    rows, cols = chosen["RUN"] * chosen["GROUPS"], chosen["COLS"]

    def outputs(R: int, C: int) -> tuple[Tensor, Tensor]:
        row_tiles, col_tiles = blocked_shape(R, C // 32)
        scale_shape = (512 * row_tiles * col_tiles,) if blocked else (R, C // 32)
        return x.new_empty((*lead, R, C), dtype=fmt.dtype), x.new_empty((*lead, *scale_shape), dtype=torch.uint8)

    q_col, s_col = outputs(K, M)
    q_row, s_row = outputs(M, K) if with_rows else (q_col, s_col)
    even = M % rows == 0 and K % cols == 0
    wide = max(rows * max(x.stride(-2), K), cols * max(x.stride(-1), M)) >= 2**31
    if x.numel():
        grid = (-(-M // rows), -(-K // cols), E)
        _mx_tile[grid](
            x, q_col, s_col, q_row, s_row, None, None, None,
            M, K, x.stride(0) if lead else 0, *x.stride()[-2:], M, 0, 0,
            fmt.max, fmt.emax, fmt.mantissa_bits, scaling, blocked, with_rows, even, wide, **chosen,
        )  # fmt: skip
    columns = q_col, s_col.view(torch.float8_e8m0fnu)
    return (q_row, s_row.view(torch.float8_e8m0fnu), *columns) if with_rows else columns


def launch_groups(
    x: Tensor, q_col: Tensor, s_col: Tensor, start: Tensor, end: Tensor, offs: Tensor, pad_to: int, scaled_rows: int,
    numerics: tuple[float, int, int, str, bool],
) -> None:  # fmt: skip
    """The columns of token groups, padded; `scaled_rows`, all that have scales, may be more than q_col has."""
    (tokens, K), R = x.shape, q_col.shape[1]
    chosen = config(x, with_rows=False)
    rows, cols = chosen["RUN"] * chosen["GROUPS"], chosen["COLS"]
    wide = max(rows * max(x.stride(0), K), cols * max(x.stride(1), R)) >= 2**31
    if scaled_rows:
        grid = (-(-scaled_rows // rows), max(1, -(-K // cols)), 1)  # one if only start and end are written
        _mx_tile[grid](
            x, q_col, s_col, q_col, s_col, start, end, offs, R, K, 0, *x.stride(), tokens, offs.shape[0],
            offs.stride(0), *numerics, False, False, wide, **chosen, ALIGN=pad_to, CHUNK=chunk(offs.shape[0]),
        )  # fmt: skip
