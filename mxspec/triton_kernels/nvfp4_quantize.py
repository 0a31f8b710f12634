"""nvfp4_quantize in Triton: a program owns a run of scale bytes, in the order in which they lie in memory.

As in mx_quantize, the place of a byte determines the row and the 16 elements that it scales, and the padding of the
blocked layout is the scale of blocks of zeros. With 16x16 blocks a program owns whole squares of scale bytes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxspec.formats import NVFP4_BLOCK_SIZE
from mxspec.triton_kernels.common.blocked import blocked_shape, part_of_tiles
from mxspec.triton_kernels.common.launch import UNFUSED, for_device, span
from mxspec.triton_kernels.common.nvfp4_numerics import (
    BYTES,
    NEAREST,
    SEED,
    block_scale,
    bytes_of_words,
    converts,
    factors,
    is_short,
    of_matrix,
    packed_codes,
    random_of,
    random_words,
    scale_byte,
    store_tensor_scale,
)
from mxspec.triton_kernels.common.pairs import block_of_row, in_words, instructions
from mxspec.triton_kernels.common.runs import load_eight
from mxspec.triton_kernels.tiles import nvfp4_columns
from mxspec.triton_kernels.tiles.largest import largest_magnitudes

# On an H200 0.97 of a bare cast's rate along rows, with blocked scales 0.95 (benchmarks/results/decisions.md).
# Blackwell: compiled, not run.
RANK = {(9, 0): 1, (10, 0): 1}
# By compute capability and layout. A program has BLOCKS scale bytes, that is, 16 * BLOCKS elements. Blocked scale bytes
# are those of TILES tiles, side by side: a program then reads longer runs of a row.
_HOPPER = {
    "flat": {"BLOCKS": 128, "TILES": 1, "num_warps": 2},
    "strided": {"BLOCKS": 256, "TILES": 1, "num_warps": 4},
    "blocked": {"BLOCKS": 128, "TILES": 2, "num_warps": 2},
    "blocked, random": {"BLOCKS": 256, "TILES": 1, "num_warps": 4},
    # 16x16 scale bytes, or half of a blocked tile: rows r and r + 32 * i. With the limit, the order of instructions is
    # faster.
    "square": {"BLOCKS": 256, "TILES": 1, "num_warps": 2, "maxnreg": 128},
}
CONFIGS = {(9, 0): _HOPPER, (10, 0): _HOPPER}
# The registers of a thread on Hopper by layout, for numbers of `in_words` that are rounded to nearest. More programs
# then fit on a processor.
_REGISTERS = {"flat": {"maxnreg": 72}, "blocked, even": {"maxnreg": 72}, "blocked": {"maxnreg": 80}}
# Without .ftz, which would lose subnormals.
_ARITHMETIC = (r"st\.global\.(v[24]\.)?b32", r"mul\.(rn\.)?f32", r"fma\.rn\.f32")
PTX = {"sm90": _ARITHMETIC, "sm100": (*_ARITHMETIC, r"cvt\.rn\.satfinite\.e2m1x2\.f32")}
# A program has up to so many parts, and there are at least so many programs for each processor.
_SPAN, _PROGRAMS = 4, 32
_ROW_TILES = 32768  # in a grid's second dimension, which holds at most 65535


def supports(x: Tensor, tensor_amax: Tensor | None = None, *, axis: int = -1, **_: Any) -> str | None:
    if x.ndim == 3 and x.shape[0] > 65535:
        return f"takes up to 65535 experts, the limit of its grid; x has {x.shape[0]}"
    if x.numel() > 2**34:
        return f"counts blocks in 32 bits, so x may have up to 2^34 elements; it has {x.numel()}"
    if axis == -2:
        if not _is_transposed(x):
            return nvfp4_columns.supports(x)
        x = x.mT
    if x.shape[-1] >= 2**28:
        return f"counts the bytes of a row of tiles in 32 bits, so K must be below 2^28; it is {x.shape[-1]}"
    return None


def _is_transposed(x: Tensor) -> bool:
    """Whether consecutive elements in memory are those of a column.

    Blocks along a column are then blocks along the rows of the transpose.
    """
    return x.stride(-2) == 1 and x.stride(-1) != 1


@triton.jit
def _nvfp4_quantize(
    x, amax, qdata, scale, tensor_scale,
    R, C, stride_e, stride_r, stride_k, amax_stride, row_groups, span,
    LAYOUT: tl.constexpr, WIDE: tl.constexpr, SQUARE: tl.constexpr, EVEN: tl.constexpr, BOUNDED: tl.constexpr,
    CONVERTS: tl.constexpr, ASM: tl.constexpr, BLOCKS: tl.constexpr, TILES: tl.constexpr, ROW_TILES: tl.constexpr,
    random=None, random_e=None, random_r=None, random_k=None, RANDOM: tl.constexpr = NEAREST,
):  # fmt: skip
    # random: see nvfp4_quantize_stochastic. If it is a seed and an offset, random_k is their stride.
    TOGETHER: tl.constexpr = 4 if x.dtype.element_ty == tl.float32 else 8  # see load_eight
    i, eight = tl.arange(0, BLOCKS), tl.arange(0, 8)
    j, of_block = tl.arange(0, TOGETHER), tl.arange(0, 2)
    e = (tl.program_id(2) // row_groups).to(tl.int64)  # row_groups is 1 below 2^22 rows, and folds away
    # A program has up to `span` parts, one after the other. The pointers move to the start of the first part. Most
    # offsets from there fit in 32 bits.
    if LAYOUT == "flat":  # stride_k is 1
        # A matrix is contiguous: byte n scales the 16 elements at 16 * n, and no division is needed.
        first = tl.program_id(0) * span
        last = tl.minimum(first + span, tl.cdiv(R * C, BLOCKS))
        start = e * R * C + first.to(tl.int64) * BLOCKS
        place = i
        x_offset = i[:, None] * 16 + j[None, :]
        q_offset = i[:, None] * 2 + of_block[None, :]
        number = first * BLOCKS + i
        if RANDOM == BYTES:
            random += start * 16
            r_offset = i[:, None] * 16 + eight[None, :]
        x += start * 16
        qdata += start * 2
        scale += start
    elif LAYOUT == "strided":
        first, last = 0, 1
        if SQUARE:
            tl.static_assert(BLOCKS == 256)
            squares = tl.cdiv(C, 16)  # of 16 rows, side by side
            row, c = tl.program_id(0) // squares * 16 + i // 16, tl.program_id(0) % squares * 16 + i % 16
            in_matrix = (row < R) & (c < C)
            place = row.to(tl.int64) * C + c
        else:
            n = tl.program_id(0) * BLOCKS + i
            row, c = n // C, n % C
            in_matrix = n < R * C
            place = n.to(tl.int64)
        number = row * C + c
        k = c[:, None] * 16 + j[None, :]
        if RANDOM == BYTES:
            random += e * random_e
            r_offset = row.to(tl.int64)[:, None] * random_r + (c[:, None] * 16 + eight[None, :]).to(tl.int64) * random_k
        x_offset = row.to(tl.int64)[:, None] * stride_r + k.to(tl.int64) * stride_k
        q_offset = place[:, None] * 2 + of_block[None, :]
        x += e * stride_e
        qdata += e * R * C * 2
        scale += e * R * C
    else:
        parts: tl.constexpr = 512 * TILES // BLOCKS  # programs for TILES tiles
        row_tile = (tl.program_id(2) % row_groups * ROW_TILES + tl.program_id(1)).to(tl.int64)
        place, row, col = part_of_tiles(tl.program_id(0) % parts, BLOCKS, TILES)
        first = tl.program_id(0) // parts * span
        last = tl.minimum(first + span, tl.cdiv(C, 4 * TILES))
        c = first * (4 * TILES) + col
        k = c[:, None] * 16 + j[None, :]
        number = (row_tile.to(tl.int32) * 128 + row) * C + c
        if RANDOM == BYTES:
            random += e * random_e + row_tile * 128 * random_r
            r_offset = row.to(tl.int64)[:, None] * random_r + (c[:, None] * 16 + eight[None, :]).to(tl.int64) * random_k
        r = row
        if WIDE:  # the products with strides and the offsets of codes may be 2^31 or more
            r, k = r.to(tl.int64), k.to(tl.int64)
        x_offset = r[:, None] * stride_r + k * stride_k
        q_offset = r[:, None] * (C * 2) + (c[:, None] * 2 + of_block[None, :])
        x += e * stride_e + row_tile * 128 * stride_r
        qdata += (e * R + row_tile * 128) * C * 2
        scale += (e * tl.cdiv(R, 128) + row_tile) * tl.cdiv(C, 4) * 512
        scale += first.to(tl.int64) * (512 * TILES) + tl.program_id(0) % parts * (BLOCKS // TILES)

    A, h, up, wrong_matrix = of_matrix(tl.load(amax + e * amax_stride))
    for part in range(first, last):
        if LAYOUT == "flat":
            in_matrix = (part * BLOCKS + i < R * C) | EVEN
        elif LAYOUT == "blocked":
            in_matrix = ((row_tile * 128 + row < R) & (part * (4 * TILES) + col < C)) | EVEN
        owned = in_matrix
        # Two loads, so that a thread has a whole block: a warp would compute the scale of a block in each of its
        # threads. One half of the block comes after the other, which takes fewer registers than both at once.
        loaded = load_eight(x + x_offset, stride_k, in_matrix[:, None])
        narrow: tl.constexpr = loaded.dtype != tl.float32
        loaded_more = load_eight(x + x_offset + tl.cast(stride_k, tl.int64) * 8, stride_k, in_matrix[:, None])
        bits, values, more, signs, signs_more = block_of_row(loaded, loaded_more, ASM)
        if SQUARE:  # the 16 bytes i, i + 16, ... scale the 16 rows of a square
            largest = tl.max(bits.reshape(16, 16), axis=0)
            bits = tl.broadcast_to(largest[None, :], (16, 16)).reshape(BLOCKS)
        s, wrong = block_scale(bits, h, up, wrong_matrix)
        short = is_short(A, narrow and RANDOM == NEAREST)
        minus_d, factor = factors(s, h, up, wrong, short, ASM)
        if RANDOM == BYTES:
            byte = tl.load(random + r_offset, mask=in_matrix[:, None], other=0).to(tl.int32)
            byte_more = random + r_offset + tl.cast(random_k, tl.int64) * 8
            byte_more = tl.load(byte_more, mask=in_matrix[:, None], other=0).to(tl.int32)
        elif RANDOM == SEED:
            w0, w1, w2, w3 = random_words(random, random_k, number + (e * R * C).to(tl.int32))
            byte, byte_more = bytes_of_words(tl.join(w0, w1)), bytes_of_words(tl.join(w2, w3))
        else:
            byte, byte_more = None, None
        word = packed_codes(values, signs, minus_d, factor, up, wrong, short, byte, narrow, BOUNDED, CONVERTS, ASM)
        word_more = packed_codes(
            more, signs_more, minus_d, factor, up, wrong, short, byte_more, narrow, BOUNDED, CONVERTS, ASM
        )
        tl.store(qdata + q_offset, tl.join(word, word_more), mask=in_matrix[:, None])
        stored = scale_byte(s, wrong)
        if LAYOUT == "blocked":
            stored = tl.where(in_matrix, stored, 0).to(tl.uint8)
            owned = (row_tile < tl.cdiv(R, 128)) | EVEN
            if TILES > 1:
                owned &= (part * (4 * TILES) + col < tl.cdiv(C, 4) * 4) | EVEN
        # The blocks of a thread lie apart. Without the hint, their bytes would pass through shared memory, so that a
        # thread stores neighbours.
        tl.store(scale + tl.max_contiguous(place, 1), stored, mask=owned)
        if LAYOUT != "strided":  # to the next part
            blocks: tl.constexpr = BLOCKS if LAYOUT == "flat" else 4 * TILES  # of a row
            x += tl.cast(stride_k, tl.int64) * (16 * blocks)
            qdata += 2 * blocks
            scale += BLOCKS if LAYOUT == "flat" else 512 * TILES
            number += blocks
            if RANDOM == BYTES:
                random += tl.cast(random_k, tl.int64) * (16 * blocks)
    writes = (tl.program_id(0) == 0) & (tl.program_id(1) == 0) & (tl.program_id(2) % row_groups == 0)
    store_tensor_scale(tensor_scale, A, wrong_matrix, e, writes)


def nvfp4_quantize(
    x: Tensor,
    tensor_amax: Tensor | None = None,
    *,
    axis: int = -1,
    block: str = "1x16",
    scale_layout: str = "plain",
) -> tuple[Tensor, Tensor, Tensor]:
    return quantized(x, tensor_amax, axis, block == "16x16", scale_layout == "blocked")


def quantized(
    x: Tensor, tensor_amax: Tensor | None, axis: int, square: bool, blocked: bool, random: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch. `random` holds a byte for each element, by which its code is rounded, or a seed and an offset."""
    amax = largest_magnitudes(x) if tensor_amax is None else tensor_amax
    bounded, of_elements = tensor_amax is None, random is not None and random.dtype == torch.uint8
    if axis == -2 and not _is_transposed(x):
        qdata, scale, tensor_scale = nvfp4_columns.nvfp4_tile(x, amax, bounded, square, blocked, random)
        return qdata.mT, scale, tensor_scale
    if axis == -2:
        x = x.mT
        random = random.mT if random is not None and of_elements else random
    *lead, R, K = x.shape
    C, E = K // NVFP4_BLOCK_SIZE, lead[0] if lead else 1
    qdata = x.new_empty((*lead, R, K // 8), dtype=torch.int32)  # words of eight codes
    tensor_scale = x.new_empty(tuple(lead), dtype=torch.float32)
    row_tiles, col_tiles = blocked_shape(R, C)
    shape = (512 * row_tiles * col_tiles,) if blocked else (R, C)
    scale = x.new_empty((*lead, *shape), dtype=torch.uint8)
    contiguous = x.stride(-1) == 1 and x.stride(-2) == K and (not lead or x.stride(0) == R * K)
    if random is not None and of_elements:
        contiguous &= random.is_contiguous()
    layout = "blocked" if blocked else "flat" if contiguous and not square else "strided"
    name = "square" if square else "blocked, random" if blocked and random is not None else layout
    wide = blocked and 128 * max(x.stride(-2), 2 * C) + K * x.stride(-1) >= 2**31
    config = for_device(CONFIGS, x.device)[name]
    even = R * C > 0 == R % 128 == C % (4 * config["TILES"]) if blocked else R * C > 0 == R * C % config["BLOCKS"]
    if name in _REGISTERS and in_words(x) and random is None and not (wide or converts(x.device)):
        config = {**config, **_REGISTERS["blocked, even" if blocked and even else name]}
    blocks, row_groups, of_program = config["BLOCKS"], 1, 1
    if blocked:
        row_groups = max(1, -(-row_tiles // _ROW_TILES))
        parts, across = 512 * config["TILES"] // blocks, -(-col_tiles // config["TILES"])
        of_program = 1 if square else span(parts * across, row_tiles * E, x.device, _SPAN, _PROGRAMS)
        grid = (parts * max(1, -(-across // of_program)), max(1, min(row_tiles, _ROW_TILES)), E * row_groups)
    elif square:
        grid = (max(1, R // 16 * -(-C // 16)), 1, E)
    else:
        parts = -(-R * C // blocks)
        of_program = span(parts, E, x.device, _SPAN, _PROGRAMS) if layout == "flat" else 1
        grid = (max(1, -(-parts // of_program)), 1, E)
    if E:  # a matrix without elements has a tensor scale
        _nvfp4_quantize[grid](
            x, amax, qdata, scale, tensor_scale, R, C, x.stride(0) if lead else 0, x.stride(-2), x.stride(-1),
            amax.stride(0) if lead else 0, row_groups, of_program, layout, wide, square, even, bounded,
            converts(x.device), instructions(x.device), ROW_TILES=_ROW_TILES, **config, **random_of(random),
            **UNFUSED,
        )  # fmt: skip
    codes, scales = qdata.view(torch.float4_e2m1fn_x2), scale.view(torch.float8_e4m3fn)
    return codes.mT if axis == -2 else codes, scales, tensor_scale
