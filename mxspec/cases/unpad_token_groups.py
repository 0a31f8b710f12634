"""The calls of unpad_token_groups."""

from __future__ import annotations

from typing import Any

from mxspec.cases.common import token_rows
from mxspec.cases.common.bytes import made
from mxspec.cases.common.groups import ARRANGED, GROUPS, groups_fit, offsets, padded_fits
from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.quantizers import fits
from mxspec.cases.common.space import Space
from mxspec.cases.common.tensors import STRIDES
from mxspec.cases.common.token_rows import BEYOND, MATRIX, PLACES, may_be_negated, places, places_fit


def _possible(choice: Choice) -> bool:
    arranged = groups_fit(choice, choice.get("tokens")) and places_fit(choice)
    return arranged and may_be_negated(choice) and padded_fits(choice, "tokens", "cols", 32) and fits(choice)


def _make(choice: Choice) -> tuple[Any, ...]:
    """Of padded there may be fewer rows than the groups take, or more."""
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
