"""mx_quantize_groups in Helion: the kernels of mx_quantize. A program reads the rows of one token group.

Along axis -1, a program owns a run of the bytes of a row of scale tiles, as in the blocked layout of mx_quantize, even
if the scales are plain. Along axis -2, it owns a tile of `tiles/mx_columns.py`. Pad rows are read as zeros, so that
they get the codes and the scale bytes of the contract.

Both loops are an `hl.grid`, so that a program has its whole tile. Ref mode then runs the programs one by one, and so
tests the masks.
"""

from __future__ import annotations

from typing import NamedTuple

import helion.language as hl
import torch
from torch import Tensor

from mxspec.formats import element
from mxspec.helion_kernels.common.blocked import blocked_to_row_col
from mxspec.helion_kernels.common.groups import (
    chunk,
    grouped_tile,
    padded_ends,
    padded_rows,
    passed,
    tokens_left,
    tokens_of,
)
from mxspec.helion_kernels.common.launch import flat, for_device, launch, on_grid
from mxspec.helion_kernels.common.numerics import held, scale_value, widened
from mxspec.helion_kernels.common.runs import load_run
from mxspec.helion_kernels.mx_quantize import quantize_tile
from mxspec.helion_kernels.tiles.mx_columns import TILES, column_codes, column_scale, tile_index


class Part(NamedTuple):
    blocks: int  # scale bytes of a program; a divisor of the 512 bytes of a tile
    num_warps: int


RANK = {(9, 0): 2, (10, 0): 2}  # Blackwell: compiled, not run
# The race by benchmarks/tune.py against mx_quantize of padded tokens: benchmarks/results/decisions.md.
_HOPPER = Part(64, 2)
CONFIGS = {(9, 0): _HOPPER, (10, 0): _HOPPER}
PTX = (
    r"ld\.global\.v4\.b32",
    r"st\.global\.v4\.b32|0f40C00000",
    r"cvt\.rn\.satfinite\.e[45]m[32]x2\.f32|0f40C00000",
)  # e2m1 has a minimum with 6, and stores fewer bytes


# `tokens_2` is the number of tokens plus 2, so that it is never 1. Triton would make a constant of a 1, and ptxas 12.8
# then generates wrong code. ptxas knows that all codes are zeros except the codes of one row. It packs a single zero
# for all zeros, and leaves half of the word as it was.
def _rows(
    x: Tensor, stride_m: int, stride_k: int, tokens_2: int, C: int, qdata: Tensor, R: int, scale: Tensor,
    col_tiles: int, offs: Tensor, stride_offs: int, G: int, start: Tensor, end: Tensor, row_tiles: int, programs: int,
    scaling: hl.constexpr, blocked: hl.constexpr, alignment: hl.constexpr, chunk: hl.constexpr, blocks: hl.constexpr,
) -> None:  # fmt: skip
    for row_tile, program in hl.grid([row_tiles, programs]):
        # The 128 rows of a tile belong to one group.
        row0 = row_tile * 128 + hl.arange(1)
        group, begin = row0 * 0, row0 * 0
        before = hl.zeros([], dtype=torch.int32)
        for i in range(0, G, chunk):
            g, begins, ends, before = padded_ends(offs, stride_offs, G, before, i, alignment, chunk)
            group, begin = passed(group, begin, row0, g, ends, G)
            if row_tile + program == 0:
                hl.store(start, [g], begins, extra_mask=g < G)
                hl.store(end, [g], ends, extra_mask=g < G)
        first, stop = tokens_of(group, offs, stride_offs, G)
        byte_in_row = program * blocks + hl.arange(blocks)
        row, c = blocked_to_row_col(row_tile, byte_in_row)
        token = first + row - begin
        there = (token >= 0) & (token < stop) & (token < tokens_2 - 2) & (c < C)
        k = c.unsqueeze(1) * 32 + hl.arange(32).unsqueeze(0)
        source = token.unsqueeze(1) * stride_m + k * stride_k
        values = hl.load(x, [source], extra_mask=there.unsqueeze(1).expand(blocks, 32))
        codes, byte = quantize_tile(values, qdata.dtype, scaling)
        owned = (row < R) & (c < C)
        size = held(qdata.dtype, 32)
        of_block = (row * C + c).unsqueeze(1) * size + hl.arange(size).unsqueeze(0)
        hl.store(qdata, [of_block], codes, extra_mask=owned.unsqueeze(1).expand(blocks, size))
        if blocked:  # the scales have up to G rows of tiles more than the codes
            place = (row_tile + hl.arange(1)) * col_tiles * 512 + byte_in_row
            hl.store(scale, [place], byte, extra_mask=byte_in_row < col_tiles * 512)
        else:
            hl.store(scale, [row * C + c], byte, extra_mask=owned)


def _values(
    x: Tensor, token: Tensor, stride_m: int, stride_k: int, row_scale: Tensor, row_scale_stride_m: int,
    row_scale_stride_k: int, k_tile: int, K: int, run: int, left: Tensor, codes: str, cols: int,
) -> Tensor:  # fmt: skip
    """The values of a tile of MX codes along the rows, `(runs, 1, cols, run)`.

    A thread loads a scale byte for the 8 neighbouring codes that it loads.
    """
    runs, _, _ = token.shape
    k = (k_tile * cols + hl.arange(cols)).unsqueeze(0).unsqueeze(0)
    unit = (k_tile * cols + hl.arange(cols // 8) * 8).unsqueeze(0).unsqueeze(0)
    q = load_run(x, token, stride_m, k * stride_k, k < K, run, left=left).reshape(runs, 1, cols // 8, 8, run)
    q = q.view(torch.float8_e5m2 if codes == "e5m2" else torch.float8_e4m3fn).to(torch.float32)
    byte = load_run(row_scale, token, row_scale_stride_m, (unit >> 5) * row_scale_stride_k, unit < K, run, left=left)
    return (q * scale_value(byte.reshape(runs, 1, cols // 8, 1, run))).reshape(runs, 1, cols, run)


def _columns(
    x: Tensor, stride_m: int, stride_k: int, tokens_2: int, K: int, qdata: Tensor, R: int, scale: Tensor,
    offs: Tensor, stride_offs: int, G: int, start: Tensor, end: Tensor, row_tiles: int, col_programs: int,
    row_scale: Tensor, row_scale_stride_m: int, row_scale_stride_k: int, codes: hl.constexpr, bf16: hl.constexpr,
    scaling: hl.constexpr, blocked: hl.constexpr, alignment: hl.constexpr, chunk: hl.constexpr,
    cols: hl.constexpr, run: hl.constexpr,
) -> None:  # fmt: skip
    # With `codes`, the name of their format, x holds codes along the rows. Their values are quantized, rounded to
    # bfloat16 with `bf16`.
    # Computed on the host, so that Triton keeps its divisible-by-16 specialization.
    C, width = R // 32, held(qdata.dtype, R)
    k_tiles = (K + 127) // 128
    runs = 128 // run
    for k_tile, m_tile in hl.grid([col_programs, row_tiles]):
        # Groups are padded to multiples of 128, so these rows belong to one group.
        tile = m_tile + hl.arange(1)
        group, begin = tile * 0, tile * 0
        before = hl.zeros([], dtype=torch.int32)
        for i in range(0, G, chunk):
            g, begins, ends, before = padded_ends(offs, stride_offs, G, before, i, alignment, chunk)
            group, begin = passed(group, begin, tile * 128, g, ends, G)
            if k_tile + m_tile == 0:
                hl.store(start, [g], begins, extra_mask=g < G)
                hl.store(end, [g], ends, extra_mask=g < G)
        first, stop = tokens_of(group, offs, stride_offs, G)
        token0 = (first + tile * 128 - begin).sum(0)  # a scalar fits masks of any layout, without shared memory
        token = (token0 + hl.arange(runs) * run).unsqueeze(1).unsqueeze(2)
        left = tokens_left(token, stop, tokens_2 - 2)
        _m, k = tile_index(m_tile, k_tile, runs, 1, cols, run)
        if codes:
            wide = _values(
                x, token, stride_m, stride_k, row_scale, row_scale_stride_m, row_scale_stride_k, k_tile, K, run, left,
                codes, cols,
            )  # fmt: skip
            if bf16:
                wide = widened(wide.to(torch.bfloat16))
            byte = column_scale(wide, qdata.dtype, scaling, torch.bfloat16 if bf16 else torch.float32)
        else:
            values = load_run(x, token, stride_m, k * stride_k, k < K, run, left=left)
            wide = widened(values).reshape(runs, 1, cols, run)
            byte = column_scale(wide, qdata.dtype, scaling, x.dtype)
        byte = column_codes(wide, byte, qdata, 0, m_tile, k_tile, width, K, False)
        if blocked:  # cols is 128. (c, k // 32, k % 32) -> (k % 32, k // 32, c)
            size = torch.div(stop - first + (alignment - 1), alignment, rounding_mode="trunc") * (alignment // 128)
            place, owned = grouped_tile(tile, k_tile, group, begin >> 7, size, G, k_tiles, row_tiles)
            tiles = byte.reshape(4, 4, 32).permute(2, 1, 0).reshape(512)
            hl.store(scale, [place * 512 + hl.arange(512)], tiles, extra_mask=owned.expand(512))
        else:
            row, c = k.reshape(cols, 1), (m_tile * 4 + hl.arange(4)).unsqueeze(0)
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
    return groups(x, offs, axis, pad_to, elem_dtype, scaling, scale_layout)


def groups(
    x: Tensor, offs: Tensor, axis: int, pad_to: int, elem_dtype: torch.dtype | str, scaling: str, scale_layout: str,
    row_scale: Tensor | None = None, codes: str = "", bf16: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Launch. With `row_scale` and axis -2, x holds MX codes as bytes; bf16 says how to round their values."""
    (M, K), G, fmt, blocked = x.shape, offs.shape[0], element(elem_dtype), scale_layout == "blocked"
    R = padded_rows(M, G, pad_to)
    rows = R + 128 * G if blocked else R  # the number of rows with scales
    start, end = (offs.new_empty(G) for _ in range(2))
    col_tiles = -(-K // 128)
    if axis == -2:
        qdata = x.new_empty((K, R // fmt.per_byte), dtype=fmt.storage_dtype)
        shape = (128 * col_tiles, rows // 32) if blocked else (K, R // 32)
    else:
        qdata = x.new_empty((R, K // fmt.per_byte), dtype=fmt.storage_dtype)
        shape = (rows, 4 * col_tiles) if blocked else (R, K // 32)
    scale = x.new_empty(shape, dtype=torch.uint8)
    source, of_groups = (flat(x), *x.stride(), M + 2), (flat(offs), offs.stride(0), G, flat(start), flat(end))
    constants = scaling, blocked, pad_to, chunk(G)
    # A grid of two dimensions needs no division to find a program's place, but the second holds at most 65535. The
    # grid has at least one program across, because a program writes start and end even if there are no columns.
    if rows and axis == -2:
        tile = for_device(TILES, x.device)["col, small"]
        col_programs = max(1, -(-K // tile.cols))
        scales = (flat(row_scale), *row_scale.stride()) if row_scale is not None else (flat(x), 0, 0)
        launch(
            _columns, {(9, 0): on_grid(2, tile.num_warps, "xyz" if col_programs < 65536 else "flat")},
            *source, K, flat(qdata), R, flat(scale), *of_groups, rows // 128, col_programs, *scales, codes, bf16,
            *constants, tile.cols, tile.run,
        )  # fmt: skip
    elif rows:
        part = for_device(CONFIGS, x.device)
        row_tiles, programs = rows // 128, max(1, col_tiles) * (512 // part.blocks)
        launch(
            _rows, {(9, 0): on_grid(2, part.num_warps, "xyz" if row_tiles < 65536 else "flat")},
            *source, K // 32, flat(qdata), R, flat(scale), col_tiles, *of_groups, row_tiles, programs,
            *constants, part.blocks,
        )  # fmt: skip
    qdata = fmt.as_codes(qdata)
    return (qdata.mT if axis == -2 else qdata), scale.view(torch.float8_e8m0fnu), start, end
