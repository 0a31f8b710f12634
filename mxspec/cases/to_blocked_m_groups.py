"""The calls of to_blocked_m_groups."""

from __future__ import annotations

from torch import Tensor

from mxspec.cases.common.bytes import MATRIX, made
from mxspec.cases.common.groups import ARRANGED, GROUPS, PLAIN_GROUPS, groups_fit, offsets, padded_fits
from mxspec.cases.common.impossible import PADDED_GROUPS
from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.quantizers import LARGE_BOTH_WAYS, ONE_COLUMN_APART, PLAIN, fits
from mxspec.cases.common.space import Space


def _make(choice: Choice) -> tuple[Tensor, Tensor]:
    return made(choice), offsets(choice, choice["rows"])


def _possible(choice: Choice) -> bool:
    return fits(choice) and groups_fit(choice, choice.get("rows")) and padded_fits(choice, "rows", "cols", 128)


BEYOND: list[Choice] = [
    *LARGE_BOTH_WAYS,
    ONE_COLUMN_APART,
    {**PLAIN, "rows": 256, "cols": 288, "groups": "three hundred"},
]
SPACE = Space(
    {"rows": MATRIX["rows"], "cols": MATRIX["cols"], **GROUPS, **MATRIX},
    _make,
    {"check_offs": (False, True)},
    _possible,
    ARRANGED,
    beyond=[{**PLAIN_GROUPS, **choice} for choice in BEYOND],
)
TOKENS = "scale.rows"
MOVES_BYTES = True
IMPOSSIBLE = PADDED_GROUPS
