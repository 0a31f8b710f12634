"""MX matmuls on Hopper by way of memory: kernels write the bf16 values of both operands, and Helion multiplies them.

Matmuls by e2m1 weights use the same kernels on Hopper and Blackwell, but only for the values of tokens in codes.

Hopper cannot multiply MX codes, and a sum of 32 columns that leaves the tensor cores to be scaled costs most of their
time. But a code times its scale is exactly a bf16 number, unless the scale is near either end of its range. A kernel
reads the scales: a block with such a scale, and with a code that is not 0, raises the flag of its row. After the
matmul, `mend` computes again each sum whose row of a or of b has a flag. If no flag is raised, its programs read only
the first flag, which stands for all. NaN and Inf need no flag.

The tensor cores sum 16 consecutive columns at a time, in ascending order, whatever the tile. So the bits of a row
depend neither on the number of rows nor on the configuration.
"""

from __future__ import annotations

import functools
from typing import Any

import helion
import helion.language as hl
import torch
from torch import Tensor

from mxspec.formats import E2M1, MX_BLOCK_SIZE, element
from mxspec.helion_kernels.common.blocked import blocked_shape, blocked_to_row_col
from mxspec.helion_kernels.common.groups import chunk, padded_ends, passed, tokens_of_tile
from mxspec.helion_kernels.common.launch import config, flat, launch
from mxspec.helion_kernels.common.numerics import code_values, scale_value
from mxspec.helion_kernels.fp8_gemm import PERSISTENT, options
from mxspec.helion_kernels.mx_dequantize import dequantized
from mxspec.helion_kernels.tiles.mx_matmul import multiplied, multiplied_by_packed, scale_arguments, scale_place

PTX = r"wgmma\.mma_async.*\.f32\.bf16\.bf16"
# By code format: the first and the last scale byte under which every code becomes 0, a normal bf16 number, Inf or NaN.
# The smallest code is 2^-9 or 2^-16. The largest is just below 2^9 or 2^16. e2m1 has few bits: each of its values, from
# 2^-128 on, is a bf16 number also if it is subnormal.
EXACT = {torch.float8_e4m3fn: (10, 246), torch.float8_e5m2: (17, 239), E2M1.dtype: (0, 252)}
FIRST_FLAG = 16  # the place of the flag of row 0 of a, so that Triton knows its alignment. Flag 0 stands for all flags
# Block sizes count scale bytes. A grid of three dimensions needs no divisions to find a program's place, but two of its
# dimensions hold at most 65535.
_FLAGS, _TALL = config([1, 4, 256], 4, pid_type="xyz"), config([1, 4, 256], 4)
_OF_GROUPS = helion.Config(block_sizes=[256], num_warps=8, loop_orders=[[1, 0]])
_PLAN = helion.Config(block_sizes=[], num_warps=1)
_MEND = helion.Config(block_sizes=[], num_warps=8, num_stages=3)


def matmul_config(block_sizes: list[int], num_warps: int, num_stages: int, persistent: bool = True) -> helion.Config:
    """Programs run down eight tiles of M, then along N. TMA accesses the values and the output, if it can.

    A persistent program loads the next tile while it stores the last. Otherwise the matmul of a large output takes 1.25
    times as long on an H100.
    """
    tma = {**options("tensor_descriptor"), **(PERSISTENT if persistent else {}), "num_stages": num_stages}
    return helion.Config(block_sizes=block_sizes, num_warps=num_warps, loop_orders=[[1, 0]], **tma)


def _held(codes: Tensor) -> int:
    """The elements of codes that a block of 32 has: a byte of e2m1 holds two."""
    return 16 if codes.dtype == torch.uint8 else 32


def _raised(code: Tensor, inexact: Tensor) -> Tensor:
    """1 for blocks with an inexact scale and a code that is not 0."""
    return (inexact & (torch.where(code_values(code) != 0, 1, 0).amax(-1) > 0)).to(torch.int32)


def inexact_scales(of_block: Tensor, there: Tensor, lowest: int, highest: int) -> Tensor:
    """Where the values under a scale may be no bf16 numbers."""
    return there & ((of_block < lowest) | ((of_block > highest) & (of_block < 255)))


def _flags(
    codes: Tensor, stride_e: int, stride_r: int, R: int, C: int, scale: Tensor,
    flags: Tensor, first_flag: int, blocked: hl.constexpr, lowest: hl.constexpr, highest: hl.constexpr,
) -> None:  # fmt: skip
    """Raise the flag of each row with a value that may be inexact. The codes are read only under such a scale."""
    for e, row, byte in hl.tile(scale.shape):
        matrix, row_, byte_ = e.index[:, None, None], row.index[None, :, None], byte.index[None, None, :]
        r, c = blocked_to_row_col(row_, byte_) if blocked else (row_, byte_)
        there = ((matrix < scale.size(0)) & (r < R) & (c < C)).expand(e, row, byte)
        inexact = inexact_scales(scale[e, row, byte].to(torch.int32), there, lowest, highest)
        if inexact.to(torch.int32).amax(-1).amax(-1).amax(-1) > 0:
            held = _held(codes)
            source = (matrix * stride_e + r * stride_r + c * held).unsqueeze(-1) + hl.arange(held)[None, None, None, :]
            code = hl.load(codes, [source], extra_mask=inexact.unsqueeze(-1).expand(source.size()))
            raised = _raised(code, inexact)
            hl.atomic_max(flags, [hl.arange(1)], raised.amax(-1).amax(-1).amax(-1) + hl.arange(1))
            # Atomics have no mask. The places of other blocks get 0.
            hl.atomic_add(flags, [torch.where(there, first_flag + matrix * R + r + c * 0, 0)], raised)


def _plan_tiles(
    plan: Tensor, M: int, offs: Tensor, stride_offs: int, G: int, chunk: hl.constexpr, rows: hl.constexpr
) -> None:
    """For each tile of padded rows: the group, the first token, and the token after the group's last.

    Past the last group, the group is G.
    """
    for tile in hl.tile(plan.size(0), block_size=1):
        row0 = tile.index * rows
        group, begin = row0 * 0, row0 * 0
        before = hl.zeros([], dtype=torch.int32)
        for i in range(0, G, chunk):
            g, _begins, ends, before = padded_ends(offs, stride_offs, G, before, i, rows, chunk)
            group, begin = passed(group, begin, row0, g, ends, G)
        first, stop = tokens_of_tile(row0, group, begin, offs, stride_offs, G, M)
        # If offs is out of order, a tile may be past the tiles of the scales. It then counts as a tile of no group.
        plan[tile, 0] = torch.where(row0 + rows <= M + G * rows, group, G)
        plan[tile, 1] = first
        plan[tile, 2] = torch.where(stop < M, stop, M)


def of_plan(plan: Tensor, tile: int) -> tuple[Tensor, Tensor, Tensor]:
    """A tile's group, first token and the token after its group's last, in the index type of the kernel."""
    group, first, stop = (hl.load(plan, [tile, i]) + hl.arange(1) for i in range(3))
    return group.sum(0), first.sum(0), stop.sum(0)


def _without_plan(tile: int, M: int) -> tuple[Tensor, Tensor, Tensor]:
    """What `of_plan` gives, for a matrix that is one group."""
    zero = hl.arange(1)
    return (zero * 0).sum(0), (tile * 128 + zero).sum(0), (M + zero).sum(0)


def _values_of_groups(codes: Tensor, stride: int, C: int, scale: Tensor, out: Tensor, plan: Tensor, G: int) -> None:
    """The values of tokens whose blocked scales have tiles for each group, in the order of the scale bytes."""
    for tile, byte in hl.tile(scale.shape, block_size=[1, None]):
        group, first, stop = of_plan(plan, tile.id)
        r, c = blocked_to_row_col(byte.index * 0, byte.index)
        r = first + r
        there, held = ((r >= 0) & (r < stop) & (c < C) & (group < G)).unsqueeze(1), _held(codes)
        source = (r * stride + c * held).unsqueeze(1) + hl.arange(held).unsqueeze(0)
        value = code_values(hl.load(codes, [source], extra_mask=there.expand(byte, held)))
        value = value * scale_value(scale[tile.id, byte]).unsqueeze(1)
        target = ((r * C + c) * 32).unsqueeze(1) + hl.arange(32).unsqueeze(0)
        hl.store(out, [target], value.to(out.dtype), extra_mask=there.expand(byte, 32))


def _flags_of_groups(
    codes: Tensor, stride: int, C: int, scale: Tensor, plan: Tensor, G: int,
    flags: Tensor, first_flag: int, lowest: hl.constexpr, highest: hl.constexpr,
) -> None:  # fmt: skip
    """`_flags` of tokens whose blocked scales have tiles for each group."""
    for tile, byte in hl.tile(scale.shape, block_size=[1, None]):
        group, first, stop = of_plan(plan, tile.id)
        r, c = blocked_to_row_col(byte.index * 0, byte.index)
        r = first + r
        there = (r >= 0) & (r < stop) & (c < C) & (group < G)
        inexact = inexact_scales(scale[tile.id, byte].to(torch.int32), there, lowest, highest)
        if inexact.to(torch.int32).amax(0) > 0:
            held = _held(codes)
            source = (r * stride + c * held).unsqueeze(1) + hl.arange(held).unsqueeze(0)
            raised = _raised(hl.load(codes, [source], extra_mask=inexact.unsqueeze(1).expand(byte, held)), inexact)
            hl.atomic_max(flags, [hl.arange(1)], raised.amax(0) + hl.arange(1))
            hl.atomic_add(flags, [torch.where(there, first_flag + r, 0)], raised)


def _block(codes: Tensor, k: Any) -> Tensor:
    """The places of a block of 32 columns in a row of codes."""
    if codes.dtype == torch.uint8:
        return (k.id * 16 + hl.arange(16)).unsqueeze(0)
    return k.index.unsqueeze(0)


def _mend(
    a: Tensor, a_stride: int, a_scale: Tensor, a_stride_r: int, a_stride_c: int,
    b: Tensor, b_stride_e: int, b_stride: int, b_scale: Tensor, b_stride_r: int, b_stride_c: int, b_scale_stride_e: int,
    M: int, N: int, K: int, col_tiles: int, out: Tensor, flags: Tensor, first_flag: int, plan: Tensor, G: int,
    programs: int, row_tiles: int, tiles: int, blocked: hl.constexpr, grouped: hl.constexpr, width: hl.constexpr,
) -> None:  # fmt: skip
    """The sums of the rows and columns with a flag: each block of 32 is a sum of its own, which is scaled in fp32."""
    for program in hl.grid(programs):
        raised = hl.load(flags, [hl.arange(1)]).sum(0)
        rounds = torch.where(raised > 0, (tiles + programs - 1) // programs, 0)
        for i in hl.tile(0, rounds, block_size=1):
            tile = i.id * programs + program
            down, across = tile % row_tiles, tile // row_tiles
            in_tile = hl.arange(128).unsqueeze(1)
            expert, first, stop = of_plan(plan, down) if grouped else _without_plan(down, M)
            row, col = first + in_tile, (across * width + hl.arange(width)).unsqueeze(1)
            there = (tile < tiles) & (expert < G)
            in_a, in_b = (row >= 0) & (row < stop) & there, (col < N) & there
            of_a = hl.load(flags, [first_flag + row], extra_mask=in_a)
            of_b = hl.load(flags, [first_flag + M + expert * N + col], extra_mask=in_b)
            summed = torch.where(of_a.amax(0).amax(0) + of_b.amax(0).amax(0) > 0, K, 0)
            acc = hl.zeros([128, width], dtype=torch.float32)
            for k in hl.tile(0, summed, block_size=32):
                c = (k.id + hl.arange(1)).unsqueeze(0)
                # Tile `down` of the plan is tile `down` of the blocked scales.
                of_row = down * 128 + in_tile if blocked else row
                a_at = scale_place(of_row, c, a_stride_r, a_stride_c, col_tiles, blocked)
                b_at = expert * b_scale_stride_e + scale_place(col, c, b_stride_r, b_stride_c, col_tiles, blocked)
                of_row_of_a = hl.load(a, [row * a_stride + _block(a, k)], extra_mask=in_a)
                of_row_of_b = hl.load(b, [expert * b_stride_e + col * b_stride + _block(b, k)], extra_mask=in_b)
                of_scales = hl.load(a_scale, [a_at], extra_mask=in_a), hl.load(b_scale, [b_at], extra_mask=in_b)
                if b.dtype == torch.uint8:
                    acc = multiplied_by_packed(acc, of_row_of_a, of_scales[0], of_row_of_b, of_scales[1])
                else:
                    acc = multiplied(acc, of_row_of_a, of_scales[0], of_row_of_b, of_scales[1], 32)
            flagged = ((of_a > 0) | (of_b.t() > 0)) & in_a & in_b.t()
            hl.store(out, [row * N + col.t()], acc.to(out.dtype), extra_mask=flagged)


# The tiles of a matmul of two matrices of values: see `tile_of`. A tile of 128 x 256 to fp32 would need 272 KiB of
# shared memory.
TILES = {
    "128 x 256": matmul_config([128, 256, 64], 8, 3),
    "128 x 128": matmul_config([128, 128, 64], 8, 4),
    "64 x 64": matmul_config([64, 64, 128], 4, 4, persistent=False),
}


def tile_of(out: Tensor) -> str:
    """The largest tile of which there are enough for the processors. The times: benchmarks/results/decisions.md."""
    M, N = out.shape
    wide, square = (-(-M // 128) * -(-N // cols) for cols in (256, 128))
    if M <= 64 or 3 * square < processors(out.device):
        return "64 x 64"
    return "128 x 128" if 2 * wide < processors(out.device) or out.dtype == torch.float32 else "128 x 256"


@functools.cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type != "cpu" else 4


def _elements(codes: Tensor) -> int:
    """The number of elements of a row."""
    return codes.shape[-1] * element(codes.dtype).per_byte


def _stored(codes: Tensor) -> Tensor:
    """The codes, or their bytes if two share a byte."""
    return codes.view(torch.uint8) if codes.dtype == E2M1.dtype else codes


def bf16_values(codes: Tensor, scale: Tensor, blocked: bool, flags: Tensor, first_flag: int, role: str) -> Tensor:
    """`mx_dequantize` of one matrix or several, with the flags of its rows."""
    *lead, R, _ = codes.shape
    C, E = _elements(codes) // MX_BLOCK_SIZE, lead[0] if lead else 1
    bytes_, of_e = scale.view(torch.uint8), scale.stride(0) if lead else 0
    if blocked:
        row_tiles, col_tiles = blocked_shape(R, C)
        bytes_ = bytes_.as_strided((E, row_tiles, 512 * col_tiles), (of_e, 512 * col_tiles, 1))
    elif not lead:
        bytes_ = bytes_.unsqueeze(0)
    launch(
        _flags, {(9, 0): _FLAGS if max(bytes_.shape[:2]) < 65536 else _TALL}, flat(_stored(codes)),
        codes.stride(0) if lead else 0, codes.stride(-2), R, C, bytes_, flags, first_flag, blocked,
        *EXACT[codes.dtype], role=role,
    )  # fmt: skip
    return dequantized(codes, scale, -1, torch.bfloat16, "blocked" if blocked else "plain", None, role)


def bf16_values_of_groups(codes: Tensor, scale: Tensor, flags: Tensor, plan: Tensor, G: int) -> Tensor:
    """The bf16 values of tokens with blocked scales. The rows of no group are not written."""
    M, K = codes.shape[0], _elements(codes)
    C, q = K // MX_BLOCK_SIZE, flat(_stored(codes))
    out = torch.empty((M, K), dtype=torch.bfloat16, device=codes.device)
    bytes_ = 512 * blocked_shape(1, C)[1]
    tiles = scale.view(torch.uint8).as_strided((scale.numel() // bytes_, bytes_), (bytes_, 1))
    launch(_values_of_groups, {(9, 0): _OF_GROUPS}, q, codes.stride(0), C, tiles, out.view(-1), plan, G)
    launch(
        _flags_of_groups, {(9, 0): _OF_GROUPS}, q, codes.stride(0), C, tiles, plan, G,
        flags, FIRST_FLAG, *EXACT[codes.dtype],
    )  # fmt: skip
    return out


def plan_of(offs: Tensor, M: int, rows: int = 128) -> Tensor:
    """The plan of tiles of `rows` tokens."""
    E = offs.shape[0]
    plan = torch.empty((-(-M // rows) + E, 3), dtype=torch.int32, device=offs.device)
    launch(_plan_tiles, {(9, 0): _PLAN}, plan, M, flat(offs), offs.stride(0), E, chunk(E), rows, role=str(rows))
    return plan


def mend(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, blocked: bool, flags: Tensor,
    plan: Tensor | None = None,
) -> None:  # fmt: skip
    M, K, N, grouped = a.shape[0], _elements(a), b.shape[-2], plan is not None
    row_tiles, programs = -(-M // 128) if plan is None else plan.shape[0], processors(a.device)
    width = 32 if b.dtype == E2M1.dtype else 64  # with 64 columns, Triton 3.6 keeps registers of e2m1 in local memory
    launch(
        _mend, {(9, 0): _MEND}, flat(_stored(a)), a.stride(0), *scale_arguments(a_scale, blocked),
        flat(_stored(b)), b.stride(0) if grouped else 0, b.stride(-2), *scale_arguments(b_scale, blocked),
        b_scale.stride(0) if grouped else 0, M, N, K, blocked_shape(1, K // MX_BLOCK_SIZE)[1], flat(out),
        flags, FIRST_FLAG, flags.unsqueeze(1) if plan is None else plan, b.shape[0] if grouped else 1,
        programs, row_tiles, row_tiles * -(-N // width), blocked, grouped, width,
    )  # fmt: skip
