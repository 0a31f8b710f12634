"""mx_quantize_groups in Helion: the kernels of mx_quantize, reading each row where its group says.

Along axis -1 a program owns a run of the bytes of a row of tiles of scales, as in mx_quantize's blocked layout, also
where the scales are plain. Along axis -2 it owns a tile of `_mx_tile`. Pad rows are read as zeros, so that their codes
and scale bytes come out as the contract says.

Both loops are an `hl.grid`, so that a program has its tile whole: ref mode then runs them one by one and tests the
masks.
"""

from __future__ import annotations

from typing import NamedTuple

import helion.language as hl
import torch
from torch import Tensor

from mxspec.formats import element
from mxspec.helion_kernels._blocked import blocked_to_row_col
from mxspec.helion_kernels._groups import chosen, chunk, grouped_tile, holds, padded_ends, padded_rows
from mxspec.helion_kernels._launch import flat, for_device, launch, on_grid
from mxspec.helion_kernels._mx_tile import TILES, column_codes, load_run
from mxspec.helion_kernels._numerics import magnitude_bits
from mxspec.helion_kernels.mx_quantize import quantize_tile


class Part(NamedTuple):
    blocks: int  # scale bytes a program, a divisor of the 512 of a tile
    num_warps: int


# No RANK: compiled and interpreted, not yet run on a GPU, so that it is taken by name only.
# Those of mx_quantize for blocked scales; not yet run on a GPU.
_HOPPER = Part(256, 8)
CONFIGS = {(9, 0): _HOPPER, (10, 0): _HOPPER}
PTX = (r"ld\.global\.v4\.b32", r"st\.global\.v4\.b32", r"cvt\.rn\.satfinite\.e[45]m[32]x2\.f32")


def _rows(
    x: Tensor, stride_m: int, stride_k: int, tokens: int, C: int, qdata: Tensor, R: int, scale: Tensor, col_tiles: int,
    offs: Tensor, stride_offs: int, G: int, start: Tensor, end: Tensor, row_tiles: int, programs: int,
    scaling: hl.constexpr, blocked: hl.constexpr, alignment: hl.constexpr, chunk: hl.constexpr, blocks: hl.constexpr,
) -> None:  # fmt: skip
    for row_tile, program in hl.grid([row_tiles, programs]):
        # The 128 rows of a tile are in one group.
        row0 = row_tile * 128 + hl.arange(1)
        token0, stop, begin = row0 * 0, row0 * 0, row0 * 0
        before = hl.zeros([], dtype=torch.int32)
        for i in range(0, G, chunk):
            g, firsts, ends, begins, until, before = padded_ends(offs, stride_offs, G, before, i, alignment, chunk)
            mine = holds(begins, until, row0)
            token0 = token0 + chosen(mine, firsts)
            stop = stop + chosen(mine, ends)
            begin = begin + chosen(mine, begins)
            if row_tile + program == 0:
                hl.store(start, [g], begins, extra_mask=g < G)
                hl.store(end, [g], until, extra_mask=g < G)
        byte_in_row = program * blocks + hl.arange(blocks)
        row, c = blocked_to_row_col(row_tile, byte_in_row)
        token = token0 + row - begin
        there = (token >= 0) & (token < stop) & (token < tokens) & (c < C)
        k = c.unsqueeze(1) * 32 + hl.arange(32).unsqueeze(0)
        source = token.unsqueeze(1) * stride_m + k * stride_k
        values = hl.load(x, [source], extra_mask=there.unsqueeze(1).expand(blocks, 32))
        codes, byte = quantize_tile(values, qdata.dtype, scaling)
        owned = (row < R) & (c < C)
        hl.store(qdata, [row.unsqueeze(1) * (C * 32) + k], codes, extra_mask=owned.unsqueeze(1).expand(blocks, 32))
        if blocked:  # G rows of tiles more than there are codes
            place = (row_tile + hl.arange(1)) * col_tiles * 512 + byte_in_row
            hl.store(scale, [place], byte, extra_mask=byte_in_row < col_tiles * 512)
        else:
            hl.store(scale, [row * C + c], byte, extra_mask=owned)


def _columns(
    x: Tensor, stride_m: int, stride_k: int, tokens: int, K: int, qdata: Tensor, R: int, scale: Tensor,
    offs: Tensor, stride_offs: int, G: int, start: Tensor, end: Tensor, row_programs: int, col_programs: int,
    scaling: hl.constexpr, blocked: hl.constexpr, alignment: hl.constexpr, chunk: hl.constexpr,
    rows: hl.constexpr, cols: hl.constexpr, run: hl.constexpr,
) -> None:  # fmt: skip
    C = R // 32  # on the host, so that Triton knows of a multiple of 16 that it is one
    col_tiles, row_tiles = R // 128 + G, (K + 127) // 128  # of scales, which lie transposed
    groups, units, blocks = rows // run, rows // 128, rows // 32
    for k_tile, m_tile in hl.grid([col_programs, row_programs]):
        # Groups are padded to multiples of 128, so that 128 rows are in one.
        tile = m_tile * units + hl.arange(units)
        token0, stop, begin, last = tile * 0, tile * 0, tile * 0, tile * 0
        before = hl.zeros([], dtype=torch.int32)
        for i in range(0, G, chunk):
            g, firsts, ends, begins, until, before = padded_ends(offs, stride_offs, G, before, i, alignment, chunk)
            mine = holds(begins, until, tile * 128)
            token0 = token0 + chosen(mine, firsts)
            stop = stop + chosen(mine, ends)
            begin = begin + chosen(mine, begins)
            last = last + chosen(mine, until)
            if k_tile + m_tile == 0:
                hl.store(start, [g], begins, extra_mask=g < G)
                hl.store(end, [g], until, extra_mask=g < G)
        begin = torch.where(last > 0, begin, before)
        token = (token0 + tile * 128 - begin).unsqueeze(1) + (hl.arange(128 // run) * run).unsqueeze(0)
        limit = torch.where(stop < tokens, stop, tokens).unsqueeze(1)
        left = torch.where((token >= 0) & (token < limit), limit - token, 0).reshape(groups).unsqueeze(1)
        token = token.reshape(groups).unsqueeze(1)
        k = (k_tile * cols + hl.arange(cols)).unsqueeze(0)
        values = load_run(x, token, stride_m, k * stride_k, k < K, run, left=left).reshape(groups, cols, run)
        largest = magnitude_bits(values).amax(-1).reshape(blocks, 32 // run, cols).amax(1)
        byte = column_codes(values, largest, qdata, 0, m_tile, k_tile, R, K, scaling, False)
        if blocked:  # cols is 128. (c // 4, c % 4, k // 32, k % 32) -> (c // 4, k % 32, k // 32, c % 4)
            tiles = byte.reshape(units, 4, 4, 32).permute(0, 3, 2, 1).reshape(units, 512)
            place, owned = grouped_tile(tile, k_tile, begin >> 7, last >> 7, row_tiles, col_tiles)
            to = place.unsqueeze(1) * 512 + hl.arange(512).unsqueeze(0)
            hl.store(scale, [to], tiles, extra_mask=owned.unsqueeze(1).expand(units, 512))
        else:
            row, c = k.permute(1, 0), (m_tile * blocks + hl.arange(blocks)).unsqueeze(0)
            hl.store(scale, [row * C + c], byte.permute(1, 0), extra_mask=(row < K) & (c < C))


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
    rows = R + 128 * G if blocked else R  # that have scales
    start, end = (offs.new_empty(G) for _ in range(2))
    col_tiles = -(-K // 128)
    if axis == -2:
        codes = x.new_empty((K, R), dtype=fmt.dtype)
        shape = (128 * -(-K // 128), rows // 32) if blocked else (K, R // 32)
    else:
        codes = x.new_empty((R, K), dtype=fmt.dtype)
        shape = (rows, 4 * col_tiles) if blocked else (R, K // 32)
    scale = x.new_empty(shape, dtype=torch.uint8)
    source, groups = (flat(x), *x.stride(), M), (flat(offs), offs.stride(0), G, flat(start), flat(end))
    constants = scaling, blocked, pad_to, chunk(G)
    # A grid of two dimensions saves the division that undoes a flat one, but holds at most 65535 in the second. One
    # program across if only start and end are written.
    if rows and axis == -2:
        tile = for_device(TILES, x.device)["col"]
        row_programs, col_programs = -(-rows // tile.rows), max(1, -(-K // tile.cols))
        launch(
            _columns, {(9, 0): on_grid(2, tile.num_warps, "xyz" if col_programs < 65536 else "flat")},
            *source, K, flat(codes), R, flat(scale), *groups, row_programs, col_programs,
            *constants, tile.rows, tile.cols, tile.run,
        )  # fmt: skip
    elif rows:
        part = for_device(CONFIGS, x.device)
        row_tiles, programs = rows // 128, max(1, col_tiles) * (512 // part.blocks)
        launch(
            _rows, {(9, 0): on_grid(2, part.num_warps, "xyz" if row_tiles < 65536 else "flat")},
            *source, K // 32, flat(codes), R, flat(scale), col_tiles, *groups, row_tiles, programs,
            *constants, part.blocks,
        )  # fmt: skip
    return (codes.mT if axis == -2 else codes), scale.view(torch.float8_e8m0fnu), start, end
