"""mx_quantize in Helion: one kernel for both scale layouts, whose programs run over the scale bytes as stored."""

from __future__ import annotations

from typing import Any

import helion
import helion.language as hl
import torch
from torch import Tensor

from mxspec.formats import MX_BLOCK_SIZE, element
from mxspec.helion_kernels._blocked import blocked_shape, blocked_to_row_col
from mxspec.helion_kernels._launch import extent, launch
from mxspec.helion_kernels._numerics import block_amax, reciprocal_scale, saturating_cast, shared_exponent

RANK = {(9, 0): 2, (10, 0): 2}  # measurement: to be filled in


def _config(block_sizes: list[int], num_warps: int) -> helion.Config:
    # Programs run along the last dimension first, as memory does; Helion's own order is the opposite.
    order = [list(range(len(block_sizes)))[::-1]] if len(block_sizes) > 1 else []
    return helion.Config(block_sizes=block_sizes, num_warps=num_warps, loop_orders=order)


# Block sizes are of the scales, for `flat`; (E, R, C, 1) of them for `strided`; (E, row tiles, column tiles, bytes of a
# tile) for `blocked`. 2048 elements and 2 warps a program: 32 elements a thread, four 16-byte loads in flight.
CONFIGS = {
    "flat": {(9, 0): _config([64], 2), (10, 0): _config([64], 2)},
    "strided": {(9, 0): _config([1, 1, 64, 1], 2), (10, 0): _config([1, 1, 64, 1], 2)},
    "blocked": {(9, 0): _config([1, 1, 1, 64], 2), (10, 0): _config([1, 1, 1, 64], 2)},
}
_PLAIN = [(64, 2), (64, 1), (64, 4), (32, 1), (32, 2), (128, 2), (128, 4), (128, 8), (256, 4), (256, 8), (512, 16)]
_BLOCKED = [(1, 64, 2), (1, 32, 1), (1, 32, 2), (1, 128, 2), (1, 128, 4), (1, 256, 8), (1, 512, 8), (1, 512, 16)]
_BLOCKED += [(2, 32, 2), (2, 64, 4), (4, 16, 2), (4, 32, 4), (4, 64, 8), (8, 16, 4), (8, 32, 8), (16, 16, 8)]
CANDIDATE_CONFIGS = {
    "flat": [_config([blocks], warps) for blocks, warps in _PLAIN],
    "blocked": [_config([1, 1, tiles, offsets], warps) for tiles, offsets, warps in _BLOCKED],
}


def supports(x: Tensor, *, axis: int = -1, **_: Any) -> str | None:
    return None if axis == -1 else "has only axis -1"


def _quantize_tile(values: Tensor, elem_dtype: torch.dtype, scaling: str) -> tuple[Tensor, Tensor]:
    """Codes and scale bytes of a tile whose last dimension is a block."""
    fmt = element(elem_dtype)
    byte = shared_exponent(block_amax(values), fmt, scaling)
    codes = saturating_cast(values.to(torch.float32) * reciprocal_scale(byte).unsqueeze(-1), fmt)
    return codes, byte.to(torch.uint8)


def _row_and_block(row_tile: Tensor, col_tile: Tensor, offset: Tensor, blocked: bool) -> tuple[Tensor, Tensor]:
    return blocked_to_row_col(row_tile, col_tile, offset) if blocked else (row_tile, col_tile)


def _flat(x: Tensor, qdata: Tensor, scale: Tensor, scaling: hl.constexpr) -> None:
    for blocks in hl.tile(scale.size(0)):
        codes, byte = _quantize_tile(x[blocks, :], qdata.dtype, scaling)
        qdata[blocks, :] = codes
        scale[blocks] = byte


def _strided(
    x: Tensor, stride_e: int, stride_r: int, stride_c: int, stride_k: int, R: int, C: int,
    qdata: Tensor, scale: Tensor, scaling: hl.constexpr, blocked: hl.constexpr,
) -> None:  # fmt: skip
    # The loop runs over the scale bytes. Those of padding come out as the scale of a block of zeros, which is 0.
    # x and qdata are flat: ref mode masks an access by one index tensor only, and Helion drops the index and the mask
    # of a store along a dimension of size 1, so that lanes past its end would write there too.
    E, row_tiles, col_tiles, tile_bytes = scale.shape
    tile_bytes = hl.specialize(tile_bytes)
    for e, row_tile, col_tile, offset in hl.tile([E, row_tiles, col_tiles, tile_bytes]):
        matrix = e.index[:, None, None, None, None]
        r, c = _row_and_block(
            row_tile.index[None, :, None, None, None],
            col_tile.index[None, None, :, None, None],
            offset.index[None, None, None, :, None],
            blocked,
        )
        k = hl.arange(32)[None, None, None, None, :]
        source = matrix * stride_e + r * stride_r + c * stride_c + k * stride_k
        valid = ((matrix < E) & (r < R) & (c < C)).expand(source.size())
        codes, byte = _quantize_tile(hl.load(x, [source], extra_mask=valid), qdata.dtype, scaling)
        hl.store(qdata, [((matrix * R + r) * C + c) * 32 + k], codes, extra_mask=valid)
        scale[e, row_tile, col_tile, offset] = byte


def _launch(x: Tensor, elem_dtype: Any, scaling: str, scale_layout: str, config: Any = None) -> tuple[Tensor, Tensor]:
    *lead, R, K = x.shape
    C = K // MX_BLOCK_SIZE
    row_tiles, col_tiles = blocked_shape(R, C)
    shape = (R, C) if scale_layout == "plain" else (512 * row_tiles * col_tiles,)
    qdata = torch.empty(x.shape, dtype=element(elem_dtype).dtype, device=x.device)
    scale = torch.empty(*lead, *shape, dtype=torch.uint8, device=x.device)
    if (
        scale.numel() > 1 and scale_layout == "plain" and x.is_contiguous()
    ):  # along a dimension of 1 Helion masks nothing
        blocks, codes = x.view(-1, MX_BLOCK_SIZE), qdata.view(-1, MX_BLOCK_SIZE)
        launch(_flat, CONFIGS["flat"], blocks, codes, scale.view(-1), scaling, config=config)
    elif scale.numel():
        E, stride_e = (lead[0], x.stride(0)) if lead else (1, 0)
        stride_r, stride_k = x.stride()[-2:]
        blocked = scale_layout == "blocked"
        tiles = scale.view((E, row_tiles, col_tiles, 512) if blocked else (E, R, C, 1))
        strides = (stride_e, stride_r, MX_BLOCK_SIZE * stride_k, stride_k)
        args = (x.as_strided((extent(x),), (1,)), *strides, R, C, qdata.view(-1), tiles, scaling)
        launch(_strided, CONFIGS["blocked" if blocked else "strided"], *args, blocked, config=config)
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
