"""mx_gemm in Helion: on Hopper a matmul of bf16 values (tiles/mx_by_memory.py), on Blackwell a matmul of the codes."""

from __future__ import annotations

from typing import Any

import helion.language as hl
import torch
from torch import Tensor

from mxspec.formats import FP8_DTYPES, MX_BLOCK_SIZE
from mxspec.helion_kernels.common.blocked import blocked_shape
from mxspec.helion_kernels.common.launch import config, launch
from mxspec.helion_kernels.tiles import mx_by_memory, mx_matmul
from mxspec.helion_kernels.tiles.mx_by_memory import FIRST_FLAG, bf16_values, matmul_config, mend
from mxspec.helion_kernels.tiles.mx_matmul import multiplied, scale_arguments, scale_place, step_for

# Rates: benchmarks/results/decisions.md. Blackwell: compiled, not run.
RANK = {(9, 0): 2, (10, 0): 2}
BATCH_INVARIANT = True
PTX = {"sm90": (mx_by_memory.PTX,), "sm100": mx_matmul.PTX["sm100"]}
# Programs run down eight tiles of M, then along N, so that programs that run at the same time share rows of a and b.
_SCALED = config([128, 128], 8, num_stages=4, l2_groupings=[8])
CONFIGS = {
    "large": {(9, 0): matmul_config([128, 256, 64], 8, 3), (10, 0): _SCALED},
    "at most 64 rows": {(9, 0): matmul_config([64, 64, 128], 4, 4, persistent=False), (10, 0): _SCALED},
}


def supports(a: Tensor, a_scale: Tensor | None, b: Tensor, b_scale: Tensor, **_: Any) -> str | None:
    for name, t in (("a", a), ("b", b)):
        if t.dtype not in FP8_DTYPES:
            return f"multiplies e4m3fn and e5m2 codes, and {name} has dtype {t.dtype}"
    return None


def _of_values(x: Tensor, w: Tensor, out: Tensor) -> None:
    for m, n in hl.tile(out.size()):
        acc = hl.zeros([m, n], dtype=torch.float32)
        for k in hl.tile(x.size(1)):
            acc = hl.dot(x[m, k], w[n, k].t(), acc=acc)
        out[m, n] = acc.to(out.dtype)


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
    configs = CONFIGS["at most 64 rows" if M <= 64 else "large"]
    if step_for(a.device) != MX_BLOCK_SIZE:
        launch(
            _mx_gemm, configs, a, *scale_arguments(a_scale, blocked), b, *scale_arguments(b_scale, blocked),
            blocked_shape(1, K // 32)[1], out, blocked, step_for(a.device),
        )  # fmt: skip
        return out
    flags = torch.zeros(FIRST_FLAG + M + N, dtype=torch.int32, device=a.device)
    x = bf16_values(a, a_scale, blocked, flags, FIRST_FLAG, "a")
    w = bf16_values(b, b_scale, blocked, flags, FIRST_FLAG + M, "b")
    launch(_of_values, configs, x, w, out)
    mend(a, a_scale, b, b_scale, out, blocked, flags)
    return out
