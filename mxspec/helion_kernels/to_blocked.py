"""to_blocked in Helion: a program reads 128 rows, transposes them in shared memory, and writes whole tiles.

The loop is an `hl.grid`, so that a program has whole tiles to reorder.
"""

from __future__ import annotations

from typing import NamedTuple

import helion.language as hl
import torch
from torch import Tensor

from mxspec.helion_kernels.common.blocked import blocked_shape, turned
from mxspec.helion_kernels.common.launch import extent, for_device, launch, on_grid


class Tiles(NamedTuple):
    tiles: int  # tiles of a program, along a row of tiles
    num_warps: int


RANK = {(9, 0): 2, (10, 0): 2}
# The same tiles as Triton's. 16 tiles read 64 bytes of a row, and 16-byte loads need rows that start at multiples of
# 16. The race against Triton: benchmarks/results/decisions.md.
_HOPPER = {"aligned": Tiles(16, 8), "odd": Tiles(4, 2)}
CONFIGS = {(9, 0): _HOPPER, (10, 0): _HOPPER}
PTX = (r"st\.global\.v4\.b32",)


def _to_blocked(
    scale: Tensor, stride_e: int, stride_r: int, stride_c: int, E: int, R: int, C: int, out: Tensor, tiles: hl.constexpr
) -> None:
    col_tiles = (C + 3) // 4
    # Helion's first loop is the outermost here: programs run along a row of tiles, then down, then to the next expert.
    for e, row_tile, program in hl.grid([E, (R + 127) // 128, (col_tiles + tiles - 1) // tiles]):
        r = (row_tile * 128 + hl.arange(128))[:, None]
        c = (program * (4 * tiles) + hl.arange(4 * tiles))[None, :]
        values = hl.load(scale, [e * stride_e + r * stride_r + c * stride_c], extra_mask=(r < R) & (c < C))
        values = turned(values, tiles)
        byte = program * (512 * tiles) + hl.arange(512 * tiles)
        hl.store(out, [e * ((R + 127) // 128) + row_tile, byte], values, extra_mask=byte < col_tiles * 512)


def to_blocked(scale: Tensor) -> Tensor:
    *lead, R, C = scale.shape
    row_tiles, col_tiles = blocked_shape(R, C)
    out = torch.empty(*lead, 512 * row_tiles * col_tiles, dtype=torch.uint8, device=scale.device)
    if out.numel():
        E, stride_e = (lead[0], scale.stride(0)) if lead else (1, 0)
        tiles, num_warps = for_device(CONFIGS, scale.device)["aligned" if C % 16 == 0 else "odd"]
        launch(
            _to_blocked, {(9, 0): on_grid(3, num_warps)}, scale.view(torch.uint8).as_strided((extent(scale),), (1,)),
            stride_e, *scale.stride()[-2:], E, R, C, out.view(E * row_tiles, 512 * col_tiles), tiles,
        )  # fmt: skip
    return out.view(scale.dtype)
