"""mx_requantize_groups in Triton: the tiles of `tiles/mx_columns.py`, which read codes and scale bytes of rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mxspec.formats import element, exponent_rule
from mxspec.triton_kernels.common.groups import padded_rows
from mxspec.triton_kernels.tiles import mx_columns

RANK = {(9, 0): 1, (10, 0): 1}  # 0.89 of a copy's rate at 32768 x 7168 on an H100. Blackwell: compiled, not run
PTX = (
    r"ld\.global\.v2\.b32",
    r"st\.global\.v4\.b32",
    r"cvt\.rn\.f16x2\.e[45]m[32]x2",
    r"cvt\.rn\.satfinite\.e[45]m[32]x2\.f32",
    r"mul\.(rn\.)?f32",  # without .ftz, which would lose the subnormals
)


def supports(qdata: Tensor, scale: Tensor, offs: Tensor, **_: Any) -> str | None:
    return mx_columns.supports(qdata)


def mx_requantize_groups(
    qdata: Tensor,
    scale: Tensor,
    offs: Tensor,
    *,
    dtype: torch.dtype = torch.float32,
    pad_to: int = 128,
    elem_dtype: torch.dtype | str = torch.float8_e4m3fn,
    scaling: str = "rceil",
    scale_layout: str = "blocked",
    check_offs: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (M, K), G, fmt, blocked = qdata.shape, offs.shape[0], element(elem_dtype), scale_layout == "blocked"
    R = padded_rows(M, G, pad_to)
    rows = R + 128 * G if blocked else R  # the number of rows with scales
    start, end = (offs.new_empty(G) for _ in range(2))
    codes = qdata.view(torch.uint8)  # as integers, so that a masked load can give 0
    q_col = qdata.new_empty((K, R), dtype=fmt.dtype)
    s_col = codes.new_empty((128 * -(-K // 128), rows // 32) if blocked else (K, R // 32))
    mx_columns.launch_groups(
        codes, q_col, s_col, start, end, offs, pad_to, rows, (*exponent_rule(fmt, scaling, dtype), blocked),
        values=mx_columns.CODES.value, row_scale=scale.view(torch.uint8), e5m2=qdata.dtype == torch.float8_e5m2,
        bf16=dtype == torch.bfloat16,
    )  # fmt: skip
    return q_col.mT, s_col.view(torch.float8_e8m0fnu), start, end
