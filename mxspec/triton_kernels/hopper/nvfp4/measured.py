"""For `mxspec.explain`: how fast the NVFP4 matmuls were beside bfloat16 matmuls of the same values.

Each range goes over the shapes of benchmarks/results/decisions.md, under Triton 3.6, in one loop of CUDA graphs. A
number above 1 says that this backend was faster. The values of codes are written to memory first, except the weights'
values for few tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mxspec.triton_kernels.hopper.measured import of_size
from mxspec.triton_kernels.hopper.nvfp4.launch import reads, takes_few

# By rows: values by values, and codes by codes. Few rows of codes: with the weights' codes in registers, and with their
# values in memory.
VALUES = (
    (1, 128, "on an H200, 1 to 128 rows: 0.75 to 1.11 of the rate of torch.mm in bfloat16"),
    (4096, 8192, "on an H100, 4096 to 8192 rows: 1.01 to 1.03 of the rate of torch.mm in bfloat16"),
)
IN_REGISTERS = ((1, 128, "on an H200, 1 to 128 rows: 0.41 to 2.38 of the rate of torch.mm with bfloat16 values"),)
CODES = (
    (1, 128, "on an H200, 1 to 128 rows: 0.35 to 0.46 of the rate of torch.mm with bfloat16 values"),
    (4096, 8192, "on an H100, 4096 to 8192 rows: 0.72 to 0.95 of the rate of torch.mm with bfloat16 values"),
)
# By tokens per expert: codes by codes.
FEW_CODES = (
    (1, 32, "on an H200, up to 32 tokens an expert: 1.17 to 2.46 of the rate of torch._grouped_mm with values"),
    (128, 256, "on an H200, 128 to 256 tokens an expert: 0.61 to 1.05 of the rate of torch._grouped_mm with values"),
)
# By experts.
GROUPED = ((16, 128, "on an H100, 16 to 128 experts: 1.03 to 1.31 of the rate of torch._grouped_mm in bfloat16"),)
WGRAD = ((32, 128, "on an H100, 32 to 128 experts: 1.00 to 1.07 of the rate of torch._grouped_mm in bfloat16"),)
WGRAD_FLOAT32 = ((32, 128, "on an H100, 32 to 128 experts: 0.77 to 0.89 of the rate of torch._grouped_mm to bfloat16"),)


def dense(
    a: Tensor, a_scale: Tensor | None, a_tensor_scale: Tensor, b: Tensor, b_scale: Tensor | None,
    b_tensor_scale: Tensor, *, out_dtype: torch.dtype = torch.bfloat16, scale_layout: str = "plain", **_: Any,
) -> str | None:  # fmt: skip
    out = a.new_empty(1, b.shape[0], dtype=out_dtype)
    if a_scale is not None and out_dtype == torch.bfloat16 and takes_few(a, a_scale, b, b_scale):
        return of_size(a.shape[0], IN_REGISTERS)
    if out_dtype != torch.bfloat16 or not reads(a, a_scale, b, b_scale, out):
        return None
    if a_scale is None and b_scale is None:
        return of_size(a.shape[0], VALUES)
    return None if a_scale is None or b_scale is None else of_size(a.shape[0], CODES)


def grouped(
    a: Tensor, a_scale: Tensor | None, a_tensor_scale: Tensor, b: Tensor, b_scale: Tensor | None,
    b_tensor_scale: Tensor, offs: Tensor, *, out_dtype: torch.dtype = torch.bfloat16, scale_layout: str = "blocked",
    **_: Any,
) -> str | None:  # fmt: skip
    if a_scale is not None and takes_few(a, a_scale, b, b_scale):
        tokens = max(1, a.shape[0] // b.shape[0])
        return of_size(tokens, FEW_CODES) if out_dtype == torch.bfloat16 else None
    values = a_scale is None and b_scale is None and out_dtype == torch.bfloat16
    out = a.new_empty(1, b.shape[1], dtype=out_dtype)
    return of_size(b.shape[0], GROUPED) if values and reads(a, None, b, None, out, "M") else None


def wgrad(
    dy: Tensor, dy_scale: Tensor | None, dy_tensor_scale: Tensor, x: Tensor, x_scale: Tensor | None,
    x_tensor_scale: Tensor, offs: Tensor, *, out_dtype: torch.dtype = torch.float32, **_: Any,
) -> str | None:  # fmt: skip
    out = dy.new_empty(1, x.shape[1], dtype=out_dtype)
    if dy_scale is not None or x_scale is not None or not reads(dy.mT, None, x.mT, None, out, "K"):
        return None
    return of_size(offs.shape[0], WGRAD if out_dtype == torch.bfloat16 else WGRAD_FLOAT32)
