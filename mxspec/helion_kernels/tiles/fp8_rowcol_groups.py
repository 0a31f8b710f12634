"""One kernel quantizes token groups in both directions: tokens, an activation of them, or its gradient.

A program owns a block of 128 padded tokens of 128 features, and reads it once from memory. All tokens of the block
belong to one group. The rows past the last group count as one more group. Their row codes are written, and their column
codes are 0.

A thread has a run of tokens of each of 8 neighbouring features. It loads 16 bytes of a token, stores the codes of 8
features of a token, and stores the codes of the run of a feature.
"""

from __future__ import annotations

from typing import NamedTuple

import helion.language as hl
import torch
from torch import Tensor

from mxspec.formats import E4M3FN, FP8_BLOCK_SIZE, fp32_bits
from mxspec.helion_kernels.common.clamped_swiglu import clamped_swiglu_run
from mxspec.helion_kernels.common.clamped_swiglu import gradient_run as clamped_gradient_run
from mxspec.helion_kernels.common.fp8_numerics import factors
from mxspec.helion_kernels.common.groups import chunk, padded_ends, padded_rows, passed, tokens_left, tokens_of_tile
from mxspec.helion_kernels.common.launch import flat, for_device, launch, on_grid
from mxspec.helion_kernels.common.numerics import magnitude_bits, saturating_cast, widened
from mxspec.helion_kernels.common.runs import dimension, load_run, store_run
from mxspec.helion_kernels.common.swiglu import gradient_run, swiglu_run


class Tile(NamedTuple):
    across: int  # the threads of a warp along the features; the other threads are along the tokens
    run: int  # the tokens of a feature that one thread holds
    num_warps: int


# Larger tiles spill registers to local memory. The tiles are not timed yet, so the ops that use them have no rank.
_HOPPER = {
    "tokens": Tile(8, 8, 8),
    "swiglu": Tile(2, 4, 16),
    "gradient": Tile(4, 4, 16),
    # The last block is shorter. The masks along the features take registers, too.
    "tokens, tail": Tile(8, 4, 16),
    "swiglu, tail": Tile(4, 4, 16),
    "gradient, tail": Tile(4, 4, 16),
    "clamped": Tile(4, 4, 16),
    "clamped, tail": Tile(4, 4, 16),
    "clamped gradient": Tile(4, 4, 16),
    "clamped gradient, tail": Tile(4, 4, 16),
}
_BLACKWELL = {**_HOPPER, "gradient": Tile(2, 4, 16), "gradient, tail": Tile(8, 4, 16)}
TILES = {(9, 0): _HOPPER, (10, 0): _BLACKWELL}
# The row codes of a thread are 8 bytes of each token.
PTX = (r"ld\.global\.v4\.b32", r"st\.global\.v2\.b32", r"cvt\.rn\.satfinite\.e4m3x2\.f32")


def _both(
    values: Tensor, d: Tensor, d_block: int, D: int, q_row: Tensor, s_row: Tensor, q_col: Tensor, s_col: Tensor,
    token: Tensor, left: Tensor, tokens: int, tile: Tensor, first: Tensor, count: Tensor, there: Tensor, live: Tensor,
    inside: Tensor | None, eps_bits: int, pow2: bool, across: int, run: int,
) -> None:  # fmt: skip
    """Store the codes and scales of a block of values, in both directions.

    - `d`: the features, `(across, 1, parts, 1, 8)`. They begin at the block `d_block` of a row.
    - `token`: the first token of each run, `(1, lanes, 1, runs, 1)`. `left`: the tokens that exist from it on.
    - `tile`, `first`, `count`: the block of padded tokens, and the first block and the number of blocks of its group.
    - `there`: whether the block is among the blocks of its group. `live`: whether `offs` has this group.
    - `inside`: which features exist, in the shape of `values` without the run; None if all exist.
    """
    lanes = 32 // across
    parts, runs = 16 // across, 128 // (lanes * run)
    wide = widened(values).reshape(across, lanes, parts, runs, 8, run)
    bits = magnitude_bits(wide)
    row, row_back = factors(bits.amax(4).amax(2).amax(0), eps_bits, pow2)  # (lanes, runs, run)
    col, col_back = factors(bits.amax(5).amax(3).amax(1), eps_bits, pow2)  # (across, parts, 8)

    codes = wide * row.reshape(1, lanes, 1, runs, 1, run)
    halves = (
        codes.reshape(across, lanes, parts, runs, 8, 2, 2, 2, 2)
        if run == 16
        else codes.reshape(across, lanes, parts, runs, 8, 2, 2, 2)
        if run == 8
        else codes.reshape(across, lanes, parts, runs, 8, 2, 2)
    )
    store_run(q_row, token * D + d, D, halves, inside, run, left)
    row_token = token.reshape(lanes, runs, 1) + dimension(run, 2, 3)
    written = left.reshape(lanes, runs, 1) > dimension(run, 2, 3)
    hl.store(s_row, [d_block * tokens + row_token], row_back, extra_mask=written)

    codes = torch.where(live, wide * col.reshape(across, 1, parts, 1, 8, 1), 0.0)
    place = (first * D + tile - first + d * count) * 128 + dimension(lanes, 1, 5) * run
    place = (place + dimension(runs, 3, 5) * (lanes * run)).unsqueeze(-1) + dimension(run, 5, 6)
    owned = there.reshape(1, 1, 1, 1, 1, 1)
    stored = (owned if inside is None else owned & inside.unsqueeze(-1)).expand(across, lanes, parts, runs, 8, run)
    hl.store(q_col, [place], saturating_cast(codes, E4M3FN), extra_mask=stored)
    d = d.reshape(across, parts, 8)
    hl.store(s_col, [tile * D + d], torch.where(live, col_back, 0.0), extra_mask=None if inside is None else d < D)


# `tokens_2` is the number of tokens plus 2, so that it is never 1. With a constant 1, ptxas 12.8 generates wrong code
# (see mx_quantize_groups).
def _rowcol(
    x: Tensor, stride_m: int, stride_d: int, dh: Tensor, dh_stride_m: int, dh_stride_d: int,
    bias: Tensor, bias_stride_g: int, bias_stride_d: int,
    tokens_2: int, width: int, half: int,
    q_row: Tensor, s_row: Tensor, q_col: Tensor, s_col: Tensor, blocks: int,
    offs: Tensor, stride_offs: int, G: int, start: Tensor, end: Tensor, col_programs: int, eps_bits: int,
    how: hl.constexpr, pow2: hl.constexpr, empty: hl.constexpr, tail: hl.constexpr, chunk: hl.constexpr,
    across: hl.constexpr, run: hl.constexpr,
) -> None:  # fmt: skip
    lanes = 32 // across
    parts, runs = 16 // across, 128 // (lanes * run)
    for block, d_tile in hl.grid([blocks, col_programs]):  # features first, as memory has them
        tile = block + hl.arange(1)
        group, begin = tile * 0, tile * 0
        before = hl.zeros([], dtype=torch.int32)
        for i in range(0, G, chunk):
            g, begins, ends, before = padded_ends(offs, stride_offs, G, before, i, 128, chunk)
            group, begin = passed(group, begin, tile * 128, g, ends, G)
            if d_tile + block == 0:
                hl.store(start, [g], begins, extra_mask=g < G)
                hl.store(end, [g], ends, extra_mask=g < G)
        if not empty:
            token, stop = tokens_of_tile(tile * 128, group, begin, offs, stride_offs, G, tokens_2 - 2)
            first = begin >> 7  # the group's first block; the group has `count` blocks
            count = torch.div(stop - token + (tile - first) * 128 + 127, 128, rounding_mode="trunc")
            count = torch.where(group < G, count, blocks - first)
            # True for all blocks if offs is in order.
            there = (count > tile - first) & (count <= blocks - first)
            live = group.sum(0) < G  # scalars fit masks of any layout, without shared memory
            m = token.sum(0) + dimension(lanes, 1, 5) * run + dimension(runs, 3, 5) * (lanes * run)
            left = tokens_left(m, stop, tokens_2 - 2)
            d8 = d_tile * 128 + dimension(across, 0, 5) * 8 + dimension(parts, 2, 5) * (8 * across)
            d = d8 + dimension(8, 4, 5)
            some = left.expand(across, lanes, parts, runs, 8)
            inside = (d < width).expand(across, lanes, parts, runs, 8) if tail else None  # the last block is shorter
            source = d * stride_d
            if how == "tokens":
                values = load_run(x, m, stride_m, source, inside, run, left=some)
            elif how == "swiglu":
                values = swiglu_run(x, m, stride_m, source, (width + d) * stride_d, inside, some, run)
            elif how == "clamped":
                at = group.sum(0) * bias_stride_g + 2 * d * bias_stride_d
                of_gate = hl.load(bias, [at], extra_mask=(d < width) & live)
                of_up = hl.load(bias, [at + bias_stride_d], extra_mask=(d < width) & live)
                values = clamped_swiglu_run(
                    x, m, stride_m, 2 * source, 2 * source + stride_d, of_gate, of_up, live, inside, some, run
                )
            elif how == "clamped gradient":  # 8 neighbours are 4 gates and 4 ups in turn, of 4 columns of dh
                h = (d8 >> 1) + dimension(4, 4, 5)
                at = group.sum(0) * bias_stride_g + 2 * h * bias_stride_d
                of_gate = hl.load(bias, [at], extra_mask=(h < half) & live)
                of_up = hl.load(bias, [at + bias_stride_d], extra_mask=(h < half) & live)
                half_left = left.expand(across, lanes, parts, runs, 4)
                half_inside = (h < half).expand(across, lanes, parts, runs, 4) if tail else None
                values = clamped_gradient_run(
                    x, dh, m, stride_m, dh_stride_m, source, h * dh_stride_d, of_gate, of_up, live, inside, some,
                    half_inside, half_left, run,
                )  # fmt: skip
            else:  # the first half of the features are those of gate; 8 neighbours are in one half
                in_gate = d8 < half
                feature = torch.where(in_gate, d8, d8 - half) + dimension(8, 4, 5)
                of_gate, of_up, of_h = feature * stride_d, (half + feature) * stride_d, feature * dh_stride_d
                values = gradient_run(x, dh, m, stride_m, dh_stride_m, of_gate, of_up, of_h, in_gate, inside, some, run)
            _both(
                values, d, d_tile, width, q_row, s_row, q_col, s_col, m, left,
                tokens_2 - 2, tile, first, count, there, live, inside, eps_bits, pow2, across, run,
            )  # fmt: skip


def rowcol_groups(
    how: str, x: Tensor, offs: Tensor, scale_format: str, eps: float = 1e-12, dh: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Quantize x in both directions. `how` names the values: `tokens` for x itself.

    For the other values, x is gate and up. `swiglu` and `gradient` are SwiGLU and its gradient. `clamped` and
    `clamped gradient` are the clamped SwiGLU and its gradient. A gradient needs `dh`, the gradient of the activation.
    The clamped SwiGLU and its gradient need `bias`.
    """
    (M, D), G = x.shape, offs.shape[0]
    width = D // 2 if how in ("swiglu", "clamped") else D  # columns of the results
    dh, bias = x if dh is None else dh, x if bias is None else bias
    R = padded_rows(M, G, FP8_BLOCK_SIZE)
    blocks = R // FP8_BLOCK_SIZE
    q_row = x.new_empty((M, width), dtype=torch.float8_e4m3fn)
    s_row = x.new_empty((-(-width // FP8_BLOCK_SIZE), M), dtype=torch.float32)
    q_col = x.new_empty((width, R), dtype=torch.float8_e4m3fn)
    s_col = x.new_empty((blocks, width), dtype=torch.float32)
    start, end = (offs.new_empty(G) for _ in range(2))
    tail = width % FP8_BLOCK_SIZE != 0
    tile = for_device(TILES, x.device)[f"{how}, tail" if tail else how]
    if blocks:
        programs = -(-width // FP8_BLOCK_SIZE)
        # A grid of two dimensions needs no division to find a program's place, but the second holds at most 65535. At
        # least one program across: with no features, start and end are still written.
        pid_type = "xyz" if blocks < 65536 else "flat"
        launch(
            _rowcol, {(9, 0): on_grid(2, tile.num_warps, pid_type)}, flat(x), *x.stride(),
            flat(dh), *dh.stride(), flat(bias), *bias.stride(), M + 2, width, D // 2,
            flat(q_row), flat(s_row), flat(q_col), flat(s_col), blocks,
            flat(offs), offs.stride(0), G, flat(start), flat(end), max(1, programs), fp32_bits(eps),
            how, scale_format == "pow2", programs == 0, tail, chunk(G), tile.across, tile.run,
        )  # fmt: skip
    return q_row, s_row.mT, q_col, s_col.mT, start, end
