"""to_blocked_k_groups in Helion: a program reorders neighbouring tiles, of one group or of several.

A tile takes four bytes of each row. These bytes may begin at any address, because a group may begin at any column of
the scales. If the scales are a whole number of aligned words, the program reads the one or two words that hold the four
bytes, shifts them together, and moves them as one word. Otherwise it reads the bytes one by one.
"""

from __future__ import annotations

from typing import NamedTuple

import helion.language as hl
import torch
from torch import Tensor

from mxspec.helion_kernels.common.groups import chunk, grouped_tile, padded_ends, tokens_of
from mxspec.helion_kernels.common.launch import flat, for_device, launch, on_grid


class Tiles(NamedTuple):
    tiles: int  # tiles of a program, along a row of tiles
    num_warps: int


RANK = {(9, 0): 2, (10, 0): 2}  # Blackwell: compiled, not run
_HOPPER = Tiles(16, 4)  # the race by benchmarks/tune.py: benchmarks/results/decisions.md
CONFIGS = {(9, 0): _HOPPER, (10, 0): _HOPPER}
PTX = (r"st\.global\.v4\.b32",)


def _load(x: Tensor, place: Tensor, mask: Tensor) -> Tensor:
    """Load a matrix with neighbouring threads along a row.

    By default, Triton 3.6 lets the threads run down the columns.
    """
    return hl.load(x, [place.reshape(-1)], extra_mask=mask.expand(place.shape).reshape(-1)).reshape(place.shape)


def _from_bytes(scale: Tensor, byte: Tensor, stride: int, mask: Tensor, left: Tensor) -> Tensor:
    """Read up to four bytes from each place on, as a word. `left` is the number of bytes that exist."""
    parts = [_load(scale, byte + i * stride, mask & (left > i)).to(torch.int32) << 8 * i for i in range(4)]
    return parts[0] | parts[1] | parts[2] | parts[3]


def _to_blocked_k_groups(
    scale: Tensor, stride_r: int, stride_c: int, R: int, C: int, out: Tensor, row_tiles: int, col_tiles: int,
    offs: Tensor, stride_offs: int, G: int, start: Tensor, row_programs: int, col_programs: int,
    words: hl.constexpr, wide: hl.constexpr, chunk: hl.constexpr, tiles: hl.constexpr,
) -> None:  # fmt: skip
    for row_tile, col_program in hl.grid([row_programs, col_programs]):
        if row_tile + col_program == 0:
            hl.store(start, [0], 0)
        lane = hl.arange(tiles)
        tile = col_program * tiles + lane
        ended, first_begin = lane * 0, hl.zeros([], dtype=torch.int32)
        before = hl.zeros([], dtype=torch.int32)
        for i in range(0, G, chunk):
            g, _begins, ends, before = padded_ends(offs, stride_offs, G, before, i, 4, chunk)
            # Count the groups that end at each tile. This takes fewer instructions than to compare each tile with each
            # end.
            at = torch.where(g < G, (ends >> 2) - col_program * tiles, tiles)
            at = torch.where(at > 0, at, 0)
            ended = ended + (at.unsqueeze(0) == lane.unsqueeze(1)).sum(1, dtype=torch.int32)
            last = torch.where(at == 0, ends, 0).amax(0)
            first_begin = torch.where(last > first_begin, last, first_begin)
            if row_tile + col_program == 0:
                hl.store(start, [g + 1], ends.to(torch.int64), extra_mask=g < G)
        last = hl.associative_scan(torch.maximum, torch.where(ended > 0, lane, 0), dim=0)
        group = hl.cumsum(ended, 0)
        begin = torch.where(last > 0, (col_program * tiles + last) * 4, first_begin)
        first, stop = tokens_of(group, offs, stride_offs, G)
        c = first + tile * 4 - begin
        limit = torch.clamp(stop, 0, C)
        rest = torch.where(limit - c < 4, limit - c, 4)
        left = torch.where((c >= 0) & (rest > 0), rest, 0).unsqueeze(0)  # of the four columns of a tile
        row = hl.arange(128).unsqueeze(1)
        there = row_tile * 128 + row < R
        # Bytes are counted in 64 bits, although words are counted in 32: `launch` knows only the number of words.
        first_byte = (hl.zeros([], dtype=torch.int64) + row_tile * 128) * stride_r
        wide_row, wide_c = (row.to(torch.int64), c.to(torch.int64)) if wide else (row, c)
        byte = wide_row * stride_r + wide_c.unsqueeze(0) * stride_c
        if words:
            skip = byte & 3
            place = (first_byte >> 2) + (byte >> 2)
            word = _load(scale, place, there & (left > 0)).to(torch.int64) & 0xFFFFFFFF
            more = _load(scale, place + 1, there & (skip + left > 4)).to(torch.int64)
            keep = (torch.full_like(left, 1, dtype=torch.int64) << (left * 8)) - 1
            word = (((more << 32) | word) >> (skip * 8)) & keep
        else:
            word = _from_bytes(scale, first_byte + byte, stride_c, there, left)
        # (r // 32, r % 32, tile) -> (tile, r % 32, r // 32)
        word = word.to(torch.int32).reshape(4, 32, tiles).permute(2, 1, 0).reshape(tiles, 128)
        size = (stop - first + 3) >> 2
        place, owned = grouped_tile(tile, row_tile, group, begin >> 2, size, G, row_tiles, col_tiles)
        to = place.unsqueeze(1) * 128 + hl.arange(128).unsqueeze(0)
        hl.store(out, [to], word, extra_mask=owned.unsqueeze(1).expand(tiles, 128))


def to_blocked_k_groups(scale: Tensor, offs: Tensor, *, check_offs: bool = False) -> tuple[Tensor, Tensor]:
    (R, C), G = scale.shape, offs.shape[0]
    row_tiles, col_tiles = -(-R // 128), -(-(C + 4 * G) // 4)
    # The kernel writes whole tiles. The returned part may end in the middle of a tile.
    out = scale.new_empty(512 * row_tiles * col_tiles)
    start = offs.new_empty(G + 1, dtype=torch.int64)
    bits = flat(scale.view(torch.uint8))
    words = scale.stride(1) == 1 and bits.numel() % 4 == 0 and (bits.data_ptr() | int(bits.storage_offset())) % 4 == 0
    tiles, num_warps = for_device(CONFIGS, scale.device)
    wide = 128 * scale.stride(0) + (C + 4) * scale.stride(1) >= 2**31
    # At least one program, which writes start.
    row_programs, col_programs = max(1, row_tiles), max(1, -(-col_tiles // tiles))
    launch(
        _to_blocked_k_groups, {(9, 0): on_grid(2, num_warps)}, bits.view(torch.int32) if words else bits,
        *scale.stride(), R, C, flat(out.view(torch.int32)), row_tiles, col_tiles, flat(offs), offs.stride(0), G, start,
        row_programs, col_programs, words, wide, chunk(G), tiles,
    )  # fmt: skip
    return out[: 128 * row_tiles * (C + 4 * G)].view(128 * row_tiles, C + 4 * G), start
