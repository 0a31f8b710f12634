"""The cases of fp8_quantize_k_groups: calls written by hand, calls worth timing, and the dimensions of a call."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from mxspec.cases.common.groups import ARRANGED, BEYOND, GROUPS, groups_fit, offsets, padded_fits
from mxspec.cases.common.impossible import PADDED_GROUPS
from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.quantizers import (
    MATRIX,
    REPEATED,
    fits,
    made,
    shape_of,
)
from mxspec.cases.common.space import Space
from mxspec.cases.common.token_groups import far_apart, grouped, offs_of, random_offs
from mxspec.reference.common import checks
from mxspec.reference.common.fp8_numerics import SCALE_FORMATS
from mxspec.spec import Case, Shapes, random_bits, random_normal, these


def cases() -> Iterator[Case]:
    def args(sizes, M, D, dtype=torch.bfloat16):
        return random_normal(M, D, dtype=dtype), offs_of(sizes)

    for name, sizes, M, _, flags in grouped():
        if len(sizes) < 300:  # more groups would take minutes in an interpreter, because of their padding
            yield Case(name, partial(args, sizes, M, 96), flags=flags)
    for dtype in checks.FLOAT_DTYPES:
        for scale_format in SCALE_FORMATS:
            bits = partial(lambda dtype: (random_bits(200, 64, dtype=dtype), offs_of([140, 50])), dtype)
            name = f"random bit patterns, {str(dtype)[6:]}, {scale_format}"
            yield Case(name, bits, {"scale_format": scale_format}, flags={"edge"})
            name = f"{str(dtype)[6:]}, {scale_format}"
            yield Case(name, partial(args, [130, 0, 7], 140, 128, dtype), {"scale_format": scale_format})
    yield Case("ragged against every tile", partial(args, [129, 300, 128], 560, 176))
    yield Case("odd D", partial(args, [130, 9], 139, 333), flags={"edge"})
    yield Case("one column", partial(args, [130, 9], 139, 1), flags={"edge"})
    yield Case("no columns", partial(args, [130, 9], 139, 0), flags={"edge"})
    yield Case("transposed input", lambda: (random_normal(64, 210).mT, offs_of([130, 70])))
    yield Case("every second row", lambda: (random_normal(300, 64)[::2], offs_of([130, 9])))
    yield Case("every second column", lambda: (random_normal(150, 128)[:, ::2], offs_of([130, 9])))
    yield Case("rows far apart", lambda: (far_apart(140, 64), offs_of([100, 39])), flags={"edge"})
    yield Case("larger eps", lambda: (random_normal(150, 64) * 2**-30, offs_of([140, 10])), {"eps": 1e-4})
    yield Case("zeros", lambda: (-torch.zeros(150, 64), offs_of([140, 9])), flags={"edge"})
    yield Case("checked", partial(args, [30, 10], 41, 64), {"check_offs": True})
    large = these(random_normal(1, 2048).expand(2**20 + 256, 2048), offs_of([2**20 + 256]))
    yield Case("2^31 elements and more", large, flags={"large"})

    x, offs = args([5, 0, 40], 50, 64)

    def refused(name, error, match, x=x, offs=offs, **kwargs):
        return Case(name, these(x, offs), kwargs, raises=error, match=match)

    yield refused("float64", TypeError, "torch.float64", x.double())
    yield refused("3-D", ValueError, "2-D", x[None])
    yield refused("int64 offs", TypeError, "offs has dtype torch.int64; needs torch.int32", offs=offs.long())
    yield refused("2-D offs", ValueError, "offs has shape (1, 3); needs a 1-D", offs=offs[None])
    yield refused("offs elsewhere", ValueError, "one device", offs=offs.to("meta"))
    yield refused("unknown scale format", ValueError, "'ue8m0'", scale_format="ue8m0")
    yield refused("eps 0", ValueError, "eps = 0.0", eps=0.0)
    yield refused("offs that decrease", ValueError, "offs[1] = 5 after 45", offs=offs.flip(0), check_offs=True)
    yield refused("offs past M", ValueError, "offs[-1] = 51 is past M = 50", offs=offs + 6, check_offs=True)


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    def args(M: int, D: int) -> tuple[Tensor, Tensor]:
        return torch.randn(M, D, dtype=torch.bfloat16), random_offs(M, 8)

    for M, D in shapes.matrices:
        if M >= 1024 and M * D < 2**30:
            yield Case(f"{M}x{D}, G 8", partial(args, M, D))


def _make(choice: Choice) -> tuple[Tensor, Tensor]:
    return made(choice, shape_of(choice), across=True), offsets(choice, choice["rows"])


def _possible(choice: Choice) -> bool:
    return fits(choice) and groups_fit(choice, choice.get("rows")) and padded_fits(choice, "rows", "cols", 128)


OPTIONS = {"scale_format": SCALE_FORMATS, "eps": (1e-12, 1e-4), "check_offs": (False, True)}
SPACE = Space(
    {"rows": MATRIX["rows"], "cols": MATRIX["cols"], **GROUPS, **MATRIX},
    _make,
    OPTIONS,
    _possible,
    [*REPEATED, *ARRANGED],
    beyond=BEYOND,
)
TOKENS = "x.rows"
ACROSS = True
IMPOSSIBLE = (
    (r"x\.rows = 1 \| x\.(?:saturating block somewhere|block of zeros)", "32 elements along the tokens need 32 tokens"),
    *PADDED_GROUPS,
)
