"""mx_grouped_gemm in Helion: tiles of 128 rows of one group each. Each program finds its group by itself."""

from __future__ import annotations

import helion.language as hl
import torch
from torch import Tensor

from mxspec.helion_kernels.common.blocked import blocked_shape
from mxspec.helion_kernels.common.groups import chunk, padded_ends, passed, tokens_of_tile
from mxspec.helion_kernels.common.launch import config, flat, launch
from mxspec.helion_kernels.tiles.mx_matmul import PTX as PTX
from mxspec.helion_kernels.tiles.mx_matmul import multiplied, scale_arguments, scale_place, step_for

# Slower than Triton for the reason in mx_gemm. Rates on an H200: benchmarks/results/decisions.md. Blackwell: compiled,
# not run.
RANK = {(9, 0): 2, (10, 0): 2}
BATCH_INVARIANT = True
# Programs run down the rows first, so that programs that run at the same time share the weights of an expert.
_ROWS = 128  # as the tiles of a group's scales
CONFIGS = {(9, 0): config([64], 8, num_stages=4), (10, 0): config([128], 8, num_stages=4)}  # as in mx_gemm


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


def mx_grouped_gemm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    offs: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    scale_layout: str = "blocked",
    check_offs: bool = False,
) -> Tensor:
    (M, K), (E, N, _), blocked = a.shape, b.shape, scale_layout == "blocked"
    out = torch.empty((M, N), dtype=out_dtype, device=a.device)
    if not out.numel():
        return out
    if not K or not E:
        return out.zero_()
    launch(
        _mx_grouped_gemm, CONFIGS, flat(a), a.stride(0), *scale_arguments(a_scale, blocked),
        flat(b), *b.stride()[:2], *scale_arguments(b_scale, blocked), b_scale.stride(0),
        M, N, K, blocked_shape(1, K // 32)[1], flat(out), -(-M // _ROWS) + E, flat(offs), offs.stride(0), E,
        chunk(E), blocked, step_for(a.device),
    )  # fmt: skip
    return out
