"""NVFP4 matmuls in plain Triton: a program computes one tile of one group's output.

Each operand is codes with e4m3 scales, or bfloat16 values. Codes become bfloat16 values in registers, which is exact.
A program sums 64 columns of K at a time in fp32, in ascending order. It multiplies the sums by the tensor scales last.

Blackwell's tensor cores take codes and e4m3 scales directly, if both operands are codes. No GPU has run that.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxspec.formats import NVFP4_BLOCK_SIZE
from mxspec.triton_kernels.common.groups import chunk, group_of, rows_before, tokens_of
from mxspec.triton_kernels.common.launch import FUSED, for_device
from mxspec.triton_kernels.common.nvfp4_numerics import exact_values
from mxspec.triton_kernels.common.tile_order import swizzle

# A tile has 128 rows, as a tile of the blocked layout, and groups are padded to 128 rows in that layout. So the scales
# of a tile's rows are in one row of scale tiles. SCALED: the tensor cores multiply the scales, 128 columns at a time.
_HOPPER = {"BLOCK_M": 128, "BLOCK_N": 64, "SWIZZLE": 8, "SCALED": False, "num_warps": 8, "num_stages": 3}
CONFIGS = {(9, 0): _HOPPER, (10, 0): _HOPPER | {"BLOCK_N": 128, "SCALED": True}}
PTX = {
    "sm90": (r"wgmma\.mma_async.*\.f32\.bf16\.bf16",),
    "sm100": (r"tcgen05\.mma.*\.kind::(mxf4nvf4\.block_scale|f16)",),
}


@triton.jit
def _scale_rows(row, stride_r, BLOCKED: tl.constexpr):
    """The offset of the scales of rows. `stride_r` is the stride of a row, or of a row of tiles if BLOCKED."""
    return row // 128 * stride_r + row % 32 * 16 + row % 128 // 32 * 4 if BLOCKED else row * stride_r


@triton.jit
def _scales(at, in_rows, left, stride_c, BLOCKED: tl.constexpr, BLOCKS: tl.constexpr):
    """The scales of BLOCKS blocks from pointers to the first scale of each row, as e4m3. Past `left` they are 0."""
    c = tl.arange(0, BLOCKS)
    column = (c // 4 * 512 + c % 4).to(tl.int64) if BLOCKED else c.to(tl.int64) * stride_c
    byte = tl.load(at[:, None] + column[None, :], mask=in_rows[:, None] & (c * 16 < left)[None, :], other=0)
    return byte.to(tl.float8e4nv, bitcast=True)


@triton.jit
def _operand(
    at, stride_k, scale_at, scale_stride_c, in_rows, left, CODES: tl.constexpr, BLOCKED: tl.constexpr,
):  # fmt: skip
    """The bfloat16 values of 64 columns of K. `at` and `scale_at` are pointers to the first column of each row."""
    if CODES:
        pair = tl.arange(0, 32)
        q = tl.load(at[:, None] + pair[None, :], mask=in_rows[:, None] & (pair * 2 < left)[None, :], other=0)
        s = _scales(scale_at, in_rows, left, scale_stride_c, BLOCKED, 4).to(tl.float32)
        s = tl.broadcast_to(s[:, :, None], (at.shape[0], 4, 8)).reshape(at.shape[0], 32)
        return exact_values(q, s)
    else:
        k = tl.arange(0, 64)
        mask = in_rows[:, None] & (k < left)[None, :]
        return tl.load(at[:, None] + k.to(tl.int64)[None, :] * stride_k, mask=mask, other=0.0)


@triton.jit
def _past(scale_at, stride_c, STEP: tl.constexpr, BLOCKED: tl.constexpr):
    """Pointers to the scales of the next STEP columns of K."""
    return scale_at + (STEP // 64 * 512 if BLOCKED else tl.cast(stride_c, tl.int64) * (STEP // 16))


@triton.jit
def _tiles(
    a, a_stride_r, a_stride_k, a_scale, a_scale_stride_r, a_scale_stride_c, a_number, a_number_stride,
    b, b_stride_e, b_stride_r, b_stride_k,
    b_scale, b_scale_stride_e, b_scale_stride_r, b_scale_stride_c, b_number, b_number_stride,
    out, offs, offs_stride, E, M, N, K, row_tiles,
    GROUPED: tl.constexpr, A_CODES: tl.constexpr, B_CODES: tl.constexpr, BLOCKED: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SWIZZLE: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Compute one tile of the output. For K-groups, the row tiles of each group follow one another.

    `top` is the tile's first row of a and of the output, and `tile` counts rows of scale tiles. If offs is out of
    order, the result has no meaning, but nothing outside of the operands is read.
    """
    row_tile, n_tile = swizzle(tl.program_id(0), row_tiles, tl.cdiv(N, BLOCK_N), SWIZZLE)
    columns, tile, group, first = tl.cast(K, tl.int32), row_tile, row_tile * 0, row_tile * 0
    if GROUPED == "M":  # groups are padded to whole tiles; the rows past the last group become zeros
        start = row_tile * BLOCK_M
        group, _, stop, begin = group_of(start, offs, offs_stride, E, None, None, False, BLOCK_M, CHUNK)
        first_row = tl.load(offs + (group - 1) * offs_stride, mask=group > 0, other=0)
        top = first_row.to(tl.int64) + (start - begin)
        end = tl.where(group < E, tl.minimum(stop, M), M)
        columns = tl.where(group < E, columns, 0)
        if BLOCKED:
            columns = tl.where(start <= M + 128 * E - BLOCK_M, columns, 0)
        b += group.to(tl.int64) * b_stride_e
        if B_CODES:
            b_scale += group.to(tl.int64) * b_scale_stride_e
    elif GROUPED == "K":  # the sum runs along the tokens of a group
        m_tiles = tl.cdiv(M, BLOCK_M)
        group, tile = row_tile // m_tiles, row_tile % m_tiles
        top, end = (tile * BLOCK_M).to(tl.int64), M
        out += group.to(tl.int64) * M * N
        first, stop = tokens_of(group, offs, offs_stride, E)
        # A difference of two numbers of at least 0 fits in int32.
        first, stop = tl.minimum(tl.maximum(first, 0), K), tl.minimum(tl.maximum(stop, 0), K)
        if A_CODES or B_CODES:  # whole blocks
            first, stop = first // 16 * 16, stop // 16 * 16
        columns = tl.maximum(stop - first, 0)
        if BLOCKED:  # the tiles of a group are stored together, row by row
            begin, across = rows_before(group, offs, offs_stride, 64, CHUNK) // 64, tl.cdiv(columns, 64)
            columns = tl.where((begin >= 0) & ((begin + across) * 4 <= K // 16 + 4 * E), columns, 0)
            if A_CODES:
                a_scale += begin.to(tl.int64) * tl.cdiv(M, 128) * 512
                a_scale_stride_r = across.to(tl.int64) * 512
            if B_CODES:
                b_scale += begin.to(tl.int64) * tl.cdiv(N, 128) * 512
                b_scale_stride_r = across.to(tl.int64) * 512
        else:
            if A_CODES:
                a_scale += (first // 16).to(tl.int64) * a_scale_stride_c
            if B_CODES:
                b_scale += (first // 16).to(tl.int64) * b_scale_stride_c
        a += (first // 2).to(tl.int64) if A_CODES else first.to(tl.int64) * a_stride_k
        b += (first // 2).to(tl.int64) if B_CODES else first.to(tl.int64) * b_stride_k
    else:
        top, end = (row_tile * BLOCK_M).to(tl.int64), M
    row, left = tl.arange(0, BLOCK_M).to(tl.int64), n_tile.to(tl.int64) * BLOCK_N
    column = tl.arange(0, BLOCK_N).to(tl.int64)
    in_a, in_b = (top + row >= 0) & (top + row < end), left + column < N
    a_at, b_at = a + top * a_stride_r + row * a_stride_r, b + left * b_stride_r + column * b_stride_r
    a_scale_at, b_scale_at = None, None
    if A_CODES:
        a_scale += (tile.to(tl.int64) * (BLOCK_M // 128) if BLOCKED else top) * a_scale_stride_r
        a_scale_at = a_scale + _scale_rows(row, a_scale_stride_r, BLOCKED)
    if B_CODES:
        b_scale_at = b_scale + _scale_rows(left + column, b_scale_stride_r, BLOCKED)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if SCALED:
        pair = tl.arange(0, 64)
        for k in range(0, columns, 128):
            there = (pair * 2 < columns - k)[None, :]
            x = tl.load(a_at[:, None] + pair[None, :], mask=in_a[:, None] & there, other=0)
            w = tl.load(b_at[:, None] + pair[None, :], mask=in_b[:, None] & there, other=0)
            of_x = _scales(a_scale_at, in_a, columns - k, a_scale_stride_c, BLOCKED, 8)
            of_w = _scales(b_scale_at, in_b, columns - k, b_scale_stride_c, BLOCKED, 8)
            acc = tl.dot_scaled(x, of_x, "e2m1", w.T, of_w, "e2m1", acc)
            a_at += 64
            b_at += 64
            a_scale_at = _past(a_scale_at, a_scale_stride_c, 128, BLOCKED)
            b_scale_at = _past(b_scale_at, b_scale_stride_c, 128, BLOCKED)
    else:
        for k in range(0, columns, 64):
            x = _operand(a_at, a_stride_k, a_scale_at, a_scale_stride_c, in_a, columns - k, A_CODES, BLOCKED)
            w = _operand(b_at, b_stride_k, b_scale_at, b_scale_stride_c, in_b, columns - k, B_CODES, BLOCKED)
            acc = tl.dot(x, w.T, acc)
            a_at += 32 if A_CODES else tl.cast(a_stride_k, tl.int64) * 64
            b_at += 32 if B_CODES else tl.cast(b_stride_k, tl.int64) * 64
            if A_CODES:
                a_scale_at = _past(a_scale_at, a_scale_stride_c, 64, BLOCKED)
            if B_CODES:
                b_scale_at = _past(b_scale_at, b_scale_stride_c, 64, BLOCKED)
    in_group = group < E  # rows of no group have no tensor scale
    number = tl.load(a_number + group * a_number_stride, mask=in_group, other=0.0)
    number *= tl.load(b_number + group * b_number_stride, mask=in_group, other=0.0)
    at = out + top * N + left + (row[:, None] * N + column[None, :])
    tl.store(at, (acc * number).to(out.dtype.element_ty), mask=in_a[:, None] & in_b[None, :])


def nvfp4_tiles(
    a: Tensor, a_scale: Tensor | None, a_number: Tensor, b: Tensor, b_scale: Tensor | None, b_number: Tensor,
    out: Tensor, scale_layout: str, *, offs: Tensor | None = None, grouped: str = "", **options: Any,
) -> Any:  # fmt: skip
    """Multiply `(M, K)` by `(N, K)` into `out`: one matmul, or M in groups, each with its own b, or K in groups.

    `options` change the configuration. Returns the compiled kernel.
    """
    M, N, E = a.shape[0], b.shape[-2], 1 if offs is None else offs.shape[0]
    K = a.shape[1] if a_scale is None else 2 * a.shape[1]
    config: dict[str, Any] = {**for_device(CONFIGS, a.device), "CHUNK": chunk(E), **FUSED, **options}
    codes, blocked = (a_scale is not None, b_scale is not None), scale_layout == "blocked"
    config["SCALED"] = config["SCALED"] and all(codes)
    across = 512 * -(-K // (4 * NVFP4_BLOCK_SIZE))  # the bytes of a row of tiles; for K-groups programs find their own

    def of(t: Tensor, scale: Tensor | None) -> tuple[Any, ...]:
        # Without elements, PyTorch makes both strides 1. Triton fails to compile codes whose rows are 1 apart.
        strides = t.stride() if t.numel() else (0,) * t.ndim
        if scale is None:
            return t, *strides, None, *(0,) * t.ndim
        lead = (scale.stride(0),) if t.ndim == 3 else ()
        return (
            t.view(torch.uint8), *strides, scale.view(torch.uint8),
            *lead, *((across, 1) if blocked else scale.stride()[-2:]),
        )  # fmt: skip

    def of_groups(number: Tensor) -> tuple[Tensor, int]:
        return number, number.stride(0) if number.ndim else 0

    row_tiles = -(-M // config["BLOCK_M"])
    if grouped == "M":
        row_tiles += E  # each group, and the rows that belong to no group, may begin a tile
    elif grouped == "K":
        row_tiles *= E
    of_b = of(b, b_scale)
    if b.ndim == 2:  # one matrix for all groups
        of_b = (of_b[0], 0, *of_b[1:4], 0, *of_b[4:])
    return _tiles[(row_tiles * -(-N // config["BLOCK_N"]),)](
        *of(a, a_scale), *of_groups(a_number), *of_b, *of_groups(b_number),
        out, offs, 0 if offs is None else offs.stride(0), E, M, N, K, row_tiles,
        GROUPED=grouped, A_CODES=codes[0], B_CODES=codes[1], BLOCKED=blocked, **config,
    )  # fmt: skip
