"""torchao's main branch of August 2026: the contract, except for one block under `even`, Inf in FP8, and NVFP4."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.formats import E2M1, E4M3FN, E8M0FNU, NVFP4_LARGEST, SCALINGS, ElementFormat
from mxspec.reference.common.numerics import reciprocal_scale, saturating_cast, shared_exponent
from mxspec.rules import _fp8, _mx, _nvfp4

NAME = "torchao main"
SMALLEST_NVFP4_SCALE = 2.0**-6  # `E4M3_EPS`: the smallest normal number of e4m3fn
RECORDED: dict[str, dict[str, dict[str, str]]] = {
    "mx": {f"aomain.{scaling}": {"scaling": scaling} for scaling in SCALINGS},
    "blk": {"aoblk": {}},
    "nvfp4": {"ao": {}},
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


def nvfp4_quantize(
    x: Tensor,
    tensor_amax: Tensor | None = None,
    *,
    axis: int = -1,
    block: str = "1x16",
    scale_layout: str = "plain",
) -> tuple[Tensor, Tensor, Tensor]:
    """The scale is `fl(fl(b/6) / T)`, and at least 2^-6. The codes are `x * fl(fl(1/T) / s)`.

    So no scale is subnormal, and a small block under a large A loses bits. A block of zeros has the scale 2^-6, byte
    0x08. If T or 1/T is not a normal number, such as for a matrix of zeros, a NaN may reach the codes. The preset
    refuses a call in which it does, and so a NaN in x. torchao has no float16.

    Source: torchao/prototype/mx_formats/nvfp4_tensor.py (`nvfp4_quantize`, `per_tensor_amax_to_scale`), 36027d8.
    """
    return nvfp4(x, tensor_amax, axis, block, scale_layout, NAME)


def nvfp4(
    x: Tensor, tensor_amax: Tensor | None, axis: int, block: str, scale_layout: str, name: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The rule of `nvfp4_quantize`, with a release's name in the errors."""
    if x.dtype == torch.float16:
        raise NotImplementedError(f"nvfp4_quantize: {name} has no float16; needs bfloat16 or float32")
    return _nvfp4.quantize(x, tensor_amax, axis, block, scale_layout, _nvfp4_rule, name)


def _nvfp4_rule(blocks: Tensor, b: Tensor, A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    blocks, T = blocks.float(), A.float() / NVFP4_LARGEST
    s = (b.float() / E2M1.max / T).clamp(SMALLEST_NVFP4_SCALE, E4M3FN.max)
    return blocks * (T.reciprocal() / _nvfp4.rounded_scale(s)).unsqueeze(-1), s, T
