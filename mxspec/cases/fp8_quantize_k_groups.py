"""The calls of fp8_quantize_k_groups."""

from __future__ import annotations

from torch import Tensor

from mxspec.cases.common.groups import ARRANGED, GROUPS, PLAIN_GROUPS, groups_fit, offsets, padded_fits
from mxspec.cases.common.impossible import PADDED_GROUPS
from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.quantizers import (
    LARGE_BOTH_WAYS,
    MATRIX,
    ONE_COLUMN_APART,
    PLAIN,
    REPEATED,
    fits,
    made,
    shape_of,
)
from mxspec.cases.common.space import Space
from mxspec.reference._fp8_numerics import SCALE_FORMATS


def _make(choice: Choice) -> tuple[Tensor, Tensor]:
    return made(choice, shape_of(choice), across=True), offsets(choice, choice["rows"])


def _possible(choice: Choice) -> bool:
    return fits(choice) and groups_fit(choice, choice.get("rows")) and padded_fits(choice, "rows", "cols", 128)


OPTIONS = {"scale_format": SCALE_FORMATS, "eps": (1e-12, 1e-4), "check_offs": (False, True)}
BEYOND: list[Choice] = [
    *LARGE_BOTH_WAYS,
    ONE_COLUMN_APART,
    {**PLAIN, "rows": 256, "cols": 288, "groups": "three hundred"},
]
SPACE = Space(
    {"rows": MATRIX["rows"], "cols": MATRIX["cols"], **GROUPS, **MATRIX},
    _make,
    OPTIONS,
    _possible,
    [*REPEATED, *ARRANGED],
    beyond=[{**PLAIN_GROUPS, **choice} for choice in BEYOND],
)
TOKENS = "x.rows"
ACROSS = True
IMPOSSIBLE = (
    (r"x\.rows = 1 \| x\.(?:saturating block somewhere|block of zeros)", "no 32 elements in a run"),
    *PADDED_GROUPS,
)
