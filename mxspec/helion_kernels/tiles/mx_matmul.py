"""Code that the MX matmuls share: the configurations, the place of a scale's byte, and one step of the sums.

Blackwell's tensor cores apply the scales themselves, and a step is four blocks. Hopper's tensor cores do not: there a
step is one block, and its sum is scaled before it is added to the fp32 sums.
"""

from __future__ import annotations

import os
from typing import Any

import helion.language as hl
import torch
from torch import Tensor

from mxspec.formats import MX_BLOCK_SIZE
from mxspec.helion_kernels.common.launch import flat, for_device
from mxspec.helion_kernels.common.numerics import code_values

PTX = {
    "sm90": (r"wgmma\.mma_async.*\.f32\.(e[45]m[32]\.e[45]m[32]|f16\.f16)",),
    "sm100": (r"tcgen05\.mma.*kind::mxf8f6f4\.block_scale",),
}
STEP = {(9, 0): MX_BLOCK_SIZE, (10, 0): 4 * MX_BLOCK_SIZE}
# Helion multiplies codes of one format. Codes of two formats become fp16, which holds the values of both. Ref mode
# needs no conversion: it multiplies any two formats, and it has no fp16 products with fp32 sums.
_REF = os.environ.get("HELION_INTERPRET") == "1"
_FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


def step_for(device: torch.device) -> int:
    return for_device(STEP, device)


def scale_arguments(scale: Tensor, blocked: bool) -> tuple[Any, ...]:
    """The scale bytes, and the strides of plain scales along rows and blocks."""
    return flat(scale.view(torch.uint8)), *((0, 0) if blocked else scale.stride()[-2:])


def scale_place(r: Tensor, c: Tensor, stride_r: int, stride_c: int, col_tiles: Tensor | int, blocked: bool) -> Tensor:
    """The byte that holds the scale `(r, c)`. Blocked scales are in 128x4 tiles, with `col_tiles` in a row of tiles."""
    if not blocked:
        return r * stride_r + c * stride_c
    return ((r >> 7) * col_tiles + (c >> 2)) * 512 + (r & 31) * 16 + ((r >> 5) & 3) * 4 + (c & 3)


def _power(field: Tensor, byte: Tensor) -> Tensor:
    return torch.where(byte == 255, 0x7FC00000, field << 23).view(torch.float32)


def _halves(scale: Tensor) -> tuple[Tensor, Tensor]:
    """Two powers of two whose product is `2^(byte - 127)`.

    The exponent is halved down and up. Both are NaN for byte 255.
    """
    byte = scale.to(torch.int32)
    return _power(((byte + 1) >> 1) + 63, byte), _power((byte >> 1) + 64, byte)


def multiplied_by_packed(acc: Tensor, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """`acc` plus a block of a `(M, 32)` times the transpose of a block of b, which holds e2m1 codes `(N, 16)`.

    a: e2m1 or FP8 codes, which bf16 holds exactly.
    """
    # Triton converts e5m2 to bfloat16 without Inf and NaN. By way of fp16 it keeps them, and every code is exact.
    of_a = code_values(a) if a.dtype == torch.uint8 else a.to(torch.float16)
    block = hl.dot(of_a.to(torch.bfloat16), code_values(b).to(torch.bfloat16).t(), out_dtype=torch.float32)
    return acc + scaled(block, a_scale, b_scale)


def scaled(block: Tensor, a_scale: Tensor, b_scale: Tensor) -> Tensor:
    (a_down, a_up), (b_down, b_up) = _halves(a_scale), _halves(b_scale.t())
    return block * (a_down * b_up) * (a_up * b_down)


def multiplied(acc: Tensor, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, step: int) -> Tensor:
    """`acc` plus a `(M, step)` times the transpose of b `(N, step)`, with one scale for each block of a and of b.

    The product of two scales may be outside of the range of fp32, even if the scaled value is not. So on Hopper a sum
    is scaled twice, by half of the exponent each time. A half is between 2^-127 and 2^127, because one scale is halved
    down and the other is halved up.
    """
    if step != MX_BLOCK_SIZE:
        return hl.dot_scaled(a, a_scale, _FORMATS[a.dtype], b.t(), b_scale, _FORMATS[b.dtype], acc=acc)
    if a.dtype != b.dtype and not _REF:
        a, b = a.to(torch.float16), b.to(torch.float16)
    block = hl.dot(a, b.t(), out_dtype=torch.float32)
    return acc + scaled(block, a_scale, b_scale)
