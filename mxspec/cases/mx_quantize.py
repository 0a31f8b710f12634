"""The calls of mx_quantize."""

from __future__ import annotations

from torch import Tensor

from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.quantizers import (
    EXPERTS_PAST_A_GRID,
    LARGE_BOTH_WAYS,
    ONE_COLUMN_APART,
    PAST_A_GRID,
    REPEATED,
    STACK,
    axis_of,
    fits,
    made,
    shape_of,
)
from mxspec.cases.common.space import Space
from mxspec.reference._numerics import SCALINGS
from mxspec.reference.mx_quantize import ELEM_CHOICES, SCALE_LAYOUTS


def _possible(choice: Choice) -> bool:
    axis = axis_of(choice)
    return fits(choice, 32 if axis == -2 else 1, 32 if axis == -1 else 1)


def _make(choice: Choice) -> tuple[Tensor]:
    return (made(choice, shape_of(choice), axis_of(choice) == -2),)


OPTIONS = {"axis": (-1, -2), "elem_dtype": ELEM_CHOICES, "scaling": SCALINGS, "scale_layout": SCALE_LAYOUTS}
SQUARE = [{"elem_dtype": elem, "rows": 256, "cols": 256, "strides": "row-major"} for elem in ELEM_CHOICES]
BEYOND = [*PAST_A_GRID, EXPERTS_PAST_A_GRID, *LARGE_BOTH_WAYS, {**ONE_COLUMN_APART, "axis": -2}]
SPACE = Space(STACK, _make, OPTIONS, _possible, [*REPEATED, *SQUARE], beyond=BEYOND)
IMPOSSIBLE = (
    (r"axis (?:= -1|not given) \| x\.cols (?:= 1|odd)", "K is a multiple of 32"),
    (r"axis = -2 \| x\.rows (?:= 1|odd)", "M is a multiple of 32"),
    (r"x\.cols (?:= 1|odd) \| x\.rows (?:= 1|odd)", "one of them is a multiple of 32"),
)
