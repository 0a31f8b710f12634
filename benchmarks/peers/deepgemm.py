"""DeepGEMM's FP8 matmuls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mxspec.formats import FP8_BLOCK_SIZE

from ._common import adapter, is_1x128, major, mn_major, need, tma_scales, version_of

LIBRARY = "DeepGEMM"


def version() -> str:
    return version_of("deep_gemm")


@adapter("fp8_gemm", "DeepGEMM", prepare=tma_scales)
def fp8_gemm(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    import deep_gemm

    need(hasattr(deep_gemm, "fp8_gemm_nt"), "has no fp8_gemm_nt in this build")
    need(major(a.device) == 9, "rounds fp32 scales to powers of two except on Hopper")
    if is_1x128(b, b_scale):
        need(out_dtype == torch.float32, "does 1x128 by 1x128 to fp32")
        out = a.new_zeros(a.shape[0], b.shape[0], dtype=out_dtype)  # zeros: this kernel can only add to its output
        deep_gemm.fp8_gemm_nt((a, a_scale), (b, b_scale), out, c=out, recipe=(1, 1, FP8_BLOCK_SIZE))
        return out
    need(out_dtype == torch.bfloat16, "does 1x128 by 128x128 to bfloat16")
    out = a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype)
    deep_gemm.fp8_gemm_nt((a, a_scale), (b, b_scale), out)
    return out


@adapter("fp8_gemm_", "DeepGEMM", prepare=lambda acc, *operands: (acc, *tma_scales(*operands)))
def fp8_gemm_(acc: Tensor, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> None:
    import deep_gemm

    need(hasattr(deep_gemm, "fp8_gemm_nt"), "has no fp8_gemm_nt in this build")
    need(major(a.device) == 9, "rounds fp32 scales to powers of two except on Hopper")
    need(is_1x128(b, b_scale), "adds in place with 1x128 by 1x128 only")
    deep_gemm.fp8_gemm_nt((a, a_scale), (b, b_scale), acc, c=acc, recipe=(1, 1, FP8_BLOCK_SIZE))


def onto_anything(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """DeepGEMM's 1x128 by 1x128 matmul without zeroing its output: the kernel's own time, and a wrong output."""
    import deep_gemm

    out = a.new_empty(a.shape[0], b.shape[0], dtype=torch.float32)
    deep_gemm.fp8_gemm_nt((a, a_scale), (b, b_scale), out, c=out, recipe=(1, 1, FP8_BLOCK_SIZE))
    return out


def _groups(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, offs: Tensor, **options: Any) -> tuple[Tensor, ...]:
    from mxspec.deepgemm_kernels.fp8_grouped_gemm import grouped_layout

    return a, mn_major(a_scale, multiple=4), b, b_scale.contiguous(), grouped_layout(offs, a.shape[0])


@adapter("fp8_grouped_gemm", "DeepGEMM", prepare=_groups)  # `offs` is the expert of each row here
def fp8_grouped_gemm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    offs: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    alignment: int = 1,
    check_offs: bool = False,
) -> Tensor:
    import deep_gemm

    need(hasattr(deep_gemm, "m_grouped_fp8_gemm_nt_contiguous"), "has no m-grouped matmul in this build")
    need(major(a.device) == 9, "rounds fp32 scales to powers of two except on Hopper")
    need(alignment % FP8_BLOCK_SIZE == 0, "takes groups in whole blocks of 128 rows")
    need(out_dtype == torch.bfloat16, "gives bfloat16")
    out = a.new_empty(a.shape[0], b.shape[1], dtype=out_dtype)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous((a, a_scale), (b, b_scale), out, offs)
    return out
