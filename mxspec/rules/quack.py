"""quack (Dao-AILab): the PyTorch code that its tests and benchmarks quantize with."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.formats import E8M0FNU, ElementFormat
from mxspec.reference.common.numerics import saturating_cast
from mxspec.rules import _mx

NAME = "quack"
RECORDED = {"mx": {f"quack.{scaling}": {"scaling": scaling} for scaling in ("floor", "rceil")}}


def mx_quantize(
    x: Tensor,
    *,
    axis: int = -1,
    elem_dtype: torch.dtype | str = torch.float8_e4m3fn,
    scaling: str = "rceil",
    scale_layout: str = "plain",
) -> tuple[Tensor, Tensor]:
    """The contract's scales, with two exceptions: rceil if amax / max is subnormal, and floor for Inf.

    If amax / max is subnormal, rceil gives byte 1. Under floor, Inf counts as 2^128 and saturates. Under floor, a block
    with byte 0 is divided by 2^-126 although the byte means 2^-127. This halves the elements. In a block with a NaN, or
    with an Inf under rceil, the finite elements become zeros.

    Source: quack/blockscaled/quantize.py (`to_mx`, `_compute_e8m0_scale_rceil`, `_compute_e8m0_scale_floor`).
    """

    def rule(blocks: Tensor, fmt: ElementFormat) -> tuple[Tensor, Tensor]:
        blocks = blocks.float()
        amax = blocks.abs().amax(-1, keepdim=True)
        bits = (amax / fmt.max).view(torch.int32)
        rceil = torch.where(amax.isfinite(), (bits >> 23) + ((bits & 0x7FFFFF) != 0), E8M0FNU.nan_code)
        byte = rceil if scaling == "rceil" else _mx.floor_byte(amax, fmt)
        return saturating_cast(_mx.divide(blocks, byte), fmt), byte

    return _mx.quantize(x, axis, elem_dtype, scaling, scale_layout, rule, NAME, RECORDED["mx"])
