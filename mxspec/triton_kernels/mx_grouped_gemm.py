"""mx_grouped_gemm in Triton: the kernels of mx_gemm.

In the kernels for codes on Hopper and in `tiles/mx_weights.py`, a plan in memory holds the rows of each tile. In the
other plain tiles, in Hopper's matmul of bf16 values and in the kernel for Blackwell, each program finds its group by
itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mxspec.triton_kernels.blackwell import mx_matmul as blackwell
from mxspec.triton_kernels.common.launch import capability
from mxspec.triton_kernels.hopper import releases
from mxspec.triton_kernels.hopper.mx.by_memory import by_weights, mx_bf16, pays_for_groups
from mxspec.triton_kernels.hopper.mx.launch import mx_few, mx_sm90, reads, takes_few
from mxspec.triton_kernels.hopper.mx.measured import grouped as measured
from mxspec.triton_kernels.hopper.releases import note
from mxspec.triton_kernels.mx_gemm import PTX, no_bfloat16
from mxspec.triton_kernels.tiles.mx_matmul import mx_tiles

__all__ = ["BATCH_INVARIANT", "PTX", "RANK", "measured", "mx_grouped_gemm", "note", "supports"]

# The race against torch._grouped_mm in bf16 on an H200: benchmarks/results/decisions.md. Blackwell: no GPU has run the
# tiles, nor the kernel with TMA, which `auto` takes on sm_100 for blocked scales. Both were compiled and interpreted.
RANK = {(9, 0): 1, (10, 0): 1}
BATCH_INVARIANT = releases.refusal() is None  # without Gluon, the tiles sum in another order than cuBLAS


def supports(a: Tensor, a_scale: Tensor | None, b: Tensor, b_scale: Tensor, offs: Tensor, **_: Any) -> str | None:
    return no_bfloat16(a)


def mx_grouped_gemm(
    a: Tensor,
    a_scale: Tensor | None,
    b: Tensor,
    b_scale: Tensor,
    offs: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    scale_layout: str = "blocked",
    check_offs: bool = False,
) -> Tensor:
    (M, K), (E, N, _), on = a.shape, b.shape, a.device
    packed = b.dtype == torch.float4_e2m1fn_x2
    if packed and capability(on) != (10, 0):
        if a.numel() and b.numel():
            return by_weights(a, a_scale, b, b_scale, out_dtype, scale_layout, offs)
        return torch.zeros((M, N), dtype=out_dtype, device=on)
    assert a_scale is not None  # only bfloat16 has no scales
    if not packed and K and E and pays_for_groups(M, N, E, out_dtype, on):
        return mx_bf16(a, a_scale, b, b_scale, out_dtype, scale_layout, offs)
    out = torch.empty((M, N), dtype=out_dtype, device=on)
    if not out.numel():
        return out
    operands = a, a_scale, b, b_scale, out
    if packed:
        mx_tiles(*operands, scale_layout, offs=offs, grouped="M")
    elif blackwell.reads(*operands, scale_layout):
        blackwell.mx_sm100(*operands, offs=offs, grouped="M")
    elif takes_few(a, b, out):
        mx_few(*operands, scale_layout, offs=offs)
    else:
        multiply = mx_sm90 if reads(a, b, out) else mx_tiles
        multiply(*operands, scale_layout, offs=offs, grouped="M")
    return out
