"""mx_quantize_rowcol_groups in Triton: a Gluon kernel on Hopper, otherwise the tiles of `tiles/mx_columns.py`.

The Gluon kernel is in `hopper/mx/`. Each token is read once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mxspec.formats import E2M1, element
from mxspec.triton_kernels.hopper.mx import quantize
from mxspec.triton_kernels.hopper.releases import note
from mxspec.triton_kernels.tiles import mx_both_ways, mx_columns
from mxspec.triton_kernels.tiles.fp8_both_ways import TOKENS, Results

__all__ = ["PTX", "RANK", "mx_quantize_rowcol_groups", "note", "supports"]

RANK = {(9, 0): 1, (10, 0): 1}  # Blackwell: compiled, not run; rates: benchmarks/results/decisions.md
PTX = (
    r"ld\.global\.v4\.b32",
    r"st\.global\.v[24]\.b32|0f(40C00000|40400000|3F740000)",
    r"cvt\.rn\.satfinite\.(e[45]m[32]|e2m1)x2\.f32|0f(40C00000|40400000|3F740000)",
)  # on Hopper, e2m1 has the constant of a limit (6, 3, or 61/64), and stores fewer bytes


def supports(x: Tensor, offs: Tensor, *, elem_dtype: torch.dtype | str = torch.float8_e4m3fn, **_: Any) -> str | None:
    if element(elem_dtype) == E2M1 and x.dtype == torch.float32:
        return "quantizes bfloat16 and float16 to e2m1, not float32, for which its tile spills registers"
    return mx_columns.supports(x)


def mx_quantize_rowcol_groups(
    x: Tensor,
    offs: Tensor,
    *,
    pad_to: int = 128,
    elem_dtype: torch.dtype | str = torch.float8_e4m3fn,
    scaling: str = "rceil",
    scale_layout: str = "blocked",
    check_offs: bool = False,
) -> Results:
    # The Gluon kernel writes no e2m1. With plain scales the tiles are faster: benchmarks/results/decisions.md.
    by_gluon = scale_layout == "blocked" and element(elem_dtype) != E2M1 and quantize.reads(x.shape[1], offs, pad_to, x)
    by = quantize if by_gluon else mx_both_ways
    return by.both_ways(TOKENS.value, x, None, offs, pad_to, elem_dtype, scaling, scale_layout)
