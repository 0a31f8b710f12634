"""to_blocked_k_groups in Triton: a program turns TILES neighbouring tiles, of one group or of several.

The columns of a group begin at any byte of a row, so that rows are read a byte a thread, neighbouring threads reading
neighbouring bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxspec.triton_kernels._blocked import turned
from mxspec.triton_kernels._groups import chunk, group_of, grouped_tile
from mxspec.triton_kernels._launch import for_device

# No RANK: compiled and interpreted, not yet run on a GPU, so that it is taken by name only.
_HOPPER = {"TILES": 16, "num_warps": 8}  # not yet run on a GPU
CONFIGS = {(9, 0): _HOPPER, (10, 0): _HOPPER}
PTX = (r"st\.global\.v4\.b32",)


@triton.jit
def _to_blocked_k_groups(
    scale, out, start, offs,
    R, C, G, stride_r, stride_c, stride_offs, row_tiles, col_tiles, programs,
    CHUNK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0) % programs * TILES + tl.arange(0, TILES)
    row_tile = tl.program_id(0) // programs
    writes = tl.program_id(0) == 0
    column0, stop, begin, end = group_of(tile * 4, offs, stride_offs, G, None, start, writes, 4, CHUNK)
    r = row_tile * 128 + tl.arange(0, 128)
    c = (column0 + tile * 4 - begin)[:, None] + tl.arange(0, 4)[None, :]  # (TILES, 4)
    there = (c >= 0) & (c < tl.minimum(stop, C)[:, None])
    source = scale + (r.to(tl.int64) * stride_r)[:, None, None] + (c.to(tl.int64) * stride_c)[None, :, :]
    values = tl.load(source, mask=(r < R)[:, None, None] & there[None, :, :], other=0)
    values = turned(values, TILES)
    place, there = grouped_tile(tile, row_tile, begin // 4, end // 4, row_tiles, col_tiles)
    tl.store(out + (place * 512)[:, None] + tl.arange(0, 512)[None, :], values, mask=there[:, None])


def to_blocked_k_groups(scale: Tensor, offs: Tensor, *, check_offs: bool = False) -> tuple[Tensor, Tensor]:
    (R, C), G = scale.shape, offs.shape[0]
    row_tiles, col_tiles = -(-R // 128), -(-(C + 4 * G) // 4)
    out = scale.new_empty(512 * row_tiles * col_tiles)  # whole tiles are written, of which a part may be returned
    start = offs.new_empty(G + 1, dtype=torch.int64)
    config = for_device(CONFIGS, scale.device)
    programs = max(1, triton.cdiv(col_tiles, config["TILES"]))  # for each row of tiles; one if only start is written
    _to_blocked_k_groups[(programs * max(1, row_tiles),)](
        scale.view(torch.uint8), out.view(torch.uint8), start, offs, R, C, G, *scale.stride(),
        offs.stride(0), row_tiles, col_tiles, programs, chunk(G), **config,
    )  # fmt: skip
    return out[: 128 * row_tiles * (C + 4 * G)].view(128 * row_tiles, C + 4 * G), start
