"""The plan of token groups: which rows each tile of tokens has. See `scheduler.py`.

It is for matmuls on Hopper, and for `../tiles/mx_weights.py` on other GPUs, too.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mxspec.triton_kernels.common.groups import chunk, group_of, rows_before
from mxspec.triton_kernels.common.launch import UNFUSED


@triton.jit
def write_plan(plan, tiles, offs, offs_stride, G, R, CHUNK: tl.constexpr, TILE: tl.constexpr):
    """For each TILE padded rows of token groups: the group, the first row, the end of the group's rows, and a number.

    The number is that of the first row's tile, if each group is padded to tiles of 128 rows.

    Rows that belong to no group have the group -1, and their tiles are zeros. No row is outside of the operand,
    whatever offs holds.
    """
    rows_of_groups = tl.load(offs + (G - 1) * offs_stride)
    for t in range(tl.program_id(0), tiles, tl.num_programs(0)):
        group, first, stop, begin = group_of(t * TILE, offs, offs_stride, G, None, None, False, TILE, CHUNK)
        none = (group >= G) | (t * TILE + TILE > R + TILE * G)
        row = tl.where(none, rows_of_groups, first) + t * TILE - begin
        in_tiles = (rows_before(group, offs, offs_stride, 128, CHUNK) + t * TILE - begin) // 128
        tl.store(plan + 4 * t, tl.where(none, -1, group))
        tl.store(plan + 4 * t + 1, tl.minimum(tl.maximum(row, 0), R))
        tl.store(plan + 4 * t + 2, tl.where(none, R, tl.minimum(stop, R)))
        tl.store(plan + 4 * t + 3, tl.maximum(in_tiles, 0))


def tiles_of(R: int, G: int, tile: int) -> int:
    """The number of tiles. Each group may begin a tile, and so may the rows that belong to no group."""
    return -(-R // tile) + G


def plan_of(offs: Tensor, R: int, tile: int) -> Tensor:
    """The plan of R rows: four numbers for each tile."""
    G = offs.shape[0]
    plan = offs.new_empty(tiles_of(R, G, tile), 4)
    write_plan[(plan.shape[0],)](
        plan, plan.shape[0], offs, offs.stride(0), G, R, chunk(G), tile, num_warps=1, **UNFUSED
    )  # fmt: skip
    return plan
