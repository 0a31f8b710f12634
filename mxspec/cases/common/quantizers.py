"""The tensors that quantizers read."""

from __future__ import annotations

from torch import Tensor

from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.space import given
from mxspec.cases.common.tensors import (
    BEGINS,
    EXPERT_STRIDES,
    FLOATS,
    STRIDES,
    VALUES,
    float_values,
    laid,
    laid_negated,
    small_enough,
    strides_fit,
)

SIZES = (0, 1, 32, 161, 256, 1056, 4128)
EXPERTS = (None, 0, 1, 2, 9, 33, 257)
MATRIX = {
    "rows": SIZES,
    "cols": SIZES,
    "experts": (None,),
    "strides": STRIDES,
    "values": VALUES,
    "begins": BEGINS,
    "negated": (False, True),
    "dtype": FLOATS,
}
STACK = {**MATRIX, "experts": EXPERTS, "strides": (*STRIDES, *EXPERT_STRIDES)}
# A repeated row shows every special value only if it is long, and so does a repeated column.
REPEATED = [
    {"strides": "one row repeated", "values": "special", "cols": 1056},
    {"strides": "one column repeated", "values": "special", "rows": 1056},
    {"values": "special", "rows": 1, "cols": 1056},
    {"values": "special", "rows": 1056, "cols": 1},
]
# The second and third dimension of a CUDA grid hold at most 65535 programs.
PLAIN = {"experts": None, "strides": "row-major", "values": "finite", "begins": "at 0", "negated": False}
PAST_A_GRID = [
    {**PLAIN, "rows": 65600, "cols": 32},
    {**PLAIN, "rows": 32, "cols": 65600},
]
# More than 256 rows with more than 4096 columns, and the reverse; and a matrix of one column whose rows have gaps. An
# op with an axis takes the matrix of one column with axis -2.
LARGE_BOTH_WAYS = [{**PLAIN, "rows": 4128, "cols": 288}, {**PLAIN, "rows": 288, "cols": 4128}]
WHOLE_BOTH_WAYS = [{**PLAIN, "rows": 4224, "cols": 384}, {**PLAIN, "rows": 384, "cols": 4224}]  # multiples of 128
ONE_COLUMN_APART = {**PLAIN, "rows": 256, "cols": 1, "strides": "rows apart", "axis": -2}
EXPERTS_PAST_A_GRID = {**PLAIN, "rows": 1, "cols": 32, "experts": 65600}


def shape_of(choice: Choice) -> tuple[int, ...]:
    matrix = choice["rows"], choice["cols"]
    return matrix if choice.get("experts") is None else (choice["experts"], *matrix)


def fits(choice: Choice, rows: int = 1, cols: int = 1) -> bool:
    """Whether a tensor can have these sizes, strides and values. Its sizes must be multiples of `rows` and `cols`."""
    if choice.get("rows", 0) % rows or choice.get("cols", 0) % cols:
        return False
    told = [choice[name] for name in ("strides", "values") if name in choice]
    if "none" in told and (set(told) != {"none"} or choice.get("negated") or choice.get("begins", "at 0") != "at 0"):
        return False
    sizes = [choice[name] for name in ("rows", "cols", "experts") if choice.get(name) is not None]
    if not small_enough(*sizes):
        return False
    if 0 in sizes and (choice.get("negated") or (told and "none" not in told)):
        return False
    if choice.get("strides") in EXPERT_STRIDES and choice.get("experts", 2) is None:
        return False
    if not {"rows", "cols", "experts"} <= choice.keys():
        return True
    if told and ("none" in told) != (0 in sizes):
        return False
    return "strides" not in choice or strides_fit(choice["strides"], shape_of(choice))


def made(choice: Choice, shape: tuple[int, ...], across: bool = False) -> Tensor:
    """The tensor of a choice, which may be a negated view."""
    x = float_values(shape, choice["dtype"], choice["values"], across)
    arrange = laid_negated if choice["negated"] else laid
    return arrange(x, choice["strides"], choice["begins"])


def axis_of(choice: Choice) -> int | None:
    return given(choice, "axis", -1)
