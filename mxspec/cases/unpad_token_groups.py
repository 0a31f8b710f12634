"""The cases of unpad_token_groups: calls written by hand, calls worth timing, and the dimensions of a call."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mxspec.cases.common import token_rows
from mxspec.cases.common.bytes import made
from mxspec.cases.common.groups import ARRANGED, GROUPS, groups_fit, offsets, padded_fits
from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.quantizers import fits
from mxspec.cases.common.space import Space
from mxspec.cases.common.tensors import STRIDES
from mxspec.cases.common.token_groups import DTYPES, far_apart, grouped, offs_of, random_offs, start_of
from mxspec.cases.common.token_rows import BEYOND, MATRIX, PLACES, may_be_negated, places, places_fit
from mxspec.reference.common.groups import bounds, padded_rows
from mxspec.spec import Case, Shapes, random_bits, random_normal, these


def cases() -> Iterator[Case]:
    def args(sizes, M, K, alignment=32, dtype=torch.bfloat16):
        rows = padded_rows(M, len(sizes), alignment)
        bits = random_bits(rows, K, dtype=torch.uint8 if dtype == torch.bool else dtype)
        return bits > 127 if dtype == torch.bool else bits, offs_of(sizes), start_of(sizes, alignment), M

    for name, sizes, M, K, flags in grouped():
        alignment = 32 if len(sizes) < 300 else 8  # with more groups, an alignment of 32 would make most rows padding
        yield Case(name, partial(args, sizes, M, K, alignment), flags=flags)
    for alignment in (1, 3, 128):
        yield Case(f"alignment {alignment}", partial(args, [7, 0, 33, 24], 70, 256, alignment))
    for dtype in DTYPES:
        yield Case(f"{str(dtype)[6:]}", partial(args, [70, 0, 9], 80, 512, dtype=dtype))
    for K in (1, 40, 1100):
        yield Case(f"K = {K}", partial(args, [5, 40], 45, K), flags={"edge"})
    padded, offs, start, M = args([5, 0, 40], 50, 256)
    yield Case("padded is too short", these(padded[:60], offs, start, M), flags={"edge"})
    yield Case("a gap before the first group", these(padded, offs, start + 3, M), flags={"edge"})
    # The last group comes first in padded, and the empty group begins at the same row as group 0.
    turned = torch.tensor([45, 45, 0], dtype=torch.int32)
    yield Case("groups in another order", these(padded, offs, turned, M))
    yield Case("groups that share rows", these(padded, offs, start // 8, M), flags={"edge"})
    yield Case("no columns", these(padded[:, :0], offs, start, M), flags={"edge"})
    yield Case("no tokens asked for", these(padded, offs * 0, start * 0, 0), flags={"edge"})
    yield Case("transposed input", lambda: (random_normal(256, padded.shape[0]).mT, offs, start, M))
    yield Case("every second start", these(padded, offs, start.repeat_interleave(2)[::2], M), flags={"edge"})
    yield Case(
        "rows far apart", lambda: (far_apart(200, 64), offs_of([70, 60]), start_of([70, 60], 128), 130), flags={"edge"}
    )
    yield Case("checked", these(padded, offs, start, M), {"check_offs": True})

    def refused(name, error, match, padded=padded, offs=offs, start=start, M=M, **kwargs):
        return Case(name, these(padded, offs, start, M), kwargs, raises=error, match=match)

    yield refused("float64", TypeError, "padded has dtype torch.float64; needs real", padded.double())
    yield refused("1-D", ValueError, "2-D", padded[0])
    yield refused("int64 offs", TypeError, "torch.int64", offs=offs.long())
    yield refused("int64 start", TypeError, "torch.int64", start=start.long())
    yield refused("one start too few", ValueError, "start has shape (2,); needs (3,) as offs has", start=start[:2])
    yield refused("offs elsewhere", ValueError, "one device", offs=offs.to("meta"))
    yield refused("-1 tokens", ValueError, "num_tokens = -1", M=-1)
    yield refused("too many tokens", ValueError, "fewer than 2^31", M=2**31)
    yield refused("offs past the tokens", ValueError, "offs[-1] = 45 is past num_tokens = 44", M=44, check_offs=True)


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    def args(M: int, K: int, G: int, alignment: int) -> tuple[Tensor, Tensor, Tensor, int]:
        offs = random_offs(M, G)
        start = bounds(offs, alignment)[0]
        return torch.randn(padded_rows(M, G, alignment), K, dtype=torch.bfloat16), offs, start, M

    for M, K, G in shapes.padding:
        if G in (8, 256):
            yield Case(f"{M}x{K}, G {G}, 32", partial(args, M, K, G, 32))


def _possible(choice: Choice) -> bool:
    arranged = groups_fit(choice, choice.get("tokens")) and places_fit(choice)
    return arranged and may_be_negated(choice) and padded_fits(choice, "tokens", "cols", 32) and fits(choice)


def _make(choice: Choice) -> tuple[Any, ...]:
    """The arguments of a choice; padded may have fewer rows than the groups take, or more."""
    start, _ = places(choice, choice["tokens"], 32)
    return made(choice), offsets(choice, choice["tokens"]), start, choice["tokens"]


DIMENSIONS = {"tokens": (0, 1, 161, 256, 1056, 4128), **token_rows.SIZES, **GROUPS, **PLACES, **MATRIX}
ALSO = [{"tokens" if name == "rows" else name: value for name, value in part.items()} for part in ARRANGED]
ALSO += [{"tokens": 0, "rows": 256, "cols": 256, "strides": strides} for strides in STRIDES[1:]]
WIDE = [*BEYOND, {**BEYOND[1], "groups": "one offset repeated"}]
SPACE = Space(
    DIMENSIONS,
    _make,
    {"check_offs": (False, True)},
    _possible,
    ALSO,
    beyond=[{"tokens": 256, **choice} for choice in WIDE],
)
MOVES_BYTES = True
TOKENS = "num_tokens"
IMPOSSIBLE = token_rows.IMPOSSIBLE
