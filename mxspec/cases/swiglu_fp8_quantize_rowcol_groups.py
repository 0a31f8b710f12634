"""The cases of swiglu_fp8_quantize_rowcol_groups: calls written by hand, calls worth timing, and dimensions."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from mxspec.cases.common.groups import offsets
from mxspec.cases.common.impossible import PADDED_GROUPS
from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.quantizers import REPEATED, made, shape_of
from mxspec.cases.common.rowcol_groups import ALSO, BEYOND, dimensions, grouped_cases, possible, refused_offs
from mxspec.cases.common.space import Space
from mxspec.cases.common.swiglu import every_gate, gates, least_gates, with_subnormal
from mxspec.cases.common.token_groups import far_apart, offs_of, random_offs
from mxspec.cases.fp8_quantize_1x128 import TAILS, tokens_of
from mxspec.formats import FP8_SIZE_MULTIPLE
from mxspec.reference.common.fp8_numerics import SCALE_FORMATS
from mxspec.spec import Case, Shapes, random_bits, random_normal, these


def cases() -> Iterator[Case]:
    def tokens(M: int) -> tuple[Tensor, ...]:
        return (gates(M, 256),)

    yield from grouped_cases(tokens)
    yield Case("every gate", lambda: (every_gate(), offs_of([130, 382])), flags={"edge"})
    yield Case("a sigmoid below 2^-126", lambda: (least_gates(), offs_of([1] * 8)), flags={"edge"})
    for scale_format in SCALE_FORMATS:
        bits = these(random_bits(200, 512, dtype=torch.bfloat16), offs_of([140, 50]))
        yield Case(f"random bit patterns, {scale_format}", bits, {"scale_format": scale_format}, flags={"edge"})
    yield Case("subnormal values", lambda: (with_subnormal(gates(40, 256)), offs_of([33, 7])), flags={"edge"})
    yield Case("no columns", lambda: (gates(139, 0), offs_of([130, 9])), flags={"edge"})
    yield Case("transposed input", lambda: (gates(256, 210).mT, offs_of([130, 70])))
    yield Case("every second row", lambda: (gates(300, 256)[::2], offs_of([130, 9])))
    yield Case("every second column", lambda: (gates(150, 512)[:, ::2], offs_of([130, 9])))
    yield Case("rows far apart", lambda: (far_apart(140, 256), offs_of([100, 39])), flags={"edge"})
    for i, width in enumerate(TAILS):
        kw = {"scale_format": SCALE_FORMATS[i % 2]}
        yield Case(f"2I = {2 * width}", partial(of_width, width), kw)
    yield Case("zeros", lambda: (-torch.zeros(150, 256).bfloat16(), offs_of([140, 9])), flags={"edge"})
    large = these(random_normal(1, 4096).expand(2**20 + 256, 4096), offs_of([2**20 + 256]))
    yield Case("2^31 elements and more", large, flags={"large"})

    yield from refused_offs(tokens)
    x, offs = gates(50, 384), offs_of([5, 0, 40])
    for wide in (16, 400, 5776):
        match = f"2I = {wide} is not a multiple of 32; pad"
        yield Case(f"2I = {wide}", these(torch.zeros(50, wide).bfloat16(), offs), raises=ValueError, match=match)
    yield Case("float32", these(x.float(), offs), raises=TypeError, match="torch.float32")
    yield Case("3-D", these(x[None], offs), raises=ValueError, match="2-D")


def of_width(width: int) -> tuple[Tensor, Tensor]:
    M, offs = tokens_of(width)
    return gates(M, 2 * width), offs


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    def args(M: int, D: int) -> tuple[Tensor, Tensor]:
        return torch.randn(M, 2 * D, dtype=torch.bfloat16), random_offs(M, 8)

    for M, D in shapes.matrices:
        if M >= 1024 and M * D < 2**29:
            yield Case(f"{M}x{D}, G 8", partial(args, M, D))


def make(choice: Choice) -> tuple[Tensor, Tensor]:
    return made(choice, shape_of(choice)), offsets(choice, choice["rows"])


SPACE = Space(
    dimensions((0, 256, 288, 1280, 4352), (torch.bfloat16,)),
    make,
    {"scale_format": SCALE_FORMATS, "check_offs": (False, True)},
    partial(possible, cols=2 * FP8_SIZE_MULTIPLE),
    [*(part for part in REPEATED if part.get("cols") not in (1, 1056)), *ALSO],
    beyond=BEYOND,
)
TOKENS = "gate_up.rows"
IMPOSSIBLE = PADDED_GROUPS
