"""PyTorch's own ops: grouped matmuls of bfloat16, and token groups padded by indexing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mxspec.reference.common.groups import padded_rows, round_up

from ._bf16 import fp8_groups_in_bf16, fp8_tokens_in_bf16, mx_groups_in_bf16, mx_tokens_in_bf16
from ._common import adapter, need

LIBRARY = "torch"


def version() -> str:
    return torch.__version__


@adapter("fp8_grouped_gemm", "torch bf16", prepare=fp8_groups_in_bf16)
def fp8_grouped_gemm_bf16(
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
    need(out_dtype == torch.bfloat16, "gives bfloat16")
    return torch._grouped_mm(a, b.mT, offs=offs)


@adapter("fp8_grouped_gemm_wgrad", "torch bf16", prepare=fp8_tokens_in_bf16)
def fp8_grouped_gemm_wgrad_bf16(
    dy: Tensor,
    dy_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    offs: Tensor,
    *,
    out_dtype: torch.dtype = torch.float32,
    check_offs: bool = False,
) -> Tensor:
    need(out_dtype == torch.bfloat16, "gives bfloat16")
    return torch._grouped_mm(dy.t(), x, offs=offs)


@adapter("mx_grouped_gemm", "torch bf16", prepare=mx_groups_in_bf16)
def mx_grouped_gemm_bf16(
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
    need(out_dtype == torch.bfloat16, "gives bfloat16")
    return torch._grouped_mm(a, b.mT, offs=offs)


@adapter("mx_grouped_gemm_wgrad", "torch bf16", prepare=mx_tokens_in_bf16)
def mx_grouped_gemm_wgrad_bf16(
    dy: Tensor,
    dy_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    offs: Tensor,
    *,
    out_dtype: torch.dtype = torch.float32,
    scale_layout: str = "blocked",
    check_offs: bool = False,
) -> Tensor:
    need(out_dtype == torch.bfloat16, "gives bfloat16")
    return torch._grouped_mm(dy.t(), x, offs=offs)


@adapter("pad_token_groups", "torch index_copy_", waits=True)
def pad_token_groups_index_copy(x: Tensor, offs: Tensor, alignment: int, *, check_offs: bool = False) -> Any:
    """The simplest way to pad: read the sizes on the host."""
    ends = offs.tolist()
    sizes = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    padded = [round_up(n, alignment) for n in sizes]
    start = [sum(padded[:g]) for g in range(len(padded))]
    rows = padded_rows(x.shape[0], len(ends), alignment)
    index = torch.cat([torch.arange(s, s + n, device=x.device) for s, n in zip(start, sizes, strict=True)])
    out = x.new_zeros(rows, x.shape[1]).index_copy_(0, index, x[: len(index)])
    return out, offs.new_tensor(start), offs.new_tensor([s + n for s, n in zip(start, padded, strict=True)])
