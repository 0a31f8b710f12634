"""A small set of choices in which every two values of different dimensions meet."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, combinations, product
from typing import Any

Choice = dict[str, Any]
Pair = tuple[tuple[str, int], ...]  # two dimensions, each with the index of its value

_MOST_DECISIONS = 400


def pairwise(
    dimensions: Mapping[str, Sequence[Any]],
    possible: Callable[[Choice], bool],
    also: Iterable[Choice] = (),
    blind: Callable[[Choice], bool] = lambda choice: False,
    implied: Collection[Any] = (),
) -> Iterator[Choice]:
    """Choices, one value per dimension, that together show every possible pair of values.

    The first pair that is still missing starts a choice. Each other dimension then takes the value that shows the most
    missing pairs. The search draws no random number, so the choices are the same on every machine.

    Args:
        dimensions: the values of each dimension. Dimensions that limit other dimensions come first.
        possible: whether a choice, or a part of a choice, can be made. If a part cannot be made, nothing that contains
            it may be possible.
        also: parts of choices, each with some dimensions, that must appear too.
        blind: whether a choice, or a part of a choice, hides the effect of its other values, for example because its
            whole output is NaN. Such a choice is made only for pairs that no other choice has.
        implied: values that follow from values of other dimensions; their pairs need not appear.

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
    # Each value is a bit. A single operation then counts the values of a choice that a given value has not met.
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
        """The choice with a value for every dimension, or None if no value fits some dimension."""
        name = next((name for name in names if name not in picked), None)
        if name is None:
            return picked
        left[0] -= 1
        size, start = len(values[name]), first[name]
        met = [-(missing & bits).bit_count() for missing in unmet[start : start + size]]
        # Equally good values take turns: `turn` rotates the order, and the sort is stable.
        for i in sorted(((i + turn) % size for i in range(size)), key=met.__getitem__):
            if left[0] < 0:
                return None  # a choice may exist, but finding it would take every combination of the earlier dimensions
            grown, grown_bits = {**part, name: values[name][i]}, bits | 1 << start + i
            if fits(grown, grown_bits, seeing):
                found = completed({**picked, name: i}, grown, grown_bits, turn + 1, seeing)
                if found:
                    return found
        return None

    left = [0]  # the number of decisions that remain to the search for the current choice

    # keyed by the bits of a choice, because searches meet the same parts again
    can_be, is_blind = dict[int, bool](), dict[int, bool]()

    def fits(part: Choice, bits: int, seeing: bool) -> bool:
        if bits not in can_be:
            can_be[bits] = possible(part)
        if not can_be[bits] or not seeing:
            return can_be[bits]
        if bits not in is_blind:
            is_blind[bits] = blind(part)
        met_blind[0] |= is_blind[bits]
        return not is_blind[bits]

    met_blind = [False]  # whether the current search left out a choice because it is blind

    def searched(start: dict[str, int], turn: int) -> tuple[bool, dict[str, int] | None]:
        """Whether the search excluded blind choices, and the first choice found."""
        part, bits = chosen(start), sum(1 << first[name] + i for name, i in start.items())
        for seeing in (True, False):
            left[0], met_blind[0] = _MOST_DECISIONS, False
            if fits(part, bits, seeing) and (picked := completed(start, part, bits, turn, seeing)):
                return seeing, picked
            if not met_blind[0]:
                break  # the second search would do the same again
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
