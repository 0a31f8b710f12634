"""The cases of an op in which every two facts of a call meet, found by the op's name.

`mxspec/cases/<op>.py` holds `SPACE`, from which they are made; `IMPOSSIBLE`, patterns of two facts that no valid call
has, each with the reason; `tokens(args)`, how many tokens a call with token groups has; `ACROSS`, where blocks lie
along rows; `MOVES_BYTES`, where values do not matter.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

from mxspec.cases.common.impossible import IMPOSSIBLE
from mxspec.cases.common.refusals import refusals
from mxspec.spec import Case, Reference


@functools.cache
def of(op: str) -> ModuleType | None:
    """The module of an op, or None where it has none."""
    name = f"mxspec.cases.{op}"
    return importlib.import_module(name) if importlib.util.find_spec(name) else None


def pair_cases(op: str) -> Iterator[Case]:
    """The cases in which every two facts meet."""
    if module := of(op):
        yield from module.SPACE.cases()


def more(reference: Reference[..., Any], own: Iterable[Case]) -> Iterator[Case]:
    """An op's own cases, those in which every two facts meet, and what it must refuse."""
    given: list[Case] = []
    for case in own:
        given.append(case)
        yield case
    if of(reference.__name__) is None:
        return
    yield from pair_cases(reference.__name__)
    names, plain = {case.name for case in given}, next(case for case in given if not case.flags)
    yield from (case for case in refusals(reference, plain) if case.name not in names)


def tokens(op: str, args: tuple[Any, ...]) -> int:
    """How many tokens a call has that are in groups, or in none of them."""
    counted = getattr(of(op), "tokens", None)
    return counted(args) if counted else args[0].shape[0]


def across(op: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call has its blocks along the rows of a tensor, and not along its columns."""
    return getattr(of(op), "ACROSS", False) or kwargs.get("axis") == -2


def moves_bytes(op: str) -> bool:
    """Whether an op moves its tensors without reading their values."""
    return getattr(of(op), "MOVES_BYTES", False)


def why_not(op: str, pair: Iterable[Any]) -> str | None:
    """Why no valid call has both facts, or None."""
    one, other = map(str, pair)
    both = (f"{one} | {other}", f"{other} | {one}")
    known = (*getattr(of(op), "IMPOSSIBLE", ()), *IMPOSSIBLE)
    return next((reason for pattern, reason in known if any(re.fullmatch(pattern, text) for text in both)), None)
