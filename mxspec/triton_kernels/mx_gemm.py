"""mx_gemm in Triton: `hopper/mx/by_memory.py` for large outputs, `hopper/mx/` for small ones, or plain tiles.

The first two are for Hopper, and so is `hopper/weights/`, for few tokens. `tiles/mx_weights.py` is for weights in e2m1
that TMA cannot read. `blackwell/mx_matmul.py` is for Blackwell and blocked scales. Plain tiles run on any GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mxspec.triton_kernels.blackwell import mx_matmul as blackwell
from mxspec.triton_kernels.common.launch import capability
from mxspec.triton_kernels.hopper import releases
from mxspec.triton_kernels.hopper.mx.by_memory import by_weights, mx_bf16, pays
from mxspec.triton_kernels.hopper.mx.launch import mx_few, mx_sm90, reads, takes_few
from mxspec.triton_kernels.hopper.mx.measured import dense as measured
from mxspec.triton_kernels.hopper.releases import note
from mxspec.triton_kernels.tiles import mx_matmul
from mxspec.triton_kernels.tiles.mx_matmul import mx_tiles

__all__ = ["BATCH_INVARIANT", "PTX", "RANK", "measured", "mx_gemm", "note", "supports"]

# The race against cuBLAS in bf16 on an H200: benchmarks/results/decisions.md. Blackwell: no GPU has run the
# tiles, nor the kernel with TMA, which `auto` takes on sm_100 for blocked scales. Both were compiled and interpreted.
RANK = {(9, 0): 1, (10, 0): 1}
BATCH_INVARIANT = releases.refusal() is None  # without Gluon, the tiles sum in another order than cuBLAS
# If one operand is e2m1 or bf16, both become bf16 on Hopper, and products of bf16 have no scales. Blackwell has an
# instruction for e2m1 by e2m1.
PTX = {
    "sm90": tuple(rf"{regex}|wgmma\.mma_async.*\.f32\.bf16\.bf16" for regex in mx_matmul.PTX["sm90"]),
    "sm100": tuple(rf"{regex}|tcgen05\.mma.*\.kind::(f16|mxf4\.block_scale)" for regex in mx_matmul.PTX["sm100"]),
}


def supports(a: Tensor, a_scale: Tensor | None, b: Tensor, b_scale: Tensor, **_: Any) -> str | None:
    return no_bfloat16(a)


def no_bfloat16(a: Tensor) -> str | None:
    """Why a bfloat16 `a` does not fit, or None."""
    # Triton 3.7 fails to compile `tiles/mx_weights.py` for sm_100.
    if a.dtype == torch.bfloat16 and capability(a.device) == (10, 0):
        return "multiplies bfloat16 by e2m1 on Hopper, not on Blackwell"
    return None


def mx_gemm(
    a: Tensor,
    a_scale: Tensor | None,
    b: Tensor,
    b_scale: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    scale_layout: str = "plain",
) -> Tensor:
    packed = b.dtype == torch.float4_e2m1fn_x2
    if packed and capability(a.device) != (10, 0):
        if a.numel() and b.numel():
            return by_weights(a, a_scale, b, b_scale, out_dtype, scale_layout)
        return torch.zeros((a.shape[0], b.shape[0]), dtype=out_dtype, device=a.device)
    assert a_scale is not None  # only bfloat16 has no scales
    if a.shape[1] and pays(a.shape[0], b.shape[0], a.device):
        return mx_bf16(a, a_scale, b, b_scale, out_dtype, scale_layout)
    out = torch.empty((a.shape[0], b.shape[0]), dtype=out_dtype, device=a.device)
    if not out.numel():
        return out
    if not packed and blackwell.reads(a, a_scale, b, b_scale, out, scale_layout):
        blackwell.mx_sm100(a, a_scale, b, b_scale, out)
        return out
    if not packed and takes_few(a, b, out):
        mx_few(a, a_scale, b, b_scale, out, scale_layout)
        return out
    # `mx_sm90` runs a separate kernel that turns its second operand into bf16. So the operand with fewer rows comes
    # second.
    if b.shape[0] > a.shape[0] and reads(b, a, out.mT):
        mx_sm90(b, b_scale, a, a_scale, out.mT, scale_layout)
    else:
        multiply = mx_sm90 if reads(a, b, out) else mx_tiles
        multiply(a, a_scale, b, b_scale, out, scale_layout)
    return out
