"""The calls of pad_token_groups."""

from __future__ import annotations

from typing import Any

from mxspec.cases.common.bytes import made
from mxspec.cases.common.groups import arranged_groups, groups_fit, offsets
from mxspec.cases.common.movers import ALIGNMENTS, ROWS
from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.quantizers import fits
from mxspec.cases.common.space import Space
from mxspec.cases.common.tensors import small_enough


def _possible(choice: Choice) -> bool:
    if {"groups", "alignment", "rows", "cols"} <= choice.keys():
        padded = choice["rows"] + (arranged_groups(choice) or 0) * choice["alignment"]
        if not small_enough(padded, choice["cols"]):
            return False
    return fits(choice) and groups_fit(choice, choice.get("rows"))


def _make(choice: Choice) -> tuple[Any, ...]:
    return made(choice), offsets(choice, choice["rows"]), choice["alignment"]


ALSO = [{"rows": 384, "groups": groups, "rest": False} for groups in ("one", "one offset repeated")]
ALSO.append({"rows": 1, "groups": "one offset repeated", "rest": False})
SPACE = Space({**ROWS, "alignment": ALIGNMENTS}, _make, {"check_offs": (False, True)}, _possible, ALSO)
MOVED = True
