"""The calls of pad_token_groups."""

from __future__ import annotations

from typing import Any

from mxspec.cases.common import token_rows
from mxspec.cases.common.bytes import made
from mxspec.cases.common.groups import ARRANGED, groups_fit, offsets, padded_fits
from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.quantizers import fits
from mxspec.cases.common.space import Space
from mxspec.cases.common.token_rows import BEYOND, MATRIX, may_be_negated

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
