"""The calls of place_token_groups."""

from __future__ import annotations

from typing import Any

from mxspec.cases.common import token_rows
from mxspec.cases.common.bytes import made
from mxspec.cases.common.groups import ARRANGED, GROUPS, groups_fit, offsets, padded_fits
from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.quantizers import fits
from mxspec.cases.common.space import Space
from mxspec.cases.common.token_rows import BEYOND, MATRIX, PLACES, may_be_negated, places, places_fit


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
