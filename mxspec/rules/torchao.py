"""torchao's main branch of August 2026: the contract, except for one block under `even` and for Inf in FP8."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.formats import E4M3FN, E8M0FNU, SCALINGS, ElementFormat
from mxspec.reference.common.numerics import reciprocal_scale, saturating_cast, shared_exponent
from mxspec.rules import _fp8, _mx

NAME = "torchao main"
RECORDED: dict[str, dict[str, dict[str, str]]] = {
    "mx": {f"aomain.{scaling}": {"scaling": scaling} for scaling in SCALINGS},
    "blk": {"aoblk": {}},
}


def mx_quantize(
    x: Tensor,
    *,
    axis: int = -1,
    elem_dtype: torch.dtype | str = torch.float8_e4m3fn,
    scaling: str = "rceil",
    scale_layout: str = "plain",
) -> tuple[Tensor, Tensor]:
    """The contract, except that `even` makes a finite block NaN if its amax rounds beyond fp32, such as bf16 max.

    In a NaN block, each fp4 element has the code of 1.5. The codes do not count, because the scale is NaN.

    Source: torchao/prototype/mx_formats/mx_tensor.py (`to_mx`), 36027d8.
    """

    def rule(blocks: Tensor, fmt: ElementFormat) -> tuple[Tensor, Tensor]:
        blocks = blocks.float()
        amax = blocks.abs().amax(-1, keepdim=True)
        byte = shared_exponent(amax, fmt, scaling)
        if scaling == "even":
            rounded = (amax.view(torch.int32) + (1 << (22 - fmt.mantissa_bits))).view(torch.float32)
            byte = torch.where(rounded.isfinite(), byte, E8M0FNU.nan_code)
        return cast(blocks * reciprocal_scale(byte), fmt), byte

    return _mx.quantize(x, axis, elem_dtype, scaling, scale_layout, rule, NAME, RECORDED["mx"])


def cast(x: Tensor, fmt: ElementFormat) -> Tensor:
    """The contract's cast, except that a NaN becomes 1.5 if the format has no NaN (`f32_to_f4_unpacked`)."""
    if fmt.nan_code is None:
        x = torch.where(x.isnan(), torch.copysign(torch.full_like(x, 1.5), x), x)
    return saturating_cast(x, fmt)


def fp8_quantize_1x128(
    x: Tensor, *, axis: int = -1, scale_format: str = "fp32", scale_major: str = "k", eps: float = 1e-12
) -> tuple[Tensor, Tensor]:
    """The contract, except that a block with an Inf stores the scale Inf, and its finite elements become zeros.

    Source: torchao/prototype/blockwise_fp8_training/kernels.py (`torch_blockwise_scale_act_quant_lhs`), 36027d8.
    """
    return _fp8.quantize_1x128(x, axis, scale_format, scale_major, eps, _factor)


def fp8_quantize_128x128(
    w: Tensor, *, scale_format: str = "fp32", eps: float = 1e-12, with_transpose: bool = False
) -> tuple[Tensor, ...]:
    """The rule of `fp8_quantize_1x128`, over a square.

    Source: torchao/prototype/blockwise_fp8_training/kernels.py (`torch_blockwise_scale_weight_quant`), 36027d8.
    """
    return _fp8.quantize_128x128(w, scale_format, eps, with_transpose, _factor)


def _factor(blocks: Tensor, dims: tuple[int, ...], scale_format: str, eps: float) -> tuple[Tensor, Tensor]:
    if scale_format != "fp32":
        raise NotImplementedError(f"fp8_quantize: {NAME} has no scale_format = {scale_format!r}; needs 'fp32'")
    amax = blocks.float().abs().amax(dims, keepdim=True).clamp(min=eps)
    s = torch.full_like(amax, E4M3FN.max) / amax
    return s, s.reciprocal()
