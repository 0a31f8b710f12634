"""to_blocked_m_groups in Helion: as `to_blocked`. Each row of tiles belongs to one token group."""

from __future__ import annotations

import helion.language as hl
import torch
from torch import Tensor

from mxspec.helion_kernels.common.blocked import blocked_shape, turned
from mxspec.helion_kernels.common.groups import chunk, padded_ends, passed, tokens_of
from mxspec.helion_kernels.common.launch import flat, for_device, launch, on_grid
from mxspec.helion_kernels.to_blocked import CONFIGS

RANK = {(9, 0): 2, (10, 0): 2}  # Blackwell: compiled, not run
PTX = (r"st\.global\.v4\.b32",)


def _to_blocked_m_groups(
    scale: Tensor, stride_r: int, stride_c: int, M: int, C: int, out: Tensor, row_tiles: int, col_tiles: int,
    offs: Tensor, stride_offs: int, G: int, start: Tensor, row_programs: int, col_programs: int,
    chunk: hl.constexpr, tiles: hl.constexpr,
) -> None:  # fmt: skip
    for row_tile, program in hl.grid([row_programs, col_programs]):
        if row_tile + program == 0:
            hl.store(start, [0], 0)
        # Groups begin at multiples of 128, so a row of tiles belongs to one group.
        row0 = row_tile * 128 + hl.arange(1)
        group, begin = row0 * 0, row0 * 0
        before = hl.zeros([], dtype=torch.int32)
        for i in range(0, G, chunk):
            g, _begins, ends, before = padded_ends(offs, stride_offs, G, before, i, 128, chunk)
            group, begin = passed(group, begin, row0, g, ends, G)
            if row_tile + program == 0:
                hl.store(start, [g + 1], ends.to(torch.int64), extra_mask=g < G)
        first, stop = tokens_of(group, offs, stride_offs, G)
        r = (first + row_tile * 128 + hl.arange(128) - begin).unsqueeze(1)
        c = (program * (4 * tiles) + hl.arange(4 * tiles)).unsqueeze(0)
        there = (r >= 0) & (r < stop.unsqueeze(1)) & (r < M)
        values = hl.load(scale, [r * stride_r + c * stride_c], extra_mask=there & (c < C))
        values = turned(values, tiles)
        byte = program * (512 * tiles) + hl.arange(512 * tiles)
        owned = (byte < col_tiles * 512) & (row_tile < row_tiles)
        hl.store(out, [(row_tile + hl.arange(1)) * col_tiles * 512 + byte], values, extra_mask=owned)


def to_blocked_m_groups(scale: Tensor, offs: Tensor, *, check_offs: bool = False) -> tuple[Tensor, Tensor]:
    (M, C), G = scale.shape, offs.shape[0]
    row_tiles, col_tiles = blocked_shape(M + 128 * G, C)
    # The kernel writes whole tiles. The returned part may end in the middle of a tile.
    out = scale.new_empty((128 * row_tiles, 4 * col_tiles))
    start = offs.new_empty(G + 1, dtype=torch.int64)
    tiles, num_warps = for_device(CONFIGS, scale.device)["aligned" if C % 16 == 0 else "odd"]
    # At least one program, which writes start.
    row_programs, col_programs = max(1, row_tiles), max(1, -(-col_tiles // tiles))
    launch(
        _to_blocked_m_groups, {(9, 0): on_grid(2, num_warps)}, flat(scale.view(torch.uint8)), *scale.stride(), M, C,
        flat(out.view(torch.uint8)), row_tiles, col_tiles, flat(offs), offs.stride(0), G, start,
        row_programs, col_programs, chunk(G), tiles,
    )  # fmt: skip
    return out[: M + 128 * G], start
