"""The cases of mx_fake_quantize_rowcol_groups: calls written by hand, calls worth timing, and dimensions."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from mxspec.cases.common.blocks import edge_blocks, every_exponent, rare_numbers
from mxspec.cases.common.groups import ARRANGED, BEYOND, GROUPS, groups_fit, offsets, padded_fits
from mxspec.cases.common.impossible import PADDED_GROUPS
from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.quantizers import MATRIX, REPEATED, fits, made, shape_of
from mxspec.cases.common.space import Space
from mxspec.cases.common.token_groups import far_apart, grouped, offs_of, random_offs
from mxspec.formats import SCALINGS
from mxspec.reference.common import checks
from mxspec.reference.mx_quantize_groups import ELEM_CHOICES
from mxspec.spec import Case, Shapes, random_bits, random_normal, these


def cases() -> Iterator[Case]:
    def args(sizes: list[int], M: int, K: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
        return random_normal(M, K, dtype=dtype), offs_of(sizes)

    for name, sizes, M, _, flags in grouped():
        if len(sizes) < 300:  # more groups would take minutes in an interpreter
            yield Case(name, partial(args, sizes, M, 160), flags=flags)
    # Every value of an option meets every value of every other option.
    for i, (dtype, scaling) in enumerate(product(checks.FLOAT_DTYPES, SCALINGS)):
        elem = ("e4m3fn", "e5m2")[(i // 2 + i // 4) % 2]
        bits = partial(lambda dtype: (random_bits(110, 64, dtype=dtype), offs_of([33, 0, 67])), dtype)
        name = f"random bit patterns, {str(dtype)[6:]}, {elem}, {scaling}"
        yield Case(name, bits, {"scaling": scaling, "elem_dtype": elem})
    for scaling, elem in product(SCALINGS, ("e4m3fn", "e5m2")):
        kw: dict[str, Any] = {"scaling": scaling, "elem_dtype": elem}
        edges = lambda: (edge_blocks(), offs_of([edge_blocks().shape[0]]))  # noqa: E731
        yield Case(f"edge blocks, {elem}, {scaling}", edges, kw, flags={"edge"})
        exponents = lambda: (every_exponent(), offs_of([100, 155]))  # noqa: E731
        yield Case(f"every exponent, {elem}, {scaling}", exponents, kw, flags={"edge"})
    for sizes in ([31], [32], [33], [64, 65], [1] * 33, [127, 128, 129]):
        yield Case(f"groups of {sizes[0]} and more, {len(sizes)} groups", partial(args, sizes, sum(sizes) + 2, 96))
    for dtype in checks.FLOAT_DTYPES:
        numbers = partial(lambda dtype: (rare_numbers(dtype, 70, 64), offs_of([40, 30])), dtype)
        yield Case(f"subnormals, Inf, -Inf and NaN, {str(dtype)[6:]}", numbers, flags={"edge"})
    yield Case("zeros", lambda: (-torch.zeros(70, 64), offs_of([40, 9])), flags={"edge"})
    tiny = lambda: (random_normal(70, 64, dtype=torch.float32) * 2.0**-118, offs_of([40, 29]))  # noqa: E731
    yield Case("values below the normal range", tiny, flags={"edge"})
    huge = lambda: (torch.full((33, 32), torch.finfo(torch.float32).max), offs_of([33]))  # noqa: E731
    yield Case("values that round to 2^128", huge, flags={"edge"})
    yield Case("no columns", partial(args, [3, 4], 7, 0), flags={"edge"})
    yield Case("one block of columns", partial(args, [3, 40], 43, 32), flags={"edge"})
    yield Case("transposed input", lambda: (random_normal(64, 210).mT, offs_of([130, 70])))
    yield Case("every second row", lambda: (random_normal(300, 64)[::2], offs_of([130, 9])))
    yield Case("every second column", lambda: (random_normal(150, 128)[:, ::2], offs_of([130, 9])))
    yield Case("rows far apart", lambda: (far_apart(140, 64), offs_of([100, 39])), flags={"edge"})
    yield Case("checked", partial(args, [30, 10], 41, 64), {"check_offs": True})
    large = these(random_normal(1, 2048).expand(2**20 + 256, 2048), offs_of([2**20 + 256]))
    yield Case("2^31 elements and more", large, flags={"large"})

    x, offs = args([5, 0, 40], 50, 64)

    def refused(
        name: str, error: type[Exception], match: str, x: Tensor = x, offs: Tensor = offs, **kwargs: Any
    ) -> Case:
        return Case(name, these(x, offs), kwargs, raises=error, match=match)

    yield refused("K = 100", ValueError, "K = 100 is not a multiple of 32, the block size", torch.zeros(50, 100))
    yield refused("float64", TypeError, "torch.float64", x.double())
    yield refused("3-D", ValueError, "2-D", x[None])
    yield refused("int64 offs", TypeError, "offs has dtype torch.int64; needs torch.int32", offs=offs.long())
    yield refused("2-D offs", ValueError, "offs has shape (1, 3); needs a 1-D", offs=offs[None])
    yield refused("offs elsewhere", ValueError, "one device", offs=offs.to("meta"))
    yield refused("unknown scaling", ValueError, "'nearest'", scaling="nearest")
    yield refused("int8 elements", TypeError, "int8", elem_dtype=torch.int8)
    yield refused("e2m1 elements", TypeError, "float4_e2m1fn_x2; needs one of", elem_dtype=torch.float4_e2m1fn_x2)
    yield refused("offs that decrease", ValueError, "offs[1] = 5 after 45", offs=offs.flip(0), check_offs=True)
    yield refused("offs past M", ValueError, "offs[-1] = 51 is past M = 50", offs=offs + 6, check_offs=True)


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    def args(M: int, K: int, G: int) -> tuple[Tensor, Tensor]:
        return torch.randn(M, K, dtype=torch.bfloat16), random_offs(M, G)

    for M, K in shapes.matrices:
        if M >= 1024 and M * K < 2**30:
            yield Case(f"{M}x{K}, G 8", partial(args, M, K, 8))
    for E, N, K in shapes.experts:
        yield Case(f"{E}x{N}x{K} as one group", partial(args, E * N, K, 1))


def _make(choice: Choice) -> tuple[Tensor, Tensor]:
    return made(choice, shape_of(choice)), offsets(choice, choice["rows"])


def _possible(choice: Choice) -> bool:
    arranged = groups_fit(choice, choice.get("rows")) and padded_fits(choice, "rows", "cols", 64)
    return arranged and fits(choice, 1, 32)


SPACE = Space(
    {"rows": MATRIX["rows"], "cols": MATRIX["cols"], **GROUPS, **MATRIX},
    _make,
    {"elem_dtype": ELEM_CHOICES, "scaling": SCALINGS, "check_offs": (False, True)},
    _possible,
    [*(part for part in REPEATED if part.get("cols") != 1), *ARRANGED],
    beyond=[choice for choice in BEYOND if choice.get("cols") != 1],
)
TOKENS = "x.rows"
IMPOSSIBLE = PADDED_GROUPS
