"""nvfp4_fake_quantize_rowcol_groups in Helion: one launch finds the magnitudes of the groups, one writes the values.

A program owns 16 rows of one padded group, and some of their columns. Such a tile has whole blocks of both directions.
The program loads the tile once for each direction, because the order of the elements in registers differs.

The loops are `hl.grid`s. Ref mode then runs the programs one by one, and so tests the masks.
"""

from __future__ import annotations

from typing import NamedTuple

import helion.language as hl
import torch
from torch import Tensor

from mxspec.helion_kernels.common.groups import chunk, padded_ends, padded_rows, passed, tokens_left, tokens_of_tile
from mxspec.helion_kernels.common.launch import flat, for_device, launch, on_grid
from mxspec.helion_kernels.common.numerics import magnitude_bits, widened
from mxspec.helion_kernels.common.nvfp4_numerics import fake_values, of_matrix, random_bytes, tensor_scale
from mxspec.helion_kernels.hadamard_16 import transformed

# Beside Triton on an H100: benchmarks/results/decisions.md. Blackwell: compiled, not run.
RANK = {(9, 0): 2, (10, 0): 2}


class Tile(NamedTuple):
    cols: int  # a multiple of 16
    num_warps: int


TILES = {(9, 0): Tile(256, 4), (10, 0): Tile(256, 4)}
PTX = (r"atom\.global\..*max", r"cvt\.rn\.satfinite\.e4m3x2\.f32")


def _turned(wide: Tensor, signs: int, dtype: torch.dtype) -> Tensor:
    """The transforms of columns `(cols, 1, 16)`, rounded to a dtype, as fp32."""
    return widened(transformed(wide, signs).to(dtype))


# `tokens_2` is the number of tokens plus 2, so that it is never 1. With a constant 1, ptxas 12.8 generates wrong code
# (see mx_quantize_groups).
def _largest(
    x: Tensor, stride_m: int, stride_k: int, tokens_2: int, K: int, found: Tensor,
    offs: Tensor, stride_offs: int, G: int, tiles: int, col_programs: int, signs: int,
    turns: hl.constexpr, chunk: hl.constexpr, cols: hl.constexpr,
) -> None:  # fmt: skip
    """The magnitudes of G + 1 groups before the transform, and if it `turns`, those after. The last is of no group."""
    for tile, program in hl.grid([tiles, col_programs]):
        row0 = tile * 16 + hl.arange(1)
        group, begin = row0 * 0, row0 * 0
        before = hl.zeros([], dtype=torch.int32)
        for i in range(0, G, chunk):
            g, _begins, ends, before = padded_ends(offs, stride_offs, G, before, i, 16, chunk)
            group, begin = passed(group, begin, row0, g, ends, G)
        first, stop = tokens_of_tile(row0, group, begin, offs, stride_offs, G, tokens_2 - 2)
        token = first.sum(0) + hl.arange(16)
        left = tokens_left(token, stop, tokens_2 - 2)
        k, m = (program * cols + hl.arange(cols)).unsqueeze(1), token.unsqueeze(0)
        there = (left > 0).unsqueeze(0) & (k < K)
        values = hl.load(x, [m * stride_m + k * stride_k], extra_mask=there)
        wide = widened(values)
        hl.atomic_max(found, [group], magnitude_bits(wide).amax(1).amax(0) + hl.arange(1).to(torch.int32))
        if turns:
            bits = magnitude_bits(_turned(wide.reshape(cols, 1, 16), signs, values.dtype))
            hl.atomic_max(found, [G + 1 + group], bits.amax(2).amax(1).amax(0) + hl.arange(1).to(torch.int32))


def _values(
    x: Tensor, stride_m: int, stride_k: int, tokens_2: int, K: int, found: Tensor, of_columns: int,
    rows: Tensor, columns: Tensor, row_scale: Tensor, column_scale: Tensor,
    offs: Tensor, stride_offs: int, G: int, start: Tensor, end: Tensor, tiles: int, col_programs: int,
    random: Tensor, stride_random: int, signs: int,
    draws: hl.constexpr, turns: hl.constexpr, chunk: hl.constexpr, cols: hl.constexpr,
) -> None:  # fmt: skip
    for tile, program in hl.grid([tiles, col_programs]):  # features first, as memory has them
        row0 = tile * 16 + hl.arange(1)
        group, begin = row0 * 0, row0 * 0
        before = hl.zeros([], dtype=torch.int32)
        for i in range(0, G, chunk):
            g, begins, ends, before = padded_ends(offs, stride_offs, G, before, i, 16, chunk)
            group, begin = passed(group, begin, row0, g, ends, G)
            if tile + program == 0:
                hl.store(start, [g], begins, extra_mask=g < G)
                hl.store(end, [g], ends, extra_mask=g < G)
                amax = hl.load(found, [g], extra_mask=g < G).view(torch.float32)
                hl.store(row_scale, [g], tensor_scale(amax), extra_mask=g < G)
                turned_amax = hl.load(found, [of_columns + g], extra_mask=g < G).view(torch.float32)
                hl.store(column_scale, [g], tensor_scale(turned_amax), extra_mask=g < G)
        first, stop = tokens_of_tile(row0, group, begin, offs, stride_offs, G, tokens_2 - 2)
        token = first.sum(0) + hl.arange(16)
        live = group.sum(0) < G
        left = tokens_left(token, stop, tokens_2 - 2)
        k = program * cols + hl.arange(cols)
        number = (tile * K + k).unsqueeze(1).to(torch.int32)

        m, feature = token.unsqueeze(1), k.unsqueeze(0)
        there = (left > 0).unsqueeze(1) & (feature < K)
        wide = widened(hl.load(x, [m * stride_m + feature * stride_k], extra_mask=there)).reshape(16, cols // 16, 16)
        A, wrong = of_matrix(hl.load(found, [group]).view(torch.float32).unsqueeze(1))
        bits = magnitude_bits(wide).amax(2)
        if draws:
            seed = hl.load(random, [hl.arange(1)]).unsqueeze(1)
            offset = hl.load(random, [stride_random + hl.arange(1)]).unsqueeze(1)
            byte = random_bytes(number, seed, offset).reshape(cols, 16).t().reshape(16, cols // 16, 16)
            value = fake_values(wide, bits, A, wrong, byte)
        else:
            value = fake_values(wide, bits, A, wrong)
        of_rows = torch.where(live, value.reshape(16, cols), 0.0).to(torch.bfloat16)
        hl.store(rows, [m * K + feature], of_rows, extra_mask=there)

        across, there_across = k.unsqueeze(1), (left > 0).unsqueeze(0) & (k < K).unsqueeze(1)
        loaded = hl.load(x, [token.unsqueeze(0) * stride_m + across * stride_k], extra_mask=there_across)
        turned = widened(loaded).reshape(cols, 1, 16)
        if turns:
            turned = _turned(turned, signs, loaded.dtype)
        of_column, is_wrong = of_matrix(hl.load(found, [of_columns + group]).view(torch.float32).unsqueeze(1))
        largest = magnitude_bits(turned).amax(2)
        if draws:
            column = fake_values(turned, largest, of_column, is_wrong, random_bytes(number, seed, offset + 1))
        else:
            column = fake_values(turned, largest, of_column, is_wrong)
        column = torch.where(live, column.reshape(cols, 16), 0.0).to(torch.bfloat16).t()
        row = (tile * 16 + hl.arange(16)).unsqueeze(1)
        mask = ((row >= 0) & (feature < K)).expand(16, cols)
        hl.store(columns, [row * K + feature], column, extra_mask=mask)


def nvfp4_fake_quantize_rowcol_groups(
    x: Tensor,
    offs: Tensor,
    random: Tensor | None = None,
    *,
    signs: int | None = None,
    check_offs: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    (M, K), G = x.shape, offs.shape[0]
    R, turns = padded_rows(M, G, 16), signs is not None
    rows, columns = (x.new_empty((n, K), dtype=torch.bfloat16) for n in (M, R))
    row_scale, column_scale = (x.new_empty(G, dtype=torch.float32) for _ in range(2))
    start, end = (offs.new_empty(G) for _ in range(2))
    if R:
        cols, num_warps = for_device(TILES, x.device)
        found = torch.zeros(2 * (G + 1), dtype=torch.int32, device=x.device)
        # At least one program, which writes start, end and the scales even if there are no columns.
        tiles, col_programs = R // 16, max(1, -(-K // cols))
        # A grid of two dimensions needs no division to find a program's place, but the second holds at most 65535.
        config = on_grid(2, num_warps, "xyz" if tiles < 65536 else "flat")
        of_x, of_offs = (flat(x), *x.stride(), M + 2, K, found), (flat(offs), offs.stride(0), G)
        launch(_largest, {(9, 0): config}, *of_x, *of_offs, tiles, col_programs, signs or 0, turns, chunk(G), cols)
        launch(
            _values, {(9, 0): config}, *of_x, G + 1 if turns else 0, flat(rows), flat(columns),
            flat(row_scale), flat(column_scale), *of_offs, flat(start), flat(end), tiles, col_programs,
            flat(offs if random is None else random), 0 if random is None else random.stride(0), signs or 0,
            random is not None, turns, chunk(G), cols,
        )  # fmt: skip
    return rows, row_scale, columns, column_scale, start, end
