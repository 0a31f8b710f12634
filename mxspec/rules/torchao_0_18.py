"""torchao 0.18 in eager PyTorch: `rceil` by log2, Inf as a large number, byte 0 with another meaning."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.formats import E8M0FNU, SCALINGS, ElementFormat
from mxspec.reference.common.numerics import reciprocal_scale
from mxspec.rules import _mx, torchao
from mxspec.rules.torchao import cast

NAME = "torchao 0.18"
RECORDED: dict[str, dict[str, dict[str, str]]] = {
    "mx": {f"ao018.{scaling}": {"scaling": scaling} for scaling in SCALINGS},
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
    """The contract's scales, with two exceptions: Inf, and, under rceil, amax / max just above a power of two.

    A block with byte 0 also has other codes.

    - Inf: byte 254 under rceil, otherwise 247 (e4m3) or 240 (e5m2). It saturates.
    - Byte 0: floor, ceil and even divide by 2^-126 although the byte means 2^-127. This halves the elements. rceil does
      not scale the block at all, so its elements become zeros.
    - NaN: under rceil as in the contract. Under the other rules, the finite elements of its block become zeros.

    Source: torchao 0.18.0, prototype/mx_formats/mx_tensor.py (`to_mx`, `_to_mx_rceil`).
    """

    def rule(blocks: Tensor, fmt: ElementFormat) -> tuple[Tensor, Tensor]:
        blocks = blocks.float()
        amax = blocks.abs().amax(-1, keepdim=True)
        if scaling == "rceil":
            return _rceil(blocks, amax, fmt)
        if scaling == "even":  # an amax that rounds beyond fp32 is Inf
            rounded = amax.view(torch.int32) + (1 << (22 - fmt.mantissa_bits))
            amax = torch.where(amax.isnan(), amax, (rounded & 0x7F800000).view(torch.float32))
        byte = _mx.floor_byte(amax, fmt, ceil=scaling == "ceil")
        return cast(_mx.divide(blocks, byte), fmt), byte

    return _mx.quantize(x, axis, elem_dtype, scaling, scale_layout, rule, NAME, RECORDED["mx"])


def _rceil(blocks: Tensor, amax: Tensor, fmt: ElementFormat) -> tuple[Tensor, Tensor]:
    exponent = torch.log2(amax / fmt.max).ceil().clamp(-127, 127)  # in fp32, where the log2 of 1024 + 1 ulp is 10
    byte = torch.where(amax.isinf(), E8M0FNU.largest_code, exponent + E8M0FNU.bias)
    byte = torch.where(amax.isnan(), E8M0FNU.nan_code, byte).to(torch.uint8)
    return cast(blocks * torch.where(byte == 0, 1.0, reciprocal_scale(byte)), fmt), byte


def nvfp4_quantize(
    x: Tensor,
    tensor_amax: Tensor | None = None,
    *,
    axis: int = -1,
    block: str = "1x16",
    scale_layout: str = "plain",
) -> tuple[Tensor, Tensor, Tensor]:
    """The rule of `rules.torchao`: the file is the same in both.

    Source: torchao 0.18.0, prototype/mx_formats/nvfp4_tensor.py (`nvfp4_quantize`).
    """
    return torchao.nvfp4(x, tensor_amax, axis, block, scale_layout, NAME)
