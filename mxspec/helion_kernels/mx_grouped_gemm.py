"""mx_grouped_gemm in Helion: tiles of rows of one group each.

On Hopper, a plan in memory holds the rows of each tile, and a matmul multiplies bf16 values (tiles/mx_by_memory.py). On
Blackwell, each program finds its group by itself and multiplies the codes.

Weights in e2m1 are read as codes on both, by a plan. As in mx_gemm, they become bf16 in registers.
"""

from __future__ import annotations

import helion
import helion.language as hl
import torch
from torch import Tensor

from mxspec.formats import E2M1, MX_BLOCK_SIZE, element
from mxspec.helion_kernels.common.blocked import blocked_shape
from mxspec.helion_kernels.common.groups import chunk, padded_ends, passed, tokens_of_tile
from mxspec.helion_kernels.common.launch import Configs, config, flat, launch
from mxspec.helion_kernels.fp8_gemm import options
from mxspec.helion_kernels.mx_gemm import blocks_of_step, padded, weights
from mxspec.helion_kernels.tiles import mx_by_memory, mx_matmul
from mxspec.helion_kernels.tiles.mx_by_memory import (
    FIRST_FLAG,
    bf16_values,
    bf16_values_of_groups,
    matmul_config,
    mend,
    of_plan,
    plan_of,
)
from mxspec.helion_kernels.tiles.mx_matmul import multiplied, scale_arguments, scale_place, step_for

# Rates: benchmarks/results/decisions.md. Blackwell: compiled, not run.
RANK = {(9, 0): 2, (10, 0): 2}
BATCH_INVARIANT = True
PTX = {"sm90": (mx_by_memory.PTX,), "sm100": (rf"{mx_matmul.PTX['sm100'][0]}|tcgen05\.mma.*\.kind::f16",)}
# Programs run down the rows first, so that programs that run at the same time share the weights of an expert.
_ROWS = 128  # as the tiles of a group's scales
_STEP = 64  # columns of K of the bf16 values
CONFIGS = {(9, 0): matmul_config([256], 8, 4), (10, 0): config([128], 8, num_stages=4)}
# The most tokens per expert for which a tile has 16, 32 or 64, as in Triton.
PER_EXPERT = {16: 10, 32: 40, 64: 96}


def _weights(num_stages: int) -> Configs:
    """For b in e2m1 and bfloat16 tokens. TMA reads the tokens."""
    tma = options([*6 * ["pointer"], "tensor_descriptor", "pointer"])
    config = helion.Config(**{**tma, "block_sizes": [64], "num_warps": 4, "num_stages": num_stages})
    return {(9, 0): config, (10, 0): config}


WEIGHTS = {16: _weights(5), 32: _weights(4), 64: _weights(3), 128: _weights(3)}


def _of_values(
    x: Tensor, w: Tensor, out: Tensor, plan: Tensor, G: int, whole: hl.constexpr, step: hl.constexpr
) -> None:
    for tile, n in hl.tile([plan.size(0), out.size(1)], block_size=[1, None]):
        M = x.size(0)
        expert, first, stop = of_plan(plan, tile.id)
        # As in fp8_grouped_gemm, a tile is read whole, even if it has rows of other groups.
        top = torch.clamp(first, 0, M - 128) if whole else first * 0
        acc = hl.zeros([128, n], dtype=torch.float32)
        for k in hl.tile(0, torch.where(expert < G, x.size(1), 0), block_size=step):
            row = top + hl.arange(128)
            if not whole:
                row = torch.clamp(row, max=M - 1)
            acc = hl.dot(x[row, k], w[expert, n, k].t(), acc=acc)
        row = top + hl.arange(128)
        there = (row >= first) & (row < stop)
        hl.store(out, [row, n], acc.to(out.dtype), extra_mask=there[:, None])


def _mx_grouped_gemm(
    a: Tensor, a_stride: int, a_scale: Tensor, a_stride_r: int, a_stride_c: int,
    b: Tensor, b_stride_e: int, b_stride: int, b_scale: Tensor, b_stride_r: int, b_stride_c: int, b_scale_stride_e: int,
    M: int, N: int, K: int, col_tiles: int, out: Tensor, row_tiles: int, offs: Tensor, stride_offs: int, G: int,
    chunk: hl.constexpr, blocked: hl.constexpr, step: hl.constexpr,
) -> None:  # fmt: skip
    for tile, n in hl.tile([row_tiles, N], block_size=[1, None]):
        row0 = tile.id * 128 + hl.arange(1)
        group, begin = row0 * 0, row0 * 0
        before = hl.zeros([], dtype=torch.int32)
        for i in range(0, G, chunk):
            g, _begins, ends, before = padded_ends(offs, stride_offs, G, before, i, 128, chunk)
            group, begin = passed(group, begin, row0, g, ends, G)
        first, stop = tokens_of_tile(row0, group, begin, offs, stride_offs, G, M)
        row = (first + hl.arange(128)).unsqueeze(1)
        there = (row >= 0) & (row < stop.unsqueeze(1)) & (row < M)
        # Nothing is summed past the last group. If offs is out of order, nothing is summed past the rows of the scales.
        expert = group.sum(0)
        summed = torch.where((expert < G) & (tile.id * 128 + 128 <= M + G * 128), K, 0)
        acc = hl.zeros([128, n], dtype=torch.float32)
        for k in hl.tile(0, summed, block_size=step):
            c = (k.id * (step // 32) + hl.arange(step // 32)).unsqueeze(0)
            col = n.index.unsqueeze(1)
            # A group's tiles of scales begin at the same rows as its tiles of rows.
            of_row = tile.id * 128 + hl.arange(128).unsqueeze(1) if blocked else row
            of_a = scale_place(of_row, c, a_stride_r, a_stride_c, col_tiles, blocked)
            of_b = expert * b_scale_stride_e + scale_place(col, c, b_stride_r, b_stride_c, col_tiles, blocked)
            acc = multiplied(
                acc, hl.load(a, [row * a_stride + k.index.unsqueeze(0)], extra_mask=there),
                hl.load(a_scale, [of_a], extra_mask=there & (c * 32 < K)),
                hl.load(b, [expert * b_stride_e + col * b_stride + k.index.unsqueeze(0)]),
                hl.load(b_scale, [of_b], extra_mask=c * 32 < K), step,
            )  # fmt: skip
        hl.store(out, [row * N + n.index.unsqueeze(0)], acc.to(out.dtype), extra_mask=there)


def _by_weights(
    a: Tensor, b: Tensor, b_stride_e: int, b_stride: int,
    b_scale: Tensor, b_stride_r: int, b_stride_c: int, b_scale_stride_e: int,
    C: int, col_tiles: int, out: Tensor, plan: Tensor, G: int,
    rows: hl.constexpr, every: hl.constexpr, blocked: hl.constexpr, blocks: hl.constexpr,
) -> None:  # fmt: skip
    for tile, n in hl.tile([plan.size(0), out.size(1)], block_size=[1, None]):
        M = a.size(0)
        expert, first, stop = of_plan(plan, tile.id)
        top = torch.clamp(first, 0, M - rows) if every else first * 0  # as in `_of_values`
        acc = hl.zeros([n, rows], dtype=torch.float32)
        for k in hl.tile(0, torch.where(expert < G, a.size(1), 0), block_size=blocks * 32):
            col, c = n.index.unsqueeze(1), (k.id * blocks + hl.arange(blocks)).unsqueeze(0)
            byte = (k.id * (blocks * 16) + hl.arange(blocks * 16)).unsqueeze(0)
            pairs = hl.load(b, [expert * b_stride_e + col * b_stride + byte], extra_mask=byte < C * 16)
            place = expert * b_scale_stride_e + scale_place(col, c, b_stride_r, b_stride_c, col_tiles, blocked)
            w = weights(pairs, hl.load(b_scale, [place], extra_mask=c < C), blocks)
            row = top + hl.arange(rows)
            if not every:
                row = torch.clamp(row, max=M - 1)
            acc = hl.dot(w, padded(a[row, k], blocks * 32).t(), acc=acc)
        row = top + hl.arange(rows)
        there = (row >= first) & (row < stop)
        hl.store(out, [row, n], (acc * 16.0).to(out.dtype).t(), extra_mask=there[:, None])


def _values(a: Tensor, a_scale: Tensor, blocked: bool, flags: Tensor, plan: Tensor, G: int) -> Tensor:
    """The bf16 values of tokens. The kernels also raise the flags of their rows."""
    if blocked:
        return bf16_values_of_groups(a, a_scale, flags, plan, G)
    return bf16_values(a, a_scale, blocked, flags, FIRST_FLAG, "a")


def mx_grouped_gemm(
    a: Tensor,
    a_scale: Tensor | None,
    b: Tensor,
    b_scale: Tensor,
    offs: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    scale_layout: str = "blocked",
    check_offs: bool = False,
) -> Tensor:
    M, (E, N, _), blocked = a.shape[0], b.shape, scale_layout == "blocked"
    K = b.shape[2] * element(b.dtype).per_byte
    out = torch.empty((M, N), dtype=out_dtype, device=a.device)
    if not out.numel():
        return out
    if not K or not E:
        return out.zero_()
    C, col_tiles = K // 32, blocked_shape(1, K // 32)[1]
    if b.dtype == E2M1.dtype:
        x, flags, plan = a, None, None
        if a_scale is not None:
            flags, plan = torch.zeros(FIRST_FLAG + M + E * N, dtype=torch.int32, device=a.device), plan_of(offs, M)
            x = _values(a, a_scale, blocked, flags, plan, E)
        rows = next((rows for rows, most in PER_EXPERT.items() if most * E >= M), 128)
        of_tokens = plan if plan is not None and rows == 128 else plan_of(offs, M, rows)
        launch(
            _by_weights, WEIGHTS[rows], x, flat(b.view(torch.uint8)), *b.stride()[:2],
            *scale_arguments(b_scale, blocked), b_scale.stride(0), C, col_tiles, out, of_tokens, E,
            rows, rows <= M, blocked, blocks_of_step(b, rows < 128),
        )  # fmt: skip
        if flags is not None and a_scale is not None:
            mend(a, a_scale, b, b_scale, out, blocked, flags, plan)
        return out
    assert a_scale is not None  # only bfloat16 has no scales
    if step_for(a.device) != MX_BLOCK_SIZE:
        launch(
            _mx_grouped_gemm, CONFIGS, flat(a), a.stride(0), *scale_arguments(a_scale, blocked),
            flat(b), *b.stride()[:2], *scale_arguments(b_scale, blocked), b_scale.stride(0),
            M, N, K, col_tiles, flat(out), -(-M // _ROWS) + E, flat(offs), offs.stride(0), E,
            chunk(E), blocked, step_for(a.device),
        )  # fmt: skip
        return out
    flags, plan = torch.zeros(FIRST_FLAG + M + E * N, dtype=torch.int32, device=a.device), plan_of(offs, M)
    x = _values(a, a_scale, blocked, flags, plan, E)
    w = bf16_values(b, b_scale, blocked, flags, FIRST_FLAG + M, "b")
    launch(_of_values, CONFIGS, x, w, out, plan, E, M >= _ROWS, _STEP)
    mend(a, a_scale, b, b_scale, out, blocked, flags, plan)
    return out
