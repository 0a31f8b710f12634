"""The calls of mx_quantize_groups."""

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
    axis_of,
    fits,
    made,
    shape_of,
)
from mxspec.cases.common.space import Space, given
from mxspec.reference._numerics import SCALINGS
from mxspec.reference.mx_quantize import SCALE_LAYOUTS
from mxspec.reference.mx_quantize_groups import ELEM_CHOICES


def _possible(choice: Choice) -> bool:
    pad_to = given(choice, "pad_to", 128) or 128
    arranged = groups_fit(choice, choice.get("rows")) and padded_fits(choice, "rows", "cols", pad_to)
    return arranged and fits(choice, 1, 32 if axis_of(choice) == -1 else 1)


def _make(choice: Choice) -> tuple[Tensor, Tensor]:
    return made(choice, shape_of(choice), axis_of(choice) == -2), offsets(choice, choice["rows"])


OPTIONS = {
    "axis": (-1, -2),
    "pad_to": (128, 384),
    "elem_dtype": ELEM_CHOICES,
    "scaling": SCALINGS,
    "scale_layout": SCALE_LAYOUTS,
    "check_offs": (False, True),
}
BEYOND: list[Choice] = [
    *LARGE_BOTH_WAYS,
    {**ONE_COLUMN_APART, "axis": -2},
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
IMPOSSIBLE = (
    (r"axis (?:= -1|not given) \| x\.cols (?:= 1|odd)", "K is a multiple of 32"),
    *PADDED_GROUPS,
)
