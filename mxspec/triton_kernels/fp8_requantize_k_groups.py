"""fp8_requantize_k_groups in Triton: the kernel of fp8_quantize_k_groups, which reads codes and a scale for each token.

A program has 128 tokens by 128 features. So it has one block of each token, and a token has one scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.triton_kernels.fp8_quantize_k_groups import k_groups

RANK = {(9, 0): 1, (10, 0): 1}  # 0.71 of a copy's rate at 32768 x 7168 on an H100. Blackwell: compiled, not run
PTX = (
    r"ld\.global\.v2\.b32",
    r"st\.global\.v4\.b32",
    r"cvt\.rn\.f16x2\.e4m3x2",
    r"cvt\.rn\.satfinite\.e4m3x2\.f32",
    r"mul\.(rn\.)?f32",  # without .ftz, which would lose the subnormals
)


def fp8_requantize_k_groups(
    qdata: Tensor,
    scale: Tensor,
    offs: Tensor,
    *,
    dtype: torch.dtype = torch.float32,
    scale_format: str = "fp32",
    eps: float = 1e-12,
    check_offs: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    codes = qdata.view(torch.uint8)  # as integers, so that a masked load can give 0
    return k_groups(codes, offs, scale_format, eps, scale, dtype == torch.bfloat16)
