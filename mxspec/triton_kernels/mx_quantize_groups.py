"""mx_quantize_groups in Triton: the kernels of mx_quantize. A program reads the rows of one token group.

Along axis -1, a program owns a part of some tiles of 128 x 4 scales, side by side: with blocked scales a run of bytes
of each tile, with plain scales some rows. It does the same for the next tiles of the row, since they have the same
group. Along axis -2, it owns a tile of `tiles/mx_columns.py`. Pad rows are read as zeros, so that they get the codes
and the scale bytes of the contract. Rows after the last group are zeros, without any arithmetic.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxspec.formats import element, exponent_rule
from mxspec.triton_kernels.common.blocked import part_of_tiles, store_part
from mxspec.triton_kernels.common.groups import chunk, group_of, padded_rows
from mxspec.triton_kernels.common.launch import UNFUSED, for_device, span
from mxspec.triton_kernels.common.numerics import (
    e2m1_pairs,
    magnitude_bits,
    reciprocal_scale,
    saturating_cast,
    shared_exponent,
    widened,
)
from mxspec.triton_kernels.common.pairs import e2m1_of_mx_blocks, instructions, load_mx_blocks
from mxspec.triton_kernels.tiles import mx_columns

RANK = {(9, 0): 1, (10, 0): 1}  # Blackwell: compiled, not run
# By layout, and with words of e2m1. A program has BLOCKS scale bytes of TILES tiles, up to _SPAN times. The race:
# benchmarks/results/decisions.md.
_HOPPER = {
    "plain": {"BLOCKS": 32, "TILES": 4, "num_warps": 1},
    "blocked": {"BLOCKS": 32, "TILES": 1, "num_warps": 1},
    "plain, words": {"BLOCKS": 64, "TILES": 4, "num_warps": 2},
    "blocked, words": {"BLOCKS": 64, "TILES": 2, "num_warps": 2},
}
_SPAN = {"plain": 2, "blocked": 4, "plain, words": 4, "blocked, words": 4}
CONFIGS = {(9, 0): _HOPPER, (10, 0): _HOPPER}
_ROW_TILES = 32768  # in a grid's second dimension, which holds at most 65535
PTX = (
    r"ld\.global\.v4\.b32",
    r"st\.global\.v4\.b32|0f(40C00000|40400000|3F740000)",
    r"cvt\.rn\.satfinite\.(e[45]m[32]|e2m1)x2\.f32|0f(40C00000|40400000|3F740000)",
)  # on Hopper, e2m1 has the constant of a limit (6, 3, or 61/64), and stores fewer bytes


def supports(x: Tensor, offs: Tensor, *, axis: int = -1, **_: Any) -> str | None:
    if axis == -2:
        return mx_columns.supports(x)
    if x.shape[1] >= 2**29:
        return f"counts the bytes of a row of tiles in 32 bits, so K must be below 2^29; it is {x.shape[1]}"
    return None


# `tokens` is not specialized: Triton would make a constant of a 1, and ptxas 12.8 then generates wrong code. ptxas
# knows that all codes are zeros except the codes of one row. It packs a single zero for all zeros, and leaves half of
# the word as it was.
@triton.jit(do_not_specialize=["tokens", "span"])
def _mx_quantize_groups(
    x, qdata, scale, start, end, offs,
    tokens, R, C, row_tiles, span, stride_m, stride_k, G, stride_offs,
    EMAX: tl.constexpr, ROUND: tl.constexpr, EXCEPT: tl.constexpr,
    BLOCKED: tl.constexpr, WIDE: tl.constexpr, ASM: tl.constexpr, ALIGN: tl.constexpr, CHUNK: tl.constexpr,
    BLOCKS: tl.constexpr, TILES: tl.constexpr, ROW_TILES: tl.constexpr,
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
    WORDS: tl.constexpr = qdata.dtype.element_ty == tl.int32
    E2M1: tl.constexpr = WORDS or qdata.dtype.element_ty == tl.uint8
    if group < G:
        token = token0 + row_tile * 128 - begin
        read = (token + row >= 0) & (token + row < tl.minimum(stop, tokens))
        r, k = row, col[:, None] * 32 + tl.arange(0, 8 if WORDS else 32)[None, :]
        if WIDE:
            r, k = r.to(tl.int64), k.to(tl.int64)
        offset = (r * stride_m)[:, None] + k * stride_k
        x_rows = x + token.to(tl.int64) * stride_m
        for i in range(steps):
            col_tile = (first + i) * TILES
            there = read & (col_tile * 4 + col < C)
            source = x_rows + col_tile.to(tl.int64) * 128 * stride_k + offset
            if WORDS:
                quarters = load_mx_blocks(source, stride_k, there[:, None])
                q, byte = e2m1_of_mx_blocks(quarters, x.dtype.element_ty, EMAX, ROUND, EXCEPT, ASM)
            else:
                values = widened(tl.load(source, mask=there[:, None], other=0))
                byte = shared_exponent(tl.max(magnitude_bits(values), axis=1), EMAX, ROUND, EXCEPT)
                q = values * reciprocal_scale(byte, EMAX)[:, None]
                q = e2m1_pairs(q, ASM) if E2M1 else saturating_cast(q, qdata.dtype.element_ty)
            store_part(
                qdata, scale, q, byte.to(tl.uint8), place, row, col, row_tile, col_tile, R, C, row_tiles,
                BLOCKED, WIDE,
            )  # fmt: skip
    else:  # rows after the last group
        q = tl.zeros((BLOCKS, 4 if WORDS else 16 if E2M1 else 32), qdata.dtype.element_ty)
        byte = tl.zeros((BLOCKS,), tl.uint8)
        for i in range(steps):
            col_tile = (first + i) * TILES
            store_part(
                qdata, scale, q, byte, place, row, col, row_tile, col_tile, R, C, row_tiles, BLOCKED, WIDE
            )  # fmt: skip


def mx_quantize_groups(
    x: Tensor,
    offs: Tensor,
    *,
    axis: int = -1,
    pad_to: int = 128,
    elem_dtype: torch.dtype | str = torch.float8_e4m3fn,
    scaling: str = "rceil",
    scale_layout: str = "blocked",
    check_offs: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (M, K), G, fmt, blocked = x.shape, offs.shape[0], element(elem_dtype), scale_layout == "blocked"
    R = padded_rows(M, G, pad_to)
    rows = R + 128 * G if blocked else R  # the number of rows with scales
    start, end = (offs.new_empty(G) for _ in range(2))
    constants = *exponent_rule(fmt, scaling, x.dtype), blocked
    col_tiles = -(-K // 128)
    if axis == -2:
        qdata = mx_columns.empty_codes(x, (K, R), fmt)
        shape = (128 * col_tiles, rows // 32) if blocked else (K, R // 32)
        scale = x.new_empty(shape, dtype=torch.uint8)
        mx_columns.launch_groups(x, qdata, scale, start, end, offs, pad_to, rows, constants)
        return fmt.as_codes(qdata.view(fmt.storage_dtype)).mT, scale.view(torch.float8_e8m0fnu), start, end
    qdata = mx_columns.empty_codes(x, (R, K), fmt, words=x.dtype != torch.float32)
    scale = x.new_empty((rows, 4 * col_tiles) if blocked else (R, K // 32), dtype=torch.uint8)
    name = f"{scale_layout}, words" if qdata.dtype == torch.int32 else scale_layout
    config = for_device(CONFIGS, x.device)[name]
    if rows:
        # The grid has programs across even if there are no columns, because a program still writes start and end.
        row_tiles, across = rows // 128, -(-col_tiles // config["TILES"])
        programs = 512 * config["TILES"] // config["BLOCKS"]  # for neighbouring tiles
        steps = span(programs * across, row_tiles, x.device, _SPAN[name])
        grid = (programs * max(1, -(-across // steps)), min(row_tiles, _ROW_TILES), -(-row_tiles // _ROW_TILES))
        wide = max(128 * x.stride(0) + 128 * config["TILES"] * x.stride(1), 128 * K) >= 2**31
        _mx_quantize_groups[grid](
            x, qdata, scale, start, end, offs, M, R, K // 32, row_tiles, steps, *x.stride(), G, offs.stride(0),
            *constants, wide, instructions(x.device), pad_to, chunk(G), ROW_TILES=_ROW_TILES, **config, **UNFUSED,
        )  # fmt: skip
    return fmt.as_codes(qdata.view(fmt.storage_dtype)), scale.view(torch.float8_e8m0fnu), start, end
