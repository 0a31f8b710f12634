"""MX matmuls in plain Triton: a program computes one tile of one group's output.

Rows of the operands may have any strides; the codes of a row are contiguous.

Blackwell's tensor cores take codes and scale bytes directly. On other GPUs, the kernel multiplies a block of 32 columns
as fp16, which holds every code of every format, and scales its sums in fp32. It takes every code and every scale byte.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxspec.formats import MX_BLOCK_SIZE
from mxspec.triton_kernels.common.groups import chunk, group_of, rows_before, tokens_of
from mxspec.triton_kernels.common.launch import FUSED, for_device
from mxspec.triton_kernels.common.tile_order import swizzle

# A tile has 128 rows, as a tile of the blocked layout, and groups are padded to 128 rows in that layout. So the scales
# of a tile's rows are in one row of scale tiles. "aligned": codes at multiples of 16 bytes are copied 16 bytes at a
# time. "any": other codes pass through registers, and on Blackwell a larger tile would need more registers than there
# are.
_HOPPER = {"BLOCK_M": 128, "BLOCK_N": 64, "SWIZZLE": 8, "SCALED": False, "num_warps": 8, "num_stages": 3}
CONFIGS = {
    "aligned": {(9, 0): _HOPPER, (10, 0): _HOPPER | {"BLOCK_N": 128, "SCALED": True}},
    "any": {(9, 0): _HOPPER, (10, 0): _HOPPER | {"BLOCK_N": 32}},
}
PTX = {
    "sm90": (r"wgmma\.mma_async.*\.f32\.f16\.f16",),
    "sm100": (r"tcgen05\.mma.*\.kind::mxf8f6f4\.block_scale",),
}


@triton.jit
def _scale_rows(row, stride_r, BLOCKED: tl.constexpr):
    """The offset of the scales of rows. `stride_r` is the stride of a row, or of a row of tiles if BLOCKED."""
    return row // 128 * stride_r + row % 32 * 16 + row % 128 // 32 * 4 if BLOCKED else row * stride_r


@triton.jit
def _factors(a_byte, b_byte):
    """Two fp32 factors for the sum of each row and column; NaN for a byte 255.

    The product of the two factors is the product of both scales.

    A sum of 448 times 2^127 is out of the range of fp32, even if a factor 2^-127 follows. So each factor takes half of
    both exponents. The two factors then differ by at most a factor of 2. If the first makes a sum overflow or
    underflow, the exact result does so, too.
    """
    a_byte, b_byte = a_byte.to(tl.int32), b_byte.to(tl.int32)
    a_low = tl.where(a_byte == 255, 0x7FC00000, ((a_byte + 1) // 2 + 63) << 23).to(tl.float32, bitcast=True)
    b_low = tl.where(b_byte == 255, 0x7FC00000, ((b_byte + 1) // 2 + 63) << 23).to(tl.float32, bitcast=True)
    a_high = ((a_byte // 2 + 64) << 23).to(tl.float32, bitcast=True)
    b_high = ((b_byte // 2 + 64) << 23).to(tl.float32, bitcast=True)
    return a_low[:, None] * b_high[None, :], a_high[:, None] * b_low[None, :]


@triton.jit
def _block(at, there, PACKED: tl.constexpr):
    """Blocks of 32 codes as fp16. `at` are pointers to the first byte of each block.

    PACKED: a byte holds two codes of e2m1. The bits of a code become the upper bits of a fp16, which is the value times
    2^-14, also if it is subnormal.
    """
    if PACKED:
        byte = tl.load(at[:, None] + tl.arange(0, 16)[None, :], mask=there[:, None], other=0).to(tl.uint16)
        even = ((byte & 7) << 9 | (byte & 8) << 12).to(tl.float16, bitcast=True)
        odd = ((byte & 0x70) << 5 | (byte & 0x80) << 8).to(tl.float16, bitcast=True)
        return (tl.join(even, odd) * 16384.0).to(tl.float16).reshape(at.shape[0], 32)
    else:
        return tl.load(at[:, None] + tl.arange(0, 32)[None, :], mask=there[:, None], other=0.0).to(tl.float16)


@triton.jit
def _sums(
    a, a_scale, a_stride_c, in_a, b, b_scale, b_stride_c, in_b, blocks,
    BLOCKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The sums of a tile. The arguments are pointers to its rows of a and b, and to their scales."""
    A_PACKED: tl.constexpr = a.dtype.element_ty == tl.uint8
    B_PACKED: tl.constexpr = b.dtype.element_ty == tl.uint8
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for c in range(blocks):
        x, w = _block(a, in_a, A_PACKED), _block(b, in_b, B_PACKED)
        if BLOCKED:
            a_scale_at, b_scale_at = a_scale + c % 4, b_scale + c % 4
            a_scale += (c % 4 // 3) * 512
            b_scale += (c % 4 // 3) * 512
        else:
            a_scale_at, b_scale_at = a_scale, b_scale
            a_scale += a_stride_c
            b_scale += b_stride_c
        one, other = _factors(tl.load(a_scale_at, mask=in_a, other=127), tl.load(b_scale_at, mask=in_b, other=127))
        acc += tl.dot(x, w.T) * one * other
        a += 16 if A_PACKED else 32
        b += 16 if B_PACKED else 32
    return acc


@triton.jit
def _scaled_sums(
    a, a_scale, a_stride_c, in_a, b, b_scale, b_stride_c, in_b, blocks,
    BLOCKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """`_sums` on tensor cores that scale: four blocks at a time, that is, the scale bytes of a row of a tile."""
    A_FP8: tl.constexpr = "e5m2" if a.dtype.element_ty == tl.float8e5 else "e4m3"
    A: tl.constexpr = "e2m1" if a.dtype.element_ty == tl.uint8 else A_FP8
    B_FP8: tl.constexpr = "e5m2" if b.dtype.element_ty == tl.float8e5 else "e4m3"
    B: tl.constexpr = "e2m1" if b.dtype.element_ty == tl.uint8 else B_FP8
    A_BYTES: tl.constexpr = 64 if A == "e2m1" else 128
    B_BYTES: tl.constexpr = 64 if B == "e2m1" else 128
    A_ZERO: tl.constexpr = 0 if A == "e2m1" else 0.0
    B_ZERO: tl.constexpr = 0 if B == "e2m1" else 0.0
    a_k, b_k, c = tl.arange(0, A_BYTES), tl.arange(0, B_BYTES), tl.arange(0, 4)
    if BLOCKED:
        a_stride_c, b_stride_c = 1, 1
    a_at, b_at = a[:, None] + a_k[None, :], b[:, None] + b_k[None, :]
    a_scale_at = a_scale[:, None] + c.to(tl.int64)[None, :] * a_stride_c
    b_scale_at = b_scale[:, None] + c.to(tl.int64)[None, :] * b_stride_c
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, blocks, 4):
        in_c = (c < blocks - first)[None, :]
        x = tl.load(a_at, mask=in_a[:, None] & (a_k < (blocks - first) * (A_BYTES // 4))[None, :], other=A_ZERO)
        w = tl.load(b_at, mask=in_b[:, None] & (b_k < (blocks - first) * (B_BYTES // 4))[None, :], other=B_ZERO)
        of_x = tl.load(a_scale_at, mask=in_a[:, None] & in_c, other=127)
        of_w = tl.load(b_scale_at, mask=in_b[:, None] & in_c, other=127)
        acc = tl.dot_scaled(x, of_x, A, w.T, of_w, B, acc)
        a_at += A_BYTES
        b_at += B_BYTES
        a_scale_at += 512 if BLOCKED else tl.cast(a_stride_c, tl.int64) * 4
        b_scale_at += 512 if BLOCKED else tl.cast(b_stride_c, tl.int64) * 4
    return acc


@triton.jit
def _tile(
    row_tile, n_tile,
    a, a_stride, a_scale, a_scale_stride_r, a_scale_stride_c,
    b, b_stride_e, b_stride, b_scale, b_scale_stride_e, b_scale_stride_r, b_scale_stride_c,
    out, out_stride_m, out_stride_n, offs, offs_stride, E, M, N, K,
    GROUPED: tl.constexpr, BLOCKED: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SCALED: tl.constexpr, a_flags=None, b_flags=None,
    MEND: tl.constexpr = False,
):  # fmt: skip
    """Compute one tile of the output. For K-groups, the row tiles of each group follow one another.

    With MEND, store only the elements whose present value is Inf or NaN.

    `a_flags` and `b_flags` hold a flag for each row of a and of b, 128 for each tile of rows. With them, compute the
    tile only if one of its flags is raised, and store only the elements of rows and columns with a flag.
    """
    # `top` is the tile's first row of a and of the output, and `tile` counts rows of scale tiles. If offs is out of
    # order, the result has no meaning, but nothing outside of the operands is read.
    blocks, tile, group = K // 32, row_tile, row_tile * 0
    if GROUPED == "M":  # groups are padded to whole tiles; the rows past the last group become zeros
        start = row_tile * BLOCK_M
        group, _, stop, begin = group_of(start, offs, offs_stride, E, None, None, False, BLOCK_M, CHUNK)
        first = tl.load(offs + (group - 1) * offs_stride, mask=group > 0, other=0)
        top = first.to(tl.int64) + (start - begin)
        end = tl.where(group < E, tl.minimum(stop, M), M)
        blocks = tl.where(group < E, blocks, 0)
        if BLOCKED:
            blocks = tl.where(start <= M + 128 * E - BLOCK_M, blocks, 0)
        b += group.to(tl.int64) * b_stride_e
        b_scale += group.to(tl.int64) * b_scale_stride_e
    elif GROUPED == "K":  # the sum runs along the tokens of a group
        m_tiles = tl.cdiv(M, BLOCK_M)
        group, tile = row_tile // m_tiles, row_tile % m_tiles
        top, end = (tile * BLOCK_M).to(tl.int64), M
        out += group.to(tl.int64) * M * N
        first, stop = tokens_of(group, offs, offs_stride, E)
        # The same value, as a multiple of 32, so that a load knows its alignment.
        first = tl.maximum(first, 0) // 32 * 32
        stop = tl.maximum(tl.minimum(stop, K), 0)  # a difference of two numbers of at least 0 fits in int32
        blocks = tl.maximum(stop - first, 0) // 32
        a += first
        b += first
        if BLOCKED:  # the tiles of a group are stored together, row by row
            begin, across = rows_before(group, offs, offs_stride, 128, CHUNK) // 128, tl.cdiv(blocks, 4)
            blocks = tl.where((begin >= 0) & ((begin + across) * 4 <= K // 32 + 4 * E), blocks, 0)
            a_scale += begin.to(tl.int64) * tl.cdiv(M, 128) * 512
            b_scale += begin.to(tl.int64) * tl.cdiv(N, 128) * 512
            a_scale_stride_r = across.to(tl.int64) * 512
            b_scale_stride_r = across.to(tl.int64) * 512
        else:
            a_scale += (first // 32).to(tl.int64) * a_scale_stride_c
            b_scale += (first // 32).to(tl.int64) * b_scale_stride_c
    else:
        top, end = (row_tile * BLOCK_M).to(tl.int64), M
    if a_flags is not None:
        of_a = tl.load(a_flags + row_tile * BLOCK_M + tl.arange(0, BLOCK_M)) != 0
        of_b = b_flags + group * tl.cdiv(N, 128) * 128 + n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        of_b = tl.load(of_b, mask=(group < E) & (tl.arange(0, BLOCK_N) >= 0), other=0) != 0
        flagged = of_a[:, None] | of_b[None, :]
        raised = tl.max(of_a.to(tl.int32), 0) + tl.max(of_b.to(tl.int32), 0) > 0
        blocks, end = tl.where(raised, blocks, 0), tl.where(raised, end, 0)
    row, left = tl.arange(0, BLOCK_M).to(tl.int64), n_tile.to(tl.int64) * BLOCK_N
    column = tl.arange(0, BLOCK_N).to(tl.int64)
    in_a, in_b = (top + row >= 0) & (top + row < end), left + column < N
    a_scale += (tile.to(tl.int64) * (BLOCK_M // 128) if BLOCKED else top) * a_scale_stride_r
    a_scale_at = a_scale + _scale_rows(row, a_scale_stride_r, BLOCKED)
    b_scale_at = b_scale + _scale_rows(left + column, b_scale_stride_r, BLOCKED)
    a_at = a + top * a_stride + row * a_stride
    b_at = b + left * b_stride + column * b_stride
    of_a, of_b = (a_at, a_scale_at, a_scale_stride_c, in_a), (b_at, b_scale_at, b_scale_stride_c, in_b)
    if SCALED:
        acc = _scaled_sums(*of_a, *of_b, blocks, BLOCKED, BLOCK_M, BLOCK_N)
    else:
        acc = _sums(*of_a, *of_b, blocks, BLOCKED, BLOCK_M, BLOCK_N)
    out += top * out_stride_m + left * out_stride_n
    at = out + row[:, None] * out_stride_m + column[None, :] * out_stride_n
    there = in_a[:, None] & in_b[None, :]
    if a_flags is not None:
        there = there & flagged
    if MEND:
        present = tl.load(at, mask=there, other=0.0).to(tl.float32).to(tl.int32, bitcast=True)
        there = there & ((present & 0x7FFFFFFF) >= 0x7F800000)
    tl.store(at, acc.to(out.dtype.element_ty), mask=there)


@triton.jit
def _tiles(
    a, a_stride, a_scale, a_scale_stride_r, a_scale_stride_c,
    b, b_stride_e, b_stride, b_scale, b_scale_stride_e, b_scale_stride_r, b_scale_stride_c,
    out, out_stride_m, out_stride_n, offs, offs_stride, E, M, N, K,
    row_tiles,
    GROUPED: tl.constexpr, BLOCKED: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SWIZZLE: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    row_tile, n_tile = swizzle(tl.program_id(0), row_tiles, tl.cdiv(N, BLOCK_N), SWIZZLE)
    _tile(
        row_tile, n_tile,
        a, a_stride, a_scale, a_scale_stride_r, a_scale_stride_c,
        b, b_stride_e, b_stride, b_scale, b_scale_stride_e, b_scale_stride_r, b_scale_stride_c,
        out, out_stride_m, out_stride_n, offs, offs_stride, E, M, N, K,
        GROUPED, BLOCKED, CHUNK, BLOCK_M, BLOCK_N, SCALED,
    )  # fmt: skip


@triton.jit
def _marked_tiles(
    a, a_stride, a_scale, a_scale_stride_r, a_scale_stride_c,
    b, b_stride_e, b_stride, b_scale, b_scale_stride_e, b_scale_stride_r, b_scale_stride_c,
    out, out_stride_m, out_stride_n, offs, offs_stride, E, M, N, K,
    marks,
    GROUPED: tl.constexpr, BLOCKED: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SCALED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    # Another kernel has counted the tiles. It stored the row and the column of each, in tiles of WIDTH columns. Its
    # finite sums are right and stay, so the bits of a row do not depend on an Inf or a NaN in another row.
    parts: tl.constexpr = WIDTH // BLOCK_N
    for i in range(tl.program_id(0), tl.load(marks) * parts, tl.num_programs(0)):
        mark = marks + 1 + i // parts * 2
        _tile(
            tl.load(mark), tl.load(mark + 1) * parts + i % parts,
            a, a_stride, a_scale, a_scale_stride_r, a_scale_stride_c,
            b, b_stride_e, b_stride, b_scale, b_scale_stride_e, b_scale_stride_r, b_scale_stride_c,
            out, out_stride_m, out_stride_n, offs, offs_stride, E, M, N, K,
            GROUPED, BLOCKED, CHUNK, BLOCK_M, BLOCK_N, SCALED, MEND=True,
        )  # fmt: skip


@triton.jit
def _flagged_tiles(
    a, a_stride, a_scale, a_scale_stride_r, a_scale_stride_c,
    b, b_stride_e, b_stride, b_scale, b_scale_stride_e, b_scale_stride_r, b_scale_stride_c,
    out, out_stride_m, out_stride_n, offs, offs_stride, E, M, N, K,
    row_tiles, flags,
    GROUPED: tl.constexpr, BLOCKED: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    # PyTorch's grouped matmul left the rows of no group as they were, so they become zeros here.
    if GROUPED == "M":
        n, size = tl.arange(0, 2048), tl.cast(M, tl.int64) * N
        first = tl.load(offs + (E - 1) * offs_stride).to(tl.int64) * N + tl.program_id(0) * 2048
        for start in range(first, size, tl.num_programs(0) * 2048):
            tl.store(out + start + n, 0.0, mask=start + n < size)
    if tl.load(flags) != 0:
        for i in range(tl.program_id(0), row_tiles * tl.cdiv(N, BLOCK_N), tl.num_programs(0)):
            _tile(
                i % row_tiles, i // row_tiles,
                a, a_stride, a_scale, a_scale_stride_r, a_scale_stride_c,
                b, b_stride_e, b_stride, b_scale, b_scale_stride_e, b_scale_stride_r, b_scale_stride_c,
                out, out_stride_m, out_stride_n, offs, offs_stride, E, M, N, K,
                GROUPED, BLOCKED, CHUNK, BLOCK_M, BLOCK_N, SCALED, flags + 1, flags + 1 + 128 * row_tiles,
            )  # fmt: skip


def _aligned(codes: Tensor) -> bool:
    return (codes.data_ptr() | codes.stride(-2)) % 16 == 0 and (codes.ndim < 3 or codes.stride(0) % 16 == 0)


def mx_tiles(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, scale_layout: str,
    *, offs: Tensor | None = None, grouped: str = "", marks: Tensor | None = None, width: int = 0,
    flags: Tensor | None = None, programs: int = 0, **options: Any,
) -> None:  # fmt: skip
    """Multiply `(M, K)` by `(N, K)` into `out`: one matmul, or M in groups, each with its own b, or K in groups.

    `out` may be the transpose of contiguous matrices. `options` change the configuration.

    `marks` and `flags` limit the work to some tiles, which `programs` programs compute.

    - `marks`, int32: the number of marked tiles, then the row and the column of each. A marked tile has 128 rows and
      `width` columns. Only its elements that are Inf or NaN in `out` are written.
    - `flags`, int32: one flag for all, then the flags of a, then those of each b. Each tile of 128 rows has 128 flags,
      one for each row; each group begins a new tile. The kernel computes the elements whose row of a or of b has a flag
      that is not 0, and sets the rows of no group to 0.
    """
    (M, K), N, E = a.shape, b.shape[-2], 1 if offs is None else offs.shape[0]
    if a.dtype == torch.float4_e2m1fn_x2:
        K *= 2
    a, b = (t.view(torch.uint8) if t.dtype == torch.float4_e2m1fn_x2 else t for t in (a, b))
    if not K:
        out.zero_()
        return
    config: dict[str, Any] = dict(for_device(CONFIGS["aligned" if _aligned(a) and _aligned(b) else "any"], a.device))
    blocked = scale_layout == "blocked"
    across = 512 * -(-K // (4 * MX_BLOCK_SIZE))  # the bytes of a row of tiles; for K-groups every program finds its own
    of_a, of_b = ((across, 1) if blocked else scale.stride()[-2:] for scale in (a_scale, b_scale))
    expert = (b.stride(0), b_scale.stride(0)) if b.ndim == 3 else (0, 0)
    operands = (
        a, a.stride(0), a_scale.view(torch.uint8), *of_a,
        b, expert[0], b.stride(-2), b_scale.view(torch.uint8), expert[1], *of_b,
        out, *out.stride()[-2:], offs, 0 if offs is None else offs.stride(0), E, M, N, K,
    )  # fmt: skip
    config |= {"GROUPED": grouped, "BLOCKED": blocked, "CHUNK": chunk(E), **FUSED, **options}
    row_tiles = -(-M // config["BLOCK_M"])
    if grouped == "M":
        row_tiles += E  # each group, and the rows that belong to no group, may begin a tile
    elif grouped == "K":
        row_tiles *= E
    if marks is None and flags is None:
        _tiles[(row_tiles * -(-N // config["BLOCK_N"]),)](*operands, row_tiles, **config)
        return
    del config["SWIZZLE"]
    config["BLOCK_N"] = 32  # a loop over tiles takes registers, too
    if marks is not None:
        _marked_tiles[(programs,)](*operands, marks, WIDTH=width, **config)
    else:
        _flagged_tiles[(programs,)](*operands, row_tiles, flags, **config)
