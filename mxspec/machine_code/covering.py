"""Choose the cases that are enough to compile, because each combination of options costs a compilation.

A kernel is compiled anew for every combination of its constants and dtypes. As a rule, a fault in one combination is a
fault of one or two of its options, and it shows in every case that has them. So a covering of the cases has, for each
kernel, every value of every option that any case has. That includes the shipped configurations. A covering of two
options at a time also has every two values that meet in any case, and each divisibility of a number and each alignment
of a tensor by itself.

The frameworks say what a launch depends on before they compile it, so this file names no op and no option.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

from torch import Tensor

# The name of an argument or of a compiler's option, and what is known about it.
Trait = tuple[str, Hashable]


@dataclass(frozen=True)
class Launch:
    """The facts that the code of one launch depends on."""

    kernel: str
    options: frozenset[Trait]  # constants, dtypes, configuration: a kernel may branch on these
    numbers: frozenset[Trait]  # whether an argument is 1, or a multiple of 16

    def shows(self, together: int) -> set[Hashable]:
        """The combinations of `together` options.

        If there are fewer options, the only combination is all of them. With 0, it is the kernel alone. With two, each
        trait of a number is one more combination.
        """
        some = itertools.combinations(self.options, min(together, len(self.options)))
        numbers = self.numbers if together > 1 else ()
        return {(self.kernel, frozenset(traits)) for traits in (*some, *({number} for number in numbers))}


@contextlib.contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Inside, no kernel is compiled or run. The list that this gives grows with each launch."""
    launches: list[Launch] = []
    with contextlib.ExitStack() as stack:
        if "triton" in sys.modules:
            from triton.runtime.jit import JITFunction

            stack.enter_context(mock.patch.multiple(JITFunction, run=_recording_triton(launches)))
        if runtime := sys.modules.get("helion.runtime.kernel"):
            stack.enter_context(mock.patch.multiple(runtime.Kernel, __call__=_recording_helion(launches)))
        yield launches


def _name(fn: Callable[..., Any]) -> str:
    return f"{fn.__module__}.{fn.__qualname__}"


def _recording_triton(launches: list[Launch]) -> Callable[..., None]:
    from triton.runtime.driver import driver

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        binder = self.device_caches[driver.active.get_current_device()][-1]
        bound, specialization, options = binder(*args, **kwargs)
        chosen, numbers = {(name, str(value)) for name, value in options.items()}, set()
        for parameter, argument, (kinds, attributes) in zip(self.params, bound.values(), specialization, strict=True):
            for name, value, kind, attribute in _flat(parameter.name, argument, kinds, attributes):
                if parameter.is_constexpr:
                    chosen.add((name, str(attribute)))
                else:
                    numbers.add((name, f"{kind} {attribute}"))
                    if not isinstance(value, int | float):
                        chosen.add((name, str(kind)))
        launches.append(Launch(_name(self.fn), frozenset(chosen), frozenset(numbers)))

    return run


def _flat(name: str, value: Any, kind: Any, attribute: Any) -> Iterator[tuple[str, Any, Any, Any]]:
    """An argument of a launch, or, if it is a tuple, each argument that the tuple holds."""
    if not isinstance(kind, tuple):
        yield name, value, kind, attribute
        return
    for i, parts in enumerate(zip(value, kind, attribute, strict=True)):
        yield from _flat(f"{name}.{i}", *parts)


def _recording_helion(launches: list[Launch]) -> Callable[..., None]:
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        args = self.normalize_args(*args, **kwargs)
        chosen = {(str(i), part) for i, part in enumerate(self._base_specialization_key(args))}
        numbers = set[Trait]()
        for i, value in enumerate(args):
            if isinstance(value, Tensor):
                numbers.add((str(i), value.storage_offset() * value.element_size() % 16 == 0))
            elif type(value) is int:
                numbers.add((str(i), "1" if value == 1 else value % 16 == 0))
        chosen |= {("configs", str(self.configs)), ("index", self.settings.index_dtype)}
        launches.append(Launch(_name(self.fn), frozenset(chosen), frozenset(numbers)))

    return call


def covering(launches: Sequence[Iterable[Launch]], together: int = 2) -> set[int]:
    """Indices of a greedy cover: repeatedly take the case that adds the most uncovered combinations of options.

    At the end, a case is dropped if the other cases that were taken show everything that it shows.
    """
    equal = {frozenset(case): i for i, case in reversed([*enumerate(launches)])}  # the first of equal cases
    shown = {
        i: set[Hashable]().union(*(launch.shows(together) for launch in case))
        for case, i in sorted(equal.items(), key=lambda item: item[1])
    }
    taken, left = list[int](), {i: some for i, some in shown.items() if some}
    while left:
        most = max(left, key=lambda i: len(left[i]))
        taken.append(most)
        left = {i: new for i, some in left.items() if (new := some - shown[most])}
    times = Counter(itertools.chain.from_iterable(shown[i] for i in taken))
    for i in tuple(taken):
        if all(times[one] > 1 for one in shown[i]):
            taken.remove(i)
            times.subtract(shown[i])
    return set(taken)
