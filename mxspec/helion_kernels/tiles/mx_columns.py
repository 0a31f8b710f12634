"""MX blocks along the columns, or along columns and rows from one read. A program owns a tile of whole blocks.

A tile is held as `(runs, parts, part, run)`, with row `run * r + i` at `[r, ..., i]`. The columns are in parts, of
which a warp has whole 32x1 blocks.

- Each i is a load of its own, and `hl.join` leaves a loaded value in the thread that loaded it, beside the 8 columns of
  its 16-byte load. `torch.stack` does not.
- So a thread computes most of a column's maximum in its registers.
- The codes of `run` rows of a column are consecutive bytes of the result. They pass through shared memory together,
  where the tile is transposed.

The loop is an `hl.grid`, and the sizes of a tile are constants: reshapes need constants, and scale tiles need whole
tiles. Ref mode runs such programs one by one, so it also tests their masks.

Indices are products of tensors, which are 64-bit if they have to be. A product of sizes alone would be 32-bit. Helion
may form such a product from a scalar index.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import helion.language as hl
import torch
from torch import Tensor

from mxspec.formats import ElementFormat
from mxspec.helion_kernels.common.blocked import blocked_shape
from mxspec.helion_kernels.common.launch import extent, for_device, launch, on_grid
from mxspec.helion_kernels.common.numerics import (
    FP6_WORDS,
    fp6_thirds,
    held,
    magnitude_bits,
    packed_cast,
    reciprocal_scale,
    shared_exponent,
    stored,
    widened,
    written,
)
from mxspec.helion_kernels.common.runs import load_run, store_run


class Tile(NamedTuple):
    rows: int
    cols: int
    part: int  # a warp has whole 32x1 blocks of this many columns
    run: int  # the rows of a column that one thread holds
    num_warps: int


# The same tiles as Triton's. The race against Triton: benchmarks/results/decisions.md.
_HOPPER = {
    "col, small": Tile(128, 128, 128, 16, 4),  # also for token groups, because one group has all rows of this tile
    "col, large": Tile(256, 128, 128, 16, 8),
    "rowcol": Tile(128, 128, 64, 8, 8),
}
TILES = {(9, 0): _HOPPER, (10, 0): _HOPPER}


def by_block(wide: Tensor) -> Tensor:
    """A tile `(runs, parts, part, run)` with the rows of each 32x1 block apart: `(blocks, runs, parts, part, run)`."""
    runs, parts, part, run = wide.shape
    return wide.reshape(runs * run // 32, 32 // run, parts, part, run)


def column_scale(wide: Tensor, elem_dtype: torch.dtype, scaling: str, dtype: torch.dtype) -> Tensor:
    """The 32x1 scale bytes of a tile, int32: `(blocks, parts, part)`."""
    largest = magnitude_bits(by_block(wide)).amax(-1).amax(1)
    return shared_exponent(largest, stored(elem_dtype), scaling, dtype)


def column_codes(
    wide: Tensor, byte: Tensor, qdata: Tensor, e: int, m_tile: int, k_tile: int, width: int, K: int, even: bool
) -> Tensor:
    """Store the 32x1 codes. Returns the scale bytes as uint8, `(blocks, cols)`.

    width: the elements of qdata that hold the codes of a column.
    """
    blocks, _runs, parts, part, _run = by_block(wide).shape
    fmt, cols = stored(qdata.dtype), parts * part
    rows = held(qdata.dtype, blocks * 32)  # as they are stored
    values = by_block(wide) * reciprocal_scale(byte, fmt).unsqueeze(1).unsqueeze(4)
    k = (k_tile * cols + hl.arange(cols)).unsqueeze(1)
    if qdata.dtype in FP6_WORDS:  # eight rows are three words
        m = (m_tile * rows + 3 * hl.arange(blocks * 4)).unsqueeze(0)
        owned = None if even else (k < K) & (m < width)
        for i, third in enumerate(fp6_thirds(values, fmt)):
            words = third.permute(2, 3, 0, 1, 4).reshape(cols, blocks * 4)
            hl.store(qdata, [(e * K + k) * width + m + i], words, extra_mask=owned)
        return byte.to(torch.uint8).reshape(blocks, cols)
    codes = packed_cast(values, fmt).permute(2, 3, 0, 1, 4).reshape(cols, rows)
    m = (m_tile * rows + hl.arange(rows)).unsqueeze(0)
    hl.store(qdata, [(e * K + k) * width + m], codes, extra_mask=None if even else (k < K) & (m < width))
    return byte.to(torch.uint8).reshape(blocks, cols)


def _columns(
    wide: Tensor, byte: Tensor, qdata: Tensor, scale: Tensor, e: int, m_tile: int, k_tile: int, width: int, K: int,
    C: int, blocked: bool, even: bool,
) -> None:  # fmt: skip
    byte = column_codes(wide, byte, qdata, e, m_tile, k_tile, width, K, even)
    blocks, cols = byte.shape
    if blocked:  # cols is 128. (c // 4, c % 4, k // 32, k % 32) -> (c // 4, k % 32, k // 32, c % 4)
        byte = byte.reshape(blocks // 4, 4, 4, 32).permute(0, 3, 2, 1).reshape(blocks * 128)
        place, row_tiles, col_tiles = m_tile * (blocks * 128) + hl.arange(blocks * 128), (K + 127) // 128, (C + 3) // 4
        owned = None if even else place < col_tiles * 512
        hl.store(scale, [(e * row_tiles + k_tile) * col_tiles * 512 + place], byte, extra_mask=owned)
    else:
        c, k = (m_tile * blocks + hl.arange(blocks)).unsqueeze(0), (k_tile * cols + hl.arange(cols)).unsqueeze(1)
        hl.store(scale, [(e * K + k) * C + c], byte.permute(1, 0), extra_mask=None if even else (k < K) & (c < C))


def store_rows(
    wide: Tensor, qdata: Tensor, scale: Tensor, e: int, m_tile: int, k_tile: int, M: int, width: int, C: int,
    row_tiles: int, scaling: str, dtype: torch.dtype, blocked: bool, even: bool,
) -> None:  # fmt: skip
    """Store the 1x32 codes and scale bytes of a tile.

    `width` counts the elements of qdata in a row, and `row_tiles` the rows of tiles of blocked scales.
    """
    (runs, parts, part, run), fmt = wide.shape, stored(qdata.dtype)
    rows, cols = runs * run, parts * part
    values = wide.reshape(runs, parts, part // 32, 32, run)
    byte = shared_exponent(magnitude_bits(values).amax(3), fmt, scaling, dtype)
    values = (values * reciprocal_scale(byte, fmt).unsqueeze(3)).reshape(runs, parts, part, 2, 2, 2)  # run is 8
    if qdata.dtype in FP6_WORDS:  # eight columns are three words
        m, k = tile_index(m_tile, k_tile, runs, parts, part // 8, run)
        k = 3 * k
    else:
        m, k = tile_index(m_tile, k_tile, runs, parts, held(qdata.dtype, part), run)  # k counts elements of qdata
    inside = None if even else (m < M) & (k < width)
    store_run(qdata, (e * M + m) * width + k, width, values, inside, run)
    byte = byte.to(torch.uint8).permute(0, 3, 1, 2).reshape(rows, cols // 32)
    if blocked:  # (r // 128, r % 128 // 32, r % 32, c) -> (r // 128, r % 32, r % 128 // 32, c)
        byte = byte.reshape(rows // 128, 4, 32, 4).permute(0, 2, 1, 3).reshape(rows // 128, 512)
        col_tiles = (C + 3) // 4
        row_tile = (m_tile * (rows // 128) + hl.arange(rows // 128)).unsqueeze(1)
        owned = None if even else (row_tile < row_tiles).expand(rows // 128, 512)
        start = ((e * row_tiles + row_tile) * col_tiles + k_tile) * 512
        hl.store(scale, [start + hl.arange(512).unsqueeze(0)], byte, extra_mask=owned)
    else:
        row, c = (
            (m_tile * rows + hl.arange(rows)).unsqueeze(1),
            (k_tile * (cols // 32) + hl.arange(cols // 32)).unsqueeze(0),
        )
        hl.store(scale, [(e * M + row) * C + c], byte, extra_mask=None if even else (row < M) & (c < C))


def tile_index(m_tile: int, k_tile: int, runs: int, parts: int, part: int, run: int) -> tuple[Tensor, Tensor]:
    """The first row of each run, `(runs, 1, 1)`, and the columns, `(1, parts, part)`."""
    m = (m_tile * (runs * run) + hl.arange(runs) * run).unsqueeze(1).unsqueeze(2)
    k = k_tile * (parts * part) + (hl.arange(parts) * part).unsqueeze(1) + hl.arange(part).unsqueeze(0)
    return m, k.unsqueeze(0)


def _mx_tile(
    x: Tensor, stride_e: int, stride_m: int, stride_k: int, E: int, M: int, K: int, strips: int,
    q_col: Tensor, s_col: Tensor, q_row: Tensor, s_row: Tensor,
    scaling: hl.constexpr, blocked: hl.constexpr, with_rows: hl.constexpr, even: hl.constexpr, strip: hl.constexpr,
    rows: hl.constexpr, cols: hl.constexpr, part: hl.constexpr, run: hl.constexpr,
) -> None:  # fmt: skip
    # Computed on the host, so that Triton keeps its divisible-by-16 specialization.
    m_blocks, k_blocks = M // 32, K // 32
    m_width, k_width = held(q_col.dtype, M), held(q_col.dtype, K)
    runs, parts, bit = rows // run, cols // part, strip.bit_length() - 1
    # x and the results are flat, so only the mask of an access limits what it touches.
    for e, k_strip, i in hl.grid([E, strips, (M + rows - 1) // rows * strip]):
        m_tile, k_tile = i >> bit, k_strip * strip + (i & (strip - 1))  # `//` and `%` would need a branch on the sign
        m, k = tile_index(m_tile, k_tile, runs, parts, part, run)
        inside = None if even else (m < M) & (k < K)  # M is a multiple of 32
        values = load_run(x, m, stride_m, e * stride_e + k * stride_k, inside, run)
        wide = widened(values).reshape(runs, parts, part, run)
        byte = column_scale(wide, q_col.dtype, scaling, x.dtype)
        if with_rows:  # after both maxima, so that the magnitudes free their registers
            store_rows(
                wide, q_row, s_row, e, m_tile, k_tile, M, k_width, k_blocks, (M + 127) // 128, scaling, x.dtype,
                blocked, even,
            )  # fmt: skip
        _columns(wide, byte, q_col, s_col, e, m_tile, k_tile, m_width, K, m_blocks, blocked, even)


def mx_tile(
    x: Tensor, fmt: ElementFormat, scaling: str, scale_layout: str, with_rows: bool = False
) -> tuple[Tensor, ...]:
    """`(q_col, s_col)` of x; or `(q_row, s_row, q_col, s_col)`, if `with_rows`.

    The codes q_col are stored as those of the transpose, `(..., K, M)`.
    """
    *lead, M, K = x.shape
    E, blocked = lead[0] if lead else 1, scale_layout == "blocked"
    tiles = for_device(TILES, x.device)
    tile = tiles["rowcol" if with_rows else "col, large" if x.numel() >= 2**26 else "col, small"]
    rows, cols, part, run, num_warps = tile

    def outputs(R: int, C: int) -> tuple[Tensor, Tensor]:
        row_tiles, col_tiles = blocked_shape(R, C // 32)
        scale_shape = (512 * row_tiles * col_tiles,) if blocked else (R, C // 32)
        return written(x, (*lead, R, C), fmt), x.new_empty((*lead, *scale_shape), dtype=torch.uint8)

    k_tiles = -(-K // cols)
    strip = math.gcd(k_tiles, 8) if with_rows else 1  # 8 tiles write whole sectors of plain scales
    q_col, s_col = outputs(K, M)
    q_row, s_row = outputs(M, K) if with_rows else (q_col, s_col)
    if x.numel():
        # Grid order: along the rows first, so that neighbouring programs write neighbouring bytes of the columns'
        # results. Within a strip, programs first run along its tiles of a row, for the bytes of the rows' results. A
        # grid of three dimensions needs no divisions to find a program's place, but two of its dimensions hold at most
        # 65535.
        pid_type = "xyz" if max(E, k_tiles // strip) < 65536 else "flat"
        launch(
            _mx_tile, {(9, 0): on_grid(3, num_warps, pid_type)}, x.as_strided((extent(x),), (1,)),
            x.stride(0) if lead else 0, x.stride(-2), x.stride(-1), E, M, K, k_tiles // strip,
            q_col.view(-1), s_col.view(-1), q_row.view(-1), s_row.view(-1),
            scaling, blocked, with_rows, M % rows == 0 and K % cols == 0, strip,
            rows, cols, part, run,
        )  # fmt: skip
    q_row, q_col = (fmt.as_codes(q.view(fmt.storage_dtype)) for q in (q_row, q_col))
    columns = q_col, s_col.view(torch.float8_e8m0fnu)
    return (q_row, s_row.view(torch.float8_e8m0fnu), *columns) if with_rows else columns
