"""The cases of mx_quantize_rowcol_groups: calls written by hand, calls worth timing, and the dimensions of a call."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mxspec.cases.common.blocks import edge_blocks, every_exponent, rare_numbers
from mxspec.cases.common.groups import ARRANGED, BEYOND, offsets
from mxspec.cases.common.impossible import PADDED_GROUPS
from mxspec.cases.common.mx_rowcol_groups import (
    WITH_E2M1,
    dimensions,
    grouped_cases,
    possible,
    refused_groups,
    with_options,
)
from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.quantizers import REPEATED, made, shape_of
from mxspec.cases.common.rowcol_groups import with_offs
from mxspec.cases.common.space import Space
from mxspec.cases.common.token_groups import far_apart, offs_of, random_offs
from mxspec.formats import MX_BLOCK_SIZE, SCALINGS
from mxspec.reference.common import checks
from mxspec.reference.mx_quantize import SCALE_LAYOUTS
from mxspec.spec import Case, Shapes, random_bits, random_normal, these


def cases() -> Iterator[Case]:
    def tokens(M: int, K: int = 96) -> tuple[Tensor, ...]:
        return (random_normal(M, K),)

    yield from grouped_cases(tokens)
    for dtype in checks.FLOAT_DTYPES:
        bits = partial(lambda dtype: (random_bits(110, 64, dtype=dtype), offs_of([33, 0, 67])), dtype)
        yield from with_options(f"random bit patterns, {str(dtype)[6:]}", bits)
    yield from with_options("edge blocks", lambda: (edge_blocks(), offs_of([20, 6])), flags={"edge"})
    yield from with_options("every exponent", lambda: (every_exponent(), offs_of([100, 155])), flags={"edge"})
    for dtype in checks.FLOAT_DTYPES:
        numbers = partial(lambda dtype: (rare_numbers(dtype, 70, 64), offs_of([40, 30])), dtype)
        yield Case(f"subnormals, Inf, -Inf and NaN, {str(dtype)[6:]}", numbers, flags={"edge"})
    yield Case("zeros", lambda: (-torch.zeros(150, 64), offs_of([140, 9])), flags={"edge"})
    yield Case("no columns", lambda: (*tokens(139, 0), offs_of([130, 9])), flags={"edge"})
    for K in (32, 128, 416):
        yield Case(f"{K} columns", partial(with_offs, partial(tokens, K=K), 150, [130, 9]))
    yield Case("transposed input", lambda: (random_normal(160, 210).mT, offs_of([130, 70])))
    yield Case("every second row", lambda: (random_normal(300, 64)[::2], offs_of([130, 9])))
    yield Case("every second column", lambda: (random_normal(150, 192)[:, ::2], offs_of([130, 9])))
    yield Case("rows far apart", lambda: (far_apart(140, 64), offs_of([100, 39])), flags={"edge"})
    large = these(random_normal(1, 2048).expand(2**20 + 256, 2048), offs_of([2**20 + 256]))
    yield Case("2^31 elements and more", large, flags={"large"})

    for i, (dtype, scaling) in enumerate(zip((*checks.FLOAT_DTYPES, torch.bfloat16), SCALINGS, strict=True)):
        kw: dict[str, Any] = {"elem_dtype": "e2m1", "scaling": scaling, "scale_layout": SCALE_LAYOUTS[i % 2]}
        bits = partial(lambda dtype: (random_bits(110, 64, dtype=dtype), offs_of([33, 0, 67])), dtype)
        yield Case(f"random bit patterns, {str(dtype)[6:]}, e2m1, {scaling}", bits, kw)
        yield Case(f"edge blocks, e2m1, {scaling}", lambda: (edge_blocks(), offs_of([20, 6])), kw, flags={"edge"})
    for layout in SCALE_LAYOUTS:
        kw = {"elem_dtype": torch.float4_e2m1fn_x2, "scale_layout": layout}
        yield Case(f"three groups, e2m1, {layout}", partial(with_offs, partial(tokens, K=160), 310, [129, 0, 177]), kw)
        yield Case(f"nothing, e2m1, {layout}", lambda: (*tokens(0, 64), offs_of([])), kw, flags={"edge"})
        yield Case(f"no columns, e2m1, {layout}", lambda: (*tokens(139, 0), offs_of([130, 9])), kw, flags={"edge"})
    yield from refused_groups(tokens, e2m1=True)
    (x,), offs = tokens(50), offs_of([5, 0, 40])
    yield Case("K = 80", these(x[:, :80], offs), raises=ValueError, match="K = 80 is not a multiple of 32, the")
    yield Case("float64", these(x.double(), offs), raises=TypeError, match="torch.float64")
    yield Case("3-D", these(x[None], offs), raises=ValueError, match="2-D")


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    def args(M: int, K: int) -> tuple[Tensor, Tensor]:
        return torch.randn(M, K, dtype=torch.bfloat16), random_offs(M, 8)

    for M, K in shapes.matrices:
        if M >= 1024 and M * K < 2**30:
            yield Case(f"{M}x{K}, G 8", partial(args, M, K))


def _make(choice: Choice) -> tuple[Tensor, Tensor]:
    return made(choice, shape_of(choice)), offsets(choice, choice["rows"])


SPACE = Space(
    dimensions((0, 32, 256, 1056, 4128), checks.FLOAT_DTYPES),
    _make,
    WITH_E2M1,
    partial(possible, cols=MX_BLOCK_SIZE),
    [*(part for part in REPEATED if part.get("cols") != 1), *ARRANGED],
    beyond=[choice for choice in BEYOND if choice.get("cols") != 1],
)
TOKENS = "x.rows"
IMPOSSIBLE = PADDED_GROUPS
