"""mx_quantize in Helion: a tile of whole blocks, and one kernel for each order in which their scales are stored."""

from __future__ import annotations

from typing import Any

import helion
import helion.language as hl
import torch
from torch import Tensor

from mxspec.formats import MX_BLOCK_SIZE, element
from mxspec.helion_kernels._launch import launch
from mxspec.helion_kernels._numerics import magnitude_bits, reciprocal_scale, saturating_cast, shared_exponent

RANK = {(9, 0): 2, (10, 0): 2}  # measurement: to be filled in


def _config(block_sizes: list[int], num_warps: int, **more: Any) -> helion.Config:
    # Programs run along the last dimension first, as memory does; Helion's own order is the opposite.
    order = list(range(len(block_sizes)))[::-1]
    return helion.Config(block_sizes=block_sizes, num_warps=num_warps, loop_orders=[order], **more)


# Block sizes are (E, R, C) of the scales for the plain layout and (E, row tiles, column tiles, bytes of a tile) for
# the blocked one. 2048 elements and 2 warps a program: 32 elements a thread, four 16-byte loads in flight.
CONFIGS = {
    "plain": {(9, 0): _config([1, 1, 64], 2), (10, 0): _config([1, 1, 64], 2)},
    "blocked": {(9, 0): _config([1, 1, 1, 64], 2), (10, 0): _config([1, 1, 1, 64], 2)},
}


def supports(x: Tensor, *, axis: int = -1, **_: Any) -> str | None:
    return None if axis == -1 else "has only axis -1"


def _quantize_tile(values: Tensor, elem_dtype: torch.dtype, scaling: str) -> tuple[Tensor, Tensor]:
    """Codes and scale bytes of a tile whose last dimension is a block."""
    fmt = element(elem_dtype)
    byte = shared_exponent(magnitude_bits(values).amax(-1), fmt, scaling)
    codes = saturating_cast(values.to(torch.float32) * reciprocal_scale(byte).unsqueeze(-1), fmt)
    return codes, byte.to(torch.uint8)


def _plain(x: Tensor, qdata: Tensor, scale: Tensor, scaling: hl.constexpr) -> None:
    E, R, C, block_size = x.shape
    block_size = hl.specialize(block_size)
    for e, r, c in hl.tile([E, R, C]):
        codes, byte = _quantize_tile(x[e, r, c, :], qdata.dtype, scaling)
        qdata[e, r, c, :] = codes
        scale[e, r, c] = byte


def _blocked(x: Tensor, qdata: Tensor, scale: Tensor, scaling: hl.constexpr) -> None:
    # The loop runs over the output, bytes of padding included: they come out as the scale of a block of zeros, 0.
    E, R, C, block_size = x.shape
    block_size = hl.specialize(block_size)
    E, row_tiles, col_tiles, tile_bytes = scale.shape
    tile_bytes = hl.specialize(tile_bytes)
    for e, row_tile, col_tile, offset in hl.tile([E, row_tiles, col_tiles, tile_bytes]):
        o = offset.index[None, None, None, :]  # (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4
        r = row_tile.index[None, :, None, None] * 128 + ((o >> 2) & 3) * 32 + (o >> 4)
        c = col_tile.index[None, None, :, None] * 4 + (o & 3)
        valid = ((r < R) & (c < C))[:, :, :, :, None]
        at = [e.index[:, None, None, None], r, c, slice(None)]
        codes, byte = _quantize_tile(hl.load(x, at, extra_mask=valid), qdata.dtype, scaling)
        hl.store(qdata, at, codes, extra_mask=valid)
        scale[e, row_tile, col_tile, offset] = byte


def _launch(x: Tensor, elem_dtype: Any, scaling: str, scale_layout: str, config: Any = None) -> tuple[Tensor, Tensor]:
    *lead, R, K = x.shape
    C = K // MX_BLOCK_SIZE
    row_tiles, col_tiles = -(-R // 128), -(-C // 4)
    shape = (R, C) if scale_layout == "plain" else (512 * row_tiles * col_tiles,)
    qdata = torch.empty(x.shape, dtype=element(elem_dtype).dtype, device=x.device)
    scale = torch.empty(*lead, *shape, dtype=torch.uint8, device=x.device)
    if scale.numel():
        E = lead[0] if lead else 1
        if scale_layout == "plain":
            # A contiguous x is one row of blocks, so that a tile never ends with a row.
            size = (1, 1, E * R * C) if x.is_contiguous() else (E, R, C)
            body, tiled = _plain, scale.view(size)
        else:
            size = (E, R, C)
            body, tiled = _blocked, scale.view(E, row_tiles, col_tiles, 512)
        blocks = x.unflatten(-1, (C, MX_BLOCK_SIZE))
        blocks = blocks.view(*size, MX_BLOCK_SIZE) if x.is_contiguous() or lead else blocks.unsqueeze(0)
        launch(body, CONFIGS[scale_layout], blocks, qdata.view(blocks.shape), tiled, scaling, config=config)
    return qdata, scale.view(torch.float8_e8m0fnu)


def mx_quantize(
    x: Tensor,
    *,
    axis: int = -1,
    elem_dtype: torch.dtype | str = torch.float8_e4m3fn,
    scaling: str = "rceil",
    scale_layout: str = "plain",
) -> tuple[Tensor, Tensor]:
    return _launch(x, elem_dtype, scaling, scale_layout)
