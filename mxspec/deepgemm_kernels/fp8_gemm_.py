"""fp8_gemm_ in DeepGEMM: 1x128 by 1x128. DeepGEMM's kernel can only add to its output."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.deepgemm_kernels import fp8_gemm
from mxspec.deepgemm_kernels._library import INTERPRETABLE, PTX, absent, layout_reason, row_major

__all__ = ["INTERPRETABLE", "PTX", "fp8_gemm_", "supports"]


def supports(acc: Tensor, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> str | None:
    if reason := absent(acc.device, "fp8_gemm_nt"):
        return reason
    if b_scale.shape[0] != b.shape[0]:
        return "adds in place with 1x128 by 1x128 only; its 1x128 by 128x128 writes bfloat16"
    if reason := fp8_gemm.supports(a, a_scale, b, b_scale, out_dtype=torch.float32):
        return reason
    return layout_reason(("acc", acc, row_major(acc.shape)))


def fp8_gemm_(acc: Tensor, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> None:
    fp8_gemm.add_1x128(acc, a, a_scale, b, b_scale)
