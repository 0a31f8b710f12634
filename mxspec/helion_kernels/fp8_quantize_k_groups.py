"""fp8_quantize_k_groups in Helion: the tile of fp8_quantize_1x128 that transposes codes, read from the rows of a group.

A program owns a block of 128 padded tokens of `cols` features. All tokens of the block belong to one group. Its codes
of one feature are 128 bytes of the result, aligned to 128. The padding past the last group counts as one more group,
which holds zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import helion.language as hl
import torch
from torch import Tensor

from mxspec.formats import FP8_BLOCK_SIZE, fp32_bits
from mxspec.helion_kernels.common.groups import chunk, padded_ends, padded_rows, passed, tokens_left, tokens_of
from mxspec.helion_kernels.common.launch import flat, for_device, launch, on_grid
from mxspec.helion_kernels.common.numerics import widened
from mxspec.helion_kernels.common.runs import load_run
from mxspec.helion_kernels.tiles.fp8_columns import store_turned, turn, turned_index


class Tile(NamedTuple):
    cols: int
    num_warps: int


_HOPPER = Tile(128, 4)  # as fp8_quantize_1x128, "across, mn"
TILES = {(9, 0): _HOPPER, (10, 0): _HOPPER}  # not timed yet, so without a rank
PTX = (r"ld\.global\.v4\.b32", r"st\.global\.v4\.b32", r"cvt\.rn\.satfinite\.e4m3x2\.f32")


def _values(
    x: Tensor, row: Tensor, run: Tensor, stride_m: int, row_scale: Tensor, row_scale_stride_m: int, block: int,
    inside: Tensor | None, left: Tensor, bf16: bool,
) -> Tensor:  # fmt: skip
    """The values of a tile of codes, `(4, 8, warps, 1, 8, 16)`. A token has one scale, because a tile has 128 features.

    Each thread loads the scales of its 16 tokens. If it loaded other scales, Triton would exchange the codes.
    """
    _, warps, _, _ = row.shape
    mask = None if inside is None else inside.unsqueeze(1)
    q = load_run(x, run, stride_m, row.unsqueeze(1), mask, 16, left=left.expand(4, 8, warps, 1, 8))
    q = q.view(torch.float8_e4m3fn).to(torch.float32)
    token, there = run.expand(4, 8, warps, 1, 1), left.expand(4, 8, warps, 1, 1)
    wide = q * load_run(row_scale, token, row_scale_stride_m, block + token * 0, None, 16, left=there)
    wide = wide.reshape(4, 8, warps, 1, 8, 16)
    return widened(wide.to(torch.bfloat16)) if bf16 else wide


# `tokens_2` is the number of tokens plus 2, so that it is never 1. With a constant 1, ptxas 12.8 generates wrong code
# (see mx_quantize_groups).
def _blocks(
    x: Tensor, stride_m: int, stride_d: int, tokens_2: int, D: int, qdata: Tensor, scale: Tensor, blocks: int,
    offs: Tensor, stride_offs: int, G: int, start: Tensor, end: Tensor, col_programs: int, eps_bits: int,
    row_scale: Tensor, row_scale_stride_m: int, row_scale_stride_d: int,
    codes: hl.constexpr, bf16: hl.constexpr,
    pow2: hl.constexpr, even: hl.constexpr, chunk: hl.constexpr, cols: hl.constexpr,
) -> None:  # fmt: skip
    # With `codes`, x holds codes along the features. Their values are quantized, rounded to bfloat16 with `bf16`.
    for block, d_tile in hl.grid([blocks, col_programs]):  # features first, as in Triton
        tile = block + hl.arange(1)
        group, begin = tile * 0, tile * 0
        before = hl.zeros([], dtype=torch.int32)
        for i in range(0, G, chunk):
            g, begins, ends, before = padded_ends(offs, stride_offs, G, before, i, 128, chunk)
            group, begin = passed(group, begin, tile * 128, g, ends, G)
            if d_tile + block == 0:
                hl.store(start, [g], begins, extra_mask=g < G)
                hl.store(end, [g], ends, extra_mask=g < G)
        token0, stop = tokens_of(group, offs, stride_offs, G)
        first = begin >> 7  # the group's first block; the group has `count` blocks
        count = torch.div(stop - token0 + 127, 128, rounding_mode="trunc")
        count = torch.where(group < G, count, blocks - first)
        # True for all blocks if offs is in order.
        there = (count > tile - first) & (count <= blocks - first)
        token = (token0 + (tile - first) * 128).sum(0)  # a scalar fits masks of any layout, without shared memory
        d, run = turned_index(cols)
        d = d_tile * cols + d
        run = token + run
        inside = None if even else d < D
        owned = there.reshape(1, 1, 1, 1).expand(4, cols // 32, 1, 8)
        left = tokens_left(run, stop, tokens_2 - 2)
        place = (first * D + tile - first + d * count) * 128
        if codes:
            wide = _values(
                x, d * stride_d, run, stride_m, row_scale, row_scale_stride_m, d_tile * row_scale_stride_d, inside,
                left, bf16,
            )  # fmt: skip
            back = store_turned(wide, qdata, place, inside, owned, eps_bits, pow2)
        else:
            back = turn(x, d * stride_d, run, stride_m, qdata, place, inside, owned, left, eps_bits, pow2)
        hl.store(scale, [tile * D + d], torch.where(group < G, back, 0.0), extra_mask=inside)


def fp8_quantize_k_groups(
    x: Tensor, offs: Tensor, *, scale_format: str = "fp32", eps: float = 1e-12, check_offs: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return k_groups(x, offs, scale_format, eps)


def k_groups(
    x: Tensor, offs: Tensor, scale_format: str, eps: float, row_scale: Tensor | None = None, bf16: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch. With `row_scale`, x holds codes along the features, as bytes; bf16 says how to round their values."""
    (M, D), G = x.shape, offs.shape[0]
    R = padded_rows(M, G, FP8_BLOCK_SIZE)
    blocks = R // FP8_BLOCK_SIZE
    qdata = x.new_empty((D, R), dtype=torch.float8_e4m3fn)
    scale = x.new_empty((blocks, D), dtype=torch.float32)
    start, end = (offs.new_empty(G) for _ in range(2))
    tile = for_device(TILES, x.device)
    if blocks:
        col_programs = max(1, -(-D // tile.cols))  # at least one: with no features, start and end are still written
        codes = row_scale is not None and D > 0
        scales = (flat(row_scale), *row_scale.stride()) if row_scale is not None else (flat(x), 0, 0)
        # A grid of two dimensions needs no division to find a program's place, but the second holds at most 65535.
        pid_type = "xyz" if blocks < 65536 else "flat"
        launch(
            _blocks, {(9, 0): on_grid(2, tile.num_warps, pid_type)}, flat(x), *x.stride(), M + 2, D,
            flat(qdata), flat(scale), blocks, flat(offs), offs.stride(0), G, flat(start), flat(end), col_programs,
            fp32_bits(eps), *scales, codes, bf16, scale_format == "pow2", col_programs * tile.cols == D, chunk(G),
            tile.cols,
        )  # fmt: skip
    return qdata, scale.mT, start, end
