"""clamped_swiglu_backward_fp8_quantize_rowcol_groups in Triton: the tiles of `tiles/fp8_clamped_swiglu.py`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mxspec.triton_kernels.tiles.fp8_both_ways import Results
from mxspec.triton_kernels.tiles.fp8_clamped_swiglu import both_ways

RANK = {(9, 0): 1, (10, 0): 1}  # Blackwell: compiled, not run
PTX = (r"ld\.global\.v4\.b32", r"st\.global\.v[24]\.b32", r"cvt\.rn\.satfinite\.e4m3x2\.f32")


def supports(gate_up: Tensor, bias: Tensor, dh: Tensor, *_: Any, **__: Any) -> str | None:
    # With other strides, the arithmetic and the addresses need more registers than a thread has.
    if gate_up.stride(1) == dh.stride(1) == 1:
        return None
    return "needs contiguous rows: stride 1 along the last dimension of gate_up and dh"


def clamped_swiglu_backward_fp8_quantize_rowcol_groups(
    gate_up: Tensor, bias: Tensor, dh: Tensor, offs: Tensor, *, scale_format: str = "fp32", check_offs: bool = False
) -> Results:
    return both_ways(gate_up, bias, dh, offs, scale_format)
