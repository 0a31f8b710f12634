"""Slow tests take turns: a run of `make test` takes a share of them, and the next commit takes another.

`@pytest.mark.turns(n)` marks tests of which a run takes one in n. The commit decides which. With `by`, each combination
of these parameters has at least one test in every run: `@pytest.mark.turns(4, by=("op", "backend"))`.

MXSPEC_TURN, which the Makefile sets to the commit, switches this on. Without it, as in `make complete`, on a GPU and in
`python -m pytest`, all tests run. A run says how many tests it left to other commits.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections import defaultdict

import pytest
import torch

_LEFT = pytest.StashKey[int]()


def _hash(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest(), 16)


def turn() -> int | None:
    """The number of this run, or None if all tests run."""
    commit = os.environ.get("MXSPEC_TURN")
    return _hash(commit) if commit and not torch.cuda.is_available() else None


def chosen(count: int, names: list[str]) -> list[str]:
    """One in `count` of the names, at least one, or all names. The turns of two lists do not depend on each other."""
    number, count = turn(), min(count, len(names))
    return names if number is None else names[_hash(f"{number} {names}") % count :: count]


def left_out(items: list[pytest.Item], number: int) -> set[pytest.Item]:
    """The marked tests that run `number` leaves to others."""
    groups: dict[tuple[object, ...], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if mark := item.get_closest_marker("turns"):
            values = [item.callspec.params[name] for name in mark.kwargs.get("by", ())]
            groups[(mark.args[0], bool(values), item.nodeid.partition("[")[0], *values)].append(item)
    out = set()
    for (count, has_one, name, *_), members in groups.items():
        # Not in the order of the file, in which neighbours are alike. Functions with the same parameters agree.
        members.sort(key=lambda item: _hash(item.nodeid.partition("[")[2]))
        count, first = min(count, len(members)) if has_one else count, _hash(str(name)) if len(members) == 1 else 0
        out |= {item for i, item in enumerate(members, first) if i % count != number % count}
    return out


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "turns(n, by=()): a run of `make test` takes one in n of these tests")
    config.stash[_LEFT] = 0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    number = turn()
    if number is None:
        return
    out = left_out(items, number)
    items[:] = [item for item in items if item not in out]
    config.hook.pytest_deselected(items=list(out))
    config.stash[_LEFT] = len(out)


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["left"] = session.config.stash[_LEFT]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error) -> None:
    left = getattr(node, "workeroutput", {}).get("left", 0)  # a process that died says nothing
    node.config.stash[_LEFT] = max(node.config.stash[_LEFT], left)


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    if left := config.stash[_LEFT]:
        terminalreporter.write_line(f"{left} tests were left to other commits; `make complete` runs all of them")


if __name__ == "__main__":  # python -m tests.turns 2 helion triton
    count, *every = sys.argv[1:]
    taken = chosen(int(count), every)
    if left := [name for name in every if name not in taken]:
        print(f"{', '.join(left)}: left to other commits; `make complete` runs all of them", file=sys.stderr)
    print(*taken)
