"""The cases of swiglu_backward: calls written by hand, calls worth timing, and the dimensions of a call."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from mxspec.cases.common.elementwise import impossible, space, told_before
from mxspec.cases.common.swiglu import gates, hard_gates, of_matrices
from mxspec.spec import Case, Shapes, random_normal, these


def cases() -> Iterator[Case]:
    yield from of_matrices(3)
    yield Case("gates that show every rounding", hard_gates, flags={"edge"})
    (gate, up), dh = gates(20, 512).chunk(2, -1), random_normal(20, 256, seed=3)

    def refused(
        name: str, error: type[Exception], match: str, gate: Tensor = gate, up: Tensor = up, dh: Tensor = dh
    ) -> Case:
        return Case(name, these(gate, up, dh), raises=error, match=match)

    yield refused("float32", TypeError, "gate has dtype torch.float32; needs torch.bfloat16", gate.float())
    yield refused("a float16 up", TypeError, "up has dtype torch.float16; needs torch.bfloat16", up=up.half())
    yield refused("a float32 gradient", TypeError, "dh has dtype torch.float32", dh=dh.float())
    yield refused("3-D", ValueError, "gate has shape (1, 20, 256)", gate[None], up[None], dh[None])
    yield refused("one column too few", ValueError, "up has shape (20, 255); needs (20, 256)", up=up[:, 1:])
    wide = torch.cat([dh, dh], 1)
    yield refused("a gradient as wide as both", ValueError, "dh has shape (20, 512); needs (20, 256)", dh=wide)
    yield refused("one gradient for all rows", ValueError, "dh has shape (1, 256); needs (20, 256)", dh=dh[:1])
    yield refused("up elsewhere", ValueError, "and up on meta; needs one device", up=up.to("meta"))
    yield refused("a gradient elsewhere", ValueError, "and dh on meta", dh=dh.to("meta"))


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    """Gate and up are the halves of one tensor."""

    def args(M: int, width: int) -> tuple[Tensor, ...]:
        gate, up = torch.randn(M, 2 * width, dtype=torch.bfloat16).chunk(2, -1)
        return gate, up, torch.randn(M, width, dtype=torch.bfloat16)

    for M, width in shapes.matrices:
        yield Case(f"{M}x{width}", partial(args, M, width))


SPACE = space("up", "dh")
TOLD_BEFORE = told_before("up", "dh")
IMPOSSIBLE = impossible("gate", "up", "dh")
