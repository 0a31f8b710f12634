"""The launch of the Gluon kernel of `both_ways.py`: FP8 codes of token groups in both directions on Hopper."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mxspec.formats import FP8_BLOCK_SIZE, fp32_bits
from mxspec.triton_kernels.common.groups import chunk
from mxspec.triton_kernels.common.launch import UNFUSED, grid
from mxspec.triton_kernels.hopper import releases
from mxspec.triton_kernels.tiles.fp8_both_ways import EPS, GRADIENT, SWIGLU, Results, allocated

if releases.refusal() is None:
    from mxspec.triton_kernels.hopper.fp8.both_ways import blocks_of_tokens, fp8_both_ways_sm90

# The registers of a thread for each kind of values, so that three or two programs fit on a multiprocessor. From Triton
# 3.9 on a thread needs a few registers more, and would spill under these limits. So one limit is higher there, and one
# is absent.
if releases.release() in ("3.6", "3.7", "3.8"):
    REGISTERS: dict[int, int | None] = {0: 80, 1: 128, 2: 128}
else:
    REGISTERS = {0: 88, 1: 128, 2: None}


def both_ways(values: int, x: Tensor, dh: Tensor | None, offs: Tensor, scale_format: str, eps: float = EPS) -> Results:
    """Launch, for what `quantizers.reads` accepts. The arguments are those of `tiles.fp8_both_ways.both_ways`."""
    M, G = x.shape[0], offs.shape[0]
    D = x.shape[1] // 2 if values == SWIGLU.value else x.shape[1]
    results = allocated(x, offs, M, D)
    q_row, s_row, q_col, s_col, start, end = results
    blocks = s_col.shape[1]
    places = grid(1, blocks)
    table = offs.new_empty((places[1] * places[2], 4))
    blocks_of_tokens[(len(table),)](
        table, start, end, offs, offs.stride(0), M, G, blocks, chunk(G), num_warps=4, **UNFUSED
    )
    # An aligned program computes a tile of both gradients. If the halves end inside a tile, it computes one tile.
    half = x.shape[1] // 2
    apart = values == GRADIENT.value and half % FP8_BLOCK_SIZE != 0
    across = half if values == GRADIENT.value and not apart else D
    # A program of one gradient needs 106 registers, but spills some of them under a limit.
    options: dict[str, Any] = {"num_warps": 8, "maxnreg": None if apart else REGISTERS[values], **UNFUSED}
    fp8_both_ways_sm90[grid(-(-across // FP8_BLOCK_SIZE), blocks)](
        x.view(torch.int32), x.stride(0) // 2,
        *((None, 0) if dh is None else (dh.view(torch.int32), dh.stride(0) // 2)),
        q_row.view(torch.int16), s_row, q_col.view(torch.int8), s_col, table, M, D, half, fp32_bits(eps),
        values, scale_format == "pow2", D % FP8_BLOCK_SIZE != 0, apart, **options,
    )  # fmt: skip
    return results
