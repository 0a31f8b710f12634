"""fp8_quantize_rowcol_groups in Triton: the tiles of `tiles/fp8_both_ways.py`."""

from __future__ import annotations

from torch import Tensor

from mxspec.triton_kernels.tiles.fp8_both_ways import TOKENS, Results, both_ways

RANK = {(9, 0): 1, (10, 0): 1}  # Blackwell: compiled, not run
PTX = (r"ld\.global\.v4\.b32", r"st\.global\.v4\.b32", r"cvt\.rn\.satfinite\.e4m3x2\.f32")


def fp8_quantize_rowcol_groups(
    x: Tensor, offs: Tensor, *, scale_format: str = "fp32", eps: float = 1e-12, check_offs: bool = False
) -> Results:
    return both_ways(TOKENS.value, x, None, offs, scale_format, eps)
