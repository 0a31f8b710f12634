"""The cases of fp8_quantize_rowcol_groups: calls written by hand, calls worth timing, and the dimensions of a call."""

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
from mxspec.cases.common.token_groups import far_apart, offs_of, random_offs
from mxspec.cases.fp8_quantize_1x128 import TAILS, tokens_of
from mxspec.formats import FP8_SIZE_MULTIPLE
from mxspec.reference.common import checks
from mxspec.reference.common.fp8_numerics import SCALE_FORMATS
from mxspec.spec import Case, Shapes, random_bits, random_normal, these


def cases() -> Iterator[Case]:
    def tokens(M: int, D: int = 256, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
        return (random_normal(M, D, dtype=dtype),)

    yield from grouped_cases(tokens)
    for dtype in checks.FLOAT_DTYPES:
        for scale_format in SCALE_FORMATS:
            bits = partial(lambda dtype: (random_bits(200, 128, dtype=dtype), offs_of([140, 50])), dtype)
            name = f"random bit patterns, {str(dtype)[6:]}, {scale_format}"
            yield Case(name, bits, {"scale_format": scale_format}, flags={"edge"})
    yield Case("no columns", lambda: (*tokens(139, 0), offs_of([130, 9])), flags={"edge"})
    yield Case("transposed input", lambda: (random_normal(128, 210).mT, offs_of([130, 70])))
    yield Case("every second row", lambda: (random_normal(300, 128)[::2], offs_of([130, 9])))
    yield Case("every second column", lambda: (random_normal(150, 256)[:, ::2], offs_of([130, 9])))
    yield Case("rows far apart", lambda: (far_apart(140, 128), offs_of([100, 39])), flags={"edge"})
    for i, D in enumerate(TAILS):
        dtype = checks.FLOAT_DTYPES[i % 3]
        kw = {"scale_format": SCALE_FORMATS[i % 2]}
        yield Case(f"{D} columns", partial(_of_columns, D, dtype), kw)
    yield Case("208 columns of a transposed input", lambda: (random_normal(208, 150).mT, offs_of([130, 9])))
    yield Case("tails of zeros and with a NaN", _tails, flags={"edge"})
    yield Case("larger eps", lambda: (random_normal(150, 128) * 2**-30, offs_of([140, 10])), {"eps": 1e-4})
    yield Case("zeros", lambda: (-torch.zeros(150, 128), offs_of([140, 9])), flags={"edge"})
    large = these(random_normal(1, 2048).expand(2**20 + 256, 2048), offs_of([2**20 + 256]))
    yield Case("2^31 elements and more", large, flags={"large"})

    yield from refused_offs(tokens)
    (x,), offs = tokens(50), offs_of([5, 0, 40])
    for D, wrong in ((100, x[:, :100]), (8, x[:, :8]), (2888, torch.zeros(50, 2888))):
        yield Case(f"D = {D}", these(wrong, offs), raises=ValueError, match=f"D = {D} is not a multiple of 16; pad")
    yield Case("float64", these(x.double(), offs), raises=TypeError, match="torch.float64")
    yield Case("3-D", these(x[None], offs), raises=ValueError, match="2-D")
    yield Case("eps 0", these(x, offs), {"eps": 0.0}, raises=ValueError, match="eps = 0.0")


def _of_columns(D: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    M, offs = tokens_of(D)
    return random_normal(M, D, dtype=dtype), offs


def _tails() -> tuple[Tensor, Tensor]:
    """Rows that end with a shorter block: of zeros, with a NaN, and with the largest number of the row."""
    x = random_normal(145, 272)
    x[:3, 256:], x[5, 271], x[131, 256], x[141, 260] = -0.0, torch.nan, 2.0**30, torch.inf
    return x, offs_of([130, 0, 9])


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    def args(M: int, D: int) -> tuple[Tensor, Tensor]:
        return torch.randn(M, D, dtype=torch.bfloat16), random_offs(M, 8)

    for M, D in shapes.matrices:
        if M >= 1024 and M * D < 2**30:
            yield Case(f"{M}x{D}, G 8", partial(args, M, D))


def _make(choice: Choice) -> tuple[Tensor, Tensor]:
    return made(choice, shape_of(choice)), offsets(choice, choice["rows"])


OPTIONS = {"scale_format": SCALE_FORMATS, "eps": (1e-12, 1e-4), "check_offs": (False, True)}
SPACE = Space(
    dimensions((0, 128, 144, 1152, 4224), checks.FLOAT_DTYPES),
    _make,
    OPTIONS,
    partial(possible, cols=FP8_SIZE_MULTIPLE),
    [*(part for part in REPEATED if part.get("cols") not in (1, 1056)), *ALSO],
    beyond=BEYOND,
)
TOKENS = "x.rows"
IMPOSSIBLE = PADDED_GROUPS
