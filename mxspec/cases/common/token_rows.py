"""The rows of tokens for the ops that pad, unpad and place token groups."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mxspec.cases.common.bytes import MATRIX as BYTES
from mxspec.cases.common.groups import GROUPS, in_groups, in_groups_of_three, laid_vector, sizes_of
from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.quantizers import LARGE_BOTH_WAYS, ONE_COLUMN_APART
from mxspec.cases.common.token_groups import DTYPES

# The dimensions that limit the others most come first.
SIZES = {name: BYTES[name] for name in ("rows", "cols")}
MATRIX: dict[str, Any] = {**SIZES, **GROUPS, **BYTES, "dtype": DTYPES, "negated": (False, True)}
# The places of the groups among the padded rows.
PLACES: dict[str, Any] = {
    "order": ("rising", "turned", "turned but the first", "with gaps"),
    "start": ("dense", "apart"),
    "start begin": ("at 0", "later"),
}
# Sizes and strides that no pair of the values above shows.
BEYOND: list[Choice] = [
    {"order": "rising", "start": "dense", "start begin": "at 0", **choice, "dtype": DTYPES[0]}
    for choice in in_groups_of_three(*LARGE_BOTH_WAYS, ONE_COLUMN_APART)
]


def may_be_negated(choice: Choice) -> bool:
    floats = (torch.bfloat16, torch.float32)
    return not choice.get("negated") or choice.get("dtype", floats[0]) in floats


def places(choice: Choice, tokens: int, alignment: int) -> tuple[Tensor, int]:
    """The `start` of a choice, with ranges that do not overlap, and the number of rows that hold them all."""
    sizes = sizes_of(choice["groups"], in_groups(choice, tokens))
    turned, order = choice["order"].startswith("turned"), list(range(len(sizes)))
    if turned:
        order = order[:0:-1] + order[:1] if choice["order"] == "turned" else order[:1] + order[:0:-1]
    start, row = [0] * len(sizes), 7 if choice["order"] == "with gaps" else 0
    for group in order:
        start[group] = row
        # Empty groups take a row if the order is turned, so that they have an order too.
        row += max(-(-sizes[group] // alignment) * alignment, int(turned))
    v = torch.tensor(start, dtype=torch.int32)
    return laid_vector(v, choice["start"], choice["start begin"]), row


def places_fit(choice: Choice) -> bool:
    """A single start has no stride, and an empty start has no place."""
    single = choice.get("groups") in ("no group", "one")
    if single and (choice.get("start") == "apart" or choice.get("order", "rising").startswith("turned")):
        return False
    return choice.get("groups") != "no group" or (
        choice.get("start begin", "at 0") == "at 0" and choice.get("order", "rising") == "rising"
    )


IMPOSSIBLE = (
    (
        r"\w+\.dtype (?:bool|float8_e4m3fn|int16|int32|uint8) \| \w+\.sign .*",
        "only floats have negated views: such a view reads a part of complex numbers",
    ),
    (r"offs\.groups = 0 \| start\..*", "there is no group"),
    (r"offs\.groups = 1 \| start\.(?:strides|order mixed).*", "there is one group"),
)
