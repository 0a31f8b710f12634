"""The calls of to_blocked_m_groups."""

from __future__ import annotations

from torch import Tensor

from mxspec.cases.common.bytes import MATRIX, made
from mxspec.cases.common.groups import ARRANGED, GROUPS, groups_fit, offsets, padded_fits
from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.quantizers import fits
from mxspec.cases.common.space import Space


def _make(choice: Choice) -> tuple[Tensor, Tensor]:
    return made(choice), offsets(choice, choice["rows"])


def _possible(choice: Choice) -> bool:
    return fits(choice) and groups_fit(choice, choice.get("rows")) and padded_fits(choice, "rows", "cols", 128)


SPACE = Space(
    {"rows": MATRIX["rows"], "cols": MATRIX["cols"], **GROUPS, **MATRIX},
    _make,
    {"check_offs": (False, True)},
    _possible,
    ARRANGED,
)
MOVES_BYTES = True
