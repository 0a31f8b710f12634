"""to_blocked_m_groups in Triton: as `to_blocked`. Each row of tiles belongs to one token group."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxspec.triton_kernels.common.blocked import blocked_shape, turned
from mxspec.triton_kernels.common.groups import chunk, group_of
from mxspec.triton_kernels.common.launch import UNFUSED
from mxspec.triton_kernels.to_blocked import CONFIGS

RANK = {(9, 0): 1, (10, 0): 1}  # Blackwell: compiled, not run
PTX = (r"st\.global\.v4\.b32",)


@triton.jit
def _to_blocked_m_groups(
    scale, out, start, offs,
    M, C, G, stride_r, stride_c, stride_offs, col_tiles, programs,
    CHUNK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) % programs * TILES
    row_tile = tl.program_id(0) // programs
    # Groups begin at multiples of 128, so a row of tiles belongs to one group.
    writes = tl.program_id(0) == 0
    _, first_row, stop, begin = group_of(row_tile * 128, offs, stride_offs, G, None, start, writes, 128, CHUNK)
    r = first_row + row_tile * 128 + tl.arange(0, 128) - begin
    c = first * 4 + tl.arange(0, 4 * TILES)
    there = (r >= 0) & (r < tl.minimum(stop, M))
    source = scale + (r.to(tl.int64) * stride_r)[:, None] + (c.to(tl.int64) * stride_c)[None, :]
    values = tl.load(source, mask=there[:, None] & (c < C)[None, :], other=0)
    values = turned(values, TILES)
    byte = tl.arange(0, 512 * TILES)
    tiles = out + (row_tile.to(tl.int64) * col_tiles + first) * 512
    tl.store(tiles + byte, values, mask=(first + byte // 512 < col_tiles) & (row_tile * 128 < M + 128 * G))


def to_blocked_m_groups(scale: Tensor, offs: Tensor, *, check_offs: bool = False) -> tuple[Tensor, Tensor]:
    (M, C), G = scale.shape, offs.shape[0]
    row_tiles, col_tiles = blocked_shape(M + 128 * G, C)
    # The kernel writes whole tiles. The returned rows may end in the middle of the last row of tiles.
    out = scale.new_empty((128 * row_tiles, 4 * col_tiles))
    start = offs.new_empty(G + 1, dtype=torch.int64)
    config = CONFIGS["aligned" if C % 16 == 0 else "odd"]
    # The number of programs for each row of tiles. It is at least 1, because a program writes `start` even if there are
    # no columns.
    programs = max(1, -(-col_tiles // config["TILES"]))
    _to_blocked_m_groups[(programs * max(1, row_tiles),)](
        scale.view(torch.uint8), out.view(torch.uint8), start, offs, M, C, G, *scale.stride(),
        offs.stride(0), col_tiles, programs, chunk(G), **config, **UNFUSED,
    )  # fmt: skip
    return out[: M + 128 * G], start
