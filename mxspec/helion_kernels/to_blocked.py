"""to_blocked in Helion: the loop runs over the output, so that stores are consecutive bytes and padding is written."""

from __future__ import annotations

import helion.language as hl
import torch
from torch import Tensor

from mxspec.helion_kernels._blocked import blocked_shape, blocked_to_row_col
from mxspec.helion_kernels._launch import config, extent, launch

RANK = {(9, 0): 2, (10, 0): 2}
_CONFIG = config([1, 1, 2048], 4)  # along (E, row tiles, bytes of a row of tiles)
CONFIGS = {(9, 0): _CONFIG, (10, 0): _CONFIG}  # Blackwell: compiled, not run


def _to_blocked(scale: Tensor, stride_e: int, stride_r: int, stride_c: int, R: int, C: int, out: Tensor) -> None:
    for e, row_tile, byte in hl.tile(out.shape):
        matrix = e.index[:, None, None]
        r, c = blocked_to_row_col(row_tile.index[None, :, None], byte.index[None, None, :])
        source = matrix * stride_e + r * stride_r + c * stride_c
        valid = (matrix < out.size(0)) & (r < R) & (c < C)
        out[e, row_tile, byte] = hl.load(scale, [source], extra_mask=valid)


def to_blocked(scale: Tensor) -> Tensor:
    *lead, R, C = scale.shape
    row_tiles, col_tiles = blocked_shape(R, C)
    out = torch.empty(*lead, 512 * row_tiles * col_tiles, dtype=torch.uint8, device=scale.device)
    if out.numel():
        E, stride_e = (lead[0], scale.stride(0)) if lead else (1, 0)
        flat = scale.view(torch.uint8).as_strided((extent(scale),), (1,))
        launch(
            _to_blocked, CONFIGS, flat, stride_e, *scale.stride()[-2:], R, C, out.view(E, row_tiles, 512 * col_tiles)
        )
    return out.view(scale.dtype)
