"""The cases of clamped_swiglu_backward_fp8_quantize_rowcol_groups: written by hand, worth timing, and dimensions."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from mxspec.cases.common import clamped_swiglu as common
from mxspec.cases.common.clamped_swiglu import OF_GRADIENT, refused, space, valid
from mxspec.cases.common.token_groups import random_offs
from mxspec.spec import Case, Shapes


def cases() -> Iterator[Case]:
    yield from valid(OF_GRADIENT)
    yield from refused(OF_GRADIENT)
    gate_up, bias, dh, offs = common.operands(50, 256, [5, 0, 40])

    def refused_dh(name: str, error: type[Exception], match: str, dh: Tensor) -> Case:
        return Case(name, lambda: (gate_up, bias, dh, offs), raises=error, match=match)

    yield refused_dh("a float32 gradient", TypeError, "dh has dtype torch.float32", dh.float())
    yield refused_dh("a 3-D gradient", ValueError, "dh has shape (1, 50, 128); needs a 2-D", dh[None])
    yield refused_dh("a gradient as wide as gate_up", ValueError, "dh has shape (50, 256); needs (50, 128)", gate_up)
    yield refused_dh("a gradient elsewhere", ValueError, "one device", dh.to("meta"))


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    def args(M: int, D: int) -> tuple[Tensor, ...]:
        gate_up, bias = (torch.randn(rows, 2 * D, dtype=torch.bfloat16) for rows in (M, 8))
        return gate_up, bias, torch.randn(M, D, dtype=torch.bfloat16), random_offs(M, 8)

    for M, D in shapes.matrices:
        if M >= 1024 and M * D < 2**29:
            yield Case(f"{M}x{D}, G 8", partial(args, M, D))


SPACE = space(OF_GRADIENT)
TOKENS = "gate_up.rows"
TOLD_BEFORE = ("bias.rows", "bias.cols", "dh.rows", "dh.cols")
IMPOSSIBLE = common.IMPOSSIBLE_OF_GRADIENT
