"""Code that the FP8 rules share: 1x128 and 128x128 blocks in the contract's layouts, with a peer's arithmetic."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from mxspec.formats import E4M3FN, FP8_BLOCK_SIZE
from mxspec.reference.common.fp8_numerics import blocks_of, in_blocks
from mxspec.reference.common.numerics import saturating_cast
from mxspec.reference.fp8_quantize_1x128 import check_args as check_1x128
from mxspec.reference.fp8_quantize_128x128 import check_args as check_128x128

# A rule takes blocks, the dimensions of one block, scale_format and eps. It returns the factor that multiplies elements
# and the scale that is stored; in both, the dimensions of the block have size 1.
Rule = Callable[[Tensor, tuple[int, ...], str, float], tuple[Tensor, Tensor]]
# How a peer applies the factor to the blocks, before the cast.
Scaled = Callable[[Tensor, Tensor], Tensor]


def multiplied(blocks: Tensor, factor: Tensor) -> Tensor:
    """The elements times the factor, in fp32."""
    return blocks.float() * factor


@torch.no_grad()
def quantize_1x128(
    x: Tensor, axis: int, scale_format: str, scale_major: str, eps: float, rule: Rule, scaled: Scaled = multiplied
) -> tuple[Tensor, Tensor]:
    """`fp8_quantize_1x128` with a peer's rule, in the contract's layouts; eps may have any value."""
    check_1x128(x, axis=axis, scale_format=scale_format, scale_major=scale_major)
    if axis == -2:
        x = x.mT
    blocks = in_blocks(x.contiguous())  # (M, ceil(K/128), 128)
    factor, stored = rule(blocks, (-1,), scale_format, eps)
    qdata = saturating_cast(scaled(blocks, factor), E4M3FN).flatten(-2)[:, : x.shape[1]].contiguous()
    scale = stored.squeeze(-1)
    if scale_major == "mn":
        scale = scale.mT.contiguous().mT
    return qdata.mT if axis == -2 else qdata, scale


@torch.no_grad()
def quantize_128x128(
    w: Tensor, scale_format: str, eps: float, with_transpose: bool, rule: Rule, scaled: Scaled = multiplied
) -> tuple[Tensor, ...]:
    """`fp8_quantize_128x128` with a peer's rule, in the contract's layouts; eps may have any value."""
    check_128x128(w, scale_format=scale_format, with_transpose=with_transpose)
    *lead, N, K = w.shape
    rows, cols = blocks_of(N), blocks_of(K)
    padded = pad(w, (0, cols * FP8_BLOCK_SIZE - K, 0, rows * FP8_BLOCK_SIZE - N))  # zeros do not change amax
    blocks = padded.reshape(*lead, rows, FP8_BLOCK_SIZE, cols, FP8_BLOCK_SIZE)
    factor, stored = rule(blocks, (-3, -1), scale_format, eps)
    codes = saturating_cast(scaled(blocks, factor), E4M3FN)
    outputs: tuple[Tensor, ...] = codes.reshape(*padded.shape)[..., :N, :K].contiguous(), stored.squeeze(-1).squeeze(-2)
    if with_transpose:
        outputs += tuple(t.mT.clone(memory_format=torch.contiguous_format) for t in outputs)
    return outputs
