"""nvfp4_grouped_gemm_wgrad in Helion: a matmul of bf16 values, in which each tile sums the tokens of one group.

Another kernel first writes the values of codes.
"""

from __future__ import annotations

from typing import Any

import helion
import helion.language as hl
import torch
from torch import Tensor

from mxspec.formats import NVFP4_BLOCK_SIZE
from mxspec.helion_kernels.common.launch import Configs, flat, launch
from mxspec.helion_kernels.mx_grouped_gemm_wgrad import READ, wgrad_config
from mxspec.helion_kernels.nvfp4_gemm import number_of
from mxspec.helion_kernels.tiles import nvfp4_values
from mxspec.helion_kernels.tiles.k_groups import plan_of_blocks
from mxspec.helion_kernels.tiles.nvfp4_values import Operand, of_values, operand, operand_of_k_groups

# Beside Triton on an H100: benchmarks/results/decisions.md. Blackwell: compiled, not run.
RANK = {(9, 0): 2, (10, 0): 2}
PTX = nvfp4_values.PTX
# The kernel reads as that of MX does, and then the two tensor scales.
_READ = [*READ, "pointer", "pointer"]
_PLAIN = helion.Config(block_sizes=[128, 64], num_warps=8, num_stages=3, loop_orders=[[1, 2, 0]])
CONFIGS: dict[Any, Configs] = {
    torch.bfloat16: {(9, 0): wgrad_config([*_READ, "tensor_descriptor"], 3), (10, 0): _PLAIN},
    torch.float32: {(9, 0): wgrad_config([*_READ, "pointer"], 4), (10, 0): _PLAIN},
    # If TMA cannot write a tile, the addresses of a wide tile need too many registers.
    "small or odd": {(9, 0): wgrad_config([*_READ, "pointer"], 4, 128), (10, 0): _PLAIN},
    "no TMA": {(9, 0): _PLAIN, (10, 0): _PLAIN},
}
_STEP = 64  # tokens


def _of_values(
    dy: Tensor, dy_number: Tensor, x: Tensor, x_number: Tensor, out: Tensor, offs: Tensor, stride_offs: int, M: int,
    dy_turned: hl.constexpr, x_turned: hl.constexpr, unit: hl.constexpr, step: hl.constexpr,
) -> None:  # fmt: skip
    """A group begins and ends at a multiple of `unit`, a power of two."""
    for e, n, k in hl.tile(out.size(), block_size=[1, None, None]):
        group = e.id + hl.arange(1)
        first = hl.load(offs, [(group - 1) * stride_offs], extra_mask=group > 0).sum(0)
        stop = hl.load(offs, [group * stride_offs]).sum(0)
        first, stop = torch.clamp(first, 0, M) & -unit, torch.clamp(stop, 0, M) & -unit
        stop = torch.where(stop > first, stop, first)
        whole = stop - ((stop - first) & (step - 1))
        acc = hl.zeros([n, k], dtype=torch.float32)
        # TMA has no mask, so no whole step may read tokens of the next group. If a group may end anywhere, the rest of
        # its tokens are masked in registers.
        for m in hl.tile(first, whole, block_size=step):
            of_dy = dy[m, n].t() if dy_turned else dy[n, m]
            of_x = x[m, k] if x_turned else x[k, m].t()
            acc = hl.dot(of_dy, of_x, acc=acc)
        for m in hl.tile(whole, stop, block_size=16):
            of_dy = dy[m, n].t() if dy_turned else dy[n, m]
            of_x = x[m, k] if x_turned else x[k, m].t()
            if unit == 1:
                there = m.index < stop
                of_dy = torch.where(there[None, :], of_dy, 0.0).to(of_dy.dtype)
                of_x = torch.where(there[:, None], of_x, 0.0).to(of_x.dtype)
            acc = hl.dot(of_dy, of_x, acc=acc)
        out[e.begin, n, k] = (acc * number_of(dy_number, x_number, e.begin)).to(out.dtype)


def _operand(t: Tensor, scale: Tensor | None, plan: Tensor | None, E: int, role: str) -> Operand:
    """An operand `(features, tokens)`."""
    if scale is None:
        return of_values(t)
    if plan is None:
        return operand(t, scale, False, role)
    return operand_of_k_groups(t, scale, plan, E, role)


def nvfp4_grouped_gemm_wgrad(
    dy: Tensor,
    dy_scale: Tensor | None,
    dy_tensor_scale: Tensor,
    x: Tensor,
    x_scale: Tensor | None,
    x_tensor_scale: Tensor,
    offs: Tensor,
    *,
    out_dtype: torch.dtype = torch.float32,
    scale_layout: str = "blocked",
    check_offs: bool = False,
) -> Tensor:
    E, N, K = offs.shape[0], dy.shape[1], x.shape[1]
    out = torch.empty((E, N, K), dtype=out_dtype, device=dy.device)
    if not out.numel():
        return out
    M, of_codes = dy.shape[0] * (1 if dy_scale is None else 2), dy_scale is not None or x_scale is not None
    if not M:
        return out.copy_((dy_tensor_scale * x_tensor_scale * 0.0)[:, None, None].expand_as(out))
    plan = plan_of_blocks(offs, M, NVFP4_BLOCK_SIZE) if of_codes and scale_layout == "blocked" else None
    left, right = _operand(dy.mT, dy_scale, plan, E, "dy"), _operand(x.mT, x_scale, plan, E, "x")
    unit = NVFP4_BLOCK_SIZE if of_codes else 1
    # TMA begins only at multiples of 16 bytes. A group may begin at any token, unless an operand has codes. So each
    # token must be a row.
    by_tma = all(t.by_tma and (t.turned or unit > 1) for t in (left, right))
    kind = "no TMA" if not by_tma else "small or odd" if N < 128 or K < 256 or K % 16 else out_dtype
    launch(
        _of_values, CONFIGS[kind], left.t, dy_tensor_scale.contiguous(),
        right.t, x_tensor_scale.contiguous(), out, flat(offs), offs.stride(0), M,
        left.turned, right.turned, unit, _STEP,
    )  # fmt: skip
    return out
