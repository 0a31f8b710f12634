"""The cases of pad_token_groups: calls written by hand, calls worth timing, and the dimensions of a call."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mxspec.cases.common import token_rows
from mxspec.cases.common.bytes import made
from mxspec.cases.common.groups import ARRANGED, groups_fit, offsets, padded_fits
from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.quantizers import fits
from mxspec.cases.common.space import Space
from mxspec.cases.common.token_groups import DTYPES, far_apart, grouped, offs_of, random_offs
from mxspec.cases.common.token_rows import BEYOND, MATRIX, may_be_negated
from mxspec.spec import Case, Shapes, random_bits, random_normal, these


def cases() -> Iterator[Case]:
    def args(sizes, M, K, alignment, dtype=torch.bfloat16):
        x = random_bits(M, K, dtype=torch.uint8) > 127 if dtype == torch.bool else random_bits(M, K, dtype=dtype)
        return x, offs_of(sizes), alignment

    for name, sizes, M, K, flags in grouped():
        alignment = 32 if len(sizes) < 300 else 4  # with more groups, an alignment of 32 would make most rows padding
        if len(sizes) < 1000:  # more groups would take minutes in an interpreter; a test on a GPU has them
            yield Case(f"{name}, {alignment}", partial(args, sizes, M, K, alignment), flags=flags)
        if sum(sizes) and len(sizes) < 300:
            yield Case(f"{name}, 128", partial(args, sizes, M, K, 128), flags=flags)
    for alignment in (1, 2, 3, 16, 24):
        yield Case(f"alignment {alignment}", partial(args, [7, 0, 33, 24], 70, 1024, alignment))
    yield Case("alignment 200", partial(args, [7, 0, 33], 40, 512, 200))
    for dtype in DTYPES:
        yield Case(f"{str(dtype)[6:]}", partial(args, [70, 0, 9], 80, 512, 16, dtype=dtype))
    for K in (1, 40, 1100):
        yield Case(f"K = {K}", partial(args, [5, 40], 45, K, 32), flags={"edge"})
    x, offs, alignment = args([5, 0, 40], 50, 256, 32)
    yield Case("no columns", these(x[:, :0], offs, 32), flags={"edge"})
    yield Case("transposed input", lambda: (random_normal(256, 50).mT, offs, 32))
    yield Case("every second row", lambda: (random_normal(100, 256)[::2], offs, 32))
    yield Case("every second offset", these(x, offs.repeat_interleave(2)[::2], 32), flags={"edge"})
    yield Case("checked", these(x, offs, 32), {"check_offs": True})
    yield Case("rows far apart", lambda: (far_apart(140, 64), offs_of([100, 39]), 32), flags={"edge"})
    large = random_bits(1, 2048, dtype=torch.uint8).expand(2**20 + 256, 2048)
    yield Case("2^31 elements and more", these(large, offs_of([2**20 + 256]), 128), flags={"large"})

    def refused(name, error, match, x=x, offs=offs, alignment=alignment, **kwargs):
        return Case(name, these(x, offs, alignment), kwargs, raises=error, match=match)

    i32 = partial(torch.tensor, dtype=torch.int32)
    yield refused("float64", TypeError, "x has dtype torch.float64; needs real numbers of 1, 2 or 4 bytes", x.double())
    yield refused("complex", TypeError, "torch.complex64", x=torch.zeros(50, 4, dtype=torch.complex64))
    yield refused("a list", TypeError, "x is a list", x=[1.0])
    yield refused("sparse", ValueError, "torch.sparse_coo", x=x.float().to_sparse())
    yield refused("3-D", ValueError, "2-D", x=x[None])
    yield refused("int64 offs", TypeError, "offs has dtype torch.int64; needs torch.int32", offs=offs.long())
    yield refused("2-D offs", ValueError, "offs has shape (1, 3); needs a 1-D", offs=offs[None])
    yield refused("offs elsewhere", ValueError, "and offs on meta; needs one device", offs=offs.to("meta"))
    yield refused("alignment 0", ValueError, "alignment = 0; needs at least 1", alignment=0)
    yield refused("alignment -32", ValueError, "alignment = -32", alignment=-32)
    yield refused("alignment 32.0", TypeError, "alignment = 32.0; needs an integer", alignment=32.0)
    yield refused("too many rows", ValueError, "the padded rows of 3 groups", alignment=2**30)
    yield refused("offs that decrease", ValueError, "offs[1] = 3 after 5", offs=i32([5, 3, 9]), check_offs=True)
    yield refused("a negative end", ValueError, "offs[0] = -1 after 0", offs=i32([-1, 3]), check_offs=True)
    yield refused("offs past M", ValueError, "offs[-1] = 51 is past M = 50", offs=i32([5, 51]), check_offs=True)


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    def args(M: int, K: int, G: int, alignment: int) -> tuple[Tensor, Tensor, int]:
        return torch.randn(M, K, dtype=torch.bfloat16), random_offs(M, G), alignment

    for M, K, G in shapes.padding:
        for alignment in (32, 128) if G == 8 and K >= 2048 else (32,):
            yield Case(f"{M}x{K}, G {G}, {alignment}", partial(args, M, K, G, alignment))


ALIGNMENTS = (1, 3, 16, 32, 128, 200)


def _possible(choice: Choice) -> bool:
    padded = padded_fits(choice, "rows", "cols", choice.get("alignment", 1))
    return padded and may_be_negated(choice) and fits(choice) and groups_fit(choice, choice.get("rows"))


def _make(choice: Choice) -> tuple[Any, ...]:
    return made(choice), offsets(choice, choice["rows"]), choice["alignment"]


DIMENSIONS = {"alignment": ALIGNMENTS, **MATRIX}
SPACE = Space(DIMENSIONS, _make, {"check_offs": (False, True)}, _possible, ARRANGED, beyond=BEYOND)
TOKENS = "x.rows"
MOVES_BYTES = True
IMPOSSIBLE = token_rows.IMPOSSIBLE[:1]
