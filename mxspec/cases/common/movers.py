"""Rows that are moved group by group: what they are, and where each group begins."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mxspec.cases.common.bytes import MATRIX
from mxspec.cases.common.groups import GROUPS, groups_fit, in_groups, laid_vector, sizes_of
from mxspec.cases.common.pairwise import Choice
from mxspec.reference._groups_cases import DTYPES

ALIGNMENTS = (1, 3, 16, 32, 128, 200)
ROWS: dict[str, Any] = {
    **MATRIX,
    "rows": (0, 1, 48, 384, 1041, 4128),
    "cols": (0, 1, 48, 384, 1041, 4128),
    "dtype": DTYPES,
    **GROUPS,
}
STARTS: dict[str, Any] = {
    "order": ("rising", "later", "mixed"),
    "alignment": (1, 16, 128),
    "start": ("dense", "apart", "one repeated"),
    "start begin": ("at 0", "later"),
}


def starts_fit(choice: Choice, tokens: int | None) -> bool:
    """Whether the groups can begin so: in order, after a gap, or with two of them exchanged."""
    groups, start = choice.get("groups"), choice.get("start")
    empty = groups in ("all empty", "zero repeated")
    if start == "one repeated" and not (groups is None or empty or groups == "one offset repeated"):
        return False  # groups that begin at one row share it
    if start == "apart" and groups in ("no group", "one"):
        return False
    if groups == "no group" and (choice.get("order", "rising") != "rising" or choice.get("start begin") == "later"):
        return False
    if choice.get("order") == "mixed" and (groups == "one" or start == "one repeated"):
        return False
    return groups_fit(choice, tokens)


def starts(choice: Choice, tokens: int) -> Tensor:
    """Where each group begins, as it lies in memory."""
    sizes, alignment = sizes_of(choice["groups"], in_groups(choice, tokens)), choice["alignment"]
    order = list(range(len(sizes)))
    if choice["order"] == "mixed":
        order = order[:1] + order[:0:-1] if len(order) > 2 and choice["alignment"] == 16 else order[::-1]
    row, begins = (5 if choice["order"] == "later" else 0), dict[int, int]()
    for group in order:
        begins[group] = row
        row += -(-sizes[group] // alignment) * alignment
        if choice["order"] == "mixed":
            row += 1  # or empty groups would all begin at one row
    found = torch.tensor([begins[group] for group in range(len(sizes))], dtype=torch.int32)
    if choice["start"] == "one repeated":
        return laid_vector(found[:1], "dense", choice["start begin"]).expand(len(found))
    return laid_vector(found, choice["start"], choice["start begin"])


IMPOSSIBLE = (
    (r"offs\.groups .* \| start\.groups .*", "one number, and two facts about one make no pair"),
    (r"(?:offs|start)\.groups = 0 \| (?:start|offs)\..*", "there is no group"),
    (r"(?:offs|start)\.groups = 1 \| start\.(?:order mixed|strides .*)", "there is one group"),
    (r"start\.groups = 1 \| offs\.(?:inner group|last group|strides|tokens all to one) ?.*", "there is one group"),
    (r"start\.strides one repeated \| start\.order mixed", "they exclude each other"),
    (r"start\.strides one repeated \| offs\.tokens spread", "groups that begin at one row share it"),
    (r"num_\w+ > 4096 \| \w+\.cols > (?:1024|4096)", "more than 2.2 million elements in the result"),
    (r"num_\w+ > 1024 \| \w+\.cols > 4096", "more than 2.2 million elements in the result"),
    (r"num_tokens = 0 \| offs\.(?:rest tokens|sizes|some group|tokens (?:all|spread)).*", "there are no tokens"),
    (r"num_tokens = 1 \| offs\.(?:sizes multiples of 128|tokens spread)", "there is one token"),
)
