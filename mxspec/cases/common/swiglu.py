"""Gates and ups for the cases of SwiGLU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from mxspec.cases.common.token_groups import far_apart
from mxspec.spec import Case, normal, random_bits, random_normal, these


def gates(M: int, columns: int, seed: int = 0) -> Tensor:
    """`(M, columns)` bfloat16: gates between -12 and 12 in the first half, ups of many sizes in the second half."""
    gate_up = random_normal(M, columns, seed=seed)
    half = columns // 2
    gate_up[:, :half] = (normal(M, half, seed=seed + 7) * 4.0).bfloat16()
    return gate_up


def every_gate() -> Tensor:
    """`(512, 256)`: each of the 65536 bit patterns of bfloat16 as a gate, and its up, which is between 1 and 2."""
    gate = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).view(128, 512).mT
    up = 1 + torch.arange(512)[:, None] * torch.arange(1, 129) % 128 / 128
    return torch.cat([gate, up.bfloat16()], -1)


def least_gates() -> Tensor:
    """`(8, 256)`: gates from -86.5 to -90, where sigmoid falls below 2^-126, each beside an up of 2^120 in its row."""
    gate_up = torch.zeros(8, 256, dtype=torch.bfloat16)
    gate_up[:, 0], gate_up[:, 128] = -86.5 - torch.arange(8) / 2, 2.0**120
    return gate_up


def with_subnormal(t: Tensor) -> Tensor:
    """The same matrix with a subnormal number in its first row."""
    t[0, 1] = 2.0**-130
    return t


def tied_gates() -> Tensor:
    """`(64, 128)`: in each row a gate near 0 for which `1/2 + gate/4` is the middle of two fp32 numbers."""
    odd = torch.arange(1, 65, 2).float()
    gate = torch.cat([odd * 2.0**-23, -odd * 2.0**-24])  # below 1/2, fp32 numbers lie nearer to each other
    return gate.bfloat16()[:, None].repeat(1, 128)


def hard_gates() -> tuple[Tensor, Tensor, Tensor]:
    """`(16, 10240)`: gates beside an up of 1 and the least gradients, which show every rounding of d_gate.

    A sigmoid with a wrong last bit changes the result for most of the gates, a fused sum for the first four.
    """
    gates = [-0.1123046875, -1.28125, -1.421875, -2.265625, -1.6640625, -7.0, -7.9375, -8.375, -10.125, -14.75]
    gate = (
        torch.tensor([*gates, -37.75, -38.75, -51.25, -54.25, 2.265625, 7.09375]).bfloat16()[:, None].repeat(1, 10240)
    )
    dh = torch.arange(10240).to(torch.int16).view(torch.bfloat16).repeat(16, 1)
    return gate, torch.ones_like(gate), dh


# Every kind of number, with its negative.
_KINDS = (torch.nan, torch.inf, 0.0, 2.0**-133, 2.0**-127, 2.0**-126, 2.0**-64, 1.0, 87.0, 87.5, 2.0**64, 3.3895e38)


def kinds(tensors: int) -> tuple[Tensor, ...]:
    """`(24, 24)` or `(24, 576)`: every kind of number beside every other kind, in two or three tensors."""
    numbers = torch.tensor([sign * kind for kind in _KINDS for sign in (1.0, -1.0)]).bfloat16()
    grids = torch.meshgrid(*[numbers] * tensors, indexing="ij")
    return tuple(grid.flatten(1) for grid in grids)


def _split(gate_up: Tensor) -> tuple[Tensor, ...]:
    return gate_up.chunk(2, -1)


def of_matrices(tensors: int) -> Iterator[Case]:
    """The valid cases of `swiglu` and `swiglu_backward`, which take two and three matrices of one shape."""

    def some(M: int, width: int) -> tuple[Tensor, ...]:
        """Matrices of one shape, each in its own memory."""
        every = *_split(gates(M, 2 * width)), random_normal(M, width, seed=3)
        return tuple(t.contiguous() for t in every[:tensors])

    def halves_of_one(M: int, width: int, room: int = 0) -> tuple[Tensor, ...]:
        """Gate and up as halves of one tensor, with `room` columns before the first and after the last."""
        gate_up = torch.cat([gates(M, 2 * width), gates(M, 2 * room)], 1).roll(room, 1)[:, room:][:, : 2 * width]
        return *_split(gate_up), *some(M, width)[2:]

    def each(change: Callable[[Tensor], Tensor], M: int, width: int) -> tuple[Tensor, ...]:
        return tuple(change(t) for t in some(M, width))

    for M, width in ((40, 256), (7, 768), (3, 2048), (2, 14336), (5, 2880)):
        yield Case(f"{M}x{width}", partial(some, M, width))
        yield Case(f"{M}x{width}, halves of one tensor", partial(halves_of_one, M, width))
    for M, width in ((1, 1), (5, 1), (1, 7), (33, 131), (3, 1001), (2, 2056), (300, 8)):
        yield Case(f"{M}x{width}", partial(some, M, width), flags={"edge"})
        yield Case(f"{M}x{width}, halves of one tensor", partial(halves_of_one, M, width), flags={"edge"})
    for M, width in ((0, 256), (3, 0), (0, 0)):
        yield Case(f"{M}x{width}", partial(some, M, width), flags={"edge"})
    for room in (1, 8):
        yield Case(f"rows {room} elements into memory", partial(halves_of_one, 20, 256, room), flags={"edge"})
    beside = (1 + torch.arange(512)[:, None] * torch.arange(3, 131) % 128 / 128).bfloat16()
    yield Case("every gate", lambda: (*_split(every_gate()), beside)[:tensors], flags={"edge"})
    large = torch.full((8, 128), 2.0**120, dtype=torch.bfloat16)
    yield Case("a sigmoid below 2^-126", lambda: (*_split(least_gates()), large)[:tensors], flags={"edge"})
    subnormal = _subnormal(64, 128)
    ones = torch.ones(64, 128, dtype=torch.bfloat16)
    yield Case("gates near 0", lambda: (tied_gates(), *(subnormal, ones)[: tensors - 1]), flags={"edge"})
    yield Case("every kind of number", partial(kinds, tensors), flags={"edge"})
    bits = [random_bits(300, 512, dtype=torch.bfloat16, seed=seed) for seed in range(tensors)]
    yield Case("random bit patterns", these(*bits), flags={"edge"})
    yield Case("subnormal values", lambda: tuple(map(with_subnormal, some(40, 256))), flags={"edge"})
    yield Case("zeros", lambda: each(lambda t: -torch.zeros_like(t), 40, 256), flags={"edge"})
    yield Case("transposed", lambda: each(lambda t: t.mT, 256, 210))
    yield Case("every second row", lambda: each(lambda t: t[::2], 80, 256))
    yield Case("every second column", lambda: each(lambda t: t[:, ::2], 40, 512))
    yield Case("one row repeated", lambda: each(lambda t: t.expand(40, -1), 1, 256))
    yield Case("rows far apart", lambda: tuple(far_apart(140, 128) for _ in range(tensors)), flags={"edge"})
    more = [random_normal(1, 2048, seed=seed).expand(2**20 + 256, 2048) for seed in range(tensors)]
    yield Case("2^31 elements and more", these(*more), flags={"large"})


def _subnormal(M: int, K: int) -> Tensor:
    """Numbers from 0 to 2^-124 of both signs, with random bits."""
    bits = random_bits(M, K, dtype=torch.bfloat16).view(torch.int16)
    return torch.where(bits < 0, (bits & 0x1FF) | -(2**15), bits & 0x1FF).to(torch.int16).view(torch.bfloat16)
