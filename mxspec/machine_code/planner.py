"""Which cases of an op are worth compiling, or worth tracing, since no other case shows the same."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from mxspec.dispatch import kernel_module, reference, refusal
from mxspec.machine_code.covering import Launch, covering, recorded
from mxspec.machine_code.fake_gpu import meta
from mxspec.spec import Case


def is_searched(args: Iterable[Any], edge: bool) -> bool:
    """Whether a case must have its kernel's instructions: `PTX`."""
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    return not edge and all(t.is_contiguous() and t.storage_offset() * t.element_size() % 16 == 0 for t in tensors)


def is_edge(case: Case) -> bool:
    """Whether a case may launch nothing or lack an instruction: it is at a limit, or it is generated."""
    return bool(set(case.flags) & {"edge", "generated"})


@dataclass(frozen=True)
class Call:
    """A case as it is compiled, or why it is not."""

    case: Case
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    skipped: str = ""


def calls(op: str, module: Any, generated: bool = True) -> list[Call]:
    """Every case of an op as its kernel module is called, with the generated cases or without."""
    return [_call(case, module, generated) for case in reference(op).spec.cases()]


def _call(case: Case, module: Any, generated: bool) -> Call:
    if case.raises:
        return Call(case, skipped="is refused")
    if not generated and "generated" in case.flags:  # an op's own cases have every option; tracing these takes minutes
        return Call(case, skipped="is generated, and compiled where all cases are")
    args, kwargs = [meta(arg) for arg in case.args()], {k: meta(v) for k, v in case.kwargs.items()}
    reason = module.supports(*args, **kwargs) if hasattr(module, "supports") else None
    return Call(case, args, kwargs, reason or "")


def covered(calls: Sequence[Call], fn: Callable[..., Any], together: int) -> list[Call]:
    """The calls, of which those are skipped that would compile nothing but what others show."""
    launches = []
    with recorded() as seen:
        for call in calls:
            seen.clear()
            with contextlib.suppress(Exception):  # it is raised again when the call is compiled
                fn(*call.args, **call.kwargs) if not call.skipped else None
            searched = is_searched((*call.args, *call.kwargs.values()), is_edge(call.case))
            # What has its instructions searched is covered by itself: no other case shows that of its options.
            launches.append(
                (*seen, *(dataclasses.replace(one, kernel=f"{one.kernel}, searched") for one in seen if searched))
            )
    enough = covering(launches, together)
    shown = "shows no options that other cases do not"
    return [
        call if call.skipped or i in enough or not launches[i] else dataclasses.replace(call, skipped=shown)
        for i, call in enumerate(calls)
    ]


def worth_tracing(op: str, cases: Sequence[Case]) -> list[Case]:
    """The cases that are worth a trace by Helion where Triton's interpreter runs what Helion generates.

    A trace takes a second, and ref mode runs every case of these kernels. Tiles and masks are left for the interpreter
    to show. So any two numbers of a kernel (tiles, layouts) meet in some case, and every other option (dtypes, rules)
    is in some case. Cases that share what Helion generates with many others come first.
    """
    fn, generated = getattr(kernel_module(op, "helion"), op), []
    with recorded() as seen:
        for case in cases:
            seen.clear()
            if "large" not in case.flags and refusal(op, "helion", case.args(), dict(case.kwargs)) is None:
                fn(*case.args(), **case.kwargs)
            generated.append(frozenset(Launch(one.kernel, one.options, frozenset()) for one in seen))
    shown: set[Hashable] = set()
    traced: set[Launch] = set()
    for launches in sorted(generated, key=lambda launches: -generated.count(launches)):
        new = set[Hashable]().union(*(one.shows(1) | _numbers_of(one).shows(2) for one in launches)) - shown
        if new:
            shown |= new
            traced |= launches
    return [case for case, launches in zip(cases, generated, strict=True) if launches <= traced]


def _numbers_of(launch: Launch) -> Launch:
    numbers = {(name, value) for name, value in launch.options if isinstance(value, int) or name == "configs"}
    return Launch(launch.kernel, frozenset(numbers), frozenset())
