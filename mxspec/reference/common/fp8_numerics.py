"""The arithmetic of FP8 128-blocks on tensors: the quantization factor of a block, and the values of codes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from mxspec.formats import E4M3FN, FP8_BLOCK_SIZE, FP8_SCALE_FORMATS

SCALE_FORMATS = FP8_SCALE_FORMATS


def quantization_scale(amax: Tensor, scale_format: str, eps: float) -> Tensor:
    """Return `448 / max(amax, eps)` in fp32, rounded once; NaN where amax is NaN or Inf.

    The numerator is a tensor too, because PyTorch computes `448.0 / tensor` as a reciprocal times 448. That rounds
    twice and is wrong for 33 of the 128 bfloat16 mantissas.
    """
    s = torch.full_like(amax, E4M3FN.max) / amax.clamp(min=eps)
    if scale_format == "pow2":
        s = (s.view(torch.int32) & 0x7F800000).view(torch.float32)  # drop the mantissa: round down
    return torch.where(amax.isfinite(), s, torch.nan)


def blocks_of(size: int) -> int:
    """Return the number of blocks along a dimension. The last block may be shorter."""
    return -(-size // FP8_BLOCK_SIZE)


def in_blocks(x: Tensor) -> Tensor:
    """Return `(..., K)` as `(..., ceil(K/128), 128)`. Zeros fill the last block: they change no amax."""
    K = x.shape[-1]
    C = blocks_of(K)
    return pad(x, (0, C * FP8_BLOCK_SIZE - K)).unflatten(-1, (C, FP8_BLOCK_SIZE))


def values(codes: Tensor, scale: Tensor) -> Tensor:
    """Return `code * scale`, exact in fp64; each row has one scale per 128 elements of the last dimension."""
    return codes.double() * scale.double().repeat_interleave(FP8_BLOCK_SIZE, -1)[..., : codes.shape[-1]]


def square_values(codes: Tensor, scale: Tensor) -> Tensor:
    """The same for 128x128 blocks: one scale serves 128 rows. The last scale may serve fewer rows."""
    return values(codes, scale.repeat_interleave(FP8_BLOCK_SIZE, -2)[..., : codes.shape[-2], :])
