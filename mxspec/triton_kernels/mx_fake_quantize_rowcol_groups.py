"""mx_fake_quantize_rowcol_groups in Triton: a program reads a tile of one token group once and writes its values twice.

A tile is RUNS runs of RUN rows each, by COLS columns. It is held as `(RUNS, PARTS, PART, RUN)`, like the tiles of
`tiles/mx_columns.py`: a thread has 8 columns of RUN rows. Most of a column's maximum and a quarter of a row's maximum
are then computed in the registers of one thread. PART is small enough for a warp to hold whole 32x1 blocks, so that
shuffles compute the rest. Both results are row-major like x, so no value passes through shared memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxspec.formats import E5M2, element, exponent_rule
from mxspec.triton_kernels.common import launch
from mxspec.triton_kernels.common.groups import chunk, group_of, tokens_left
from mxspec.triton_kernels.common.numerics import (
    magnitude_bits,
    saturating_cast,
    scale_factors,
    widened,
)
from mxspec.triton_kernels.common.runs import load8

RANK = {(9, 0): 1, (10, 0): 1}  # Blackwell: compiled, not run
# A program has 32 rows: the last tile of a group is half full on average, so that low tiles waste less. Small programs
# are fastest with many groups. The figures of other configurations are in benchmarks/results/decisions.md.
_HOPPER = {"BLOCKS": 1, "COLS": 128, "num_warps": 2}
CONFIGS = {(9, 0): _HOPPER, (10, 0): _HOPPER}
PTX = (
    r"ld\.global\.v4\.b32",
    r"st\.global\.v4\.b32",
    r"cvt\.rn\.satfinite\.e[45]m[32]x2\.f32",
    r"cvt\.rn\.f16x2\.e[45]m[32]x2",
    r"cvt\.rn\.bf16x2\.f32",
)


@triton.jit
def _store1(out, values, scale, mask, left, ELEM: tl.constexpr, ROW: tl.constexpr):
    """Round scaled values to elements, and store the bfloat16 values that the elements represent."""
    codes = saturating_cast(values, ELEM)
    tl.store(out, (codes.to(tl.float32) * scale).to(tl.bfloat16), mask=mask & (left > ROW))


@triton.jit
def _store2(out, stride, values, scale, mask, left, ELEM: tl.constexpr, ROW: tl.constexpr, STEP: tl.constexpr):
    even, odd = tl.split(values)
    scale_even, scale_odd = tl.split(scale)
    _store1(out, even, scale_even, mask, left, ELEM, ROW)
    _store1(out + stride, odd, scale_odd, mask, left, ELEM, ROW + STEP)


@triton.jit
def _store4(out, stride, values, scale, mask, left, ELEM: tl.constexpr, ROW: tl.constexpr, STEP: tl.constexpr):
    even, odd = tl.split(values)
    scale_even, scale_odd = tl.split(scale)
    _store2(out, 2 * stride, even, scale_even, mask, left, ELEM, ROW, 2 * STEP)
    _store2(out + stride, 2 * stride, odd, scale_odd, mask, left, ELEM, ROW + STEP, 2 * STEP)


@triton.jit
def _store8(out, stride, values, scale, mask, left, ELEM: tl.constexpr, ROW: tl.constexpr, STEP: tl.constexpr):
    even, odd = tl.split(values)
    scale_even, scale_odd = tl.split(scale)
    _store4(out, 2 * stride, even, scale_even, mask, left, ELEM, ROW, 2 * STEP)
    _store4(out + stride, 2 * stride, odd, scale_odd, mask, left, ELEM, ROW + STEP, 2 * STEP)


@triton.jit
def _store(out, stride, values, scale, mask, left, ELEM: tl.constexpr):
    """Store 8 rows from each pointer on. `values` and `scale` have a row in each place of their last dimension.

    The casts come last, because their instructions convert pairs of columns.
    """
    shape: tl.constexpr = [out.shape[0], out.shape[1], 2, 2, 2]
    scale = tl.broadcast_to(scale, values.shape).reshape(shape)
    _store8(out, stride, values.reshape(shape), scale, mask, left, ELEM, 0, 1)


# `tokens` is not specialized: with tokens == 1 ptxas 12.8 generates wrong code (see mx_quantize_groups).
@triton.jit(do_not_specialize=["tokens"])
def _mx_fake_quantize_rowcol_groups(
    x, rows, columns, offs,
    tokens, K, stride_m, stride_k, G, stride_offs,
    E5M2: tl.constexpr, EMAX: tl.constexpr, ROUND: tl.constexpr, EXCEPT: tl.constexpr, CHUNK: tl.constexpr,
    BLOCKS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = 32 * BLOCKS
    RUN: tl.constexpr = 8
    RUNS: tl.constexpr = 32 // RUN
    PART: tl.constexpr = 8 * RUN
    PARTS: tl.constexpr = COLS // PART
    elem: tl.constexpr = tl.float8e5 if E5M2 else tl.float8e4nv
    # Grid order: along K first, so that neighbouring programs read neighbouring bytes.
    tile = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    k0 = tl.program_id(0).to(tl.int64) * COLS
    group, token0, stop, begin = group_of(tile * ROWS, offs, stride_offs, G, None, None, False, ROWS, CHUNK)
    grouped = group < G
    # The rows after the last group count as one more group.
    last = tl.load(offs + (G - 1) * stride_offs, mask=G > 0, other=0)
    token0, stop = tl.where(grouped, token0, last) + tile * ROWS - begin, tl.where(grouped, stop, tokens)
    # `unit` numbers the runs: all runs of a block come first. So a warp has the 32 rows of its columns.
    unit = tl.arange(0, BLOCKS * PARTS * RUNS)[:, None]
    token = token0 + unit // (RUNS * PARTS) * 32 + unit % RUNS * RUN
    k = unit // RUNS % PARTS * PART + tl.arange(0, PART)[None, :]
    left, inside = tokens_left(token, stop, tokens), k0 + k < K
    row = token.to(tl.int64)
    x += k0 * stride_k + row * stride_m + k.to(tl.int64) * stride_k
    place = row * K + k0 + k
    values = load8(x, stride_m, inside, left, 0, 1)
    values = widened(values).reshape(BLOCKS * PARTS, RUNS, PART, RUN)

    # Compute both maxima before any codes, so that the magnitudes free their registers.
    magnitudes = magnitude_bits(values)
    down = tl.max(tl.max(magnitudes, axis=3), axis=1)[:, None, :, None]
    across = tl.max(magnitudes.reshape(BLOCKS * PARTS, RUNS, PART // 32, 32, RUN), axis=3)[:, :, :, None, :]
    across = tl.broadcast_to(across, (BLOCKS * PARTS, RUNS, PART // 32, 32, RUN)).reshape(values.shape)
    factor, scale = scale_factors(across, EMAX, ROUND, EXCEPT)
    _store(rows + place, K, values * factor, scale, inside, left, elem)
    factor, scale = scale_factors(down, EMAX, ROUND, EXCEPT)
    if grouped:
        _store(columns + place, K, values * factor, scale, inside, left, elem)
    else:  # rows that belong to no group
        for i in tl.static_range(RUN):
            tl.store(columns + place + i * K, tl.zeros(place.shape, tl.bfloat16), mask=inside & (left > i))


def mx_fake_quantize_rowcol_groups(
    x: Tensor,
    offs: Tensor,
    *,
    elem_dtype: torch.dtype | str = torch.float8_e4m3fn,
    scaling: str = "rceil",
    check_offs: bool = False,
) -> tuple[Tensor, Tensor]:
    (M, K), G, fmt, config = x.shape, offs.shape[0], element(elem_dtype), launch.for_device(CONFIGS, x.device)
    rows, columns = (x.new_empty((M, K), dtype=torch.bfloat16) for _ in range(2))
    if x.numel():
        grid = launch.grid(-(-K // config["COLS"]), -(-M // (32 * config["BLOCKS"])) + G)
        _mx_fake_quantize_rowcol_groups[grid](
            x, rows, columns, offs, M, K, *x.stride(), G, offs.stride(0),
            fmt == E5M2, *exponent_rule(fmt, scaling, x.dtype), chunk(G), **config, **launch.UNFUSED,
        )  # fmt: skip
    return rows, columns
