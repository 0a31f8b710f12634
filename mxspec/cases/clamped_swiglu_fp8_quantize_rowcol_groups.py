"""The cases of clamped_swiglu_fp8_quantize_rowcol_groups: written by hand, worth timing, and dimensions."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from mxspec.cases.common import clamped_swiglu as common
from mxspec.cases.common.clamped_swiglu import OF_H, refused, space, valid
from mxspec.cases.common.token_groups import random_offs
from mxspec.spec import Case, Shapes


def cases() -> Iterator[Case]:
    yield from valid(OF_H)
    yield from refused(OF_H)


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    def args(M: int, D: int) -> tuple[Tensor, ...]:
        gate_up, bias = (torch.randn(rows, 2 * D, dtype=torch.bfloat16) for rows in (M, 8))
        return gate_up, bias, random_offs(M, 8)

    for M, D in shapes.matrices:
        if M >= 1024 and M * D < 2**29:
            yield Case(f"{M}x{D}, G 8", partial(args, M, D))


SPACE = space(OF_H)
TOKENS = "gate_up.rows"
TOLD_BEFORE = ("bias.rows", "bias.cols")
IMPOSSIBLE = common.IMPOSSIBLE
