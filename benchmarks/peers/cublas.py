"""cuBLAS through PyTorch: FP8 with block scales, and the bfloat16 matmul that low precision has to beat."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import torch
from torch import Tensor

from ._bf16 import fp8_in_bf16, mx_in_bf16
from ._common import adapter, is_1x128, major, mn_major, need

LIBRARY = "cuBLAS"


def version() -> str:
    if torch.version.cuda is None:
        raise ImportError(f"torch {torch.__version__} is built without CUDA")
    try:
        return importlib.metadata.version("nvidia-cublas")
    except importlib.metadata.PackageNotFoundError:
        return f"CUDA {torch.version.cuda}'s"


def _scales(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, **options: Any) -> tuple[Tensor, ...]:
    if is_1x128(b, b_scale):
        return a, mn_major(a_scale), b, mn_major(b_scale)
    # cuBLAS reads a column of 128x128 scales in steps of 16 bytes, so pad the K-blocks to a multiple of four.
    return a, mn_major(a_scale), b, torch.nn.functional.pad(b_scale, (0, -b_scale.shape[1] % 4))


@adapter("fp8_gemm", "cuBLAS bf16", prepare=fp8_in_bf16)  # the time that FP8 has to beat; its outputs differ
def fp8_gemm_bf16(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    need(out_dtype == torch.bfloat16, "gives bfloat16")
    return torch.mm(a, b.t())


@adapter("fp8_gemm", "cuBLAS fp8", prepare=_scales)
def fp8_gemm_fp8(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    from torch.nn.functional import ScalingType, scaled_mm

    need(major(a.device) == 9, "has scales in blocks of 128 on Hopper only")
    recipe, of_b = ScalingType.BlockWise1x128, b_scale  # 1x128: (N, K/128), like the scales of a
    if not is_1x128(b, b_scale):
        recipe, of_b = ScalingType.BlockWise128x128, b_scale.t()  # 128x128: (K/128, N/128)
    try:
        return scaled_mm(a, b.t(), a_scale, ScalingType.BlockWise1x128, of_b, recipe, output_dtype=out_dtype)
    except RuntimeError as error:
        need("CUBLAS_STATUS_NOT_SUPPORTED" not in str(error), f"has no kernel for M = {a.shape[0]}")
        raise


@adapter("mx_gemm", "cuBLAS bf16", prepare=mx_in_bf16)
def mx_gemm_bf16(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    scale_layout: str = "plain",
) -> Tensor:
    need(out_dtype == torch.bfloat16, "gives bfloat16")
    return torch.mm(a, b.t())
