"""NVIDIA's ModelOpt: rceil by log2; MXFP4 ties towards zero, and zeros as -0; NVFP4 with no scale of 0."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.formats import E2M1, E4M3FN, E8M0FNU, NVFP4_LARGEST, ElementFormat
from mxspec.reference.common.numerics import packed, saturating_cast
from mxspec.rules import _mx, _nvfp4

NAME = "ModelOpt"
RECORDED: dict[str, dict[str, dict[str, str]]] = {
    "mx": {"modelopt047": {"scaling": "rceil"}},
    "nvfp4": {"modelopt047": {}},
}
SMALLEST_SCALE = 2.0**-9  # the smallest e4m3fn above 0, `_cast_per_block_scale_to_fp8`
BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # `MXFP4QTensor.E2M1_bounds`: the middles between the values


def mx_quantize(
    x: Tensor,
    *,
    axis: int = -1,
    elem_dtype: torch.dtype | str = torch.float8_e4m3fn,
    scaling: str = "rceil",
    scale_layout: str = "plain",
) -> tuple[Tensor, Tensor]:
    """`2^ceil(log2(amax / max))`, with log2 in fp32: a quotient just above a power of two counts as the power.

    - e4m3fn: Inf gives byte 254 and saturates. A NaN gives byte 0, and stays in its element.
    - e2m1: a number in the middle between two values becomes the smaller one: 0.75 gives 0.5. Plus and minus zero give
      the code of -0. In a block with an Inf or a NaN the byte is 0, and ModelOpt has no rule for the codes: the preset
      refuses the block.

    Source: nvidia-modelopt 0.47.0, torch/quantization/qtensor/mxfp8_tensor.py (`MXFP8QTensor`), mxfp4_tensor.py
        (`MXFP4QTensor`).
    """
    return _mx.quantize(x, axis, elem_dtype, scaling, scale_layout, _rule, NAME, RECORDED["mx"])


def _rule(blocks: Tensor, fmt: ElementFormat) -> tuple[Tensor, Tensor]:
    blocks = blocks.float()
    amax = blocks.abs().amax(-1, keepdim=True)
    exponent = (amax / fmt.max).log2().ceil().clamp(-127, 127)
    if fmt is E2M1:
        if not amax.isfinite().all():
            raise ValueError(f"mx_quantize: {NAME} has no rule for an Inf or a NaN in e2m1; needs finite numbers")
        return packed(_e2m1_codes(blocks / exponent.exp2()), fmt), exponent + E8M0FNU.bias
    exponent = torch.where(amax.isnan(), -127.0, exponent)
    return saturating_cast(blocks * (-exponent).exp2(), fmt), exponent + E8M0FNU.bias


def _e2m1_codes(x: Tensor) -> Tensor:
    """The number of bounds below the magnitude; the sign bit is set for every number that is not above zero."""
    codes = torch.zeros_like(x, dtype=torch.uint8)
    for bound in BOUNDS:
        codes += x.abs() > bound
    return codes + 8 * (x <= 0).to(torch.uint8)


def nvfp4_quantize(
    x: Tensor,
    tensor_amax: Tensor | None = None,
    *,
    axis: int = -1,
    block: str = "1x16",
    scale_layout: str = "plain",
) -> tuple[Tensor, Tensor, Tensor]:
    """The scale is `fl(b / fl(6 * T))`, and 1 if this is 0; at least 2^-9. Codes are `fl(x / fl(s * T))`.

    A block of zeros has the scale 1, byte 0x38. A block that underflows has the smallest scale, byte 0x01. The code of
    -0 is 0. A quotient that is NaN has the code 7: every code of a block with a NaN, and of a matrix of zeros, whose
    scales are NaN too. Ties are rounded to even, other than in MXFP4.

    Source: nvidia-modelopt 0.47.0, torch/quantization/qtensor/nvfp4_tensor.py (`NVFP4QTensor.quantize`).
    """
    return _nvfp4.quantize(x, tensor_amax, axis, block, scale_layout, _nvfp4_rule, NAME, nan_as=E2M1.max)


def _nvfp4_rule(blocks: Tensor, b: Tensor, A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    T = A.float() / NVFP4_LARGEST
    s = b.float() / (E2M1.max * T)
    s = torch.where(s == 0, 1.0, s).clamp(SMALLEST_SCALE, E4M3FN.max)
    y = blocks.float() / (_nvfp4.rounded_scale(s) * T).unsqueeze(-1)
    return y + 0.0, s, T  # -0 becomes +0
