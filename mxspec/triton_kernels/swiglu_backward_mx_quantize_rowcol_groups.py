"""swiglu_backward_mx_quantize_rowcol_groups in Triton: a Gluon kernel on Hopper, otherwise plain tiles.

The Gluon kernel is in `hopper/mx/`. The gradient of gate and up stays in registers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mxspec.triton_kernels.hopper.mx import quantize
from mxspec.triton_kernels.hopper.releases import note
from mxspec.triton_kernels.tiles import mx_both_ways, mx_columns
from mxspec.triton_kernels.tiles.fp8_both_ways import GRADIENT, Results

__all__ = ["PTX", "RANK", "note", "supports", "swiglu_backward_mx_quantize_rowcol_groups"]

RANK = {(9, 0): 1, (10, 0): 1}  # Blackwell: compiled, not run; rates: benchmarks/results/decisions.md
PTX = (r"ld\.global\.v4\.b32", r"st\.global\.v[24]\.b32", r"cvt\.rn\.satfinite\.e[45]m[32]x2\.f32")


def supports(gate_up: Tensor, dh: Tensor, offs: Tensor, **_: Any) -> str | None:
    for name, tensor in (("gate_up", gate_up), ("dh", dh)):
        if tensor.stride(1) != 1:  # the tile would spill registers
            return f"takes contiguous rows, that is stride(1) = 1; {name} has strides {tensor.stride()}"
    return mx_columns.supports(gate_up)


def swiglu_backward_mx_quantize_rowcol_groups(
    gate_up: Tensor,
    dh: Tensor,
    offs: Tensor,
    *,
    pad_to: int = 128,
    elem_dtype: torch.dtype | str = torch.float8_e4m3fn,
    scaling: str = "rceil",
    scale_layout: str = "blocked",
    check_offs: bool = False,
) -> Results:
    by = quantize if quantize.reads(dh.shape[1], offs, pad_to, gate_up, dh) else mx_both_ways
    return by.both_ways(GRADIENT.value, gate_up, dh, offs, pad_to, elem_dtype, scaling, scale_layout)
