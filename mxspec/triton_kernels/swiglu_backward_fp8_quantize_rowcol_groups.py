"""swiglu_backward_fp8_quantize_rowcol_groups in Triton: a Gluon kernel on Hopper, otherwise plain tiles.

The Gluon kernel is in `hopper/fp8/`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mxspec.triton_kernels.hopper import quantizers
from mxspec.triton_kernels.hopper.fp8 import quantize
from mxspec.triton_kernels.hopper.releases import note
from mxspec.triton_kernels.tiles import fp8_both_ways
from mxspec.triton_kernels.tiles.fp8_both_ways import GRADIENT, Results

__all__ = ["PTX", "RANK", "note", "supports", "swiglu_backward_fp8_quantize_rowcol_groups"]

RANK = {(9, 0): 1, (10, 0): 1}  # Blackwell: compiled, not run
PTX = (r"ld\.global\.v4\.b32", r"st\.global\.v[24]\.b32", r"cvt\.rn\.satfinite\.e4m3x2\.f32")


def supports(gate_up: Tensor, dh: Tensor, *_: Any, **__: Any) -> str | None:
    # With other strides, the arithmetic of SwiGLU and the addresses need more registers than a thread has.
    if gate_up.stride(1) == dh.stride(1) == 1:
        return None
    return "needs contiguous rows: stride 1 along the last dimension of gate_up and dh"


def swiglu_backward_fp8_quantize_rowcol_groups(
    gate_up: Tensor, dh: Tensor, offs: Tensor, *, scale_format: str = "fp32", check_offs: bool = False
) -> Results:
    by = quantize if quantizers.reads(dh.shape[1], gate_up, dh) else fp8_both_ways
    return by.both_ways(GRADIENT.value, gate_up, dh, offs, scale_format)
