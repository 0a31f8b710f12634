"""The calls of place_token_groups."""

from __future__ import annotations

from typing import Any

from mxspec.cases.common import movers
from mxspec.cases.common.bytes import made
from mxspec.cases.common.groups import offsets
from mxspec.cases.common.movers import ROWS, STARTS, starts, starts_fit
from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.quantizers import fits
from mxspec.cases.common.space import Space
from mxspec.cases.common.tensors import small_enough


def _possible(choice: Choice) -> bool:
    few = small_enough(choice.get("num_rows", 1), choice.get("cols", 1))
    return few and fits(choice) and starts_fit(choice, choice.get("rows"))


def _make(choice: Choice) -> tuple[Any, ...]:
    tokens = choice["rows"]
    return made(choice), offsets(choice, tokens), starts(choice, tokens), choice["num_rows"]


# Rows of groups that reach past the result are dropped, so that its size is any.
DIMENSIONS = {**ROWS, "num_rows": ROWS["rows"], **STARTS}
ALSO: list[Choice] = [
    {"rows": 384, "groups": "one", "rest": False},
    {"groups": "all to one", "rows": 48, "check_offs": True},
]
ALSO += [{"num_rows": 1, "rows": 48, "strides": "row-major"}, {"rows": 48, "order": "mixed", "begins": "at 0"}]
SPACE = Space(DIMENSIONS, _make, {"check_offs": (False, True)}, _possible, ALSO)
IMPOSSIBLE = movers.IMPOSSIBLE
MOVED = True
