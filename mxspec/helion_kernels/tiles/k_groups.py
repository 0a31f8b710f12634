"""A plan in memory for groups of tokens whose scales lie in blocked tiles of each group: where a block has its scale.

The blocks lie along the tokens. A tile of scales has four of them.
"""

from __future__ import annotations

import helion.language as hl
import torch
from torch import Tensor

from mxspec.helion_kernels.common.groups import chunk, padded_ends
from mxspec.helion_kernels.common.launch import config, flat, launch

_PLAN = config([64], 4)


def _plan_blocks(
    plan: Tensor, M: int, offs: Tensor, stride_offs: int, G: int, chunk: hl.constexpr, log: hl.constexpr
) -> None:
    """For each block of `2^log` tokens, four numbers that lead to its scales.

    They are the group, the group's first tile of blocked scales, the number of the group's tiles, and the place of the
    block in its group. Past the last group, the group is G.
    """
    for block in hl.tile(plan.size(0)):
        token = block.index << log
        of_tile = 4 << log
        group, begin = token * 0, token * 0
        before = hl.zeros([], dtype=torch.int32)
        for i in range(0, G, chunk):
            g, _begins, ends, before = padded_ends(offs, stride_offs, G, before, i, of_tile, chunk)
            stops = hl.load(offs, [g * stride_offs], extra_mask=g < G)
            ended = (stops.unsqueeze(0) <= token.unsqueeze(1)) & (g < G).unsqueeze(0)
            group = group + ended.sum(1, dtype=torch.int32)
            last = torch.where(ended, ends.unsqueeze(0), 0).amax(1)
            begin = torch.where(last > begin, last, begin)
        first = hl.load(offs, [(group - 1) * stride_offs], extra_mask=group > 0)
        stop = torch.clamp(hl.load(offs, [group * stride_offs], extra_mask=group < G), max=M)
        begin, tiles = begin >> (log + 2), (stop - first + (of_tile - 1)) >> (log + 2)
        # If offs is out of order, a block whose scales may be missing counts as a block of no group.
        there = (first >= 0) & (first <= token) & (token < stop) & (begin >= 0)
        there = there & (begin <= (M >> (log + 2)) + G - tiles)
        plan[block, 0] = torch.where(there, group, G)
        plan[block, 1] = begin
        plan[block, 2] = tiles
        plan[block, 3] = (token - first) >> log


def of_blocks(plan: Tensor, block: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four numbers of blocks, in the index type of the kernel."""
    group, begin, tiles, place = (hl.load(plan, [block, i]).unsqueeze(0) + hl.arange(1) for i in range(4))
    return group, begin, tiles, place


def plan_of_blocks(offs: Tensor, M: int, size: int) -> Tensor:
    """The plan of M tokens in blocks of `size`, a power of two."""
    plan = torch.empty((M // size, 4), dtype=torch.int32, device=offs.device)
    log = size.bit_length() - 1
    launch(_plan_blocks, {(9, 0): _PLAN}, plan, M, flat(offs), offs.stride(0), offs.shape[0], chunk(offs.shape[0]), log)
    return plan
