"""The bfloat16 values of NVFP4 codes, without the tensor scale, for the matmuls of values. Each value is exact.

A program owns a run of scale bytes, in the order in which they lie in memory, and reads the codes that they scale.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxspec.formats import NVFP4_BLOCK_SIZE
from mxspec.triton_kernels.common.blocked import row_col_in_tile
from mxspec.triton_kernels.common.groups import chunk, group_of
from mxspec.triton_kernels.common.launch import UNFUSED, grid
from mxspec.triton_kernels.common.nvfp4_numerics import exact_values

CONFIG = {"BLOCKS": 128, "num_warps": 4}  # as in nvfp4_dequantize


@triton.jit(do_not_specialize=["tiles", "all_tiles"])  # so that new values compile no new kernel
def _nvfp4_values(
    codes, stride_e, stride_r, scale, scale_stride_e, scale_stride_r, scale_stride_c, out,
    R, C, tiles, all_tiles, offs, offs_stride, G,
    GROUPED: tl.constexpr, BLOCKED: tl.constexpr, CHUNK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The values of BLOCKS blocks of a tile of 128 rows.

    GROUPED "M": the rows are in groups, and each group begins a new tile. GROUPED "K": the columns are in groups, whose
    tiles are stored together, row by row. Rows and columns of no group are left out.
    """
    place = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    i, pair = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS), tl.max_contiguous(tl.arange(0, 8), 4)
    j = tl.max_contiguous(tl.arange(0, 16), 8)
    if BLOCKED:
        row, col = row_col_in_tile(i % 512)
        c = i // 512 * 4 + col
    else:
        row, c = i // C, i % C
    e, tile = (place // tiles).to(tl.int64), place % tiles
    top, end, most = (tile * 128).to(tl.int64), R, C
    of_tile = tile.to(tl.int64) * (tl.cdiv(C, 4) * 512) + i
    if GROUPED == "M":
        e, tile = tl.cast(0, tl.int64), place
        _, first, stop, begin = group_of(tile * 128, offs, offs_stride, G, None, None, False, 128, CHUNK)
        top, end = (first + (tile * 128 - begin)).to(tl.int64), tl.minimum(stop, R)
        end = tl.where(tile * 128 <= R + 128 * G - 128, end, 0)  # the rows that the scale has
        of_tile = tile.to(tl.int64) * (tl.cdiv(C, 4) * 512) + i
    elif GROUPED == "K":
        across = tl.program_id(0) * BLOCKS // 512  # a column of tiles, among the padded columns of all groups
        _, first, stop, begin = group_of(across * 64, offs, offs_stride, G, None, None, False, 64, CHUNK)
        stop = tl.minimum(tl.maximum(stop, 0), C * 16)
        before, width = begin // 64, tl.cdiv(tl.maximum(stop - first, 0), 64)
        c = first // 16 + (across - before) * 4 + col
        most = tl.where((first >= 0) & ((before + width) * 4 <= C + 4 * G), stop // 16, 0)
        of_tile = (before.to(tl.int64) * tiles + tile.to(tl.int64) * width + (across - before)) * 512 + i % 512
    r = top + row
    there = (r >= 0) & (r < end) & (row < 128) & (c >= 0) & (c < most) & (place < all_tiles)
    if BLOCKED:
        scale_at = scale + e * scale_stride_e + of_tile
    else:
        scale_at = scale + e * scale_stride_e + r * scale_stride_r + c.to(tl.int64) * scale_stride_c
    s = tl.load(scale_at, mask=there, other=0).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    at = (e * stride_e + r * stride_r)[:, None] + (c[:, None] * 8 + pair[None, :])
    value = exact_values(tl.load(codes + at, mask=there[:, None], other=0), s[:, None])
    out += ((e * R + r) * (C * 16))[:, None] + (c[:, None] * 16 + j[None, :])
    tl.store(out, value, mask=there[:, None])


def nvfp4_values(
    codes: Tensor, scale: Tensor, scale_layout: str, offs: Tensor | None = None, grouped: str = ""
) -> Tensor:
    """The bfloat16 values of codes `(R, K/2)` or `(E, R, K/2)`, K-major, as `(R, K)` or `(E, R, K)`.

    With blocked scales, `grouped` says whether the rows ("M") or the columns ("K") are in the groups of `offs`. Values
    of no group are then not written.
    """
    *lead, R, stored = codes.shape
    C, blocked, E = 2 * stored // NVFP4_BLOCK_SIZE, scale_layout == "blocked", lead[0] if lead else 1
    out = torch.empty(*codes.shape[:-1], 2 * stored, dtype=torch.bfloat16, device=codes.device)
    tiles, columns = -(-R // 128), -(-C // 4) * 4 if blocked else C
    all_tiles, G, offs_stride = tiles * E, 1, 0
    if offs is None or not blocked:
        offs, grouped = None, ""
    else:
        G, offs_stride = offs.shape[0], offs.stride(0)
        all_tiles += G if grouped == "M" else 0
        columns += 4 * G if grouped == "K" else 0
    of_scale = (scale.stride(0) if lead else 0, *((0, 0) if blocked else scale.stride()[-2:]))
    _nvfp4_values[grid(-(-128 * columns // CONFIG["BLOCKS"]), all_tiles)](
        codes.view(torch.uint8), codes.stride(0) if lead else 0, codes.stride(-2), scale.view(torch.uint8), *of_scale,
        out, R, C, tiles, all_tiles, offs, offs_stride, G, grouped, blocked, chunk(G), **CONFIG, **UNFUSED,
    )  # fmt: skip
    return out
