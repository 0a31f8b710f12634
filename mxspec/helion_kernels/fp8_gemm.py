"""fp8_gemm in Helion: tiles of 128 columns, one scale block wide.

The sum of each 128 columns of K is added in fp32.
"""

from __future__ import annotations

import os
from typing import Any

import helion.language as hl
import torch
from torch import Tensor

from mxspec.helion_kernels.common.launch import Configs, config, launch

# The race on an H200, also without TMA and with descriptors that each program makes: benchmarks/results/decisions.md.
RANK = {(9, 0): 2, (10, 0): 2}  # Blackwell: compiled, not run
BATCH_INVARIANT = True
PTX = {"sm90": (r"wgmma\.mma_async.*\.f32\.e4m3\.e4m3",), "sm100": (r"tcgen05\.mma",)}
# TMA accesses the operands and the output, if it can read them. Plain loads read the scales, which may have any
# strides.
INDEXING = ["tensor_descriptor", "tensor_descriptor", "pointer", "pointer", "tensor_descriptor"]
# Programs run down eight tiles of M, then along N, so that programs that run at the same time share rows of a and b.
_COMMON: dict[str, Any] = {"l2_groupings": [8]}
PERSISTENT: dict[str, Any] = {}  # one program for each processor, and one loop over all tiles and all of K
_TWO: dict[str, Any] = {}  # two persistent programs for each processor: one adds its sum while the other multiplies
if os.environ.get("TRITON_INTERPRET") != "1":  # Helion finds neither TMA nor a number of processors in the interpreter
    _COMMON["host_tensor_descriptors"] = True
    PERSISTENT.update(pid_type="persistent_interleaved", range_flattens=[True, None])
    _TWO.update(pid_type="persistent_interleaved", num_sm_multiplier=2)


def options(indexing: list[str] | str) -> dict[str, Any]:
    """The options that all configurations share, for these kinds of memory access."""
    return {"num_stages": 4, "indexing": indexing, **_COMMON}


def configs(indexing: list[str]) -> dict[str, Configs]:
    """The configurations by kind of matmul, for these kinds of memory access."""
    large, low, thin = (config([rows], warps, **options(indexing)) for rows, warps in ((128, 8), (64, 4), (64, 8)))
    two = config([64], 4, **{**options(indexing), **_TWO, "num_stages": 3})
    return {
        # `two` was not timed with an old output to add to.
        "1x128 by 128x128": {(9, 0): two if indexing == INDEXING else large, (10, 0): large},
        # On Blackwell a tile of 128 rows has no registers left for a scale of each column.
        "1x128 by 1x128": {(9, 0): large, (10, 0): low},
        "at most 64 rows": {(9, 0): low, (10, 0): low},
        # With plain loads, the old tile of the output and its addresses need registers, too.
        "onto what TMA does not read": {(9, 0): thin, (10, 0): thin},
    }


CONFIGS = {False: configs(INDEXING), True: configs([*INDEXING, "tensor_descriptor"])}  # by whether it adds to `out`


def tiles(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, by_row: hl.constexpr, accumulate: hl.constexpr
) -> None:
    for m, n in hl.tile(out.size(), block_size=[None, 128]):
        acc = hl.zeros([m, n], dtype=torch.float32)
        for k in hl.tile(a.size(1), block_size=128):
            # Tensor cores keep only about 14 bits of a sum, so each 128 columns of K are added in fp32.
            partial = hl.dot(a[m, k], b[n, k].t(), out_dtype=torch.float32)
            of_row = a_scale[m, k.id]
            if by_row:
                acc = acc + partial * (of_row[:, None] * b_scale[n, k.id][None, :])
            else:
                acc = acc + partial * (of_row * b_scale[n.id, k.id])[:, None]
        if accumulate:
            out[m, n] = out[m, n] + acc
        else:
            out[m, n] = acc.to(out.dtype)


def multiply(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, accumulate: bool) -> None:
    """Write the product to `out`, or add it to `out`. The rows of `out` may lie apart."""
    M, N = out.shape
    by_row = b_scale.shape[0] == N != 1
    kind = "at most 64 rows" if M <= 64 else "1x128 by 1x128" if by_row else "1x128 by 128x128"
    if accumulate and (out.data_ptr() % 16 or out.stride(0) % 4):
        kind = "onto what TMA does not read"
    launch(tiles, CONFIGS[accumulate][kind], a, a_scale, b, b_scale, out, by_row, accumulate)


def fp8_gemm(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    M, N = a.shape[0], b.shape[0]
    out = torch.empty((M, N), dtype=out_dtype, device=a.device)
    if not out.numel():
        return out
    if not a.shape[1]:
        return out.zero_()
    multiply(a, a_scale, b, b_scale, out, accumulate=False)
    return out
