"""mx_grouped_gemm_wgrad in Helion: each program sums the tokens of one group.

On Hopper it multiplies bf16 values (tiles/mx_by_memory.py), on Blackwell the codes.
"""

from __future__ import annotations

import helion
import helion.language as hl
import torch
from torch import Tensor

from mxspec.formats import MX_BLOCK_SIZE
from mxspec.helion_kernels.common.blocked import blocked_shape
from mxspec.helion_kernels.common.groups import chunk, padded_ends
from mxspec.helion_kernels.common.launch import flat, launch
from mxspec.helion_kernels.fp8_gemm import options
from mxspec.helion_kernels.tiles import mx_by_memory, mx_matmul
from mxspec.helion_kernels.tiles.mx_by_memory import FIRST_FLAG, bf16_values_of_tokens, plan_of, processors
from mxspec.helion_kernels.tiles.mx_matmul import multiplied, scale_arguments, scale_place, step_for

# Rates: benchmarks/results/decisions.md. Blackwell: compiled, not run.
RANK = {(9, 0): 2, (10, 0): 2}
PTX = {"sm90": (mx_by_memory.PTX,), "sm100": mx_matmul.PTX["sm100"]}
# Programs that run at the same time share the operands of a group.
_OF_VALUES = {**options("tensor_descriptor"), "num_stages": 3, "loop_orders": [[1, 2, 0]]}
CONFIGS = {
    (9, 0): helion.Config(block_sizes=[128, 256], num_warps=8, **_OF_VALUES),
    (10, 0): helion.Config(block_sizes=[128, 128], num_warps=8, num_stages=4),
}
_MEND = helion.Config(block_sizes=[], num_warps=8, num_stages=3)


def _tokens(e: int, offs: Tensor, stride_offs: int, G: int, M: int) -> tuple[Tensor, Tensor]:
    """The first token of a group and the token after its last. The shifts tell Triton that both are multiples of 32."""
    group = e + hl.arange(1)
    first = hl.load(offs, [(group - 1) * stride_offs], extra_mask=(group > 0) & (group < G)).sum(0)
    stop = hl.load(offs, [group * stride_offs], extra_mask=group < G).sum(0)
    return torch.where(first > 0, first >> 5 << 5, 0), torch.where(stop < M, stop >> 5 << 5, M)


def _of_values(dy: Tensor, x: Tensor, out: Tensor, offs: Tensor, stride_offs: int, G: int) -> None:
    for e, n, k in hl.tile(out.size(), block_size=[1, None, None]):
        first, stop = _tokens(e.id, offs, stride_offs, G, dy.size(1))
        size = torch.where(stop > first, stop - first, 0)
        acc = hl.zeros([n, k], dtype=torch.float32)
        for i in hl.tile(0, size >> 6, block_size=1):
            m = first + i.id * 64
            acc = hl.dot(dy[n, m + hl.arange(64)], x[k, m + hl.arange(64)].t(), acc=acc)
        # The last 32 tokens of an odd number of blocks. The next 32 belong to another group.
        for i in hl.tile(size >> 6, (size + 32) >> 6, block_size=1):
            m = first + i.id * 64
            acc = hl.dot(dy[n, m + hl.arange(32)], x[k, m + hl.arange(32)].t(), acc=acc)
        out[e.id, n, k] = acc.to(out.dtype)


def _wgrad(
    dy: Tensor, dy_scale: Tensor, dy_stride_r: int, dy_stride_c: int, dy_row_tiles: int,
    x: Tensor, x_scale: Tensor, x_stride_r: int, x_stride_c: int, x_row_tiles: int,
    out: Tensor, offs: Tensor, stride_offs: int, G: int,
    chunk: hl.constexpr, blocked: hl.constexpr, step: hl.constexpr,
) -> None:  # fmt: skip
    for e, n, k in hl.tile(out.size(), block_size=[1, None, None]):
        M = dy.size(1)
        first, stop = _tokens(e.id, offs, stride_offs, G, M)
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


def _mend(
    dy: Tensor, dy_stride: int, dy_scale: Tensor, dy_stride_r: int, dy_stride_c: int, dy_row_tiles: int,
    x: Tensor, x_stride: int, x_scale: Tensor, x_stride_r: int, x_stride_c: int, x_row_tiles: int,
    out: Tensor, N: int, K: int, M: int, offs: Tensor, stride_offs: int, G: int,
    flags: Tensor, first_flag: int, programs: int, tiles: int,
    chunk: hl.constexpr, blocked: hl.constexpr,
) -> None:  # fmt: skip
    """As `mend` in tiles/mx_by_memory.py: the sums of the rows and columns with a flag, exactly."""
    for program in hl.grid(programs):
        raised = hl.load(flags, [hl.arange(1)]).sum(0)
        rounds = torch.where(raised > 0, (tiles + programs - 1) // programs, 0)
        for turn in hl.tile(0, rounds, block_size=1):
            tile = turn.id * programs + program
            of_matrix = dy_row_tiles * (x_row_tiles * 2)
            e, down, across = tile // of_matrix, tile % of_matrix % dy_row_tiles, tile % of_matrix // dy_row_tiles
            there = tile < tiles
            first, stop = _tokens(e, offs, stride_offs, G, M)
            n, k = down * 128 + hl.arange(128).unsqueeze(1), across * 64 + hl.arange(64).unsqueeze(1)
            in_n, in_k = (n < N) & there, (k < K) & there
            of_n = hl.load(flags, [first_flag + e * N + n], extra_mask=in_n)
            of_k = hl.load(flags, [first_flag + G * N + e * K + k], extra_mask=in_k)
            start, before = hl.zeros([], dtype=torch.int32), hl.zeros([], dtype=torch.int32)
            for i in range(0, G if blocked else 0, chunk):
                g, begins, _ends, before = padded_ends(offs, stride_offs, G, before, i, 128, chunk)
                start = start + torch.where(g == e, begins, 0).sum(0, dtype=torch.int32)
            begin = start >> 7 if blocked else first >> 5
            dy_begin = begin * (dy_row_tiles * 512 if blocked else dy_stride_c)
            x_begin = begin * (x_row_tiles * 512 if blocked else x_stride_c)
            col_tiles = (stop - first + 127) >> 7
            stop = torch.where((start >= 0) & (start + col_tiles * 128 <= M + G * 128), stop, 0)
            stop = torch.where(of_n.amax(0).amax(0) + of_k.amax(0).amax(0) > 0, stop, 0)
            acc = hl.zeros([128, 64], dtype=torch.float32)
            for m in hl.tile(first, stop, block_size=32):
                c = (((m.begin - first) >> 5) + hl.arange(1)).unsqueeze(0)
                of_dy = dy_begin + scale_place(n, c, dy_stride_r, dy_stride_c, col_tiles, blocked)
                of_x = x_begin + scale_place(k, c, x_stride_r, x_stride_c, col_tiles, blocked)
                acc = multiplied(
                    acc, hl.load(dy, [n * dy_stride + m.index.unsqueeze(0)], extra_mask=in_n),
                    hl.load(dy_scale, [of_dy], extra_mask=in_n),
                    hl.load(x, [k * x_stride + m.index.unsqueeze(0)], extra_mask=in_k),
                    hl.load(x_scale, [of_x], extra_mask=in_k), 32,
                )  # fmt: skip
            flagged = ((of_n > 0) | (of_k.t() > 0)) & in_n & in_k.t()
            hl.store(out, [(e * N + n) * K + k.t()], acc.to(out.dtype), extra_mask=flagged)


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
    if step_for(dy.device) != MX_BLOCK_SIZE:
        launch(
            _wgrad, CONFIGS,
            dy.mT, *scale_arguments(dy_scale, blocked), blocked_shape(N, 1)[0],
            x.mT, *scale_arguments(x_scale, blocked), blocked_shape(K, 1)[0],
            out, flat(offs), offs.stride(0), E, chunk(E), blocked, step_for(dy.device),
        )  # fmt: skip
        return out
    flags, plan = torch.zeros(FIRST_FLAG + E * (N + K), dtype=torch.int32, device=dy.device), plan_of(offs, M)
    of_dy = bf16_values_of_tokens(dy.mT, dy_scale, blocked, flags, FIRST_FLAG, plan, E, "dy")
    of_x = bf16_values_of_tokens(x.mT, x_scale, blocked, flags, FIRST_FLAG + E * N, plan, E, "x")
    launch(_of_values, CONFIGS, of_dy, of_x, out, flat(offs), offs.stride(0), E)
    down, across = blocked_shape(N, 1)[0], blocked_shape(K, 1)[0]
    launch(
        _mend, {(9, 0): _MEND}, flat(dy.mT), dy.stride(1), *scale_arguments(dy_scale, blocked), down,
        flat(x.mT), x.stride(1), *scale_arguments(x_scale, blocked), across, flat(out), N, K, M,
        flat(offs), offs.stride(0), E, flags, FIRST_FLAG, processors(dy.device), E * down * across * 2,
        chunk(E), blocked,
    )  # fmt: skip
    return out
