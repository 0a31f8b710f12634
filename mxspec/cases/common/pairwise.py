"""A small set of choices in which every two values of different dimensions meet."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, combinations, product
from typing import Any

Choice = dict[str, Any]
Pair = tuple[tuple[str, int], ...]  # a dimension and the place of its value, twice

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
    values = {name: list(of) for name, of in dimensions.items()}
    # A value is a bit. Counting those that a choice has and a value has not met is then one operation.
    first = dict(zip(names, accumulate((len(values[name]) for name in names), initial=0), strict=False))
    unmet = [0] * sum(map(len, values.values()))
    order, unneeded = list[Pair](), set(implied)
    for one, other in combinations(names, 2):
        for i, j in product(range(len(values[one])), range(len(values[other]))):
            if not {values[one][i], values[other][j]} & unneeded:
                order.append(((one, i), (other, j)))
                unmet[first[one] + i] |= 1 << first[other] + j
                unmet[first[other] + j] |= 1 << first[one] + i

    def meet(pair: Pair) -> None:
        a, b = (first[name] + i for name, i in pair)
        unmet[a] &= ~(1 << b)
        unmet[b] &= ~(1 << a)

    def have_met(pair: Pair) -> bool:
        a, b = (first[name] + i for name, i in pair)
        return not unmet[a] >> b & 1

    def chosen(picked: dict[str, int]) -> Choice:
        return {name: values[name][picked[name]] for name in names if name in picked}

    def completed(picked: dict[str, int], part: Choice, bits: int, turn: int, seeing: bool) -> dict[str, int] | None:
        """The choice with a value for every dimension, or None where no value fits one of them."""
        name = next((name for name in names if name not in picked), None)
        if name is None:
            return picked
        left[0] -= 1
        size, start = len(values[name]), first[name]
        met = [-(missing & bits).bit_count() for missing in unmet[start : start + size]]
        # equally good values take turns
        for i in sorted(((i + turn) % size for i in range(size)), key=met.__getitem__):
            if left[0] < 0:
                return None  # there may be a choice; to find it would take every combination of what comes before
            grown, grown_bits = {**part, name: values[name][i]}, bits | 1 << start + i
            if fits(grown, grown_bits, seeing):
                found = completed({**picked, name: i}, grown, grown_bits, turn + 1, seeing)
                if found:
                    return found
        return None

    left = [0]  # dimensions that the search for one choice may still decide

    can_be, is_blind = dict[int, bool](), dict[int, bool]()  # by the bits of a choice: searches meet the same parts

    def fits(part: Choice, bits: int, seeing: bool) -> bool:
        if bits not in can_be:
            can_be[bits] = possible(part)
        if not can_be[bits] or not seeing:
            return can_be[bits]
        if bits not in is_blind:
            is_blind[bits] = blind(part)
        met_blind[0] |= is_blind[bits]
        return not is_blind[bits]

    met_blind = [False]  # whether a search has left a choice out because it is blind

    def searched(start: dict[str, int], turn: int) -> tuple[bool, dict[str, int] | None]:
        """The first choice found, and whether it was looked for among those that see."""
        part, bits = chosen(start), sum(1 << first[name] + i for name, i in start.items())
        for seeing in (True, False):
            left[0], met_blind[0] = _MOST_DECISIONS, False
            if fits(part, bits, seeing) and (picked := completed(start, part, bits, turn, seeing)):
                return seeing, picked
            if not met_blind[0]:
                break  # the other search would be the same
        return False, None

    wanted = [tuple((name, values[name].index(value)) for name, value in part.items()) for part in also]
    for turn, part in enumerate([*wanted, *order]):
        if turn >= len(wanted) and have_met(part):
            continue
        seeing, picked = searched(dict(part), turn)
        if turn >= len(wanted):
            meet(part)
        if picked is None:
            continue  # no choice has this pair
        for one, other in combinations(names, 2):
            pair = ((one, picked[one]), (other, picked[other]))
            if not have_met(pair) and (seeing or blind(chosen(dict(pair)))):
                meet(pair)
        yield chosen(picked)
