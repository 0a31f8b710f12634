"""DeepSeek's inference code: it stores `amax / 448`, divides by the stored scale, and raises a smaller amax to 1e-4."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.formats import E4M3FN
from mxspec.reference.common.numerics import divided
from mxspec.rules import _fp8

NAME = "DeepSeek"
RECORDED = {"blk": {f"dsv3.ue8m0={i}": {"scale_format": name} for i, name in enumerate(("fp32", "pow2"))}}


def fp8_quantize_1x128(
    x: Tensor, *, axis: int = -1, scale_format: str = "fp32", scale_major: str = "k", eps: float = 1e-4
) -> tuple[Tensor, Tensor]:
    """Stores `amax / 448` and divides by it. The contract rounds `448 / amax` and multiplies.

    pow2 stores `2^ceil(log2(amax / 448))`, with log2 in fp32: a quotient just above a power of two counts as the power.
    A NaN stays in its element. In a block with an Inf the scale is Inf, and the finite elements become zeros. The
    kernel's division on a GPU is approximate; the division here is the exact one, rounded once.

    Source: DeepSeek-V3, inference/kernel.py (`act_quant_kernel`).
    """
    return _fp8.quantize_1x128(x, axis, scale_format, scale_major, eps, _factor, _scaled)


def fp8_quantize_128x128(
    w: Tensor, *, scale_format: str = "fp32", eps: float = 1e-4, with_transpose: bool = False
) -> tuple[Tensor, ...]:
    """The rule of `fp8_quantize_1x128`, over a square.

    Source: DeepSeek-V3, inference/kernel.py (`weight_quant_kernel`, with the clamp of `act_quant_kernel`).
    """
    return _fp8.quantize_128x128(w, scale_format, eps, with_transpose, _factor, _scaled)


def _factor(blocks: Tensor, dims: tuple[int, ...], scale_format: str, eps: float) -> tuple[Tensor, Tensor]:
    amax = blocks.abs().amax(dims, keepdim=True)
    if bool(amax.isnan().any()):  # tl.max takes the operand that is a number
        amax = torch.where(blocks.isnan(), 0, blocks.abs()).amax(dims, keepdim=True)
    amax = amax.float().clamp(min=eps)
    stored = divided(amax, E4M3FN.max)
    if scale_format == "pow2":
        stored = stored.log2().ceil().exp2()
    return stored, stored


def _scaled(blocks: Tensor, factor: Tensor) -> Tensor:
    return blocks.float() / factor
