"""mx_grouped_gemm_wgrad in Helion: each program sums the tokens of one group."""

from __future__ import annotations

import helion
import helion.language as hl
import torch
from torch import Tensor

from mxspec.helion_kernels.common.blocked import blocked_shape
from mxspec.helion_kernels.common.groups import chunk, padded_ends
from mxspec.helion_kernels.common.launch import flat, launch
from mxspec.helion_kernels.tiles.mx_matmul import PTX as PTX
from mxspec.helion_kernels.tiles.mx_matmul import multiplied, scale_arguments, scale_place, step_for

# Slower than Triton for the reason in mx_gemm. Rates on an H200: benchmarks/results/decisions.md. Blackwell: compiled,
# not run.
RANK = {(9, 0): 2, (10, 0): 2}
_NARROW, _LARGE = (helion.Config(block_sizes=[128, cols], num_warps=8, num_stages=4) for cols in (64, 128))
CONFIGS = {(9, 0): _NARROW, (10, 0): _LARGE}  # as in mx_gemm


def _wgrad(
    dy: Tensor, dy_scale: Tensor, dy_stride_r: int, dy_stride_c: int, dy_row_tiles: int,
    x: Tensor, x_scale: Tensor, x_stride_r: int, x_stride_c: int, x_row_tiles: int,
    out: Tensor, offs: Tensor, stride_offs: int, G: int,
    chunk: hl.constexpr, blocked: hl.constexpr, step: hl.constexpr,
) -> None:  # fmt: skip
    for e, n, k in hl.tile(out.size(), block_size=[1, None, None]):
        M = dy.size(1)
        group = e.id + hl.arange(1)
        first = hl.load(offs, [(group - 1) * stride_offs], extra_mask=group > 0).sum(0)
        stop = hl.load(offs, [group * stride_offs]).sum(0)
        # The shifts tell Triton that both are multiples of 32.
        first, stop = torch.where(first > 0, first >> 5 << 5, 0), torch.where(stop < M, stop >> 5 << 5, M)
        # The start of a group's scales: its first column if they are plain, its first tile if they are blocked. A tile
        # has 128 tokens.
        start, before = hl.zeros([], dtype=torch.int32), hl.zeros([], dtype=torch.int32)
        for i in range(0, G if blocked else 0, chunk):
            g, begins, _ends, before = padded_ends(offs, stride_offs, G, before, i, 128, chunk)
            start = start + torch.where(g == e.id, begins, 0).sum(0, dtype=torch.int32)
        begin = start >> 7 if blocked else first >> 5
        dy_begin = begin * (dy_row_tiles * 512 if blocked else dy_stride_c)
        x_begin = begin * (x_row_tiles * 512 if blocked else x_stride_c)
        col_tiles = (stop - first + 127) >> 7
        # Some tiles are missing only if offs is out of order.
        stop = torch.where((start >= 0) & (start + col_tiles * 128 <= M + G * 128), stop, 0)
        acc = hl.zeros([n, k], dtype=torch.float32)
        for m in hl.tile(first, stop, block_size=step):
            c = (((m.begin - first) >> 5) + hl.arange(step // 32)).unsqueeze(0)
            of_dy = dy_begin + scale_place(n.index.unsqueeze(1), c, dy_stride_r, dy_stride_c, col_tiles, blocked)
            of_x = x_begin + scale_place(k.index.unsqueeze(1), c, x_stride_r, x_stride_c, col_tiles, blocked)
            there = first + c * 32 < stop
            acc = multiplied(
                acc, dy[n, m], hl.load(dy_scale, [of_dy], extra_mask=there),
                x[k, m], hl.load(x_scale, [of_x], extra_mask=there), step,
            )  # fmt: skip
        out[e.id, n, k] = acc.to(out.dtype)


def mx_grouped_gemm_wgrad(
    dy: Tensor,
    dy_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    offs: Tensor,
    *,
    out_dtype: torch.dtype = torch.float32,
    scale_layout: str = "blocked",
    check_offs: bool = False,
) -> Tensor:
    (M, N), K, E, blocked = dy.shape, x.shape[1], offs.shape[0], scale_layout == "blocked"
    out = torch.empty((E, N, K), dtype=out_dtype, device=dy.device)
    if not out.numel():
        return out
    if not M:
        return out.zero_()
    launch(
        _wgrad, CONFIGS,
        dy.mT, *scale_arguments(dy_scale, blocked), blocked_shape(N, 1)[0],
        x.mT, *scale_arguments(x_scale, blocked), blocked_shape(K, 1)[0],
        out, flat(offs), offs.stride(0), E, chunk(E), blocked, step_for(dy.device),
    )  # fmt: skip
    return out
