"""to_blocked in Triton: a program writes whole tiles, so that its stores are consecutive bytes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxspec.triton_kernels._blocked import blocked_shape, row_col_in_tile

RANK = {(9, 0): 1, (10, 0): 1}
CONFIG = {"TILES": 4, "num_warps": 4}
PTX = (r"st\.global\.v4\.b32",)


@triton.jit
def _to_blocked(scale, out, R, C, stride_e, stride_r, stride_c, programs, TILES: tl.constexpr):
    row_tiles, col_tiles = tl.cdiv(R, 128), tl.cdiv(C, 4)
    i = tl.arange(0, 512 * TILES)
    e = (tl.program_id(0) // programs).to(tl.int64)
    tile = tl.program_id(0) % programs * TILES + i // 512
    row, col = row_col_in_tile(i % 512)
    r, c = tile // col_tiles * 128 + row, tile % col_tiles * 4 + col
    source = scale + e * stride_e + r.to(tl.int64) * stride_r + c.to(tl.int64) * stride_c
    values = tl.load(source, mask=(r < R) & (c < C), other=0)
    o = (e * row_tiles * col_tiles + tile) * 512 + i % 512
    tl.store(out + o, values, mask=tile < row_tiles * col_tiles)


def to_blocked(scale: Tensor) -> Tensor:
    *lead, R, C = scale.shape
    row_tiles, col_tiles = blocked_shape(R, C)
    out = torch.empty((*lead, 512 * row_tiles * col_tiles), dtype=torch.uint8, device=scale.device)
    if out.numel():
        programs = -(-row_tiles * col_tiles // CONFIG["TILES"])
        _to_blocked[(programs * (lead[0] if lead else 1),)](
            scale.view(torch.uint8), out, R, C, scale.stride(0) if lead else 0, *scale.stride()[-2:], programs, **CONFIG
        )
    return out.view(scale.dtype)
