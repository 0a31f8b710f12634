"""The bf16 operands of the NVFP4 matmuls in Helion, and whether TMA can read them.

A value of a code is exact in bf16. So a kernel writes the values of codes to memory, and a matmul multiplies them.
"""

from __future__ import annotations

from typing import NamedTuple

import helion
import helion.language as hl
import torch
from torch import Tensor
from torch.nn.functional import pad

from mxspec.formats import NVFP4_BLOCK_SIZE
from mxspec.helion_kernels.common.blocked import blocked_shape, blocked_to_row_col
from mxspec.helion_kernels.common.launch import flat, launch, on_grid
from mxspec.helion_kernels.common.nvfp4_numerics import values_of_pairs
from mxspec.helion_kernels.nvfp4_dequantize import dequantized
from mxspec.helion_kernels.tiles import mx_by_memory
from mxspec.helion_kernels.tiles.k_groups import of_blocks
from mxspec.helion_kernels.tiles.mx_by_memory import of_plan
from mxspec.helion_kernels.tiles.mx_matmul import scale_place

PTX = {"sm90": (mx_by_memory.PTX,), "sm100": (r"tcgen05\.mma.*\.kind::f16",)}
_OF_GROUPS = helion.Config(block_sizes=[256], num_warps=8, loop_orders=[[1, 0]])


class Operand(NamedTuple):
    """A matrix, or a stack of matrices, of bf16 values whose last dimension is contiguous.

    Attributes:
        t: the tensor.
        turned: whether its last dimension is the one that a row has in the matmul, and not the summed one.
        by_tma: whether TMA can read it.
    """

    t: Tensor
    turned: bool
    by_tma: bool


def of_values(t: Tensor) -> Operand:
    """An operand `(..., rows, K)`, with a stride of 1 in either of the last two dimensions."""
    turned = t.stride(-1) != 1 and t.stride(-2) == 1
    t = t.mT if turned else t
    rows_fit = all(s % 8 == 0 and s > 0 for s in t.stride()[:-1])
    apart = t.stride(-2) >= t.shape[-1] and t.stride(-1) == 1
    return Operand(t, turned, rows_fit and apart and t.data_ptr() % 16 == 0)


def operand(t: Tensor, scale: Tensor | None, blocked: bool, role: str) -> Operand:
    """An operand of codes `(..., rows, K / 2)` or values. A kernel writes the values of codes row by row.

    Helion does not mask along a dimension of 1, and TMA reads no empty matrix. So zeros make 16 columns of one or none.
    """
    if not t.shape[-1]:
        return of_values(t.new_zeros((*t.shape[:-1], 16), dtype=torch.bfloat16))
    if scale is None:
        return of_values(pad(t, (0, 15)) if t.shape[-1] == 1 else t)
    return of_values(dequantized(t, scale, None, -1, torch.bfloat16, blocked, role))


def _values_of_groups(codes: Tensor, stride: int, C: int, scale: Tensor, out: Tensor, plan: Tensor, G: int) -> None:
    """The values of tokens whose blocked scales have tiles for each group, in the order of the scale bytes."""
    for tile, byte in hl.tile(scale.shape, block_size=[1, None]):
        group, first, stop = of_plan(plan, tile.id)
        r, c = blocked_to_row_col(byte.index * 0, byte.index)
        r = first + r
        there = ((r >= 0) & (r < stop) & (c < C) & (group < G)).unsqueeze(1)
        source = (r * stride + c * 8).unsqueeze(1) + hl.arange(8).unsqueeze(0)
        q = hl.load(codes, [source], extra_mask=there.expand(byte, 8)).unsqueeze(1)
        value = values_of_pairs(q, scale[tile.id, byte].unsqueeze(1), None, out.dtype).reshape(byte, 16)
        target = ((r * C + c) * 16).unsqueeze(1) + hl.arange(16).unsqueeze(0)
        hl.store(out, [target], value, extra_mask=there.expand(byte, 16))


def operand_of_groups(a: Tensor, scale: Tensor, plan: Tensor, G: int) -> Operand:
    """Codes of tokens with blocked scales of groups. The rows of no group are not written."""
    M, C = a.shape[0], 2 * a.shape[1] // NVFP4_BLOCK_SIZE
    out = torch.empty((M, C * NVFP4_BLOCK_SIZE), dtype=torch.bfloat16, device=a.device)
    width = 512 * blocked_shape(1, C)[1]
    tiles = scale.as_strided((scale.numel() // width, width), (width, 1))
    codes = flat(a.view(torch.uint8))
    launch(_values_of_groups, {(9, 0): _OF_GROUPS}, codes, a.stride(0), C, tiles, out.view(-1), plan, G)
    return of_values(out)


def _values_of_k_groups(
    codes: Tensor, stride: int, R: int, C: int, scale: Tensor, row_tiles: int, plan: Tensor, G: int, out: Tensor,
    rows: hl.constexpr, cols: hl.constexpr,
) -> None:  # fmt: skip
    """The values of rows of tokens whose blocked scales have tiles for each group. Tokens of no group get any."""
    for i, j in hl.grid([(R + rows - 1) // rows, (C + cols - 1) // cols]):
        r, block = (i * rows + hl.arange(rows)).unsqueeze(1), j * cols + hl.arange(cols)
        inside = (r < R) & (block < C).unsqueeze(0)
        group, begin, tiles, c = of_blocks(plan, torch.clamp(block, max=C - 1))  # the plan has C blocks
        at = begin * row_tiles * 512 + scale_place(r, c, 0, 0, tiles, True)
        s = hl.load(scale, [at], extra_mask=inside & (group < G))
        first = block.unsqueeze(0).unsqueeze(2) * 8 + hl.arange(8).unsqueeze(0).unsqueeze(1)
        q = hl.load(codes, [r.unsqueeze(2) * stride + first], extra_mask=inside.unsqueeze(2).expand(rows, cols, 8))
        k = block.unsqueeze(0).unsqueeze(2) * 16 + hl.arange(16).unsqueeze(0).unsqueeze(1)
        target = r.unsqueeze(2) * (C * 16) + k
        mask = inside.unsqueeze(2).expand(rows, cols, 16)
        hl.store(out, [target], values_of_pairs(q, s, None, out.dtype), extra_mask=mask)


def operand_of_k_groups(t: Tensor, scale: Tensor, plan: Tensor, G: int, role: str) -> Operand:
    """Codes `(rows, tokens / 2)` with blocked scales of groups of tokens."""
    R, C = t.shape[0], 2 * t.shape[1] // NVFP4_BLOCK_SIZE
    out = torch.empty((R, C * NVFP4_BLOCK_SIZE), dtype=torch.bfloat16, device=t.device)
    rows, cols = 16, 16
    launch(
        _values_of_k_groups, {(9, 0): on_grid(2, 4)}, flat(t.view(torch.uint8)), t.stride(0), R, C, flat(scale),
        blocked_shape(R, 1)[0], plan, G, out.view(-1), rows, cols, role=role,
    )  # fmt: skip
    return of_values(out)
