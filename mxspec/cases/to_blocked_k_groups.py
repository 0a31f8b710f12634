"""The calls of to_blocked_k_groups."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mxspec.cases.common.bytes import MATRIX, made
from mxspec.cases.common.groups import ARRANGED, GROUPS, groups_fit, offsets
from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.quantizers import fits
from mxspec.cases.common.space import Space


def _make(choice: Choice) -> tuple[Tensor, Tensor]:
    return made(choice), offsets(choice, choice["cols"])


def _possible(choice: Choice) -> bool:
    return fits(choice) and groups_fit(choice, choice.get("cols"))


ALSO = [{"cols" if name == "rows" else name: value for name, value in part.items()} for part in ARRANGED]
ALSO.append({"cols": 1, "groups": "forty", "offs": "dense"})
SPACE = Space(
    {"rows": MATRIX["rows"], "cols": MATRIX["cols"], **GROUPS, **MATRIX},
    _make,
    {"check_offs": (False, True)},
    _possible,
    ALSO,
)


def tokens(args: tuple[Any, ...]) -> int:
    return args[0].shape[1]


MOVES_BYTES = True
