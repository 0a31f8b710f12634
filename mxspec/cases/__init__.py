"""The cases of every op: calls that each backend must answer as the reference does, found by the op's name.

`mxspec/cases/<op>.py` holds:

- `cases()`: the cases that are written by hand;
- `bench_cases(shapes)`: the calls that are worth timing, with tensors on torch's default device;
- `SPACE`: the dimensions of a call. Cases are generated from it so that every two facts of a call meet in a case;
- `IMPOSSIBLE`: pairs of facts that no valid call has, as patterns, each with the reason;
- `TOKENS`: the size that is divided into token groups, if there is one;
- `TOLD_BEFORE`: sizes that must equal a size of an earlier tensor of the call;
- `ROWS_TAKEN`: for a matmul, a function that takes the arguments and the options of a call, and numbers of rows of its
  output. It returns the arguments of a call with these rows, or None if there is no such call;
- `ACROSS`: True if blocks lie down the columns, as for axis -2; `MOVES_BYTES`: True if the op never reads a value.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any, cast

from mxspec.cases.common.impossible import IMPOSSIBLE, no_tokens
from mxspec.cases.common.refusals import refusals
from mxspec.spec import Case, Reference, Shapes

Arguments = tuple[Any, ...]
RowsTaken = Callable[[Arguments, Mapping[str, Any], Any], Arguments | None]


@functools.cache
def of(op: str) -> ModuleType:
    """The module with the cases of an op."""
    return importlib.import_module(f"mxspec.cases.{op}")


def pair_cases(op: str) -> Iterator[Case]:
    """The generated cases in which every two facts of a call meet."""
    yield from of(op).SPACE.cases()


def every_case(reference: Reference[..., Any]) -> Iterator[Case]:
    """All cases of an op: its own cases, the generated pairs, and the calls that it must refuse."""
    given = list[Case]()
    for case in of(reference.__name__).cases():
        given.append(case)
        yield case
    yield from pair_cases(reference.__name__)
    names, plain = {case.name for case in given}, next(case for case in given if not case.flags)
    yield from (case for case in refusals(reference, plain) if case.name not in names)


def bench_cases(op: str, shapes: Shapes) -> Iterable[Case]:
    """The calls of an op that are worth timing, at the shapes of the op's kind."""
    return cast(Iterable[Case], of(op).bench_cases(shapes))


def tokens(op: str, arguments: Mapping[str, Any]) -> int | None:
    """The number of tokens of a call, whether they belong to a group or to none. None if no size tells it."""
    if not of_tokens(op):
        return None
    name, _, dim = of_tokens(op).partition(".")
    return arguments[name].shape[{"rows": 0, "cols": 1}[dim]] if dim else arguments[name]


def of_tokens(op: str) -> str:
    """The size that counts the tokens of an op's arguments, under its name in facts."""
    return getattr(of(op), "TOKENS", "")


def across(op: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether the blocks of a call lie down the columns of a tensor, as for axis -2, and not along its rows."""
    return getattr(of(op), "ACROSS", False) or kwargs.get("axis") == -2


def moves_bytes(op: str) -> bool:
    """Whether an op moves its tensors without reading their values."""
    return getattr(of(op), "MOVES_BYTES", False)


def told_before(op: str) -> Collection[str]:
    """The sizes of an op's tensors that must equal a size of an earlier tensor of the call."""
    return getattr(of(op), "TOLD_BEFORE", ())


def rows_taken(op: str) -> RowsTaken | None:
    """A function that gives the arguments of a call with some of the rows of another call. None for most ops."""
    return cast("RowsTaken | None", getattr(of(op), "ROWS_TAKEN", None))


def why_not(op: str, pair: Iterable[Any]) -> str | None:
    """The reason why no valid call has both facts, or None."""
    return next((reason for pattern, reason in impossible(op) if matches(pattern, pair)), None)


def impossible(op: str) -> Iterator[tuple[str, str]]:
    """The pairs of facts that no valid call of an op has, as patterns, each with the reason."""
    yield from getattr(of(op), "IMPOSSIBLE", ())
    yield from IMPOSSIBLE
    if of_tokens(op):
        yield from no_tokens(of_tokens(op))


def matches(pattern: str, pair: Iterable[Any]) -> bool:
    """Whether a pattern matches these two facts, in either order."""
    one, other = map(str, pair)
    return any(re.fullmatch(pattern, text) for text in (f"{one} | {other}", f"{other} | {one}"))
