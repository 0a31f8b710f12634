"""The calls of fp8_quantize_1x128."""

from __future__ import annotations

from torch import Tensor

from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.quantizers import (
    MATRIX,
    ONE_COLUMN_APART,
    PAST_A_GRID,
    PLAIN,
    REPEATED,
    axis_of,
    fits,
    made,
    shape_of,
)
from mxspec.cases.common.space import Space
from mxspec.reference._fp8_numerics import SCALE_FORMATS
from mxspec.reference.fp8_quantize_1x128 import SCALE_MAJORS


def _possible(choice: Choice) -> bool:
    axis = axis_of(choice)
    return fits(choice, 128 if axis == -2 else 1, 128 if axis == -1 else 1)


def _make(choice: Choice) -> tuple[Tensor]:
    return (made(choice, shape_of(choice), axis_of(choice) == -2),)


SIZES = (0, 1, 33, 128, 144, 1152, 4224)
REPEATED_HERE = [{name: 1152 if value == 1056 else value for name, value in part.items()} for part in REPEATED]
OPTIONS = {"axis": (-1, -2), "scale_format": SCALE_FORMATS, "scale_major": SCALE_MAJORS, "eps": (1e-12, 1e-4)}
BEYOND = [{**PAST_A_GRID[0], "cols": 128}, {**PAST_A_GRID[1], "rows": 128, "axis": -2}]
BEYOND += [{**PLAIN, "rows": rows, "cols": cols} for rows, cols in ((4224, 384), (384, 4224))]
BEYOND.append({**ONE_COLUMN_APART, "axis": -2})
SPACE = Space({**MATRIX, "rows": SIZES, "cols": SIZES}, _make, OPTIONS, _possible, REPEATED_HERE, beyond=BEYOND)
IMPOSSIBLE = (
    (r"axis (?:= -1|not given) \| x\.cols (?:= 1|odd|a multiple of 16)", "K is a multiple of 128"),
    (r"axis = -2 \| x\.rows (?:= 1|odd|a multiple of 16)", "M is a multiple of 128"),
    (
        r"x\.cols (?:= 1|odd|a multiple of 16) \| x\.rows (?:= 1|odd|a multiple of 16)",
        "one of them is a multiple of 128",
    ),
)
