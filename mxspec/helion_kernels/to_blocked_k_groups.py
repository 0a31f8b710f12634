"""to_blocked_k_groups in Helion: a program turns tiles that are neighbours, of one group or of several.

A tile takes four bytes of each row, which begin anywhere, since a group does. They are read as the one or two aligned
words that they lie in, shifted together and turned as a word; one by one where the scales are no whole number of
aligned words.
"""

from __future__ import annotations

from typing import NamedTuple

import helion.language as hl
import torch
from torch import Tensor

from mxspec.helion_kernels._groups import chunk, grouped_tile, padded_ends, passed, tokens_of
from mxspec.helion_kernels._launch import flat, for_device, launch, on_grid


class Tiles(NamedTuple):
    tiles: int  # a program, along a row of them
    depth: int  # rows of tiles
    num_warps: int


RANK = {(9, 0): 2, (10, 0): 2}  # Blackwell: compiled, not run
_HOPPER = Tiles(16, 1, 4)
CONFIGS = {(9, 0): _HOPPER, (10, 0): _HOPPER}
PTX = (r"st\.global\.v4\.b32",)


def _load(x: Tensor, place: Tensor, mask: Tensor) -> Tensor:
    """A matrix, neighbouring threads beside each other in a row; left to itself, Triton 3.6 goes down the columns."""
    return hl.load(x, [place.reshape(-1)], extra_mask=mask.expand(place.shape).reshape(-1)).reshape(place.shape)


def _from_bytes(scale: Tensor, byte: Tensor, stride: int, mask: Tensor, left: Tensor) -> Tensor:
    """As many of the four bytes from each on as are left, as words."""
    parts = [_load(scale, byte + i * stride, mask & (left > i)).to(torch.int32) << 8 * i for i in range(4)]
    return parts[0] | parts[1] | parts[2] | parts[3]


def _to_blocked_k_groups(
    scale: Tensor, stride_r: int, stride_c: int, R: int, C: int, out: Tensor, row_tiles: int, col_tiles: int,
    offs: Tensor, stride_offs: int, G: int, start: Tensor, row_programs: int, col_programs: int,
    words: hl.constexpr, chunk: hl.constexpr, tiles: hl.constexpr, depth: hl.constexpr,
) -> None:  # fmt: skip
    for row_program, col_program in hl.grid([row_programs, col_programs]):
        if row_program + col_program == 0:
            hl.store(start, [0], 0)
        tile = col_program * tiles + hl.arange(tiles)
        group, begin = tile * 0, tile * 0
        before = hl.zeros([], dtype=torch.int32)
        for i in range(0, G, chunk):
            g, _begins, ends, before = padded_ends(offs, stride_offs, G, before, i, 4, chunk)
            group, begin = passed(group, begin, tile * 4, g, ends, G)
            if row_program + col_program == 0:
                hl.store(start, [g + 1], ends.to(torch.int64), extra_mask=g < G)
        first, stop = tokens_of(group, offs, stride_offs, G)
        c = first + tile * 4 - begin
        limit = torch.where(stop < C, stop, C)
        rest = torch.where(limit - c < 4, limit - c, 4)
        left = torch.where((c >= 0) & (rest > 0), rest, 0).unsqueeze(0)  # of a tile's four columns
        row_tile = row_program * depth + hl.arange(depth)
        r = (row_program * (depth * 128) + hl.arange(depth * 128)).unsqueeze(1)
        # 64-bit, although words are counted in 32: launch knows only their number.
        byte = r.to(torch.int64) * stride_r + c.unsqueeze(0).to(torch.int64) * stride_c
        if words:
            skip = byte & 3
            word = _load(scale, byte >> 2, (r < R) & (left > 0)).to(torch.int64) & 0xFFFFFFFF
            more = _load(scale, (byte >> 2) + 1, (r < R) & (skip + left > 4)).to(torch.int64)
            keep = (torch.full_like(left, 1, dtype=torch.int64) << (left * 8)) - 1
            word = (((more << 32) | word) >> (skip * 8)) & keep
        else:
            word = _from_bytes(scale, byte, stride_c, r < R, left)
        # (row tile, r // 32, r % 32, tile) -> (tile, row tile, r % 32, r // 32)
        word = word.to(torch.int32).reshape(depth, 4, 32, tiles).permute(3, 0, 2, 1).reshape(tiles, depth, 128)
        place, owned = grouped_tile(
            tile.unsqueeze(1), row_tile.unsqueeze(0), group.unsqueeze(1), begin.unsqueeze(1) >> 2,
            (stop - first + 3).unsqueeze(1) >> 2, G, row_tiles, col_tiles,
        )  # fmt: skip
        to = place.unsqueeze(2) * 128 + hl.arange(128).unsqueeze(0).unsqueeze(0)
        hl.store(out, [to], word, extra_mask=owned.unsqueeze(2).expand(tiles, depth, 128))


def to_blocked_k_groups(scale: Tensor, offs: Tensor, *, check_offs: bool = False) -> tuple[Tensor, Tensor]:
    (R, C), G = scale.shape, offs.shape[0]
    row_tiles, col_tiles = -(-R // 128), -(-(C + 4 * G) // 4)
    out = scale.new_empty(512 * row_tiles * col_tiles)  # whole tiles are written, of which a part may be returned
    start = offs.new_empty(G + 1, dtype=torch.int64)
    bits = flat(scale.view(torch.uint8))
    words = scale.stride(1) == 1 and bits.numel() % 4 == 0 and (bits.data_ptr() | int(bits.storage_offset())) % 4 == 0
    tiles, depth, num_warps = for_device(CONFIGS, scale.device)
    # At least one program, which writes start.
    row_programs, col_programs = max(1, -(-row_tiles // depth)), max(1, -(-col_tiles // tiles))
    launch(
        _to_blocked_k_groups, {(9, 0): on_grid(2, num_warps)}, bits.view(torch.int32) if words else bits,
        *scale.stride(), R, C, flat(out.view(torch.int32)), row_tiles, col_tiles, flat(offs), offs.stride(0), G, start,
        row_programs, col_programs, words, chunk(G), tiles, depth,
    )  # fmt: skip
    return out[: 128 * row_tiles * (C + 4 * G)].view(128 * row_tiles, C + 4 * G), start
