"""mxspec's ops computed in other ways than their best kernels, to compare with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import mxspec
from mxspec.formats import FP8_DTYPES, MX_BLOCK_SIZE

from ._common import adapter, need

LIBRARY = "mxspec"


def version() -> str:
    return mxspec.__version__


@adapter("mx_gemm", "mxspec by dot_scaled")
def mx_gemm_by_dot_scaled(
    a: Tensor,
    a_scale: Tensor | None,
    b: Tensor,
    b_scale: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    scale_layout: str = "plain",
) -> Tensor:
    need(b.dtype in FP8_DTYPES, "multiplies FP8 codes")
    assert a_scale is not None
    from mxspec.triton_kernels.tiles.mx_matmul import mx_tiles  # the kernel for Blackwell

    out = a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype)
    mx_tiles(a, a_scale, b, b_scale, out, scale_layout, SCALED=True, BLOCK_N=128)
    return out


@adapter("mx_quantize_groups", "mxspec in three ops")
def mx_quantize_groups_in_three_ops(
    x: Tensor,
    offs: Tensor,
    *,
    axis: int = -1,
    pad_to: int = 128,
    elem_dtype: torch.dtype | str = torch.float8_e4m3fn,
    scaling: str = "rceil",
    scale_layout: str = "blocked",
    check_offs: bool = False,
) -> Any:
    need(scale_layout == "blocked", "three ops are timed with blocked scales")
    padded, start, end = mxspec.pad_token_groups(x, offs, pad_to)
    qdata, scale = mxspec.mx_quantize(padded, axis=axis, elem_dtype=elem_dtype, scaling=scaling)
    if axis == -1:
        return qdata, mxspec.to_blocked_m_groups(scale, end)[0], start, end
    return qdata, mxspec.to_blocked_k_groups(scale, end // MX_BLOCK_SIZE)[0], start, end
