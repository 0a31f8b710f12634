"""Cases of ops that take several matrices of one shape: dimensions, and the choices of each matrix."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.quantizers import LARGE_BOTH_WAYS, MATRIX, ONE_COLUMN_APART, PAST_A_GRID, REPEATED, fits
from mxspec.cases.common.quantizers import made as made_alone
from mxspec.cases.common.space import Space
from mxspec.cases.common.tensors import BEGINS, STRIDES, VALUES

_OWN = {"strides": STRIDES, "values": VALUES, "begins": BEGINS, "negated": (False, True)}
_OF_VALUES = r"(?:strides|begins|sign|values|[+-]?Inf|NaN|-0|subnormal|largest|negative|tie|saturating|block) ?.*"


def _of(name: str, choice: Choice) -> Choice:
    """The part of a choice that describes the matrix `name`, with the keys that describe the first matrix."""
    own = {key.removeprefix(f"{name} "): value for key, value in choice.items() if key.startswith(f"{name} ")}
    sizes: Choice = {key: choice[key] for key in ("rows", "cols") if key in choice}
    return {"experts": None, "negated": False, "dtype": torch.bfloat16, **sizes, **own}


def _possible(names: tuple[str, ...], choice: Choice) -> bool:
    return fits(choice) and all(fits(_of(name, choice)) for name in names)


def _made(names: tuple[str, ...], choice: Choice) -> tuple[Tensor, ...]:
    shape = choice["rows"], choice["cols"]
    return made_alone(choice, shape), *(made_alone(_of(name, choice), shape) for name in names)


def space(*names: str) -> Space:
    """The space of an op that takes a bfloat16 matrix, and more matrices, with these names, of the same shape."""
    of_others = {f"{name} {key}": values for name in names for key, values in _OWN.items()}
    plain = {f"{name} {key}": values[1] for name in names for key, values in _OWN.items()}
    plain |= {f"{name} begins": "at 0" for name in names} | {f"{name} negated": False for name in names}
    apart = {**ONE_COLUMN_APART, **{f"{name} strides": "rows apart" for name in names}}
    beyond = [{**plain, **choice} for choice in (*LARGE_BOTH_WAYS, *PAST_A_GRID, apart)]
    long = [part for part in REPEATED if "strides" not in part]  # one row or column that shows every special value
    whole = [{f"{name} values": "special", f"{name} strides": "row-major"} for name in names]
    also = [*REPEATED, *({**part, **of_other} for part in long for of_other in whole)]
    make: Callable[[Choice], tuple[Tensor, ...]] = partial(_made, names)
    dimensions = {**MATRIX, "dtype": (torch.bfloat16,), **of_others}
    return Space(dimensions, make, {}, partial(_possible, names), also, beyond=beyond)


def told_before(*names: str) -> tuple[str, ...]:
    """The names of the facts that state the other matrices' sizes. The first matrix has the same sizes."""
    return tuple(f"{name}.{size}" for name in names for size in ("rows", "cols"))


def impossible(first: str, *names: str) -> tuple[tuple[str, str], ...]:
    """The pairs of facts that no call has, because all matrices have the same sizes."""
    others, only_one = "|".join(names), r"\.strides (?:column-major|one {0} repeated|{0}s apart)"
    return (
        (rf"{first}\.cols = 1 \| \w+\.(?:block of zeros|saturating block somewhere)", "a block has 32 columns"),
        (rf"{first}\.(?:rows|cols) = 0 \| (?:{others})\." + _OF_VALUES, "every matrix is empty"),
        (rf"{first}\.rows = 1 \| (?:{others})" + only_one.format("row"), "one row has no stride"),
        (rf"{first}\.cols = 1 \| (?:{others})" + only_one.format("column"), "one column has no stride"),
    )
