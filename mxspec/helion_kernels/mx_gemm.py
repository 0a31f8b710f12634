"""mx_gemm in Helion: a program computes one tile of the output, with one scale for each block of 32 columns of K."""

from __future__ import annotations

import helion.language as hl
import torch
from torch import Tensor

from mxspec.helion_kernels.common.blocked import blocked_shape
from mxspec.helion_kernels.common.launch import config, launch
from mxspec.helion_kernels.tiles.mx_matmul import PTX as PTX
from mxspec.helion_kernels.tiles.mx_matmul import multiplied, scale_arguments, scale_place, step_for

# Programs run down eight tiles of M, then along N, so that programs that run at the same time share rows of a and b.
_LARGE, _NARROW, _LOW = (
    config([rows, cols], 8, num_stages=4, l2_groupings=[8]) for rows, cols in ((128, 128), (128, 64), (64, 128))
)
# Slower than Triton on an H200, because every 32 columns of K make a separate sum, which is scaled twice
# (benchmarks/results/decisions.md). Blackwell: compiled, not run.
RANK = {(9, 0): 2, (10, 0): 2}
BATCH_INVARIANT = True
# On Hopper the scales of a tile's columns take as many registers as its sums, and a larger tile would spill.
# Blackwell's scaled products have 128 rows.
CONFIGS = {
    "large": {(9, 0): _NARROW, (10, 0): _LARGE},
    "at most 64 rows": {(9, 0): _LOW, (10, 0): _LARGE},
}


def _mx_gemm(
    a: Tensor, a_scale: Tensor, a_stride_r: int, a_stride_c: int,
    b: Tensor, b_scale: Tensor, b_stride_r: int, b_stride_c: int,
    col_tiles: int, out: Tensor, blocked: hl.constexpr, step: hl.constexpr,
) -> None:  # fmt: skip
    for m, n in hl.tile(out.size()):
        acc = hl.zeros([m, n], dtype=torch.float32)
        for k in hl.tile(a.size(1), block_size=step):
            c = (k.id * (step // 32) + hl.arange(step // 32)).unsqueeze(0)
            of_a = scale_place(m.index.unsqueeze(1), c, a_stride_r, a_stride_c, col_tiles, blocked)
            of_b = scale_place(n.index.unsqueeze(1), c, b_stride_r, b_stride_c, col_tiles, blocked)
            there = c * 32 < a.size(1)
            acc = multiplied(
                acc, a[m, k], hl.load(a_scale, [of_a], extra_mask=there),
                b[n, k], hl.load(b_scale, [of_b], extra_mask=there), step,
            )  # fmt: skip
        out[m, n] = acc.to(out.dtype)


def mx_gemm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    scale_layout: str = "plain",
) -> Tensor:
    (M, K), N, blocked = a.shape, b.shape[0], scale_layout == "blocked"
    out = torch.empty((M, N), dtype=out_dtype, device=a.device)
    if not out.numel():
        return out
    if not K:
        return out.zero_()
    launch(
        _mx_gemm, CONFIGS["at most 64 rows" if M <= 64 else "large"],
        a, *scale_arguments(a_scale, blocked), b, *scale_arguments(b_scale, blocked),
        blocked_shape(1, K // 32)[1], out, blocked, step_for(a.device),
    )  # fmt: skip
    return out
