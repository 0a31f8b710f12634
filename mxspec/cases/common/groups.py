"""Token groups in every arrangement: empty groups at any place, all tokens in one group, hundreds of groups."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from random import Random

import torch
from torch import Tensor

from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.quantizers import LARGE_BOTH_WAYS, ONE_COLUMN_APART, PLAIN

ARRANGEMENTS = (
    "no group", "one", "three", "first empty", "inner empty", "last empty", "all empty", "all to one",
    "one offset repeated", "one offset thrice", "zero repeated", "of 128", "of 128, three hundred", "singles", "forty",
    "three hundred",
)  # fmt: skip
GROUPS = {"groups": ARRANGEMENTS, "rest": (False, True), "offs": ("dense", "apart"), "offs begin": ("at 0", "later")}
# For matmuls: only the arrangements that each show a fact that no other arrangement shows.
OF_EXPERTS = {
    **GROUPS,
    "groups": (
        "no group", "one", "first empty", "inner empty", "last empty", "all empty", "all to one", "one offset repeated",
        "one offset thrice", "zero repeated", "of 128", "singles", "forty", "three hundred",
    ),
}  # fmt: skip
_PLAIN = {"groups": "three", "rest": False, "offs": "dense", "offs begin": "at 0"}


def in_groups_of_three(*choices: Choice) -> list[Choice]:
    """Choices of a matrix; its rows form three groups unless the choice says otherwise."""
    return [{**_PLAIN, **choice} for choice in choices]


BEYOND = in_groups_of_three(
    *LARGE_BOTH_WAYS, ONE_COLUMN_APART, {**PLAIN, "rows": 256, "cols": 288, "groups": "three hundred"}
)
# Facts that an arrangement shows only together with one size.
ARRANGED = [
    {"groups": "one offset repeated", "rows": 256, "rest": False},
    {"groups": "one offset repeated", "rows": 1, "rest": False},
    {"groups": "forty", "rows": 1, "rest": False, "offs": "dense"},
    {"groups": "one", "rows": 256, "rest": False},
    {"groups": "of 128, three hundred", "rest": True, "offs": "apart"},
]


@cache  # the search for choices asks for the same sizes thousands of times
def sizes_of(arrangement: str, tokens: int, unit: int = 1) -> tuple[int, ...]:
    """The number of tokens of each group. Each is a multiple of `unit`, and together they are at most `tokens`."""
    T = tokens // unit
    third = T // 3
    sizes: Sequence[int] = {
        "no group": [],
        "one": [T],
        "three": [third, T - 2 * third, third],
        "first empty": [0, third, T - third],
        "inner empty": [third, 0, T - third],
        "last empty": [third, T - third, 0],
        "all empty": [0, 0, 0],
        "all to one": [0, 0, 0, 0, T, 0, 0, 0, 0],
        "one offset repeated": [T, *300 * [0]],
        "one offset thrice": [T, 0, 0],
        "zero repeated": 301 * [0],
        "of 128": [T // 128 // 2 * 128, T // 128 * 128 - T // 128 // 2 * 128],
        "of 128, three hundred": [128 * size for size in _spread(T // 128, 301)],
        "singles": [1] * min(T, 5) + [max(T - 5, 0)],
        "forty": _spread(T, 40),
        "three hundred": _spread(T, 301),
    }[arrangement]
    return tuple(size * unit for size in sizes)


def arranged_groups(choice: Choice) -> int | None:
    """The number of groups of an arrangement; None while the arrangement is open."""
    return len(sizes_of(choice["groups"], 8)) if "groups" in choice else None


def nothing_in_groups(choice: Choice) -> bool:
    """Whether no token belongs to a group."""
    return choice.get("groups") in ("no group", "all empty", "zero repeated")


@cache
def _spread(T: int, groups: int) -> list[int]:
    """Uneven sizes, some of them 0. The first and the last are not 0 if there are enough tokens."""
    ends = sorted(Random(groups).choices(range(T + 1), k=groups - 1))
    return [b - a for a, b in zip([0, *ends], [*ends, T], strict=True)]


def in_groups(choice: Choice, tokens: int, unit: int = 1) -> int:
    """The number of tokens that belong to groups: all tokens, or, with `rest`, all but a quarter or a remainder."""
    if choice["rest"]:
        unit = 128 if choice["groups"].startswith("of 128") else unit
        return (tokens - 1) // unit * unit if unit > 1 else tokens - max(1, tokens // 4)
    return tokens


def groups_fit(choice: Choice, tokens: int | None, unit: int = 1) -> bool:
    """Whether this number of tokens can have the arrangement of a choice."""
    arrangement, rest = choice.get("groups"), choice.get("rest")
    if arrangement is None:
        return True
    if choice.get("offs") == "apart" and arrangement in ("no group", "one", *_REPEATED):
        return False  # a single offset has no stride to choose, and a repeated offset has stride 0
    if arrangement == "no group" and choice.get("offs begin") == "later":
        return False
    if rest is None or tokens is None:
        return True
    if rest and not tokens:
        return False
    if arrangement in ("no group", "all empty", "zero repeated"):
        return bool(rest) == bool(tokens)
    T = in_groups(choice, tokens, unit)
    if T % unit:
        return False
    if arrangement.startswith("of 128"):
        return T >= 128 and T % 128 == 0
    return 8 * unit <= T or arrangement in _ANY_TOKENS


def padded_fits(choice: Choice, tokens: str, others: str, pad_to: int) -> bool:
    """Whether the tokens have at most ten million elements after every group is padded."""
    if not {"groups", tokens, others} <= choice.keys():
        return True
    groups = len(sizes_of(choice["groups"], choice[tokens]))
    return (choice[tokens] + groups * pad_to) * choice[others] <= 10_000_000


_ANY_TOKENS = ("one", "one offset repeated", "one offset thrice", "forty", "three hundred", "all to one")
_REPEATED = ("one offset repeated", "one offset thrice", "zero repeated")


def offsets(choice: Choice, tokens: int, unit: int = 1) -> Tensor:
    """The `offs` of a choice, laid out in memory as the choice says."""
    sizes = sizes_of(choice["groups"], in_groups(choice, tokens, unit), unit)
    offs = torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    if choice["groups"] in _REPEATED:
        return laid_vector(offs[:1], "dense", choice["offs begin"]).expand(len(offs))
    return laid_vector(offs, choice["offs"], choice["offs begin"])


def laid_vector(v: Tensor, strides: str, begins: str) -> Tensor:
    """A vector in memory with other numbers between its elements (`apart`) or before them (`later`)."""
    step, first = (3 if strides == "apart" else 1), (5 if begins == "later" else 0)
    memory = torch.full((first + step * len(v) + 1,), -1, dtype=v.dtype)
    return memory[first : first + step * len(v) : step].copy_(v)
