"""The largest magnitude of each matrix of a stack, or of each token group, in two launches and without atomics.

The programs of the first launch give one number each. A program of the second launch finds the largest number of a
matrix. An atomic maximum would need memory that is set to 0 before, which is a third launch. PyTorch's `vector_norm`
would do the same work, but a launch plan (`mxspec.plans`) repeats only launches of Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxspec.triton_kernels.common.groups import chunk, group_of, padded_rows
from mxspec.triton_kernels.common.launch import UNFUSED, grid
from mxspec.triton_kernels.common.numerics import magnitude_bits, widened

_PROGRAMS = 2048  # for all matrices together, at least one for each; not measured
_MOST = 1024  # of one matrix
_NUM_WARPS = 4
_CLEARED = 1024  # numbers that a program sets to 0


@triton.jit
def _clear(found, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(found + i, 0, mask=i < count)


def zeros_beside(x: Tensor, count: int) -> Tensor:
    """int32 zeros on the device of x, for kernels that find magnitudes by atomic maxima beside other work."""
    found = x.new_empty((count,), dtype=torch.int32)
    _clear[(max(1, -(-count // _CLEARED)),)](found, count, _CLEARED, num_warps=_NUM_WARPS, **UNFUSED)
    return found


@triton.jit
def _largest_of_tiles(
    x, found, R, K, stride_e, stride_r, stride_k, k_tiles, tiles, ROWS: tl.constexpr, COLS: tl.constexpr
):
    x += tl.program_id(1).to(tl.int64) * stride_e
    r, k = tl.arange(0, ROWS), tl.arange(0, COLS)
    offset = r.to(tl.int64)[:, None] * stride_r + k.to(tl.int64)[None, :] * stride_k
    largest = tl.zeros([ROWS, COLS], tl.int32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        r0, k0 = tile // k_tiles * ROWS, tile % k_tiles * COLS
        inside = (r0 + r < R)[:, None] & (k0 + k < K)[None, :]
        part = x + r0.to(tl.int64) * stride_r + k0.to(tl.int64) * stride_k
        values = tl.load(part + offset, mask=inside, other=0)
        largest = tl.maximum(largest, magnitude_bits(widened(values)))
    tl.store(found + tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0), tl.max(largest))


@triton.jit
def _largest(found, amax, count, COUNT: tl.constexpr):
    e, i = tl.program_id(0).to(tl.int64), tl.arange(0, COUNT)
    largest = tl.max(tl.load(found + e * count + i, mask=i < count, other=0))
    tl.store(amax + e, largest.to(tl.float32, bitcast=True))


def largest_magnitudes(x: Tensor) -> Tensor:
    """The largest magnitude of each matrix of x, fp32: NaN if the matrix has a NaN, 0 if it is empty."""
    *lead, R, K = x.shape
    E, stride_e = (lead[0], x.stride(0)) if lead else (1, 0)
    amax = x.new_empty(tuple(lead), dtype=torch.float32)
    if not E:
        return amax
    stride_r, stride_k = x.stride()[-2:]
    # One row that is repeated has the largest magnitude of all rows.
    R, K = 1 if R and not stride_r else R, 1 if K and not stride_k else K
    if R > 1 and (stride_k > stride_r or K == 1):
        R, K, stride_r, stride_k = K, R, stride_k, stride_r
    rows, cols = 8, 512
    if stride_k == 1 and (stride_r == K or R == 1) and K % 16 == 0:  # one run of memory
        R, K, stride_r, rows, cols = R * K // 16, 16, 16, 256, 16
    k_tiles = -(-K // cols)
    tiles = -(-R // rows) * k_tiles
    count = max(1, min(tiles, _MOST, _PROGRAMS // E))
    found = x.new_empty((E, count), dtype=torch.int32)
    _largest_of_tiles[count, E](
        x, found, R, K, stride_e, stride_r, stride_k, k_tiles, tiles, rows, cols, num_warps=_NUM_WARPS, **UNFUSED
    )
    _largest[(E,)](found, amax, count, triton.next_power_of_2(count), num_warps=_NUM_WARPS, **UNFUSED)
    return amax


# `tokens` is not specialized: with tokens == 1 ptxas 12.8 generates wrong code (see mx_quantize_groups).
@triton.jit(do_not_specialize=["tokens"])
def _largest_of_rows(
    x, found, start, end, offs, tokens, K, row_tiles, stride_m, stride_k, G, stride_offs,
    ALIGN: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    # A program has some of the columns of 128 padded rows, which belong to one group.
    row_tile = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    writes = tl.program_id(0) + row_tile == 0
    _, token0, stop, begin = group_of(row_tile * 128, offs, stride_offs, G, start, end, writes, ALIGN, CHUNK)
    token0 += row_tile * 128 - begin
    r, k = tl.arange(0, ROWS), tl.arange(0, COLS)
    largest = tl.zeros([ROWS, COLS], tl.int32)
    for k0 in range(tl.program_id(0) * COLS, K, tl.num_programs(0) * COLS):
        for r0 in range(0, 128, ROWS):
            token = token0 + r0 + r
            there = (token >= 0) & (token < tl.minimum(stop, tokens))
            source = (token.to(tl.int64) * stride_m)[:, None] + (k0 + k).to(tl.int64)[None, :] * stride_k
            values = tl.load(x + source, mask=there[:, None] & (k0 + k < K)[None, :], other=0)
            largest = tl.maximum(magnitude_bits(widened(values)), largest)
    tl.store(
        found + row_tile.to(tl.int64) * tl.num_programs(0) + tl.program_id(0), tl.max(largest), row_tile < row_tiles
    )


@triton.jit
def _largest_of_groups(found, amax, start, end, row_tiles, parts, COUNT: tl.constexpr):
    g, i = tl.program_id(0), tl.arange(0, COUNT)
    # The bounds are within `found` for any offs.
    first = tl.minimum(tl.maximum(tl.load(start + g) // 128, 0), row_tiles) * parts
    last = tl.minimum(tl.maximum(tl.load(end + g) // 128, 0), row_tiles) * parts
    largest = tl.zeros([COUNT], tl.int32)
    for n in range(first, last, COUNT):
        largest = tl.maximum(largest, tl.load(found + n + i, mask=n + i < last, other=0))
    tl.store(amax + g, tl.max(largest).to(tl.float32, bitcast=True))


_PARTS = 8  # programs across 128 rows, at most; not measured


def largest_of_groups(x: Tensor, offs: Tensor, start: Tensor, end: Tensor, pad_to: int) -> Tensor:
    """The largest magnitude of each token group, fp32: NaN if the group has a NaN, 0 if it is empty.

    The launch also writes `start` and `end`, because the second launch needs them.
    """
    (M, K), G = x.shape, offs.shape[0]
    amax = x.new_empty(G, dtype=torch.float32)
    if not G:
        return amax
    rows, cols = (8, 512) if abs(x.stride(1)) <= abs(x.stride(0)) else (128, 32)
    row_tiles = padded_rows(M, G, pad_to) // 128
    parts = max(1, min(_PARTS, -(-K // cols)))
    found = x.new_empty((row_tiles, parts), dtype=torch.int32)
    _largest_of_rows[grid(parts, row_tiles)](
        x, found, start, end, offs, M, K, row_tiles, *x.stride(), G, offs.stride(0), pad_to, chunk(G), rows, cols,
        num_warps=_NUM_WARPS, **UNFUSED,
    )  # fmt: skip
    _largest_of_groups[(G,)](found, amax, start, end, row_tiles, parts, 256, num_warps=_NUM_WARPS, **UNFUSED)
    return amax
