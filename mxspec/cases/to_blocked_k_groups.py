"""The calls of to_blocked_k_groups."""

from __future__ import annotations

from torch import Tensor

from mxspec.cases.common.bytes import MATRIX, made
from mxspec.cases.common.groups import ARRANGED, GROUPS, PLAIN_GROUPS, groups_fit, offsets
from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.quantizers import LARGE_BOTH_WAYS, fits
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
    beyond=[{**PLAIN_GROUPS, **choice} for choice in LARGE_BOTH_WAYS],
)
MOVES_BYTES = True
TOKENS = "scale.cols"
