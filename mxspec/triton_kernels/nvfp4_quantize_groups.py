"""nvfp4_quantize_groups in Triton: the kernels of nvfp4_quantize. A program reads the rows of one token group.

Along axis -1, a program owns a part of some tiles of 128 x 4 scales, side by side: with blocked scales a run of bytes
of each tile, with plain scales some rows. It does the same for the next tiles of the row, since they have the same
group. Along axis -2, it owns tiles of `tiles/nvfp4_columns_of_groups.py`. Pad rows are read as zeros, so that they
get the codes and the scale bytes of the contract. Rows after the last group are zeros, without any arithmetic.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxspec.triton_kernels.common.blocked import part_of_tiles, store_part
from mxspec.triton_kernels.common.groups import chunk, group_of, padded_rows
from mxspec.triton_kernels.common.launch import UNFUSED, for_device, span
from mxspec.triton_kernels.common.nvfp4_numerics import (
    block_scale,
    converts,
    factors,
    is_short,
    of_matrix,
    packed_codes,
    scale_byte,
    store_tensor_scales,
)
from mxspec.triton_kernels.common.pairs import block_of_row, in_words, instructions
from mxspec.triton_kernels.common.runs import load_eight
from mxspec.triton_kernels.hopper.releases import release
from mxspec.triton_kernels.tiles import nvfp4_columns, nvfp4_columns_of_groups
from mxspec.triton_kernels.tiles.largest import largest_of_groups

# An H200 gave the reference's bytes. The race: benchmarks/results/decisions.md.
RANK = {(9, 0): 1, (10, 0): 1}
# A program has BLOCKS scale bytes of TILES tiles, up to _SPAN times.
_HOPPER = {
    "plain": {"BLOCKS": 64, "TILES": 2, "num_warps": 1},
    "blocked": {"BLOCKS": 64, "TILES": 1, "num_warps": 1},
}
# The registers of a thread on Hopper for numbers of `in_words`. More programs then fit on a processor. With 80 and
# plain scales, code by Triton 3.9 keeps some registers in local memory.
_REGISTERS, _OF_PLAIN = {"maxnreg": 80}, {"3.9": {"maxnreg": 88}}
_SPAN = 8
CONFIGS = {(9, 0): _HOPPER, (10, 0): _HOPPER}
_ROW_TILES = 32768  # in a grid's second dimension, which holds at most 65535
# Without .ftz, which would lose subnormals.
_ARITHMETIC = (r"st\.global\.(v[24]\.)?b32", r"mul\.(rn\.)?f32", r"fma\.rn\.f32")
PTX = {"sm90": _ARITHMETIC, "sm100": (*_ARITHMETIC, r"cvt\.rn\.satfinite\.e2m1x2\.f32")}


def supports(
    x: Tensor, offs: Tensor, tensor_amax: Tensor | None = None, *, axis: int = -1, pad_to: int = 128, **_: Any
) -> str | None:
    if axis == -2:
        return nvfp4_columns.supports(x)
    if x.shape[1] >= 2**28:
        return f"counts the bytes of a row of tiles in 32 bits, so K must be below 2^28; it is {x.shape[1]}"
    return None


# `tokens` is not specialized: with tokens == 1 ptxas 12.8 generates wrong code (see mx_quantize_groups).
@triton.jit(do_not_specialize=["tokens", "span"])
def _nvfp4_quantize_groups(
    x, amax, qdata, scale, tensor_scale, start, end, offs,
    tokens, R, C, row_tiles, span, stride_m, stride_k, amax_stride, G, stride_offs,
    BLOCKED: tl.constexpr, WIDE: tl.constexpr, BOUNDED: tl.constexpr, CONVERTS: tl.constexpr,
    ASM: tl.constexpr, ALIGN: tl.constexpr, CHUNK: tl.constexpr, BLOCKS: tl.constexpr, TILES: tl.constexpr,
    ROW_TILES: tl.constexpr,
):  # fmt: skip
    parts: tl.constexpr = 512 * TILES // BLOCKS  # programs for TILES tiles
    # Programs run along a row of tiles first, then down.
    first, part = tl.program_id(0) // parts * span, tl.program_id(0) % parts
    row_tile = tl.program_id(2) * ROW_TILES + tl.program_id(1)
    writes = tl.program_id(0) + row_tile == 0
    # The 128 rows of a tile belong to one group.
    group, token0, stop, begin = group_of(row_tile * 128, offs, stride_offs, G, start, end, writes, ALIGN, CHUNK)
    place, row, col = part_of_tiles(part, BLOCKS, TILES, BLOCKED)
    if BLOCKED:
        scale += part * (BLOCKS // TILES)
    steps = tl.minimum(span, tl.cdiv(C, 4 * TILES) - first)
    TOGETHER: tl.constexpr = 4 if x.dtype.element_ty == tl.float32 else 8  # see load_eight
    if group < G:
        A, h, up, wrong_group = of_matrix(tl.load(amax + group * amax_stride))
        token = token0 + row_tile * 128 - begin
        read = (token + row >= 0) & (token + row < tl.minimum(stop, tokens))
        r, k = row, col[:, None] * 16 + tl.arange(0, TOGETHER)[None, :]
        if WIDE:
            r, k = r.to(tl.int64), k.to(tl.int64)
        offset = (r * stride_m)[:, None] + k * stride_k
        x_rows = x + token.to(tl.int64) * stride_m
        for i in range(steps):
            col_tile = (first + i) * TILES
            there = (read & (col_tile * 4 + col < C))[:, None]
            source = x_rows + col_tile.to(tl.int64) * 64 * stride_k + offset
            # Two loads, so that a thread has a whole block.
            loaded = load_eight(source, stride_k, there)
            narrow: tl.constexpr = loaded.dtype != tl.float32
            loaded_more = load_eight(source + tl.cast(stride_k, tl.int64) * 8, stride_k, there)
            bits, values, more, signs, signs_more = block_of_row(loaded, loaded_more, ASM)
            s, wrong = block_scale(bits, h, up, wrong_group)
            short = is_short(A, narrow)
            minus_d, factor = factors(s, h, up, wrong, short, ASM)
            word = packed_codes(values, signs, minus_d, factor, up, wrong, short, None, narrow, BOUNDED, CONVERTS, ASM)
            word_more = packed_codes(
                more, signs_more, minus_d, factor, up, wrong, short, None, narrow, BOUNDED, CONVERTS, ASM
            )
            q = tl.join(word, word_more)
            store_part(
                qdata, scale, q, scale_byte(s, wrong), place, row, col, row_tile, col_tile, R, C, row_tiles,
                BLOCKED, WIDE,
            )  # fmt: skip
    else:  # rows after the last group
        q, byte = tl.zeros((BLOCKS, 2), tl.uint32), tl.zeros((BLOCKS,), tl.uint8)
        for i in range(steps):
            col_tile = (first + i) * TILES
            store_part(
                qdata, scale, q, byte, place, row, col, row_tile, col_tile, R, C, row_tiles, BLOCKED, WIDE
            )  # fmt: skip
    if writes:
        store_tensor_scales(tensor_scale, amax, amax_stride, G, CHUNK)


def nvfp4_quantize_groups(
    x: Tensor,
    offs: Tensor,
    tensor_amax: Tensor | None = None,
    *,
    axis: int = -1,
    pad_to: int = 128,
    scale_layout: str = "blocked",
    check_offs: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    (M, K), G, blocked, bounded = x.shape, offs.shape[0], scale_layout == "blocked", tensor_amax is None
    start, end = (offs.new_empty(G) for _ in range(2))
    amax = largest_of_groups(x, offs, start, end, pad_to) if tensor_amax is None else tensor_amax
    if axis == -2:
        parts = nvfp4_columns_of_groups.nvfp4_tile_of_groups(x, offs, amax, start, end, pad_to, bounded, blocked)
        return parts[0].mT, *parts[1:], start, end
    R, C, col_tiles = padded_rows(M, G, pad_to), K // 16, -(-K // 64)
    rows = R + 128 * G if blocked else R  # the number of rows with scales
    qdata = x.new_empty((R, K // 8), dtype=torch.int32)  # words of eight codes
    scale = x.new_empty((rows, 4 * col_tiles) if blocked else (R, C), dtype=torch.uint8)
    tensor_scale = x.new_empty(G, dtype=torch.float32)
    config = for_device(CONFIGS, x.device)[scale_layout]
    if rows:
        # The grid has programs across even if there are no columns, because a program still writes start and end.
        row_tiles, across = rows // 128, -(-col_tiles // config["TILES"])
        programs = 512 * config["TILES"] // config["BLOCKS"]  # for neighbouring tiles
        steps = span(programs * across, row_tiles, x.device, _SPAN)
        grid = (programs * max(1, -(-across // steps)), min(row_tiles, _ROW_TILES), -(-row_tiles // _ROW_TILES))
        wide = max(128 * x.stride(0) + 64 * config["TILES"] * x.stride(1), 128 * 8 * C) >= 2**31
        registers: dict[str, int] = {}
        if in_words(x) and not (wide or converts(x.device)):
            registers = _REGISTERS if blocked else _OF_PLAIN.get(release(), _REGISTERS)
        _nvfp4_quantize_groups[grid](
            x, amax, qdata, scale, tensor_scale, start, end, offs, M, R, C, row_tiles, steps, *x.stride(),
            amax.stride(0), G, offs.stride(0), blocked, wide, bounded, converts(x.device), instructions(x.device),
            pad_to, chunk(G), ROW_TILES=_ROW_TILES, **config, **registers, **UNFUSED,
        )  # fmt: skip
    return qdata.view(torch.float4_e2m1fn_x2), scale.view(torch.float8_e4m3fn), tensor_scale, start, end
