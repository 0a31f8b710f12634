"""nvfp4_gemm in Helion: a matmul of bf16 values. Another kernel first writes the values of codes.

The tensor cores sum 16 consecutive columns at a time, in ascending order, whatever the tile. So the bits of a row
depend neither on the number of rows nor on the configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import helion
import helion.language as hl
import torch
from torch import Tensor

from mxspec.helion_kernels.common.launch import Configs, launch
from mxspec.helion_kernels.tiles import nvfp4_values
from mxspec.helion_kernels.tiles.mx_by_memory import TILES, tile_of
from mxspec.helion_kernels.tiles.nvfp4_values import operand

# Beside Triton on an H100: benchmarks/results/decisions.md. Blackwell: compiled, not run.
RANK = {(9, 0): 2, (10, 0): 2}
BATCH_INVARIANT = True
PTX = nvfp4_values.PTX
_PLAIN, _BLACKWELL = (
    helion.Config(block_sizes=[128, cols, 64], num_warps=8, num_stages=3, loop_orders=[[1, 0]]) for cols in (64, 128)
)
CONFIGS: Mapping[str, Configs] = {
    **{name: {(9, 0): of_hopper, (10, 0): _BLACKWELL} for name, of_hopper in TILES.items()},
    "no TMA": {(9, 0): _PLAIN, (10, 0): _PLAIN},
}


def number_of(first: Tensor, second: Tensor, place: Any) -> Tensor:
    """The product of two tensor scales, one rounding to fp32."""
    one = hl.arange(1)
    return (hl.load(first, [place + one]) * hl.load(second, [place + one])).sum(0)


def _of_values(
    x: Tensor, x_number: Tensor, w: Tensor, w_number: Tensor, out: Tensor, K: int,
    x_turned: hl.constexpr, w_turned: hl.constexpr,
) -> None:  # fmt: skip
    for m, n in hl.tile(out.size()):
        acc = hl.zeros([m, n], dtype=torch.float32)
        for k in hl.tile(K):
            of_x = x[k, m].t() if x_turned else x[m, k]
            of_w = w[k, n] if w_turned else w[n, k].t()
            acc = hl.dot(of_x, of_w, acc=acc)
        out[m, n] = (acc * number_of(x_number, w_number, 0)).to(out.dtype)


def nvfp4_gemm(
    a: Tensor,
    a_scale: Tensor | None,
    a_tensor_scale: Tensor,
    b: Tensor,
    b_scale: Tensor | None,
    b_tensor_scale: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    scale_layout: str = "plain",
) -> Tensor:
    M, N, blocked = a.shape[0], b.shape[0], scale_layout == "blocked"
    out = torch.empty((M, N), dtype=out_dtype, device=a.device)
    if not out.numel():
        return out
    x, w = operand(a, a_scale, blocked, "a"), operand(b, b_scale, blocked, "b")
    tile = tile_of(out) if x.by_tma and w.by_tma else "no TMA"
    launch(
        _of_values, CONFIGS[tile], x.t, a_tensor_scale.view(1), w.t, b_tensor_scale.view(1), out,
        x.t.shape[0 if x.turned else 1], x.turned, w.turned,
    )  # fmt: skip
    return out
