"""Turns low-precision operands back into bfloat16 values, for matmuls in bfloat16."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import mxspec
from mxspec.formats import MX_BLOCK_SIZE
from mxspec.reference.common.matmul import elements_of_row, from_blocked_k_groups, from_blocked_m_groups
from mxspec.reference.fp8_dequantize import fp8_dequantize
from mxspec.reference.fp8_grouped_gemm_wgrad import group_values


def fp8_in_bf16(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, **options: Any) -> tuple[Tensor, ...]:
    return fp8_dequantize(a, a_scale), a_scale, fp8_dequantize(b, b_scale), b_scale


def fp8_groups_in_bf16(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, offs: Tensor, **options: Any
) -> tuple[Tensor, ...]:
    return *fp8_in_bf16(a, a_scale, b, b_scale), offs


def fp8_tokens_in_bf16(
    dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, offs: Tensor, **options: Any
) -> tuple[Tensor, ...]:
    def rows(flat: Tensor, scale: Tensor) -> Tensor:  # the layout before the tokens were quantized
        return group_values(flat, scale, offs).bfloat16().t().contiguous()

    return rows(dy, dy_scale), dy_scale, rows(x, x_scale), x_scale, offs


def _unrounded(values: Tensor) -> Tensor:
    """Random values around the values of codes, with the precision of real bfloat16 operands.

    The values of codes themselves have zeros as low bits. They take less power, so a bfloat16 matmul of them is faster
    than a matmul of real operands (see benchmarks/results/decisions.md).
    """
    return values * (1 + (torch.rand_like(values) - 0.5) / 16)  # e4m3: half a step is 1/32 of a value, or more


def mx_in_bf16(
    a: Tensor, a_scale: Tensor | None, b: Tensor, b_scale: Tensor, *, scale_layout: str = "plain", **options: Any
) -> tuple[Tensor | None, ...]:
    if a_scale is not None:
        a = _unrounded(mxspec.mx_dequantize(a, a_scale, scale_layout=scale_layout))
    return a, a_scale, _unrounded(mxspec.mx_dequantize(b, b_scale, scale_layout=scale_layout)), b_scale


def mx_groups_in_bf16(
    a: Tensor, a_scale: Tensor | None, b: Tensor, b_scale: Tensor, offs: Tensor,
    *, scale_layout: str = "blocked", **o: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    if a_scale is not None:
        blocked, C = scale_layout == "blocked", elements_of_row(a) // MX_BLOCK_SIZE
        plain = from_blocked_m_groups(a_scale, offs, a.shape[0], C) if blocked else a_scale
        a = _unrounded(mxspec.mx_dequantize(a, plain))
    return a, a_scale, _unrounded(mxspec.mx_dequantize(b, b_scale, scale_layout=scale_layout)), b_scale, offs


def mx_tokens_in_bf16(
    dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, offs: Tensor, *, scale_layout: str = "blocked", **o: Any
) -> tuple[Tensor, ...]:
    def values(t: Tensor, scale: Tensor) -> Tensor:
        if scale_layout == "blocked":
            blocks = t.shape[0] // MX_BLOCK_SIZE
            scale = from_blocked_k_groups(scale, offs // MX_BLOCK_SIZE, t.shape[1], blocks)
        return _unrounded(mxspec.mx_dequantize(t, scale, axis=-2))

    return values(dy, dy_scale), dy_scale, values(x, x_scale), x_scale, offs
