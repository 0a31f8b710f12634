"""to_blocked in Helion: the loop runs over the output, so that stores are consecutive bytes and padding is written."""

from __future__ import annotations

from typing import Any

import helion
import helion.language as hl
import torch
from torch import Tensor

from mxspec.helion_kernels._blocked import blocked_shape, blocked_to_row_col
from mxspec.helion_kernels._launch import extent, launch

RANK = {(9, 0): 2, (10, 0): 2}  # measurement: to be filled in


def _config(block_sizes: list[int], num_warps: int) -> helion.Config:
    # Programs run along the last dimension first, as memory does; Helion's own order is the opposite.
    return helion.Config(block_sizes=block_sizes, num_warps=num_warps, loop_orders=[[3, 2, 1, 0]])


# Block sizes are (E, row tiles, column tiles, bytes of a tile).
CONFIGS = {(9, 0): _config([1, 1, 4, 512], 4), (10, 0): _config([1, 1, 4, 512], 4)}
CANDIDATE_CONFIGS = [
    _config([1, 1, tiles, 512], warps) for tiles in (1, 2, 4, 8) for warps in (2, 4, 8) if warps <= 4 * tiles
]


def _to_blocked(scale: Tensor, stride_e: int, stride_r: int, stride_c: int, R: int, C: int, out: Tensor) -> None:
    E, row_tiles, col_tiles, tile_bytes = out.shape
    tile_bytes = hl.specialize(tile_bytes)
    for e, row_tile, col_tile, offset in hl.tile([E, row_tiles, col_tiles, tile_bytes]):
        matrix = e.index[:, None, None, None]
        r, c = blocked_to_row_col(
            row_tile.index[None, :, None, None], col_tile.index[None, None, :, None], offset.index[None, None, None, :]
        )
        source = matrix * stride_e + r * stride_r + c * stride_c
        out[e, row_tile, col_tile, offset] = hl.load(scale, [source], extra_mask=(matrix < E) & (r < R) & (c < C))


def _launch(scale: Tensor, config: Any = None) -> Tensor:
    *lead, R, C = scale.shape
    row_tiles, col_tiles = blocked_shape(R, C)
    out = torch.empty(*lead, 512 * row_tiles * col_tiles, dtype=torch.uint8, device=scale.device)
    if out.numel():
        E, stride_e = (lead[0], scale.stride(0)) if lead else (1, 0)
        flat = scale.view(torch.uint8).as_strided((extent(scale),), (1,))
        tiles = out.view(E, row_tiles, col_tiles, 512)
        launch(_to_blocked, CONFIGS, flat, stride_e, *scale.stride()[-2:], R, C, tiles, config=config)
    return out.view(scale.dtype)


def to_blocked(scale: Tensor) -> Tensor:
    return _launch(scale)
