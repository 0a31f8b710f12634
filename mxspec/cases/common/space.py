"""Cases from the dimensions of an op's calls: every two values of different dimensions meet in a case."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch

from mxspec.cases.common.pairwise import Choice, pairwise
from mxspec.spec import Case

NOT_GIVEN = "not given"


@dataclass(frozen=True)
class Space:
    """All the calls of an op that its dimensions span.

    dimensions: the values of each dimension; a choice takes one value per dimension.
    make: the positional arguments of a choice.
    options: the keyword arguments of the op and their values. Each is a dimension too, with `not given` as a value.
    possible: whether a choice, or a part of a choice, can be made.
    also: parts of choices that must appear too, for facts that need more than two dimensions.
    beyond: choices with values that no dimension has, such as more rows than a grid has programs. Dimensions that such
    a choice leaves open take the value of the first choice.
    blind: whether a choice, or a part of a choice, hides the effect of most of its values.
    implied: values that follow from values of other dimensions; their pairs need not appear.
    decisive: the options that limit other dimensions, and therefore come first.
    """

    dimensions: Mapping[str, Sequence[Any]]
    make: Callable[[Choice], tuple[Any, ...]]
    options: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    possible: Callable[[Choice], bool] = lambda choice: True
    also: Sequence[Choice] = ()
    blind: Callable[[Choice], bool] = lambda choice: False
    implied: Collection[Any] = ()
    decisive: Sequence[str] = ("axis",)
    beyond: Sequence[Choice] = ()

    @cached_property
    def choices(self) -> list[Choice]:
        options = {name: (NOT_GIVEN, *values) for name, values in self.options.items()}
        decisive = {name: values for name, values in options.items() if name in self.decisive}
        dimensions = {**decisive, **self.dimensions, **options}
        planned = list(pairwise(dimensions, self.possible, self.also, self.blind, self.implied))
        plain = dict.fromkeys(options, NOT_GIVEN)
        return [*planned, *({**planned[0], **plain, **choice} for choice in self.beyond)]

    def cases(self) -> Iterator[Case]:
        for number, choice in enumerate(self.choices, 1):
            given = {name: choice[name] for name in self.options if choice[name] is not NOT_GIVEN}
            words = ", ".join(f"{name} {_said(choice[name])}" for name in self.dimensions)
            yield Case(f"pairs {number}: {words}", partial(self.make, choice), given, flags={"generated"})


def _said(value: Any) -> str:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else str(value)


def given(choice: Choice, name: str, default: Any) -> Any:
    """The value of an option in a choice, or the op's default; None if the choice has no value yet."""
    value = choice.get(name)
    return default if value is NOT_GIVEN else value
