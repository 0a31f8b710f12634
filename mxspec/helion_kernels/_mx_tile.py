"""MX along the columns, or along columns and rows from one read: a program owns a tile of whole blocks.

A tile is held as `(groups, cols, run)`: row `run * group + i` at `[group, :, i]`. Each i is a load of its own, and
`hl.join`, unlike `torch.stack`, leaves what was loaded in the thread that loaded it, beside the 8 columns of its
16-byte loads. So most of a column's maximum is taken in registers, and the codes of `run` rows of a column, which are
consecutive bytes of the result, turn through shared memory together.

The loop is an `hl.grid` and a tile's sizes are constants: reshapes need them, and scale tiles whole ones. Ref mode runs
such programs one by one, so it tests their masks too. Indices are products of tensors, which are 64-bit where they
have to be; a product of sizes alone, which Helion may form from an index that is a scalar, would be 32-bit.
"""

from __future__ import annotations

from typing import NamedTuple

import helion.language as hl
import torch
from torch import Tensor

from mxspec.formats import ElementFormat, element
from mxspec.helion_kernels._blocked import blocked_shape
from mxspec.helion_kernels._launch import extent, for_device, launch, on_grid
from mxspec.helion_kernels._numerics import (
    fp32_bits,
    magnitude_bits,
    reciprocal_scale,
    saturating_cast,
    shared_exponent,
)


class Tile(NamedTuple):
    rows: int
    cols: int
    run: int  # rows that one thread holds of a column
    num_warps: int


# H200, as shares of Triton's rate: col 0.97 to 1.00 from 8192 x 7168 on, 0.91 to 0.93 at 8192 x 2048; rowcol 0.93 to
# 0.97 (4 warps 0.76, 256-row tiles 0.73); the uneven tile is not yet measured. Of both directions, 16 rows of 8 columns
# a thread take 230 registers, 8 take 120, so that two programs share an SM; with masks the assembler would hold to 128
# by spilling one, hence the 16 warps.
_HOPPER = {
    "col": Tile(256, 128, 16, 8),
    "rowcol": Tile(128, 128, 8, 8),
    "rowcol, uneven": Tile(128, 128, 8, 16),  # where tiles of "rowcol" reach past x
}
TILES = {(9, 0): _HOPPER, (10, 0): _HOPPER}


def load_run(
    x: Tensor, m: Tensor, stride: int, k: Tensor, mask: Tensor | None, run: int, step: int = 1,
    left: Tensor | None = None, i: int = 0,
) -> Tensor:  # fmt: skip
    """The rows m, m + step, ..., `run` of them, along new last dimensions of 2: the highest bit of a number first.

    With a mask and `left`, of the rows from each first one on only so many are there; m is i after it.
    """
    if run == 1:
        there = mask if mask is None or left is None else mask & (left > i)
        return hl.load(x, [m * stride + k], extra_mask=there)
    evens = load_run(x, m, stride, k, mask, run // 2, 2 * step, left, i)
    return hl.join(evens, load_run(x, m + step, stride, k, mask, run // 2, 2 * step, left, i + step))


def column_codes(
    values: Tensor, largest: Tensor, qdata: Tensor, e: int, m_tile: int, k_tile: int, M: int, K: int, scaling: str,
    even: bool,
) -> Tensor:  # fmt: skip
    """32x1: store the codes; the scale bytes. `largest` is by block and column, as they are."""
    (groups, cols, run), fmt = values.shape, element(qdata.dtype)
    rows, blocks = groups * run, groups * run // 32
    byte = shared_exponent(fp32_bits(largest, values.dtype), fmt, scaling)
    factor = reciprocal_scale(byte).unsqueeze(1).expand(blocks, 32 // run, cols).reshape(groups, cols, 1)
    codes = saturating_cast(values.to(torch.float32) * factor, fmt).permute(1, 0, 2).reshape(cols, rows)
    m, k = (m_tile * rows + hl.arange(rows)).unsqueeze(0), (k_tile * cols + hl.arange(cols)).unsqueeze(1)
    hl.store(qdata, [(e * K + k) * M + m], codes, extra_mask=None if even else (k < K) & (m < M))
    return byte.to(torch.uint8)


def _columns(
    values: Tensor, largest: Tensor, qdata: Tensor, scale: Tensor, e: int, m_tile: int, k_tile: int, M: int, K: int,
    C: int, scaling: str, blocked: bool, even: bool,
) -> None:  # fmt: skip
    groups, cols, run = values.shape
    blocks = groups * run // 32
    byte = column_codes(values, largest, qdata, e, m_tile, k_tile, M, K, scaling, even)
    if blocked:  # cols is 128. (c // 4, c % 4, k // 32, k % 32) -> (c // 4, k % 32, k // 32, c % 4)
        byte = byte.reshape(blocks // 4, 4, 4, 32).permute(0, 3, 2, 1).reshape(blocks * 128)
        place, row_tiles, col_tiles = m_tile * (blocks * 128) + hl.arange(blocks * 128), (K + 127) // 128, (C + 3) // 4
        owned = None if even else place < col_tiles * 512
        hl.store(scale, [(e * row_tiles + k_tile) * col_tiles * 512 + place], byte, extra_mask=owned)
    else:
        c, k = (m_tile * blocks + hl.arange(blocks)).unsqueeze(0), (k_tile * cols + hl.arange(cols)).unsqueeze(1)
        hl.store(scale, [(e * K + k) * C + c], byte.permute(1, 0), extra_mask=None if even else (k < K) & (c < C))


def _rows(
    values: Tensor, largest: Tensor, qdata: Tensor, scale: Tensor, e: int, m_tile: int, k_tile: int, M: int, K: int,
    C: int, scaling: str, blocked: bool, even: bool,
) -> None:  # fmt: skip
    """1x32: `largest` is by group of rows, block and row of the group."""
    (groups, cols, run), fmt = values.shape, element(qdata.dtype)
    rows, blocks = groups * run, cols // 32
    byte = shared_exponent(fp32_bits(largest, values.dtype), fmt, scaling)
    factor = reciprocal_scale(byte).unsqueeze(2).expand(groups, blocks, 32, run).reshape(groups, cols, run)
    m, k = (m_tile * rows + hl.arange(rows)).unsqueeze(1), (k_tile * cols + hl.arange(cols)).unsqueeze(0)
    byte = byte.to(torch.uint8)
    if blocked:  # (row tile, r // 32, r % 32 // run, c, r % run) -> (row tile, r % 32 // run, r % run, r // 32, c)
        byte = byte.reshape(rows // 128, 4, 32 // run, 4, run).permute(0, 2, 4, 1, 3).reshape(rows // 128, 512)
        row_tiles, col_tiles = (M + 127) // 128, (C + 3) // 4
        row_tile = (m_tile * (rows // 128) + hl.arange(rows // 128)).unsqueeze(1)
        owned = None if even else (row_tile < row_tiles).expand(rows // 128, 512)
        start = ((e * row_tiles + row_tile) * col_tiles + k_tile) * 512
        hl.store(scale, [start + hl.arange(512).unsqueeze(0)], byte, extra_mask=owned)
    else:
        c, byte = (k_tile * blocks + hl.arange(blocks)).unsqueeze(0), byte.permute(0, 2, 1).reshape(rows, blocks)
        hl.store(scale, [(e * M + m) * C + c], byte, extra_mask=None if even else (m < M) & (c < C))
    codes = saturating_cast(values.to(torch.float32) * factor, fmt).permute(0, 2, 1).reshape(rows, cols)
    hl.store(qdata, [(e * M + m) * K + k], codes, extra_mask=None if even else (m < M) & (k < K))


def _mx_tile(
    x: Tensor, stride_e: int, stride_m: int, stride_k: int, E: int, M: int, K: int,
    q_col: Tensor, s_col: Tensor, q_row: Tensor, s_row: Tensor,
    scaling: hl.constexpr, blocked: hl.constexpr, with_rows: hl.constexpr, even: hl.constexpr,
    rows: hl.constexpr, cols: hl.constexpr, run: hl.constexpr,
) -> None:  # fmt: skip
    m_blocks, k_blocks = M // 32, K // 32  # on the host, so that Triton knows of a multiple of 16 that it is one
    groups = rows // run
    # x and the results are flat: what an access may touch is said by its mask alone.
    for e, k_tile, m_tile in hl.grid([E, (K + cols - 1) // cols, (M + rows - 1) // rows]):
        m = (m_tile * rows + hl.arange(groups) * run).unsqueeze(1)
        k = (k_tile * cols + hl.arange(cols)).unsqueeze(0)
        inside = None if even else (m < M) & (k < K)  # M is a multiple of 32
        values = load_run(x, m, stride_m, e * stride_e + k * stride_k, inside, run).reshape(groups, cols, run)
        magnitudes = magnitude_bits(values)
        col_largest = magnitudes.amax(-1).reshape(rows // 32, 32 // run, cols).amax(1)
        if with_rows:  # after both maxima, so that the magnitudes no longer take registers
            row_largest = magnitudes.reshape(groups, cols // 32, 32, run).amax(2)
            _rows(values, row_largest, q_row, s_row, e, m_tile, k_tile, M, K, k_blocks, scaling, blocked, even)
        _columns(values, col_largest, q_col, s_col, e, m_tile, k_tile, M, K, m_blocks, scaling, blocked, even)


def mx_tile(
    x: Tensor, fmt: ElementFormat, scaling: str, scale_layout: str, with_rows: bool = False
) -> tuple[Tensor, ...]:
    """`(q_col, s_col)` of x, its codes as those of the transpose, `(..., K, M)`; or `(q_row, s_row, q_col, s_col)`."""
    *lead, M, K = x.shape
    E, blocked = lead[0] if lead else 1, scale_layout == "blocked"
    tiles = for_device(TILES, x.device)
    tile = tiles["rowcol" if with_rows else "col"]
    if with_rows and (M % tile.rows or K % tile.cols):
        tile = tiles["rowcol, uneven"]
    rows, cols, run, num_warps = tile

    def outputs(R: int, C: int) -> tuple[Tensor, Tensor]:
        row_tiles, col_tiles = blocked_shape(R, C // 32)
        scale_shape = (512 * row_tiles * col_tiles,) if blocked else (R, C // 32)
        return x.new_empty((*lead, R, C), dtype=fmt.dtype), x.new_empty((*lead, *scale_shape), dtype=torch.uint8)

    q_col, s_col = outputs(K, M)
    q_row, s_row = outputs(M, K) if with_rows else (q_col, s_col)
    if x.numel():
        # Along the rows first: neighbouring programs then write neighbouring bytes of the columns' results. A grid of
        # three dimensions saves the divisions that undo a flat one, but holds at most 65535 in two of them.
        pid_type = "xyz" if max(E, -(-K // cols)) < 65536 else "flat"
        launch(
            _mx_tile, {(9, 0): on_grid(3, num_warps, pid_type)}, x.as_strided((extent(x),), (1,)),
            x.stride(0) if lead else 0, x.stride(-2), x.stride(-1), E, M, K,
            q_col.view(-1), s_col.view(-1), q_row.view(-1), s_row.view(-1),
            scaling, blocked, with_rows, M % rows == 0 and K % cols == 0, rows, cols, run,
        )  # fmt: skip
    columns = q_col, s_col.view(torch.float8_e8m0fnu)
    return (q_row, s_row.view(torch.float8_e8m0fnu), *columns) if with_rows else columns
