"""to_blocked in Triton: a program writes whole tiles, so that its stores are consecutive bytes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxspec.triton_kernels._blocked import blocked_shape, blocked_to_row_col

RANK = {(9, 0): 1, (10, 0): 1}
CONFIG = {"TILES": 4, "num_warps": 4}


@triton.jit
def _to_blocked(scale, out, R, C, stride_e, stride_r, stride_c, bytes_per_matrix, programs, TILES: tl.constexpr):
    e = (tl.program_id(0) // programs).to(tl.int64)
    o = (tl.program_id(0) % programs).to(tl.int64) * (512 * TILES) + tl.arange(0, 512 * TILES)
    r, c = blocked_to_row_col(o, C)
    source = scale + e * stride_e + r * stride_r + c * stride_c
    values = tl.load(source, mask=(r < R) & (c < C) & (o < bytes_per_matrix), other=0)
    tl.store(out + e * bytes_per_matrix + o, values, mask=o < bytes_per_matrix)


def to_blocked(scale: Tensor) -> Tensor:
    *lead, R, C = scale.shape
    row_tiles, col_tiles = blocked_shape(R, C)
    bytes_per_matrix = 512 * row_tiles * col_tiles
    out = torch.empty(*lead, bytes_per_matrix, dtype=torch.uint8, device=scale.device)
    if out.numel():
        stride_e = scale.stride(0) if lead else 0
        programs = triton.cdiv(row_tiles * col_tiles, CONFIG["TILES"])
        _to_blocked[(programs * (lead[0] if lead else 1),)](
            scale.view(torch.uint8), out, R, C, stride_e, *scale.stride()[-2:], bytes_per_matrix, programs, **CONFIG
        )
    return out.view(scale.dtype)
