"""fp8_gemm_ in DeepGEMM: 1x128 by 1x128, which adds to its output and does nothing else."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.deepgemm_kernels import fp8_gemm
from mxspec.deepgemm_kernels.fp8_gemm import INTERPRETABLE, PTX, add_1x128

__all__ = ["INTERPRETABLE", "PTX", "fp8_gemm_", "supports"]


def supports(acc: Tensor, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> str | None:
    if reason := fp8_gemm._absent(acc.device):
        return reason
    if b_scale.shape[0] != b.shape[0]:
        return "adds in place with 1x128 by 1x128 only; its 1x128 by 128x128 writes bfloat16"
    if reason := fp8_gemm.supports(a, a_scale, b, b_scale, out_dtype=torch.float32):
        return reason
    return fp8_gemm._layout_reason("acc", acc, (acc.shape[1], 1))


def fp8_gemm_(acc: Tensor, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> None:
    add_1x128(acc, a, a_scale, b, b_scale)
