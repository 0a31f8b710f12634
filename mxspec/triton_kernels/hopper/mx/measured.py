"""For `mxspec.explain`: how fast the MX matmuls were beside bfloat16 matmuls of unquantized operands.

Each range goes over the shapes of benchmarks/results/decisions.md and of the newest stored run, under Triton 3.6. A
number above 1 says that this backend was faster.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mxspec.triton_kernels.hopper.measured import of_size
from mxspec.triton_kernels.hopper.mx import launch
from mxspec.triton_kernels.hopper.mx.by_memory import pays, pays_for_groups
from mxspec.triton_kernels.hopper.weights import launch as weights

# By rows: codes by codes, those of few rows, and bfloat16 by e2m1.
CODES = ((4096, 32768, "on an H200, 4096 to 32768 rows: 0.91 to 1.01 of the rate of cuBLAS in bfloat16"),)
FEW_CODES = ((1, 128, "on an H200, 1 to 128 rows: 0.40 to 1.29 of the rate of torch.mm in bfloat16"),)
# bfloat16 tokens of experts by e2m1, by tokens per expert.
WEIGHTS_OF_EXPERTS = (
    (1, 32, "on an H200, up to 32 tokens an expert: 1.71 to 3.55 of the rate of torch._grouped_mm with values"),
    (64, 64, "on an H200, 64 tokens an expert: 1.41 to 2.02 of the rate of torch._grouped_mm with values"),
    (128, 128, "on an H200, 128 tokens an expert: 1.17 to 1.33 of the rate of torch._grouped_mm with values"),
)
WEIGHTS = ((16, 128, "on an H200, 16 to 128 rows: 0.81 to 2.52 of the rate of torch.mm with bfloat16 weights"),)
# By tokens per expert.
IN_REGISTERS = (
    (1, 32, "on an H200, up to 32 tokens an expert: 1.11 to 2.41 of the rate of torch._grouped_mm in bfloat16"),
    (128, 128, "on an H200, 128 tokens an expert: 0.76 to 0.93 of the rate of torch._grouped_mm in bfloat16"),
)
BY_CODES = (
    (1, 32, "on an H200, up to 32 tokens an expert: 0.92 to 1.75 of the rate of torch._grouped_mm in bfloat16"),
    (128, 1024, "on an H200, 128 to 1024 tokens an expert: 0.63 to 0.90 of the rate of torch._grouped_mm in bfloat16"),
)
BY_MEMORY = (
    (4096, 8192, "on an H200, 4096 to 8192 tokens an expert: 0.86 to 1.0 of the rate of torch._grouped_mm in bfloat16"),
)
# By experts.
WGRAD = ((8, 64, "on an H200, 8 to 64 experts: 0.93 to 1.07 of the rate of torch._grouped_mm in bfloat16"),)


def dense(
    a: Tensor, a_scale: Tensor | None, b: Tensor, b_scale: Tensor,
    *, out_dtype: torch.dtype = torch.bfloat16, scale_layout: str = "plain", **_: Any,
) -> str | None:  # fmt: skip
    if b.dtype != torch.float4_e2m1fn_x2:
        assert a_scale is not None
        if pays(a.shape[0], b.shape[0], a.device):
            return of_size(a.shape[0], CODES)
        few = launch.takes_few(a, b, a.new_empty(1, b.shape[0], dtype=out_dtype))
        return of_size(a.shape[0], FEW_CODES) if few and out_dtype == torch.bfloat16 else None
    if a.dtype == torch.bfloat16 and weights.reads(a, b) and weights.bytes_at_once(b, b_scale, scale_layout) == 4:
        return of_size(a.shape[0], WEIGHTS)
    return None


def grouped(
    a: Tensor, a_scale: Tensor | None, b: Tensor, b_scale: Tensor, offs: Tensor,
    *, out_dtype: torch.dtype = torch.bfloat16, **_: Any,
) -> str | None:  # fmt: skip
    (T, _K), (E, N, _K) = a.shape, b.shape
    if out_dtype != torch.bfloat16 or not E:
        return None
    if b.dtype == torch.float4_e2m1fn_x2:
        of_codes = a.dtype == torch.bfloat16 and weights.reads(a, b) and weights.pays(T, b)
        return of_size(max(1, T // E), WEIGHTS_OF_EXPERTS) if of_codes else None
    if pays_for_groups(T, N, E, out_dtype, a.device):
        return of_size(T // E, BY_MEMORY)
    out = a.new_empty(1, N, dtype=out_dtype)
    if launch.takes_few(a, b, out):
        return of_size(max(1, T // E), IN_REGISTERS)
    return of_size(max(1, T // E), BY_CODES) if launch.reads(a, b, out) and launch.reads_experts(b) else None


def wgrad(dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, offs: Tensor, **_: Any) -> str | None:
    return of_size(offs.shape[0], WGRAD) if launch.reads(dy.mT, x.mT, dy) else None
