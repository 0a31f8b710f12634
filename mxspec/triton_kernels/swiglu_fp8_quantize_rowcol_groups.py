"""swiglu_fp8_quantize_rowcol_groups in Triton: the tiles of `tiles/fp8_both_ways.py`."""

from __future__ import annotations

from torch import Tensor

from mxspec.triton_kernels.tiles.fp8_both_ways import SWIGLU, Results, both_ways

RANK = {(9, 0): 1, (10, 0): 1}  # Blackwell: compiled, not run
PTX = (r"ld\.global\.v4\.b32", r"st\.global\.v4\.b32", r"cvt\.rn\.satfinite\.e4m3x2\.f32")


def swiglu_fp8_quantize_rowcol_groups(
    gate_up: Tensor, offs: Tensor, *, scale_format: str = "fp32", check_offs: bool = False
) -> Results:
    return both_ways(SWIGLU.value, gate_up, None, offs, scale_format)
