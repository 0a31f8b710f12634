"""Changes of format that keep every value, proven block by block.

Each function returns the new tensors, or a `NotLossless`: the number of blocks that would change, and the first one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mxspec.formats import E8M0FNU, FP8_BLOCK_SIZE, MX_BLOCK_SIZE

E8M0 = torch.float8_e8m0fnu


@dataclass(frozen=True)
class NotLossless:
    """The blocks of a tensor that a change of format would alter.

    Attributes:
        blocks: the number of blocks that were checked.
        failed: the number of blocks that would change.
        first: the index of the first such block, in the grid of the scales.
        why: the reason, in a few words.
    """

    blocks: int
    failed: int
    first: tuple[int, ...]
    why: str

    def __str__(self) -> str:
        return f"{self.failed} of {self.blocks} blocks would change, the first is block {self.first}: {self.why}"


def retype(scale: Tensor, to: torch.dtype) -> Tensor | NotLossless:
    """Store scales in another dtype, if every scale keeps its value.

    Args:
        scale: float32, bfloat16, float8_e8m0fnu, or uint8, which holds the bytes of E8M0; any shape.
        to: torch.float32, torch.bfloat16, torch.float8_e8m0fnu or torch.uint8.

    Returns:
        The scales in the dtype `to`, or a NotLossless. E8M0 holds the powers of two from 2^-127 to 2^127, and NaN
        (byte 255).

    Raises:
        TypeError: a dtype that is not listed above.

    Example:
        >>> retype(torch.tensor([[0.5, 2.0]]), torch.uint8)
        tensor([[126, 128]], dtype=torch.uint8)
        >>> print(retype(torch.tensor([[0.5, 0.3]]), torch.uint8))
        1 of 2 blocks would change, the first is block (0, 1): the scale 0.30000001192092896 is no power of two of E8M0

    Source: OCP MX v1.0, section 5.4.1 (E8M0).
    """
    known = (torch.float32, torch.bfloat16, E8M0, torch.uint8)
    if scale.dtype not in known or to not in known:
        raise TypeError(f"retype: scale is {scale.dtype} and to is {to}; needs {', '.join(map(str, known))}")
    wide = (scale.view(E8M0) if scale.dtype == torch.uint8 else scale).float()
    if to in (E8M0, torch.uint8):
        stored = _e8m0(wide)
        same, why = (stored.view(E8M0).float() == wide) | (wide.isnan() & stored.eq(255)), "is no power of two of E8M0"
        stored = stored.view(to)
    else:
        stored = wide.to(to)
        same, why = (stored.float() == wide) | wide.isnan(), f"is not exact in {to}"
    if bool(same.all()):
        return stored
    first = first_failed(~same)
    return NotLossless(scale.numel(), int((~same).sum()), first, f"the scale {wide[first].item()} {why}")


def _e8m0(scale: Tensor) -> Tensor:
    """The bytes of fp32 powers of two; any other number gives a byte of another value."""
    bits = scale.contiguous().view(torch.int32)
    byte = torch.where(bits == 0x400000, 0, bits >> 23)  # 2^-127 is subnormal in fp32
    return torch.where(scale.isnan(), E8M0FNU.nan_code, byte.clamp(0, E8M0FNU.largest_code)).to(torch.uint8)


def blocks_to_rows(scale: Tensor, shape: tuple[int, int], block: int = FP8_BLOCK_SIZE) -> Tensor | NotLossless:
    """The E8M0 scales of 1x32 blocks, from the scales of square blocks: each scale is repeated.

    Args:
        scale: `(ceil(N/block), ceil(K/block))` float32, bfloat16, float8_e8m0fnu or uint8.
        shape: `(N, K)` of the codes, which stay as they are; K is a multiple of 32.
        block: 128 or 32, the size of the squares.

    Returns:
        `(N, K/32)` uint8, contiguous; or a NotLossless, if a scale is no power of two of E8M0.

    Raises:
        TypeError: the scale has another dtype.
        ValueError: the shapes do not fit.

    Example:
        >>> blocks_to_rows(torch.tensor([[2.0]]), (1, 128))
        tensor([[128, 128, 128, 128]], dtype=torch.uint8)

    Source: OCP MX v1.0, section 5.4.1 (E8M0).
    """
    N, K = shape
    if block not in (MX_BLOCK_SIZE, FP8_BLOCK_SIZE) or K % MX_BLOCK_SIZE:
        raise ValueError(f"blocks_to_rows: block is {block} and K is {K}; needs block 32 or 128, and K % 32 = 0")
    if tuple(scale.shape) != (grid := (-(-N // block), -(-K // block))):
        raise ValueError(f"blocks_to_rows: scale is {tuple(scale.shape)}; needs {grid} for codes {shape}")
    stored = retype(scale, torch.uint8)
    if isinstance(stored, NotLossless):
        return stored
    wide = stored.repeat_interleave(block, 0)[:N].repeat_interleave(block // MX_BLOCK_SIZE, 1)
    return wide[:, : K // MX_BLOCK_SIZE].contiguous()


def first_failed(failed: Tensor) -> tuple[int, ...]:
    """The index of the first block that would change."""
    return tuple(failed.nonzero()[0].tolist())
