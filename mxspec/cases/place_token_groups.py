"""The cases of place_token_groups: calls written by hand, calls worth timing, and the dimensions of a call."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor

from mxspec.cases.common import token_rows
from mxspec.cases.common.bytes import made
from mxspec.cases.common.groups import ARRANGED, GROUPS, groups_fit, offsets, padded_fits
from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.quantizers import fits
from mxspec.cases.common.space import Space
from mxspec.cases.common.token_groups import DTYPES, far_apart, grouped, offs_of, random_offs, start_of
from mxspec.cases.common.token_rows import BEYOND, MATRIX, PLACES, may_be_negated, places, places_fit
from mxspec.reference.common.groups import bounds, padded_rows
from mxspec.spec import Case, Shapes, random_bits, random_normal, these


def cases() -> Iterator[Case]:
    def args(sizes, M, K, alignment=32, dtype=torch.bfloat16):
        x = random_bits(M, K, dtype=torch.uint8) > 127 if dtype == torch.bool else random_bits(M, K, dtype=dtype)
        return x, offs_of(sizes), start_of(sizes, alignment), padded_rows(M, len(sizes), alignment)

    def shuffled(G):
        sizes = Random(G).choices((0, 1, 2, 5), k=G)
        order = Random(G).sample(range(G), G)  # the order of the groups in the result
        begins = dict(zip(order, start_of([sizes[g] for g in order], 4).tolist(), strict=True))
        start = torch.tensor([begins[g] for g in range(G)], dtype=torch.int32)
        return random_normal(sum(sizes), 16), offs_of(sizes), start, padded_rows(sum(sizes), G, 4)

    for name, sizes, M, K, flags in grouped():
        alignment = 32 if len(sizes) < 300 else 8  # with more groups, an alignment of 32 would make most rows padding
        if len(sizes) < 1000:  # more groups would take a minute in an interpreter; the cases of unpad have them
            yield Case(name, partial(args, sizes, M, K, alignment), flags=flags)
    for dtype in DTYPES:
        yield Case(f"{str(dtype)[6:]}", partial(args, [70, 0, 9], 80, 512, dtype=dtype))
    for K in (1, 40, 1100):
        yield Case(f"K = {K}", partial(args, [5, 40], 45, K), flags={"edge"})
    x, offs, start, rows = args([5, 0, 40], 50, 256)
    yield Case("a gap before the first group", these(x, offs, start + 3, rows + 8), flags={"edge"})
    # The last group comes first in the result, and the empty group begins at the same row as group 0.
    turned = torch.tensor([45, 45, 0], dtype=torch.int32)
    yield Case("groups in another order", these(x, offs, turned, rows))
    yield Case("300 groups in another order", partial(shuffled, 300), flags={"edge"})
    yield Case("groups that share rows", these(x, offs, start // 8, rows), flags={"edge"})
    yield Case("groups before the first row", these(x, offs, start - 3, rows), flags={"edge"})
    yield Case("no room for the last rows", these(x, offs, start, 60), flags={"edge"})
    yield Case("no rows", these(x, offs, start, 0), flags={"edge"})
    yield Case("no columns", these(x[:, :0], offs, start, rows), flags={"edge"})
    yield Case("every second column", these(random_normal(50, 512)[:, ::2], offs, start, rows))
    yield Case("every second offset", these(x, offs.repeat_interleave(2)[::2], start, rows), flags={"edge"})
    yield Case(
        "rows far apart", lambda: (far_apart(140, 64), offs_of([100, 39]), start_of([100, 39], 32), 150), flags={"edge"}
    )
    yield Case("checked", these(x, offs, start, rows), {"check_offs": True})

    def refused(name, error, match, x=x, offs=offs, start=start, rows=rows, **kwargs):
        return Case(name, these(x, offs, start, rows), kwargs, raises=error, match=match)

    yield refused("float64", TypeError, "torch.float64; needs real numbers of 1, 2 or 4 bytes", x.double())
    yield refused("1-D", ValueError, "2-D", x[0])
    yield refused("int64 offs", TypeError, "torch.int64", offs=offs.long())
    yield refused("int64 start", TypeError, "torch.int64", start=start.long())
    yield refused("2-D offs", ValueError, "1-D", offs=offs[None])
    yield refused("one start too few", ValueError, "start has shape (2,); needs (3,) as offs has", start=start[:2])
    yield refused("start elsewhere", ValueError, "one device", start=start.to("meta"))
    yield refused("-1 rows", ValueError, "num_rows = -1", rows=-1)
    yield refused("too many rows", ValueError, "fewer than 2^31", rows=2**31)
    yield refused(
        "offs past M", ValueError, "offs[-1] = 99 is past M = 50", offs=torch.full_like(offs, 99), check_offs=True
    )


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    def args(M: int, K: int, G: int) -> tuple[Tensor, Tensor, Tensor, int]:
        offs = random_offs(M, G)
        return torch.randn(M, K, dtype=torch.bfloat16), offs, bounds(offs, 32)[0], padded_rows(M, G, 32)

    for M, K, G in shapes.padding:
        if G in (8, 256):
            yield Case(f"{M}x{K}, G {G}", partial(args, M, K, G))


def _possible(choice: Choice) -> bool:
    arranged = groups_fit(choice, choice.get("rows")) and places_fit(choice)
    return arranged and may_be_negated(choice) and padded_fits(choice, "rows", "cols", 32) and fits(choice)


def _make(choice: Choice) -> tuple[Any, ...]:
    start, needed = places(choice, choice["rows"], 32)
    room = {"none": 0, "too little": needed // 2, "just enough": needed, "more": needed + 45}[choice["room"]]
    return made(choice), offsets(choice, choice["rows"]), start, room


DIMENSIONS = {"room": ("none", "too little", "just enough", "more"), **token_rows.SIZES, **GROUPS, **PLACES, **MATRIX}
SPACE = Space(
    DIMENSIONS,
    _make,
    {"check_offs": (False, True)},
    _possible,
    [
        *ARRANGED,
        {"check_offs": False, "begins": "at 0", "strides": "row-major"},
        {"rows": 4128, "strides": "one column repeated"},
    ],
    beyond=[{"room": "just enough", **choice} for choice in (*BEYOND, {**BEYOND[1], "groups": "one offset repeated"})],
)
TOKENS = "x.rows"
MOVES_BYTES = True
IMPOSSIBLE = token_rows.IMPOSSIBLE[:3]
