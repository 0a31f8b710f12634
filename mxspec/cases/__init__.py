"""The cases of an op in which every two facts of a call meet, found by the op's name.

`mxspec/cases/<op>.py` holds `SPACE`, from which they are made; `IMPOSSIBLE`, patterns of two facts that no valid call
has, each with the reason; `tokens(args)`, how many tokens a call with token groups has; `ACROSS`, where blocks lie
along rows; `MOVED`, where values mean nothing to it.
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
from mxspec.spec import Case


@functools.cache
def of(op: str) -> ModuleType | None:
    """The module of an op, or None where it has none."""
    name = f"mxspec.cases.{op}"
    return importlib.import_module(name) if importlib.util.find_spec(name) else None


def pair_cases(op: str) -> Iterator[Case]:
    """The cases in which every two facts meet."""
    if module := of(op):
        yield from module.SPACE.cases()


def tokens(op: str, args: tuple[Any, ...]) -> int:
    """How many tokens a call has that are in groups, or in none of them."""
    counted = getattr(of(op), "tokens", None)
    return counted(args) if counted else args[0].shape[0]


def across(op: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call has its blocks along the rows of a tensor, and not along its columns."""
    return getattr(of(op), "ACROSS", False) or kwargs.get("axis") == -2


def moved(op: str) -> bool:
    """Whether an op moves the bytes of its tensors, whatever they mean."""
    return getattr(of(op), "MOVED", False)


def why_not(op: str, pair: Iterable[Any]) -> str | None:
    """Why no valid call has both facts, or None."""
    one, other = map(str, pair)
    both = (f"{one} | {other}", f"{other} | {one}")
    known = (*getattr(of(op), "IMPOSSIBLE", ()), *IMPOSSIBLE)
    return next((reason for pattern, reason in known if any(re.fullmatch(pattern, text) for text in both)), None)
