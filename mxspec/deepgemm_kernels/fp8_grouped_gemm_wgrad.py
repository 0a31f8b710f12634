"""fp8_grouped_gemm_wgrad in DeepGEMM, to fp32.

DeepGEMM's kernel can only add to its output, so this backend writes zeros first. A call waits for the device, to read
offs on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.deepgemm_kernels._k_groups import HOST_SYNC, add, reason_against
from mxspec.deepgemm_kernels._library import INTERPRETABLE, PTX

__all__ = ["HOST_SYNC", "INTERPRETABLE", "PTX", "fp8_grouped_gemm_wgrad", "supports"]


def supports(
    dy: Tensor,
    dy_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    offs: Tensor,
    *,
    out_dtype: torch.dtype = torch.float32,
    check_offs: bool = False,
) -> str | None:
    if reason := reason_against(dy, dy_scale, x, x_scale, offs):
        return reason
    return None if out_dtype == torch.float32 else f"gives torch.float32, not {out_dtype}"


def fp8_grouped_gemm_wgrad(
    dy: Tensor,
    dy_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    offs: Tensor,
    *,
    out_dtype: torch.dtype = torch.float32,
    check_offs: bool = False,
) -> Tensor:
    out = torch.zeros((offs.shape[0], dy.shape[0], x.shape[0]), dtype=out_dtype, device=dy.device)
    add("fp8_grouped_gemm_wgrad", out, dy, dy_scale, x, x_scale, offs)
    return out
