"""mx_fake_quantize_rowcol_groups in Helion: a program reads a tile of one group once and writes both values of it.

A tile has 32 tokens by 128 features and begins at a block of its group. So every block of both directions lies inside
one tile. Rows without a group count as one more group, whose column values are 0.

The loop is an `hl.grid`. Ref mode then runs the programs one by one, and so tests the masks.
"""

from __future__ import annotations

import helion.language as hl
import torch
from torch import Tensor

from mxspec.formats import element
from mxspec.helion_kernels.common.groups import chunk, padded_ends, padded_rows, passed, tokens_left, tokens_of_tile
from mxspec.helion_kernels.common.launch import flat, for_device, launch, on_grid
from mxspec.helion_kernels.common.numerics import (
    magnitude_bits,
    reciprocal_scale,
    saturating_cast,
    scale_value,
    shared_exponent,
    widened,
)

# The number of warps. With 4 warps, Triton 3.8 spills float16 for Blackwell.
# The op is not timed yet, so it has no rank.
CONFIGS = {(9, 0): 8, (10, 0): 8}
PTX = (r"ld\.global\.v4\.b32", r"st\.global\.v4\.b32", r"cvt\.rn\.satfinite\.e[45]m[32]x2\.f32")


def _byte(bits: Tensor, elem: str, scaling: str, dtype: torch.dtype) -> Tensor:
    return shared_exponent(bits, element(elem), scaling, dtype)


def _read_back(wide: Tensor, byte: Tensor, elem: str) -> Tensor:
    """The bfloat16 values of the codes of blocks, whose scale bytes are `byte`."""
    code = saturating_cast(wide * reciprocal_scale(byte, element(elem)), element(elem))
    return (code.to(torch.float32) * scale_value(byte)).to(torch.bfloat16)


# `tokens_2` is the number of tokens plus 2, so that it is never 1. With a constant 1, ptxas 12.8 generates wrong code
# (see mx_quantize_groups).
def _fake_quantize(
    x: Tensor, stride_m: int, stride_k: int, tokens_2: int, K: int, rows: Tensor, columns: Tensor,
    offs: Tensor, stride_offs: int, G: int, tiles: int, col_programs: int,
    elem: hl.constexpr, scaling: hl.constexpr, chunk: hl.constexpr,
) -> None:  # fmt: skip
    for tile, program in hl.grid([tiles, col_programs]):  # features first, as memory has them
        row0 = tile * 32 + hl.arange(1)
        group, begin = row0 * 0, row0 * 0
        before = hl.zeros([], dtype=torch.int32)
        for i in range(0, G, chunk):
            g, _begins, ends, before = padded_ends(offs, stride_offs, G, before, i, 32, chunk)
            group, begin = passed(group, begin, row0, g, ends, G)
        first, stop = tokens_of_tile(row0, group, begin, offs, stride_offs, G, tokens_2 - 2)
        token = first.sum(0) + hl.arange(32)  # a scalar fits masks of any layout, without shared memory
        live = group.sum(0) < G
        left = tokens_left(token, stop, tokens_2 - 2)
        k = (program * 128 + hl.arange(128)).unsqueeze(0)
        there = (left > 0).unsqueeze(1) & (k < K)
        m = token.unsqueeze(1)
        values = hl.load(x, [m * stride_m + k * stride_k], extra_mask=there)
        wide = widened(values).reshape(32, 4, 32)
        bits = magnitude_bits(wide)
        of_row = _byte(bits.amax(2), elem, scaling, x.dtype).unsqueeze(2)
        of_column = _byte(bits.amax(0), elem, scaling, x.dtype).unsqueeze(0)
        hl.store(rows, [m * K + k], _read_back(wide, of_row, elem).reshape(32, 128), extra_mask=there)
        column = torch.where(live, _read_back(wide, of_column, elem), 0.0).to(torch.bfloat16)
        hl.store(columns, [m * K + k], column.reshape(32, 128), extra_mask=there)


def mx_fake_quantize_rowcol_groups(
    x: Tensor,
    offs: Tensor,
    *,
    elem_dtype: torch.dtype | str = torch.float8_e4m3fn,
    scaling: str = "rceil",
    check_offs: bool = False,
) -> tuple[Tensor, Tensor]:
    (M, K), G = x.shape, offs.shape[0]
    rows, columns = (x.new_empty((M, K), dtype=torch.bfloat16) for _ in range(2))
    if x.numel():
        tiles = padded_rows(M, G, 32) // 32
        # A grid of two dimensions needs no division to find a program's place, but the second holds at most 65535.
        config = on_grid(2, for_device(CONFIGS, x.device), "xyz" if tiles < 65536 else "flat")
        launch(
            _fake_quantize, {(9, 0): config}, flat(x), *x.stride(), M + 2, K, flat(rows), flat(columns),
            flat(offs), offs.stride(0), G, tiles, -(-K // 128), element(elem_dtype).name, scaling, chunk(G),
        )  # fmt: skip
    return rows, columns
