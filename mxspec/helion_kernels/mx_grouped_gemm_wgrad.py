"""mx_grouped_gemm_wgrad in Helion: each tile of the output sums the tokens of one group.

On Hopper, a kernel writes the bf16 values of both operands, and Helion multiplies them: tiles/mx_by_memory.py says why.
A plan in memory holds the group of each block of tokens. On Blackwell, a program multiplies the codes, and finds the
scales of its group by itself.
"""

from __future__ import annotations

from typing import Any

import helion
import helion.language as hl
import torch
from torch import Tensor

from mxspec.formats import MX_BLOCK_SIZE
from mxspec.helion_kernels.common.blocked import blocked_shape
from mxspec.helion_kernels.common.groups import chunk, padded_ends
from mxspec.helion_kernels.common.launch import Configs, config, flat, launch
from mxspec.helion_kernels.common.numerics import scale_value
from mxspec.helion_kernels.fp8_gemm import PERSISTENT, options
from mxspec.helion_kernels.tiles import mx_by_memory, mx_matmul
from mxspec.helion_kernels.tiles.k_groups import of_blocks, plan_of_blocks
from mxspec.helion_kernels.tiles.mx_by_memory import EXACT, FIRST_FLAG, inexact_scales, processors
from mxspec.helion_kernels.tiles.mx_matmul import multiplied, scale_arguments, scale_place, step_for

# Rates on an H200: benchmarks/results/decisions.md. Blackwell: compiled, not run.
RANK = {(9, 0): 2, (10, 0): 2}
PTX = {"sm90": (mx_by_memory.PTX,), "sm100": mx_matmul.PTX["sm100"]}
_PERSISTENT = {name: value for name, value in PERSISTENT.items() if name == "pid_type"}
# The kernel reads offs twice, reads dy and x in each of two loops, and writes the output. TMA needs 128 KiB of shared
# memory to write a tile of fp32.
READ = ["pointer", "pointer", *["tensor_descriptor"] * 4]
_WRITTEN_BY_TMA, _WRITTEN = [*READ, "tensor_descriptor"], [*READ, "pointer"]


def wgrad_config(indexing: list[str], num_stages: int, cols: int = 256) -> helion.Config:
    """Programs run down eight tiles of N, then along K, then to the next group, as in mx_gemm."""
    tma: dict[str, Any] = {**options(indexing), **_PERSISTENT, "num_stages": num_stages}
    return helion.Config(block_sizes=[128, cols], num_warps=8, loop_orders=[[1, 2, 0]], **tma)


_CODES = helion.Config(block_sizes=[128, 128], num_warps=8, num_stages=4)
CONFIGS: dict[Any, Configs] = {
    torch.bfloat16: {(9, 0): wgrad_config(_WRITTEN_BY_TMA, 3), (10, 0): _CODES},
    torch.float32: {(9, 0): wgrad_config(_WRITTEN, 4), (10, 0): _CODES},
    # If TMA cannot read a tile, or if K is no multiple of 16, the addresses of a wide tile need too many registers.
    "small or odd": {(9, 0): wgrad_config(_WRITTEN, 4, 128), (10, 0): _CODES},
}
_VALUES = config([32, 4], 4)
_MEND = helion.Config(block_sizes=[], num_warps=8, num_stages=3)
_STEP = 64  # tokens of the bf16 values


def _values(
    codes: Tensor, scale: Tensor, stride_r: int, stride_c: int, row_tiles: int, plan: Tensor, G: int,
    out: Tensor, flags: Tensor, first_flag: int, blocked: hl.constexpr, lowest: hl.constexpr, highest: hl.constexpr,
) -> None:  # fmt: skip
    """The bf16 values of one operand. A value that may be inexact raises the flag of its row in its group."""
    for row, block in hl.tile([out.size(0), out.size(1)]):
        group, begin, tiles, c = of_blocks(plan, block.index)
        there = ((row.index < out.size(0)).unsqueeze(1)) & (group < G)
        # Plain scales count the blocks of all groups together.
        of_group = begin * row_tiles * 512 if blocked else 0
        at = of_group + scale_place(
            row.index.unsqueeze(1), c if blocked else block.index.unsqueeze(0), stride_r, stride_c, tiles, blocked
        )
        byte = hl.load(scale, [at], extra_mask=there)
        value = codes[row, block, :].to(torch.float32) * scale_value(byte).unsqueeze(-1)
        out[row, block, :] = value.to(out.dtype)
        inexact = inexact_scales(byte.to(torch.int32), there, lowest, highest)
        if inexact.to(torch.int32).amax(-1).amax(-1) > 0:
            nonzero = torch.where(codes[row, block, :].to(torch.float32) != 0, 1, 0).amax(-1) > 0
            raised = (inexact & nonzero).to(torch.int32)
            hl.atomic_max(flags, [hl.arange(1)], raised.amax(-1).amax(-1) + hl.arange(1))
            # Atomics have no mask. The places of other blocks get 0.
            place = first_flag + group * out.size(0) + row.index.unsqueeze(1)
            hl.atomic_add(flags, [torch.where(there, place, 0)], raised)


def _of_values(dy: Tensor, x: Tensor, out: Tensor, offs: Tensor, stride_offs: int, step: hl.constexpr) -> None:
    for e, n, k in hl.tile(out.size(), block_size=[1, None, None]):
        M = dy.size(1)
        group = e.id + hl.arange(1)
        first = hl.load(offs, [(group - 1) * stride_offs], extra_mask=group > 0).sum(0)
        stop = hl.load(offs, [group * stride_offs]).sum(0)
        first, stop = torch.clamp(first, 0, M) >> 5 << 5, torch.clamp(stop, 0, M) >> 5 << 5
        stop = torch.where(stop > first, stop, first)
        whole = stop - ((stop - first) & (step - 1))
        acc = hl.zeros([n, k], dtype=torch.float32)
        # TMA has no mask, so no step may read tokens of the next group. All groups are multiples of 32 tokens.
        for m in hl.tile(first, whole, block_size=step):
            acc = hl.dot(dy[n, m], x[k, m].t(), acc=acc)
        for m in hl.tile(whole, stop, block_size=32):
            acc = hl.dot(dy[n, m], x[k, m].t(), acc=acc)
        out[e.begin, n, k] = acc.to(out.dtype)


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
        begin = (start if blocked else first) + hl.arange(1).sum(0)  # in the index type of the kernel
        begin = begin >> 7 if blocked else begin >> 5
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
    out: Tensor, N: int, K: int, offs: Tensor, stride_offs: int, G: int, plan: Tensor,
    flags: Tensor, first_flag: int, programs: int, tiles: int, blocked: hl.constexpr,
) -> None:  # fmt: skip
    """The sums of the rows and columns with a flag: each block of 32 is a sum of its own, which is scaled in fp32."""
    for program in hl.grid(programs):
        raised = hl.load(flags, [hl.arange(1)]).sum(0)
        rounds = torch.where(raised > 0, (tiles * G + programs - 1) // programs, 0)
        for i in hl.tile(0, rounds, block_size=1):
            tile = i.id * programs + program
            e, within = tile // tiles, tile % tiles
            across = (K + 63) // 64
            n = (within // across * 128 + hl.arange(128)).unsqueeze(1)
            k = (within % across * 64 + hl.arange(64)).unsqueeze(1)
            in_n, in_k = (n < N) & (e < G), (k < K) & (e < G)
            of_n = hl.load(flags, [first_flag + e * N + n], extra_mask=in_n)
            of_k = hl.load(flags, [first_flag + G * N + e * K + k], extra_mask=in_k)
            group = e + hl.arange(1)
            M = plan.size(0) * 32
            first = hl.load(offs, [(group - 1) * stride_offs], extra_mask=(group > 0) & (group < G)).sum(0)
            stop = hl.load(offs, [group * stride_offs], extra_mask=group < G).sum(0)
            first, stop = torch.clamp(first, 0, M) >> 5 << 5, torch.clamp(stop, 0, M) >> 5 << 5
            stop = torch.where(of_n.amax(0).amax(0) + of_k.amax(0).amax(0) > 0, stop, first)
            acc = hl.zeros([128, 64], dtype=torch.float32)
            for m in hl.tile(first, stop, block_size=32):
                block = (m.begin >> 5) + hl.arange(1)
                of, begin, col_tiles, place = of_blocks(plan, block)
                there_n, there_k = in_n & (of < G), in_k & (of < G)
                c = place if blocked else block.unsqueeze(0)
                n_at = scale_place(n, c, dy_stride_r, dy_stride_c, col_tiles, blocked)
                k_at = scale_place(k, c, x_stride_r, x_stride_c, col_tiles, blocked)
                if blocked:
                    n_at, k_at = n_at + begin * dy_row_tiles * 512, k_at + begin * x_row_tiles * 512
                acc = multiplied(
                    acc, hl.load(dy, [n * dy_stride + m.index.unsqueeze(0)], extra_mask=there_n),
                    hl.load(dy_scale, [n_at], extra_mask=there_n),
                    hl.load(x, [k * x_stride + m.index.unsqueeze(0)], extra_mask=there_k),
                    hl.load(x_scale, [k_at], extra_mask=there_k), 32,
                )  # fmt: skip
            flagged = ((of_n > 0) | (of_k.t() > 0)) & in_n & in_k.t()
            hl.store(out, [(e * N + n) * K + k.t()], acc.to(out.dtype), extra_mask=flagged)


def _bf16_values(
    codes: Tensor,
    scale: tuple[Any, ...],
    blocked: bool,
    plan: Tensor,
    G: int,
    flags: Tensor,
    first_flag: int,
    role: str,
) -> Tensor:
    """The bf16 values of codes `(R, M)`. The values of tokens of no group have no meaning."""
    R, M = codes.shape
    out = torch.empty((R, M), dtype=torch.bfloat16, device=codes.device)
    in_blocks = (R, M // MX_BLOCK_SIZE, MX_BLOCK_SIZE)
    launch(
        _values, {(9, 0): _VALUES}, codes.as_strided(in_blocks, (codes.stride(0), MX_BLOCK_SIZE, 1)),
        *scale, blocked_shape(R, 1)[0], plan, G, out.view(in_blocks), flags, first_flag,
        blocked, *EXACT[codes.dtype], role=role,
    )  # fmt: skip
    return out


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
    of_offs = flat(offs), offs.stride(0)
    of_dy, of_x = scale_arguments(dy_scale, blocked), scale_arguments(x_scale, blocked)
    dy_row_tiles, x_row_tiles = blocked_shape(N, 1)[0], blocked_shape(K, 1)[0]
    if step_for(dy.device) != MX_BLOCK_SIZE:
        launch(
            _wgrad, CONFIGS[out_dtype], dy.mT, *of_dy, dy_row_tiles, x.mT, *of_x, x_row_tiles,
            out, *of_offs, E, chunk(E), blocked, step_for(dy.device),
        )  # fmt: skip
        return out
    plan = plan_of_blocks(offs, M, MX_BLOCK_SIZE)
    flags = torch.zeros(FIRST_FLAG + E * (N + K), dtype=torch.int32, device=dy.device)
    dy_values = _bf16_values(dy.mT, of_dy, blocked, plan, E, flags, FIRST_FLAG, "dy")
    x_values = _bf16_values(x.mT, of_x, blocked, plan, E, flags, FIRST_FLAG + E * N, "x")
    configs = CONFIGS["small or odd" if N < 128 or K < 256 or K % 16 else out_dtype]
    launch(_of_values, configs, dy_values, x_values, out, *of_offs, _STEP)
    launch(
        _mend, {(9, 0): _MEND}, flat(dy), dy.stride(1), *of_dy, dy_row_tiles, flat(x), x.stride(1), *of_x, x_row_tiles,
        flat(out), N, K, *of_offs, E, plan, flags, FIRST_FLAG, processors(dy.device), -(-N // 128) * -(-K // 64),
        blocked,
    )  # fmt: skip
    return out
