"""FBGEMM's quantizers and its FP8 matmul."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mxspec.formats import FP8_BLOCK_SIZE

from ._common import adapter, is_1x128, need, version_of

LIBRARY = "FBGEMM"


def version() -> str:
    return version_of("fbgemm_gpu")


@adapter("fp8_quantize_1x128", "FBGEMM")
def fp8_quantize_1x128(
    x: Tensor, *, axis: int = -1, scale_format: str = "fp32", scale_major: str = "k", eps: float = 1e-12
) -> tuple[Tensor, Tensor]:
    from fbgemm_gpu.experimental.gemm.triton_gemm.fp8_gemm import quantize_fp8_group

    need(axis == -1, "quantizes along axis -1")
    need((scale_format, eps) == ("fp32", 1e-12), "has fp32 scales and eps 1e-12 only")
    need(x.is_contiguous(), "takes row-major inputs only")
    qdata, scale = quantize_fp8_group(x, group_size=FP8_BLOCK_SIZE, k_major=scale_major == "k")
    return qdata, scale if scale_major == "k" else scale.t()


@adapter("fp8_quantize_128x128", "FBGEMM")
def fp8_quantize_128x128(
    w: Tensor, *, scale_format: str = "fp32", eps: float = 1e-12, with_transpose: bool = False
) -> tuple[Tensor, Tensor]:
    from fbgemm_gpu.experimental.gemm.triton_gemm.fp8_gemm import quantize_fp8_block

    need((scale_format, eps) == ("fp32", 1e-12), "has fp32 scales and eps 1e-12 only")
    need(not with_transpose, "gives no transpose")
    need(w.is_contiguous(), "takes row-major inputs only")
    need(w.ndim == 2 or w.shape[-2] % FP8_BLOCK_SIZE == 0, "has blocks that span two experts")
    need(w.numel() < 2**31, "counts elements in 32 bits, and from 2^31 on writes outside of its outputs")
    qdata, scale = quantize_fp8_block(w, FP8_BLOCK_SIZE, FP8_BLOCK_SIZE)
    return qdata, scale.view(*w.shape[:-2], -1, scale.shape[-1])


def _scales(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, **options: Any) -> tuple[Tensor, ...]:
    return a, a_scale.t().contiguous(), b, b_scale.t().contiguous()  # (K/128, M), (K/128, N/128)


@adapter("fp8_gemm", "FBGEMM", prepare=_scales)
def fp8_gemm(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    import fbgemm_gpu.experimental.gen_ai  # noqa: F401  # defines the operators

    need(hasattr(torch.ops.fbgemm, "f8f8bf16_groupwise"), "has no f8f8bf16_groupwise in this build")
    need(out_dtype == torch.bfloat16 and not is_1x128(b, b_scale), "does 1x128 by 128x128 to bfloat16")
    need(b.shape[0] % FP8_BLOCK_SIZE == 0, "takes N in multiples of 128")
    return torch.ops.fbgemm.f8f8bf16_groupwise(a, b, a_scale, b_scale)
