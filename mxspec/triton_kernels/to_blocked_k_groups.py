"""to_blocked_k_groups in Triton: a program reorders neighbouring tiles, of one group or of several.

A tile takes four bytes of each row. They may begin at any byte, because a group may. If the scales are a whole number
of aligned words, the program reads the one or two words that hold the four bytes, shifts them together, and moves them
as one word. Otherwise it reads the bytes one by one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxspec.triton_kernels.common.groups import chunk, grouped_tile, groups_of, tokens_left, tokens_of
from mxspec.triton_kernels.common.launch import UNFUSED, for_device

RANK = {(9, 0): 1, (10, 0): 1}  # Blackwell: compiled, not run
# By the number of ends that a program reads at a time (`chunk`). The race on an H200: benchmarks/results/decisions.md.
_HOPPER = {32: {"TILES": 32, "num_warps": 4}, 256: {"TILES": 16, "num_warps": 4}}
CONFIGS = {(9, 0): _HOPPER, (10, 0): _HOPPER}
PTX = (r"st\.global\.v4\.b32",)


@triton.jit
def _load(x, place, mask):
    """Load a matrix with neighbouring threads along a row.

    By default, Triton 3.6 lets the threads run down the columns.
    """
    mask = tl.broadcast_to(mask, place.shape).reshape(place.numel)
    return tl.load(x + place.reshape(place.numel), mask=mask, other=0).reshape(place.shape)


@triton.jit
def _to_blocked_k_groups(
    scale, out, start, offs,
    R, C, G, stride_r, stride_c, stride_offs, row_tiles, col_tiles, programs,
    WORDS: tl.constexpr, WIDE: tl.constexpr, CHUNK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    tile0, writes = tl.program_id(0) % programs * TILES, tl.program_id(0) == 0
    tile = tile0 + tl.arange(0, TILES)
    group, begin = groups_of(tile0, offs, stride_offs, G, None, start, writes, 4, CHUNK, TILES)
    first, stop = tokens_of(group, offs, stride_offs, G)
    c = first + tile * 4 - begin
    left = tl.minimum(tokens_left(c, stop, C), 4)[None, :]  # columns of a tile that exist
    row_tile, r = tl.program_id(0) // programs, tl.arange(0, 128)
    there = (row_tile * 128 + r < R)[:, None]
    scale += row_tile.to(tl.int64) * stride_r * (32 if WORDS else 128)
    if WIDE:  # the products with strides are above 2^31
        r, c = r.to(tl.int64), c.to(tl.int64)
    byte = (r * stride_r)[:, None] + (c * stride_c)[None, :]
    if WORDS:
        skip = (byte & 3).to(tl.int32)
        word = _load(scale, byte >> 2, there & (left > 0)).to(tl.int64) & 0xFFFFFFFF
        more = _load(scale, (byte >> 2) + 1, there & (skip + left > 4)).to(tl.int64)
        word = (more << 32 | word) >> (8 * skip) & ((1 << (8 * left.to(tl.int64))) - 1)
    else:
        word = tl.zeros((128, TILES), tl.int32)
        for i in tl.static_range(4):
            value = _load(scale, byte + i * stride_c, there & (left > i))
            word |= value.to(tl.int32) << (8 * i)
    # (r // 32, r % 32, tile) -> (tile, r % 32, r // 32)
    words = word.to(tl.int32).reshape(4, 32, TILES).permute(2, 1, 0).reshape(TILES, 128)
    size = (stop - first + 3) // 4
    place, owned = grouped_tile(tile, row_tile, group, begin // 4, size, G, row_tiles, col_tiles)
    tl.store(out + (place * 128)[:, None] + tl.arange(0, 128)[None, :], words, mask=owned[:, None])


def to_blocked_k_groups(scale: Tensor, offs: Tensor, *, check_offs: bool = False) -> tuple[Tensor, Tensor]:
    (R, C), G = scale.shape, offs.shape[0]
    row_tiles, col_tiles = -(-R // 128), -(-(C + 4 * G) // 4)
    # The kernel writes whole tiles, and a part of them may be returned.
    out = scale.new_empty(512 * row_tiles * col_tiles)
    start = offs.new_empty(G + 1, dtype=torch.int64)
    bits, extent = scale.view(torch.uint8), 1 + (R - 1) * scale.stride(0) + (C - 1) * scale.stride(1)
    words = (
        scale.stride(1) == 1
        and extent % 4 == 0
        and (scale.data_ptr() | int(scale.storage_offset())) % 4 == 0
        and R * C > 0
    )
    config = for_device(CONFIGS, scale.device)[chunk(G)]
    wide = 128 * scale.stride(0) + (C + 4) * scale.stride(1) >= 2**31
    # The programs for each row of tiles. At least one: with no columns, `start` is still written.
    programs = max(1, -(-col_tiles // config["TILES"]))
    _to_blocked_k_groups[(programs * max(1, row_tiles),)](
        bits.as_strided((extent,), (1,)).view(torch.int32) if words else bits, out.view(torch.int32), start, offs,
        R, C, G, *scale.stride(), offs.stride(0), row_tiles, col_tiles, programs, words, wide, chunk(G), **config,
        **UNFUSED,
    )  # fmt: skip
    return out[: 128 * row_tiles * (C + 4 * G)].view(128 * row_tiles, C + 4 * G), start
