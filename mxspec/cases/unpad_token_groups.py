"""The calls of unpad_token_groups."""

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
    few = small_enough(choice.get("num_tokens", 1), choice.get("cols", 1))
    return few and fits(choice) and starts_fit(choice, choice.get("num_tokens"))


def _make(choice: Choice) -> tuple[Any, ...]:
    tokens = choice["num_tokens"]
    return made(choice), offsets(choice, tokens), starts(choice, tokens), tokens


# Tokens whose place lies outside the padded rows are zeros, so that their number is any.
DIMENSIONS = {"num_tokens": ROWS["rows"], **ROWS, **STARTS}
ALSO: list[Choice] = [
    {"num_tokens": 384, "groups": "one", "rest": False},
    {"num_tokens": 384, "groups": "one offset repeated", "rest": False, "start": "one repeated"},
    {"num_tokens": 1, "groups": "one offset repeated", "rest": False, "start": "one repeated"},
]
SPACE = Space(DIMENSIONS, _make, {"check_offs": (False, True)}, _possible, ALSO)
IMPOSSIBLE = movers.IMPOSSIBLE
MOVED = True


def tokens(args: tuple[Any, ...]) -> int:
    return args[3]
