"""fp8_quantize_rowcol_groups in Triton: on Hopper the Gluon kernel of `hopper/fp8/`, otherwise plain tiles."""

from __future__ import annotations

from torch import Tensor

from mxspec.triton_kernels.hopper import quantizers
from mxspec.triton_kernels.hopper.fp8 import quantize
from mxspec.triton_kernels.hopper.releases import note
from mxspec.triton_kernels.tiles import fp8_both_ways
from mxspec.triton_kernels.tiles.fp8_both_ways import TOKENS, Results

__all__ = ["PTX", "RANK", "fp8_quantize_rowcol_groups", "note"]

RANK = {(9, 0): 1, (10, 0): 1}  # Blackwell: compiled, not run
PTX = (r"ld\.global\.v4\.b32", r"st\.global\.v[24]\.b32", r"cvt\.rn\.satfinite\.e4m3x2\.f32")


def fp8_quantize_rowcol_groups(
    x: Tensor, offs: Tensor, *, scale_format: str = "fp32", eps: float = 1e-12, check_offs: bool = False
) -> Results:
    by = quantize if quantizers.reads(x.shape[1], x) else fp8_both_ways
    return by.both_ways(TOKENS.value, x, None, offs, scale_format, eps)
