"""Choose the cases of an op that are worth compiling, or worth tracing, because no other case shows the same."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from mxspec.dispatch import kernel_module, reference, refusal
from mxspec.machine_code.covering import Launch, covering, recorded
from mxspec.machine_code.fake_gpu import fake_gpu
from mxspec.spec import Case, meta


def is_searched(args: Iterable[Any], edge: bool) -> bool:
    """Whether the machine code of a case is searched for the kernel's instructions (`PTX`)."""
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    return not edge and all(t.is_contiguous() and t.storage_offset() * t.element_size() % 16 == 0 for t in tensors)


def is_edge(case: Case) -> bool:
    """Whether a case may launch nothing or lack an instruction: it is at a limit, or it is generated."""
    return bool(set(case.flags) & {"edge", "generated"})


def has_no_code(module: Any) -> str | None:
    """Why a kernel module has no machine code of its own, or None: it cannot be imported, or its `PTX` says so."""
    said = module if isinstance(module, str) else getattr(module, "PTX", None)
    return said if isinstance(module, str) or (isinstance(said, str) and said.startswith("no: ")) else None


def expected(module: Any, target: str) -> tuple[str, ...]:
    """The regular expressions that a kernel module's `PTX` has for a target."""
    ptx = getattr(module, "PTX", ())
    if isinstance(ptx, str):
        raise TypeError(f"{module.__name__}: PTX is a string; needs a tuple, a dict by target, or 'no: REASON'")
    return tuple(ptx.get(target, ()) if isinstance(ptx, Mapping) else ptx)


def promises_bytes(op: str) -> bool:
    return reference(op).spec.min_sqnr_db == math.inf


@dataclass(frozen=True)
class Call:
    """A case as it is compiled, or the reason why it is skipped."""

    case: Case
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    skipped: str = ""


@functools.cache
def _on_meta(op: str, generated: bool) -> tuple[Call, ...]:
    """Every case of an op on meta tensors, made once for all backends and targets."""
    return tuple(_call(case, generated) for case in reference(op).spec.cases())


def _call(case: Case, generated: bool) -> Call:
    if case.raises:
        return Call(case, skipped="is refused")
    # An op's own cases have every option, and to trace the generated cases takes minutes.
    if not generated and "generated" in case.flags:
        return Call(case, skipped="is generated, and compiled only with all cases")
    return Call(case, [meta(arg) for arg in case.args()], {name: meta(arg) for name, arg in case.kwargs.items()})


def calls(op: str, module: Any, names: Collection[str] | None = None, generated: bool = True) -> list[Call]:
    """Every case of an op, as calls of its kernel module. With `names`, all other cases are skipped."""
    supports, shown = getattr(module, "supports", lambda *_, **__: None), "shows no option that other cases do not show"
    chosen = []
    for call in _on_meta(op, generated and names is None):
        skipped = call.skipped or supports(*call.args, **call.kwargs)
        if not skipped and names is not None and call.case.name not in names:
            skipped = shown
        chosen.append(dataclasses.replace(call, skipped=skipped or ""))
    return chosen


@functools.cache
def plan(ops: tuple[str, ...], backend: str, target: str, together: int) -> dict[str, frozenset[str]]:
    """For each op, the names of enough cases to show every combination of `together` options (see `covering`).

    Ops share kernels. If the cases of one op show something of a kernel, no other op has to show it again, provided
    that both ops check the kernel's machine code in the same way. Each op shows each of its kernels at least once.
    """
    # Imported first, because `fake_gpu` tests whether Helion is imported.
    modules = {op: kernel_module(op, backend) for op in ops}
    names, launches = [], []
    with fake_gpu(target), recorded() as seen:
        for op, module in modules.items():
            for call in [] if has_no_code(module) else calls(op, module, generated=False):
                if not call.skipped:
                    seen.clear()
                    with contextlib.suppress(Exception):  # the exception is raised again when the call is compiled
                        getattr(module, op)(*call.args, **call.kwargs)
                    names.append((op, call.case.name))
                    launches.append(_as_checked(op, call, seen, expected(module, target)))
    enough = covering(launches, together)
    chosen = [name for i, name in enumerate(names) if i in enough or not launches[i]]
    return {op: frozenset(name for other, name in chosen if other == op) for op in ops}


def _as_checked(op: str, call: Call, launches: Iterable[Launch], ptx: tuple[str, ...]) -> list[Launch]:
    """The launches of a call, under the name of each check that their machine code has to pass.

    Different checks find different things, so the launches of one check do not replace those of another. The op itself
    is one more check, with the kernel as its only trait.
    """
    checks, of_op = ["bytes" if promises_bytes(op) else "sums"], [op]
    if is_searched((*call.args, *call.kwargs.values()), is_edge(call.case)):
        checks, of_op = [*checks, f"searched for {ptx}"], [*of_op, f"{op}, searched"]
    return [
        *(dataclasses.replace(one, kernel=f"{one.kernel}, {check}") for one in launches for check in checks),
        *(Launch(f"{one.kernel}, {check}", frozenset(), frozenset()) for one in launches for check in of_op),
    ]


def worth_tracing(op: str, cases: Sequence[Case], embed: Callable[..., tuple[Any, ...]], few: bool) -> list[Case]:
    """The cases that are worth a trace by Helion when Triton's interpreter runs the code that Helion generates.

    A trace takes a second, and ref mode runs every case of these kernels. So the interpreter only has to show that
    tiles and masks are right. For this, any two numbers of a kernel (tiles, layouts) meet in some case, and every other
    option (dtypes, rules) is in some case. Cases that share their generated code with many others come first.

    With `few`, two numbers need not meet. Of the cases that share generated code, one then shows it, and so does every
    case at a limit of the contract.

    A check launches a case twice: with its inputs as given, and with the views `embed(args, reference, kwargs)`, whose
    strides may choose another kernel.
    """
    fn, generated = getattr(kernel_module(op, "helion"), op), []
    with recorded() as seen:
        for case in cases:
            seen.clear()
            args, kwargs = (() if "large" in case.flags else case.args()), dict(case.kwargs)
            for given in (args, embed(args, reference(op), kwargs)) if args else ():
                if refusal(op, "helion", given, kwargs) is not None:
                    break
                fn(*given, **kwargs)
            generated.append(frozenset(Launch(one.kernel, one.options, frozenset()) for one in seen))
    if few:
        enough = covering(generated, 1)
        traced = set[Launch]().union(*(generated[i] for i in enough))
        at_limits = (i for i, launches in enumerate(generated) if is_edge(cases[i]) and launches <= traced)
        return [cases[i] for i in sorted({*enough, *at_limits})]
    shown: set[Hashable] = set()
    traced = set[Launch]()
    for launches in sorted(generated, key=lambda launches: -generated.count(launches)):
        new = set[Hashable]().union(*(one.shows(1) | _numbers_of(one).shows(2) for one in launches)) - shown
        if new:
            shown |= new
            traced |= launches
    return [case for case, launches in zip(cases, generated, strict=True) if launches <= traced]


def _numbers_of(launch: Launch) -> Launch:
    numbers = {(name, value) for name, value in launch.options if isinstance(value, int) or name == "configs"}
    return Launch(launch.kernel, frozenset(numbers), frozenset())
