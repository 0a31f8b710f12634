"""The calls of mx_quantize_rowcol."""

from __future__ import annotations

from torch import Tensor

from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.quantizers import LARGE_BOTH_WAYS, PAST_A_GRID, REPEATED, STACK, fits, made, shape_of
from mxspec.cases.common.space import Space
from mxspec.reference._numerics import SCALINGS
from mxspec.reference.mx_quantize import ELEM_CHOICES, SCALE_LAYOUTS


def _make(choice: Choice) -> tuple[Tensor]:
    return (made(choice, shape_of(choice)),)


SIZES = (0, 32, 96, 256, 1056, 4128)
OPTIONS = {"elem_dtype": ELEM_CHOICES, "scaling": SCALINGS, "scale_layout": SCALE_LAYOUTS}
SPACE = Space(
    {**STACK, "rows": SIZES, "cols": SIZES},
    _make,
    OPTIONS,
    lambda choice: fits(choice, 32, 32),
    REPEATED[:2],
    beyond=[*PAST_A_GRID, *LARGE_BOTH_WAYS],
)
