"""Operands of the MX matmuls whose codes and scale bytes reveal wrong results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from random import Random

import torch
from torch import Tensor

from mxspec.formats import E8M0FNU, MX_BLOCK_SIZE, element
from mxspec.reference.common.groups import round_up
from mxspec.reference.common.numerics import saturating_cast
from mxspec.spec import normal

Operands = tuple[Tensor, Tensor, Tensor, Tensor]  # codes and plain scales of two operands, with blocks along K
E4M3FN, E5M2, E2M1 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float4_e2m1fn_x2
BY_E2M1 = {torch.bfloat16: "bfloat16", E4M3FN: "e4m3fn", E5M2: "e5m2", E2M1: "e2m1"}  # what meets weights in e2m1


def codes(*shape: int, dtype: torch.dtype = E4M3FN, seed: int = 0) -> Tensor:
    """Normally distributed values over most of a format's range, all of them finite. In bfloat16, values near 1.

    `shape` counts elements: of e2m1, two neighbours along the last dimension share a byte.
    """
    x = normal(*shape, seed=seed)
    if dtype == torch.bfloat16:
        return x.to(dtype)
    fmt = element(dtype)
    return saturating_cast(x * fmt.max / 4, fmt)


def rows_apart(q: Tensor) -> Tensor:
    """The same codes, in rows with gaps of 8 bytes, so that not every row begins at a multiple of 16 bytes."""
    bits = q.view(torch.uint8)
    wide = bits.new_zeros(*bits.shape[:-1], bits.shape[-1] + 8)
    wide[..., :-8] = bits
    return wide[..., :-8].view(q.dtype)


def scales(*shape: int, spread: int = 1, seed: int = 1) -> Tensor:
    """Scales from 2^-spread to 2^spread. They are near each other, so that any wrong scale shows in the SQNR."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(127 - spread, 128 + spread, shape, generator=generator).to(torch.uint8).view(E8M0FNU.dtype)


def every_scale(rows: int, blocks: int, down: bool, seed: int = 1) -> Tensor:
    """Scales that rise from 2^-127 to 2^127 along K, or fall. A rising times a falling scale is near 1."""
    byte = torch.arange(blocks) * 254 // (blocks - 1)
    jitter = torch.randint(-1, 2, (rows, blocks), generator=torch.Generator().manual_seed(seed))
    byte = (254 - byte if down else byte) + jitter
    return byte.clamp(0, E8M0FNU.largest_code).to(torch.uint8).view(E8M0FNU.dtype)


def every_byte_of_e2m1() -> tuple[Tensor, Tensor, Tensor]:
    """a, b and plain scales of b: each scale byte in a row of b of its own, with every code.

    Each row of a, in bfloat16, has one element that is not zero.
    """
    bits = torch.arange(16, dtype=torch.uint8) | torch.arange(15, -1, -1, dtype=torch.uint8) << 4
    scale = torch.arange(256, dtype=torch.uint8)[:, None].view(E8M0FNU.dtype)
    return torch.eye(32).to(torch.bfloat16), bits.expand(256, 16).contiguous().view(E2M1), scale


def every_byte_of(dtype: torch.dtype, K: int = MX_BLOCK_SIZE) -> tuple[Tensor, Tensor]:
    """The unit matrix `(K, K)` as codes, and rows `(256 + n, K)` that hold every byte of e4m3 or e5m2 in K places.

    A product of both is the second matrix. A NaN or an Inf stands in one of the last n rows, and the rest of that row
    is 1. A NaN that a kernel takes for a number shows there, and so does a subnormal that becomes 0 in the other rows.
    """
    rows, columns = torch.arange(256)[:, None], torch.arange(K)[None, :]
    found = (rows + columns * (256 // K)).remainder(256).to(torch.uint8).view(dtype)
    finite = found.float().isfinite()
    one = torch.ones((), dtype=torch.float32).to(dtype).view(torch.uint8)
    special = found.view(torch.uint8)[~finite].unique()
    last = one.expand(len(special), K).contiguous()
    last[torch.arange(len(special)), torch.arange(len(special)) * 3 % K] = special
    bits = torch.cat([found.view(torch.uint8).where(finite, one), last])
    return torch.eye(K).to(dtype), bits.view(dtype)


def pair(
    first: tuple[int, ...], second: tuple[int, ...], dtypes: tuple[torch.dtype, torch.dtype] = (E4M3FN, E4M3FN)
) -> Operands:
    """Codes of two shapes, with their scales."""
    (a, a_scale), (b, b_scale) = (
        (codes(*shape, dtype=dtype, seed=i), scales(*shape[:-1], shape[-1] // MX_BLOCK_SIZE, seed=2 + i))
        for i, (shape, dtype) in enumerate(zip((first, second), dtypes, strict=True))
    )
    return a, a_scale, b, b_scale


def special(first: tuple[int, ...], second: tuple[int, ...]) -> Iterator[tuple[str, Operands]]:
    """Pairs of operands; one operand has a special value in one row (of the last expert, if it has experts)."""

    def row(t: Tensor, i: int) -> Tensor:
        return (t[-1] if t.ndim == 3 else t)[i]

    for i, name in ((0, "the first"), (2, "the second")):
        operands = pair(first, second)
        row(operands[i], 3)[37] = torch.nan
        yield f"a NaN code in {name}", operands
        operands = pair(first, second)
        row(operands[i + 1].view(torch.uint8), 5)[1] = 255
        yield f"a scale of 255 in {name}", operands
        operands = pair(first, second)
        row(operands[i], 2)[:32] = -0.0
        row(operands[i + 1].view(torch.uint8), 2)[0] = 0
        yield f"a block of zeros in {name}", operands
    operands = pair(first, second, (E5M2, E4M3FN))
    row(operands[0], 1)[33] = torch.inf
    yield "an e5m2 Inf", operands


def laid_out(scale: Tensor, layout: str, rearrange: Callable[[Tensor], Tensor]) -> Tensor:
    """A plain scale unchanged, or blocked with 255 (NaN) in every padding byte."""
    if layout == "plain":
        return scale
    blocked, used = rearrange(scale), rearrange(torch.ones_like(scale.view(torch.uint8)))
    return torch.where(used == 1, blocked.view(torch.uint8), 255).view(scale.dtype)


def bench_sizes(M: int, E: int, ragged: bool) -> tuple[list[int], int]:
    """The tokens of each of E groups that hold M tokens, and the rows of all groups padded to 128; for the benchmarks.

    Operands are cut to these rows, so that the rate counts no row that belongs to no group.
    """
    cuts = sorted(Random(E).choices(range(M + 1), k=E - 1)) if ragged else [M * e // E for e in range(1, E)]
    sizes = [end - begin for begin, end in pairwise([0, *cuts, M])]
    return sizes, sum(round_up(n, 128) for n in sizes)
