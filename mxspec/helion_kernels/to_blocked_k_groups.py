"""to_blocked_k_groups in Helion: a program turns neighbouring tiles, of one group or of several.

The columns of a group begin at any byte of a row, so that rows are read a byte a thread, neighbouring threads reading
neighbouring bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import helion.language as hl
import torch
from torch import Tensor

from mxspec.helion_kernels._blocked import turned
from mxspec.helion_kernels._groups import chosen, chunk, grouped_tile, holds, padded_ends
from mxspec.helion_kernels._launch import flat, for_device, launch, on_grid


class Tiles(NamedTuple):
    tiles: int  # a program, along a row of them
    num_warps: int


# No RANK: compiled and interpreted, not yet run on a GPU, so that it is taken by name only.
_HOPPER = Tiles(8, 8)  # not yet run on a GPU
CONFIGS = {(9, 0): _HOPPER, (10, 0): _HOPPER}
PTX = (r"st\.global\.v4\.b32",)


def _to_blocked_k_groups(
    scale: Tensor, stride_r: int, stride_c: int, R: int, C: int, out: Tensor, row_tiles: int, col_tiles: int,
    offs: Tensor, stride_offs: int, G: int, start: Tensor, row_programs: int, col_programs: int,
    chunk: hl.constexpr, tiles: hl.constexpr,
) -> None:  # fmt: skip
    for row_tile, program in hl.grid([row_programs, col_programs]):
        if row_tile + program == 0:
            hl.store(start, [0], 0)
        tile = program * tiles + hl.arange(tiles)
        column0, stop, begin, end = tile * 0, tile * 0, tile * 0, tile * 0
        before = hl.zeros([], dtype=torch.int32)
        for i in range(0, G, chunk):
            g, firsts, ends, begins, until, before = padded_ends(offs, stride_offs, G, before, i, 4, chunk)
            mine = holds(begins, until, tile * 4)
            column0 = column0 + chosen(mine, firsts)
            stop = stop + chosen(mine, ends)
            begin = begin + chosen(mine, begins)
            end = end + chosen(mine, until)
            if row_tile + program == 0:
                hl.store(start, [g + 1], until.to(torch.int64), extra_mask=g < G)
        begin = torch.where(end > 0, begin, before)
        r = (row_tile * 128 + hl.arange(128)).unsqueeze(1).unsqueeze(2)
        c = (column0 + tile * 4 - begin).unsqueeze(1) + hl.arange(4).unsqueeze(0)  # (tiles, 4)
        there = ((c >= 0) & (c < stop.unsqueeze(1)) & (c < C)).unsqueeze(0)
        values = hl.load(scale, [r * stride_r + c.unsqueeze(0) * stride_c], extra_mask=(r < R) & there)
        values = turned(values, tiles)
        place, owned = grouped_tile(tile, row_tile, begin >> 2, end >> 2, row_tiles, col_tiles)
        byte = hl.arange(512).unsqueeze(0)
        hl.store(out, [place.unsqueeze(1) * 512 + byte], values, extra_mask=owned.unsqueeze(1).expand(tiles, 512))


def to_blocked_k_groups(scale: Tensor, offs: Tensor, *, check_offs: bool = False) -> tuple[Tensor, Tensor]:
    (R, C), G = scale.shape, offs.shape[0]
    row_tiles, col_tiles = -(-R // 128), -(-(C + 4 * G) // 4)
    out = scale.new_empty(512 * row_tiles * col_tiles)  # whole tiles are written, of which a part may be returned
    start = offs.new_empty(G + 1, dtype=torch.int64)
    tiles, num_warps = for_device(CONFIGS, scale.device)
    # At least one program, which writes start.
    row_programs, col_programs = max(1, row_tiles), max(1, -(-col_tiles // tiles))
    launch(
        _to_blocked_k_groups, {(9, 0): on_grid(2, num_warps)}, flat(scale.view(torch.uint8)), *scale.stride(), R, C,
        flat(out.view(torch.uint8)), row_tiles, col_tiles, flat(offs), offs.stride(0), G, start,
        row_programs, col_programs, chunk(G), tiles,
    )  # fmt: skip
    return out[: 128 * row_tiles * (C + 4 * G)].view(128 * row_tiles, C + 4 * G), start
