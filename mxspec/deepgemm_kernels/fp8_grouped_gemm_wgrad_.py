"""fp8_grouped_gemm_wgrad_ in DeepGEMM, in place. A call waits for the device, to read offs on the host."""

from __future__ import annotations

from torch import Tensor

from mxspec.deepgemm_kernels._k_groups import HOST_SYNC, add, reason_against
from mxspec.deepgemm_kernels._library import INTERPRETABLE, PTX, layout_reason, row_major

__all__ = ["HOST_SYNC", "INTERPRETABLE", "PTX", "fp8_grouped_gemm_wgrad_", "supports"]


def supports(
    acc: Tensor, dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, offs: Tensor, *, check_offs: bool = False
) -> str | None:
    return reason_against(dy, dy_scale, x, x_scale, offs) or layout_reason(("acc", acc, row_major(acc.shape)))


def fp8_grouped_gemm_wgrad_(
    acc: Tensor, dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, offs: Tensor, *, check_offs: bool = False
) -> None:
    add("fp8_grouped_gemm_wgrad_", acc, dy, dy_scale, x, x_scale, offs)
