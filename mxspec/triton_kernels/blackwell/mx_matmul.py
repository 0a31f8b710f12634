"""MX matmuls on Blackwell: TMA reads the codes and the blocked scales, and tensor memory holds the sums.

Compiled for sm_100 and interpreted on a CPU. No GPU has run it.

TMA reads each tile of 512 scale bytes as it is stored. The order of its bytes is the order in which the tensor cores
want them. So `tcgen05.cp` copies them from shared memory to tensor memory, and no thread holds a scale byte.

There are two schedules. Both sum each element over ascending steps of 128 columns of K.

- "persistent": K is a multiple of 128. The compiler fuses the loops over tiles and steps. So TMA already reads the next
  tile while a tile is stored.
- "tail": K is no multiple of 128, or the sums run along the tokens of a group. A last, shorter step follows the loop.
  It must not read the padding of the scales as numbers, nor the codes of the next group. So it masks them in registers.
  Each program has one tile. Two programs fit on a multiprocessor, and one computes while the other waits.

The kernel is plain Triton, and the compiler makes all barriers. Two variants do not compile:

- Two statements `if` with `else` after the inner one of two fused loops: `TritonGPUFuseNestedLoops` fails under Triton
  3.6 to 3.8. TMA cannot stop at the end of a group of rows. To choose between TMA and pointers for each part of a tile
  would take such statements. So pointers store M-groups.
- `tl.cumsum` in a loop with `warp_specialize=True`: `TritonGPUPartitionScheduling` fails under Triton 3.6 to 3.9. The
  search for a group has one. So WARP_SPECIALIZE is for `mx_gemm` alone.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mxspec.triton_kernels.common.groups import chunk, group_among, group_of, rows_before, tokens_of
from mxspec.triton_kernels.common.launch import FUSED, capability, processors
from mxspec.triton_kernels.common.tile_order import swizzle

MOST_GROUPS = 256  # of a persistent kernel, whose programs look for the group of a tile without a loop
BLOCK_M = BLOCK_K = 128  # the rows and the columns of a tile of scales
# BLOCK_N is chosen by the schedule, the output's dtype and N, and never by the number of rows. So each row is computed
# by the same instructions in every call. A persistent tile of 256 columns in fp32 leaves too little shared memory. With
# a tail, 256 columns need more than the 512 columns of tensor memory: both products have scales of their own there.
# WARP_SPECIALIZE gives TMA, the tensor cores and the output warps of their own. It is off: no GPU has run the barriers
# between these warps, and a wrong barrier hangs (github.com/triton-lang/triton/pull/6758 corrected one).
_PERSISTENT = {"PERSISTENT": True, "SWIZZLE": 8, "WARP_SPECIALIZE": False, "num_stages": 4, "num_warps": 8}
CONFIGS: dict[str, dict[str, Any]] = {
    "persistent, wide": {**_PERSISTENT, "BLOCK_N": 256},
    "persistent": {**_PERSISTENT, "BLOCK_N": 128},
    "tail": {**_PERSISTENT, "BLOCK_N": 128, "PERSISTENT": False, "num_stages": 3},
}


@triton.jit
def _in_rows(scale, ROWS: tl.constexpr):
    """Tiles of scales as TMA reads them, as (ROWS, 4). A tile has the order (32, 4, 4): row % 32, row // 32, column."""
    return scale.reshape(ROWS // 128, 1, 32, 4, 4).trans(0, 3, 2, 1, 4).reshape(ROWS, 4)


@triton.jit
def _plus_products(acc, x, of_x, w, of_w):
    A: tl.constexpr = "e5m2" if x.dtype == tl.float8e5 else "e4m3"
    B: tl.constexpr = "e5m2" if w.dtype == tl.float8e5 else "e4m3"
    return tl.dot_scaled(x, of_x, A, w.T, of_w, B, acc)


@triton.jit
def _halves(x):
    """The left and the right half of the columns."""
    return x.reshape(x.shape[0], 2, x.shape[1] // 2).permute(0, 2, 1).split()


@triton.jit
def _store(part, at, owned, group, top, left, end, out, M, N, GROUPED: tl.constexpr):
    """Store some columns of a tile. TMA leaves out what is past M and N, but it cannot stop at the end of a group."""
    if GROUPED == "M":
        part = tl.where(owned, part, 0.0)
    part = part.to(out.dtype.element_ty)
    if GROUPED == "M":
        row = top.to(tl.int64) + tl.arange(0, part.shape[0])[:, None]
        column = left + tl.arange(0, part.shape[1])[None, :]
        tl.store(out + row * N + column, part, mask=(row >= 0) & (row < end) & (column < N))
    else:
        at.store([group, top, left], part[None, :, :])


@triton.jit
def _tile(
    tile, a, a_scale, b, b_scale, out_at, out, offs, offs_stride, E, M, N, K, row_tiles,
    GROUPED: tl.constexpr, TAIL: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, SWIZZLE: tl.constexpr,
):  # fmt: skip
    """Compute one tile of the output. For K-groups, the row tiles of each group follow one another.

    The coordinates for TMA may be anything, because TMA reads zeros outside of a tensor, and writes nothing there. So
    offs that is out of order gives a result without meaning, and no access outside of the operands.
    """
    BLOCK_M: tl.constexpr = 128
    row_tile, n_tile = swizzle(tile, row_tiles, tl.cdiv(N, BLOCK_N), SWIZZLE)
    left = n_tile * BLOCK_N
    group, first, top, end, steps, over = row_tile * 0, row_tile * 0, row_tile * BLOCK_M, M, K // 128, K % 128
    of_a, of_b, expert = row_tile, n_tile * (BLOCK_N // 128), group
    if GROUPED == "M":  # groups are padded to whole tiles; the rows past the last group become zeros
        if TAIL:
            group, _, stop, begin = group_of(top, offs, offs_stride, E, None, None, False, BLOCK_M, CHUNK)
        else:
            group, _, stop, begin = group_among(top, offs, offs_stride, E, BLOCK_M, CHUNK)
        first_row = tl.load(offs + (group - 1) * offs_stride, mask=group > 0, other=0)
        top, end, expert = first_row + (top - begin), tl.where(group < E, tl.minimum(stop, M), M), group
    elif GROUPED == "K":  # the sum runs along the tokens of a group, whose scale tiles are stored together, row by row
        m_tiles = tl.cdiv(M, BLOCK_M)
        group, top = row_tile // m_tiles, row_tile % m_tiles * BLOCK_M
        first, stop = tokens_of(group, offs, offs_stride, E)
        first = tl.maximum(first, 0) // 32 * 32
        # At most K, also if offs is out of order: a difference that wraps around would make a sum without end.
        tokens = tl.maximum(tl.maximum(tl.minimum(stop, K), 0) - first, 0) // 32 * 32
        begin, across = rows_before(group, offs, offs_stride, 128, CHUNK) // 128, tl.cdiv(tokens, 128)
        steps, over = tokens // 128, tokens % 128
        of_a = begin * m_tiles + top // 128 * across
        of_b = begin * tl.cdiv(N, 128) + n_tile * across
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(steps):
        x = a.load([top, first + step * 128])
        w = b.load([expert, left, first + step * 128]).reshape(BLOCK_N, 128)
        if GROUPED == "K":  # one row of tiles, because the length of a row differs from group to group
            x_scale, w_scale = a_scale.load([0, 0, of_a + step, 0, 0]), b_scale.load([0, 0, of_b + step, 0, 0])
        else:
            x_scale, w_scale = a_scale.load([0, of_a, step, 0, 0]), b_scale.load([expert, of_b, step, 0, 0])
        acc = _plus_products(acc, x, _in_rows(x_scale, BLOCK_M), w, _in_rows(w_scale, BLOCK_N))
    if TAIL:  # noqa: SIM102  # a constant: without it, the loops over tiles and steps are not fused
        if over > 0:
            in_k, in_c = (tl.arange(0, 128) < over)[None, :], (tl.arange(0, 4) * 32 < over)[None, :]
            x = a.load([top, first + steps * 128])
            w = b.load([expert, left, first + steps * 128]).reshape(BLOCK_N, 128)
            if GROUPED == "K":
                x_scale, w_scale = a_scale.load([0, 0, of_a + steps, 0, 0]), b_scale.load([0, 0, of_b + steps, 0, 0])
                x, w = tl.where(in_k, x, 0.0).to(x.dtype), tl.where(in_k, w, 0.0).to(w.dtype)  # the next group's codes
            else:
                x_scale, w_scale = a_scale.load([0, of_a, steps, 0, 0]), b_scale.load([expert, of_b, steps, 0, 0])
            x_scale = tl.where(in_c, _in_rows(x_scale, BLOCK_M), 127)
            w_scale = tl.where(in_c, _in_rows(w_scale, BLOCK_N), 127)
            acc = _plus_products(acc, x, x_scale, w, w_scale)
    # A quarter at a time, so that a thread holds few sums, and shared memory few columns.
    one, other = _halves(acc)
    first_part, second_part = _halves(one)
    third_part, fourth_part = _halves(other)
    part: tl.constexpr = BLOCK_N // 4
    _store(first_part, out_at, group < E, group, top, left, end, out, M, N, GROUPED)
    _store(second_part, out_at, group < E, group, top, left + part, end, out, M, N, GROUPED)
    _store(third_part, out_at, group < E, group, top, left + 2 * part, end, out, M, N, GROUPED)
    _store(fourth_part, out_at, group < E, group, top, left + 3 * part, end, out, M, N, GROUPED)


@triton.jit
def mx_matmul_sm100(
    a, a_scale, b, b_scale, out_at, out, offs, offs_stride, E, M, N, K, row_tiles,
    GROUPED: tl.constexpr, TAIL: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, SWIZZLE: tl.constexpr,
    PERSISTENT: tl.constexpr, WARP_SPECIALIZE: tl.constexpr,
):  # fmt: skip
    if GROUPED == "M":  # the host knows only the largest number of row tiles
        last = tl.minimum(tl.maximum(tl.load(offs + (E - 1) * offs_stride), 0), M)
        used = rows_before(E + 0 * last, offs, offs_stride, 128, CHUNK) // 128
        row_tiles = tl.maximum(tl.minimum(used + tl.cdiv(M - last, 128), row_tiles), 0)
    tiles = row_tiles * tl.cdiv(N, BLOCK_N)
    if PERSISTENT:
        for tile in tl.range(
            tl.program_id(0), tiles, tl.num_programs(0),
            flatten=True, disallow_acc_multi_buffer=BLOCK_N == 256, warp_specialize=WARP_SPECIALIZE,
        ):  # fmt: skip
            _tile(
                tile, a, a_scale, b, b_scale, out_at, out, offs, offs_stride, E, M, N, K, row_tiles,
                GROUPED, TAIL, CHUNK, BLOCK_N, SWIZZLE,
            )  # fmt: skip
    elif tl.program_id(0) < tiles:
        _tile(
            tl.program_id(0), a, a_scale, b, b_scale, out_at, out, offs, offs_stride, E, M, N, K, row_tiles,
            GROUPED, TAIL, CHUNK, BLOCK_N, SWIZZLE,
        )  # fmt: skip


def reads(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, scale_layout: str) -> bool:
    """Whether the kernel can run: the GPU is an sm_100, the scales are blocked, and TMA can reach every tensor.

    TMA needs rows that begin at multiples of 16 bytes. `out` is contiguous.
    """
    if scale_layout != "blocked" or capability(a.device) != (10, 0):
        return False
    if not (a.numel() and b.numel() and out.numel()) or not out.is_contiguous():
        return False
    steps = [a.stride(0), b.stride(-2), out.shape[-1] * out.element_size()]
    steps += [b.stride(0), b_scale.stride(0)] if b.ndim == 3 else []
    rows_apart = min(a.stride(0), b.stride(-2)) >= a.shape[1]  # rows that share memory are for plain tiles
    places = [t.data_ptr() for t in (a, a_scale, b, b_scale, out)]
    return rows_apart and all(number % 16 == 0 for number in steps + places)


def config_for(K: int, N: int, grouped: str, groups: int, out_dtype: torch.dtype) -> dict[str, Any]:
    """The schedule and its tile."""
    if K % BLOCK_K or grouped == "K" or groups > MOST_GROUPS:
        return CONFIGS["tail"]
    return CONFIGS["persistent, wide" if N > 128 and out_dtype == torch.bfloat16 else "persistent"]


def mx_sm100(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor,
    *, offs: Tensor | None = None, grouped: str = "", **options: Any,
) -> Any:  # fmt: skip
    """`mx_tiles` of blocked scales by TMA and tensor memory. `options` change the configuration.

    Returns the compiled kernel.
    """
    (M, K), N, E = a.shape, b.shape[-2], 1 if offs is None else offs.shape[0]
    config = {**config_for(K, N, grouped, E, out.dtype), **options}
    BLOCK_N = config["BLOCK_N"]
    row_tiles, across = -(-M // BLOCK_M), -(-K // BLOCK_K)
    if grouped == "M":
        row_tiles += E  # each group, and the rows that belong to no group, may begin a tile
    elif grouped == "K":
        row_tiles *= E
    experts, of_b = (E, b.stride(0)) if b.ndim == 3 else (1, N * b.stride(0))
    matrices = E if grouped == "K" else 1

    def scales(scale: Tensor, of_expert: int, count: int, rows: int) -> TensorDescriptor:
        """Tiles of 512 bytes: those of each expert, in rows of `across`, or, for K-groups, all in one row."""
        codes, size = scale.view(torch.uint8), scale.numel() // count // 512
        shape = [1, 1, size, 2, 256] if grouped == "K" else [count, size // across, across, 2, 256]
        strides = [of_expert, shape[2] * 512, 512, 256, 1]
        return TensorDescriptor(codes, shape, strides, [1, rows // 128, 1, 2, 256])

    descriptors = (
        TensorDescriptor(a, [M, K], [a.stride(0), 1], [BLOCK_M, BLOCK_K]),
        scales(a_scale, a_scale.numel() // 16 * 16, 1, BLOCK_M),
        TensorDescriptor(b, [experts, N, K], [of_b, b.stride(-2), 1], [1, BLOCK_N, BLOCK_K]),
        scales(b_scale, *((b_scale.stride(0), E) if b.ndim == 3 else (b_scale.numel() // 16 * 16, 1)), BLOCK_N),
        TensorDescriptor(out, [matrices, M, N], [M * N, N, 1], [1, BLOCK_M, BLOCK_N // 4]),
    )
    tiles = row_tiles * -(-N // BLOCK_N)
    programs = min(tiles, processors(a.device)) if config["PERSISTENT"] else tiles
    return mx_matmul_sm100[(programs,)](
        *descriptors, out, offs, 0 if offs is None else offs.stride(0), E, M, N, K, row_tiles,
        GROUPED=grouped, TAIL=not config["PERSISTENT"], CHUNK=chunk(E), **config, **FUSED,
    )  # fmt: skip
