"""The cases of swiglu: calls written by hand, calls worth timing, and the dimensions of a call."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from mxspec.cases.common.elementwise import impossible, space, told_before
from mxspec.cases.common.swiglu import gates, of_matrices
from mxspec.spec import Case, Shapes, these


def cases() -> Iterator[Case]:
    yield from of_matrices(2)
    gate, up = gates(20, 512).chunk(2, -1)

    def refused(name: str, error: type[Exception], match: str, gate: Tensor = gate, up: Tensor = up) -> Case:
        return Case(name, these(gate, up), raises=error, match=match)

    yield refused("float32", TypeError, "gate has dtype torch.float32; needs torch.bfloat16", gate.float())
    yield refused("a float16 up", TypeError, "up has dtype torch.float16; needs torch.bfloat16", up=up.half())
    yield refused("3-D", ValueError, "gate has shape (1, 20, 256); needs a 2-D tensor", gate[None], up[None])
    yield refused("one column too few", ValueError, "up has shape (20, 255); needs (20, 256)", up=up[:, 1:])
    yield refused("one row for all", ValueError, "up has shape (1, 256); needs (20, 256)", up=up[:1])
    yield refused("up elsewhere", ValueError, "and up on meta; needs one device", up=up.to("meta"))


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    """Gate and up are the halves of one tensor."""

    def args(M: int, width: int) -> tuple[Tensor, Tensor]:
        gate, up = torch.randn(M, 2 * width, dtype=torch.bfloat16).chunk(2, -1)
        return gate, up

    for M, width in shapes.matrices:
        yield Case(f"{M}x{width}", partial(args, M, width))


SPACE = space("up")
TOLD_BEFORE = told_before("up")
IMPOSSIBLE = impossible("gate", "up")
