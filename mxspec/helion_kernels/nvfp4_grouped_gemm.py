"""nvfp4_grouped_gemm in Helion: a matmul of bf16 values. Another kernel first writes the values of codes.

A plan in memory holds the rows of each tile: see `tiles/mx_by_memory.py`.
"""

from __future__ import annotations

import helion.language as hl
import torch
from torch import Tensor

from mxspec.helion_kernels.common.launch import config, launch
from mxspec.helion_kernels.nvfp4_gemm import number_of
from mxspec.helion_kernels.tiles import nvfp4_values
from mxspec.helion_kernels.tiles.mx_by_memory import matmul_config, of_plan, plan_of
from mxspec.helion_kernels.tiles.nvfp4_values import operand, operand_of_groups

# Beside Triton on an H100: benchmarks/results/decisions.md. Blackwell: compiled, not run.
RANK = {(9, 0): 2, (10, 0): 2}
BATCH_INVARIANT = True
PTX = nvfp4_values.PTX
_PLAIN = config([64], 8, num_stages=3)
CONFIGS = {
    True: {(9, 0): matmul_config([256], 8, 4), (10, 0): config([128], 8, num_stages=3)},
    False: {(9, 0): _PLAIN, (10, 0): _PLAIN},
}  # by whether TMA reads both operands
_STEP = 64


def _of_values(
    x: Tensor, x_number: Tensor, w: Tensor, w_number: Tensor, out: Tensor, plan: Tensor, G: int, M: int, K: int,
    x_turned: hl.constexpr, w_turned: hl.constexpr, whole: hl.constexpr, step: hl.constexpr,
) -> None:  # fmt: skip
    for tile, n in hl.tile([plan.size(0), out.size(1)], block_size=[1, None]):
        expert, first, stop = of_plan(plan, tile.id)
        # As in fp8_grouped_gemm, a tile is read whole, even if it has rows of other groups or of none. These do not
        # change the group's own rows.
        top = torch.clamp(first, 0, M - 128) if whole else first * 0
        acc = hl.zeros([128, n], dtype=torch.float32)
        for k in hl.tile(0, torch.where(expert < G, K, 0), block_size=step):
            row = top + hl.arange(128)
            if not whole:
                row = torch.clamp(row, max=M - 1)
            of_x = x[k, row].t() if x_turned else x[row, k]
            of_w = w[expert, k, n] if w_turned else w[expert, n, k].t()
            acc = hl.dot(of_x, of_w, acc=acc)
        # Tiles of no group read the numbers of group 0.
        number = number_of(x_number, w_number, torch.where(expert < G, expert, 0))
        row = top + hl.arange(128)
        there = (row >= first) & (row < stop)
        result = torch.where(expert < G, acc * number, 0.0)
        hl.store(out, [row, n], result.to(out.dtype), extra_mask=there[:, None])


def nvfp4_grouped_gemm(
    a: Tensor,
    a_scale: Tensor | None,
    a_tensor_scale: Tensor,
    b: Tensor,
    b_scale: Tensor | None,
    b_tensor_scale: Tensor,
    offs: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    scale_layout: str = "blocked",
    check_offs: bool = False,
) -> Tensor:
    (M, K), (E, N, _), blocked = a.shape, b.shape, scale_layout == "blocked"
    out = torch.empty((M, N), dtype=out_dtype, device=a.device)
    if not out.numel():
        return out
    if not E:
        return out.zero_()
    plan = plan_of(offs, M)
    if a_scale is not None and blocked and K:
        x = operand_of_groups(a, a_scale, plan, E)
    else:
        x = operand(a, a_scale, blocked, "a")
    w = operand(b, b_scale, blocked, "b")
    # A group may begin at any token, and TMA begins only at multiples of 16 bytes. So each token must be a row.
    by_tma = x.by_tma and w.by_tma and not x.turned
    launch(
        _of_values, CONFIGS[by_tma], x.t, a_tensor_scale.contiguous(), w.t, b_tensor_scale.contiguous(), out, plan,
        E, M, x.t.shape[0 if x.turned else 1], x.turned, w.turned, M >= 128, _STEP,
    )  # fmt: skip
    return out
