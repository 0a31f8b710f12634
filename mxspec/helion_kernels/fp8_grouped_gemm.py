"""fp8_grouped_gemm in Helion: tiles of 128 rows of one group each. Each program finds its group by itself."""

from __future__ import annotations

import helion.language as hl
import torch
from torch import Tensor

from mxspec.helion_kernels.common.groups import chunk, padded_ends, passed, tokens_of_tile
from mxspec.helion_kernels.common.launch import config, flat, launch
from mxspec.helion_kernels.fp8_gemm import PTX as PTX
from mxspec.helion_kernels.fp8_gemm import options

_ROWS = 128
# Rates on an H200: benchmarks/results/decisions.md. Blackwell: compiled, not run.
RANK = {(9, 0): 2, (10, 0): 2}
BATCH_INVARIANT = True
# TMA reads a and b, in tiles that may begin at any row. The configuration says "tensor_descriptor" once, for all
# accesses that TMA can make. With a list, Helion's guard on strides counts the accesses of inner loops first, so code
# compiled for TMA would run on strides that TMA cannot read.
_TILE = config([], 8, **options("tensor_descriptor"))
CONFIGS = {(9, 0): _TILE, (10, 0): _TILE}


def _fp8_grouped_gemm(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, row_tiles: int,
    offs: Tensor, stride_offs: int, G: int, chunk: hl.constexpr, whole: hl.constexpr,
) -> None:  # fmt: skip
    for tile, n in hl.tile([row_tiles, out.size(1)], block_size=[1, 128]):
        M = a.size(0)
        row0 = tile.id * 128 + hl.arange(1)
        group, begin = row0 * 0, row0 * 0
        before = hl.zeros([], dtype=torch.int32)
        for i in range(0, G, chunk):
            g, _begins, ends, before = padded_ends(offs, stride_offs, G, before, i, 128, chunk)
            group, begin = passed(group, begin, row0, g, ends, G)
        first, stop = tokens_of_tile(row0, group, begin, offs, stride_offs, G, M)
        first, stop, expert = first.sum(0), stop.sum(0), group.sum(0)
        # A tile is read whole, even if it has rows of other groups: these rows do not change the group's own rows. The
        # tile must only stay within a.
        top = torch.clamp(first, 0, M - 128) if whole else first * 0
        acc = hl.zeros([128, n], dtype=torch.float32)
        for k in hl.tile(0, torch.where(expert < G, a.size(1), 0), block_size=128):
            row = top + hl.arange(128)
            if not whole:
                row = torch.clamp(row, max=M - 1)
            # Tensor cores keep only about 14 bits of a sum, so each 128 columns of K are added in fp32.
            partial = hl.dot(a[row, k], b[expert, n, k].t(), out_dtype=torch.float32)
            acc = acc + partial * (a_scale[row, k.id] * b_scale[expert, n.id, k.id])[:, None]
        row = top + hl.arange(128)
        there = (row >= first) & (row < stop) & (row < M)
        hl.store(out, [row, n], acc.to(out.dtype), extra_mask=there[:, None])


def fp8_grouped_gemm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    offs: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    alignment: int = 1,
    check_offs: bool = False,
) -> Tensor:
    (M, K), (E, N, _) = a.shape, b.shape
    out = torch.empty((M, N), dtype=out_dtype, device=a.device)
    if not out.numel():
        return out
    if not K or not E:
        return out.zero_()
    tiles = -(-M // _ROWS) + E
    launch(
        _fp8_grouped_gemm, CONFIGS, a, a_scale, b, b_scale, out, tiles,
        flat(offs), offs.stride(0), E, chunk(E), M >= _ROWS,
    )  # fmt: skip
    return out
