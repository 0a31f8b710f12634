"""to_blocked in Triton: a program reads 128 rows, transposes them in shared memory, and writes whole tiles."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxspec.triton_kernels.common.blocked import blocked_shape, turned
from mxspec.triton_kernels.common.launch import UNFUSED

RANK = {(9, 0): 1, (10, 0): 1}
# A program has TILES tiles. 16 tiles read 64 bytes of a row, and 16-byte loads need rows that start at multiples of 16.
# The race, also against a gather without a transposition: benchmarks/results/decisions.md.
CONFIGS = {"aligned": {"TILES": 16, "num_warps": 8}, "odd": {"TILES": 4, "num_warps": 2}}
PTX = (r"st\.global\.v4\.b32",)


@triton.jit
def _to_blocked(scale, out, R, C, stride_e, stride_r, stride_c, row_tiles, col_tiles, programs, TILES: tl.constexpr):
    # Programs run along a row of tiles, then down, then to the next expert. A matrix may have 2^31 scales and more.
    first = tl.program_id(0) % programs * TILES
    row_tile = tl.program_id(0) // programs % row_tiles
    e = (tl.program_id(0) // programs // row_tiles).to(tl.int64)
    r, c = row_tile * 128 + tl.arange(0, 128), first * 4 + tl.arange(0, 4 * TILES)
    source = scale + e * stride_e + (r.to(tl.int64) * stride_r)[:, None] + (c.to(tl.int64) * stride_c)[None, :]
    values = tl.load(source, mask=(r < R)[:, None] & (c < C)[None, :], other=0)
    values = turned(values, TILES)
    byte = tl.arange(0, 512 * TILES)
    tiles = out + ((e * row_tiles + row_tile) * col_tiles + first) * 512
    tl.store(tiles + byte, values, mask=first + byte // 512 < col_tiles)


def to_blocked(scale: Tensor) -> Tensor:
    *lead, R, C = scale.shape
    row_tiles, col_tiles = blocked_shape(R, C)
    out = torch.empty((*lead, 512 * row_tiles * col_tiles), dtype=torch.uint8, device=scale.device)
    if out.numel():
        config = CONFIGS["aligned" if C % 16 == 0 else "odd"]
        programs = -(-col_tiles // config["TILES"])  # for each row of tiles
        strides = scale.stride(0) if lead else 0, *scale.stride()[-2:]
        grid = (programs * row_tiles * (lead[0] if lead else 1),)
        _to_blocked[grid](
            scale.view(torch.uint8), out, R, C, *strides, row_tiles, col_tiles, programs, **config, **UNFUSED
        )
    return out.view(scale.dtype)
