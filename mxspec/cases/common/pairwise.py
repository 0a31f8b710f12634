"""A small set of choices in which every two values of different dimensions meet."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

Choice = dict[str, Any]


_MOST_DECISIONS = 400


def pairwise(
    dimensions: Mapping[str, Sequence[Any]],
    possible: Callable[[Choice], bool],
    also: Iterable[Choice] = (),
    blind: Callable[[Choice], bool] = lambda choice: False,
    implied: Collection[Any] = (),
) -> Iterator[Choice]:
    """Choices, one value for each dimension, that show every possible pair of values.

    The first pair that is still missing opens a choice; each other dimension then takes the value that shows the most
    missing pairs. No random number is drawn: the choices are the same on every machine.

    Args:
        dimensions: the values of each dimension, those first that decide what others may be.
        possible: whether some or all of a choice can be made; a part that cannot be made must stay so when it grows.
        also: parts of choices, each with some dimensions, that are to be there as well.
        blind: whether a choice, or a part of one, hides what the others of its values do: its output is all NaN, say.
            It is made only for pairs that no other choice has.
        implied: values that follow from those of other dimensions, and whose pairs nobody needs.

    >>> sizes = {"axis": (-1, -2), "rows": (1, 32), "cols": (1, 32)}
    >>> for choice in pairwise(sizes, lambda c: c.get("rows") != c.get("cols")):
    ...     print(*choice.values())
    -1 1 32
    -1 32 1
    -2 1 32
    -2 32 1
    """
    names = list(dimensions)
    places = {name: range(len(dimensions[name])) for name in names}
    missing: dict[tuple[tuple[str, int], ...], None] = {
        ((one, i), (other, j)): None
        for one, other in combinations(names, 2)
        for i in places[one]
        for j in places[other]
        if not {dimensions[one][i], dimensions[other][j]} & set(implied)
    }

    def chosen(picked: dict[str, int]) -> Choice:
        return {name: dimensions[name][picked[name]] for name in dimensions if name in picked}

    def completed(picked: dict[str, int], turn: int, seeing: bool) -> dict[str, int] | None:
        """The choice with a value for every dimension, or None where no value fits one of them."""
        name = next((name for name in names if name not in picked), None)
        if name is None:
            return picked
        left[0] -= 1
        size = len(places[name])
        turned = [(i + turn) % size for i in places[name]]  # equally good values take turns
        shows = {i: sum(_pair(names, name, i, other, j) in missing for other, j in picked.items()) for i in turned}
        for i in sorted(turned, key=lambda i: -shows[i]):
            if left[0] < 0:
                return None  # there may be a choice; to find it would take every combination of what comes before
            tried = {**picked, name: i}
            if fits(chosen(tried), seeing) and (found := completed(tried, turn + 1, seeing)):
                return found
        return None

    left = [0]  # dimensions that the search for one choice may still decide

    def searched(start: dict[str, int], turn: int, seeing: bool) -> dict[str, int] | None:
        left[0] = _MOST_DECISIONS
        return completed(start, turn, seeing)

    def fits(choice: Choice, seeing: bool) -> bool:
        return possible(choice) and not (seeing and blind(choice))

    wanted = [tuple((name, list(dimensions[name]).index(value)) for name, value in part.items()) for part in also]
    for turn, part in enumerate([*wanted, *missing]):
        if turn >= len(wanted) and part not in missing:
            continue
        start = dict(part)
        tries = ((seeing, searched(start, turn, seeing)) for seeing in (True, False) if fits(chosen(start), seeing))
        seeing, picked = next(((seeing, picked) for seeing, picked in tries if picked), (False, None))
        missing.pop(part, None)
        if picked is None:
            continue  # no choice has this pair
        for one, other in combinations(names, 2):
            pair = ((one, picked[one]), (other, picked[other]))
            if seeing or blind(chosen(dict(pair))):
                missing.pop(pair, None)
        yield chosen(picked)


def _pair(names: list[str], one: str, i: int, other: str, j: int) -> tuple[tuple[str, int], ...]:
    return ((one, i), (other, j)) if names.index(one) < names.index(other) else ((other, j), (one, i))
