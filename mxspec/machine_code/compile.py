"""One op's kernels, compiled case by case and checked.

The op's cases are the inputs and the kernel's own host function is the launcher.

A kernel module says with `PTX` what its machine code must show: regular expressions that are searched in the PTX of
every case with contiguous, 16-byte aligned tensors and without the flag `edge`; a tuple for both targets or a dict by
target. `PTX = "no: reason"` is said by a module that has no machine code of its own. In all cases no kernel may touch
local memory, which is also where registers are spilled to, and none whose bytes are promised may have a sum of floats,
whose rounding would depend on whether the compiler fuses it with a product.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from mxspec.dispatch import backends, has_kernel, kernel_module, ops
from mxspec.machine_code.fake_gpu import fake_gpu, meta
from mxspec.machine_code.measure import MachineCode, measure
from mxspec.machine_code.planner import calls, expected, has_no_code, is_edge, is_searched, promises_bytes
from mxspec.spec import Case


def _compile(compiled: list[Any], target: str, fn: Callable[..., Any], args: Any, kwargs: Any) -> list[MachineCode]:
    compiled.clear()
    fn(*args, **kwargs)
    return [measure(kernel, target) for kernel in dict.fromkeys(compiled)]


def compile_call(fn: Callable[..., Any], *args: Any, target: str, **kwargs: Any) -> list[MachineCode]:
    """Compile what `fn(*args, **kwargs)` would launch on a GPU; of the tensors only the metadata is read."""
    with fake_gpu(target) as compiled:
        return _compile(compiled, target, fn, map(meta, args), {name: meta(arg) for name, arg in kwargs.items()})


def compile_case(op: str, backend: str, case: Case, target: str) -> list[MachineCode]:
    """Compile what a backend would launch for one case of an op."""
    return compile_call(getattr(kernel_module(op, backend), op), *case.args(), target=target, **case.kwargs)


@dataclass(frozen=True)
class Result:
    op: str
    backend: str
    case: str
    target: str
    code: tuple[MachineCode, ...] = ()
    problems: tuple[str, ...] = ()
    skipped: str = ""


def problems(code: Sequence[MachineCode], regexes: Sequence[str], args: Sequence[Any], edge: bool) -> list[str]:
    """What is wrong with the machine code of one case."""
    found = [f"{c.kernel} keeps {c.local_bytes} bytes a thread in local memory" for c in code if c.local_bytes]
    if not code and not edge:
        found.append("launches nothing")
    elif is_searched(args, edge):
        ptx = "\n".join(c.ptx for c in code)
        found += [f"no {regex!r} in the PTX of {code[0].kernel}" for regex in regexes if not re.search(regex, ptx)]
    return found


def compile_op(op: str, backend: str, target: str, names: Collection[str] | None = None) -> list[Result]:
    """Compile and check every case of an op, or those of these names (`planner.plan`)."""
    module = kernel_module(op, backend)
    if reason := has_no_code(module):
        return [Result(op, backend, "all", target, skipped=reason)]
    fn, regexes, exact, results = getattr(module, op), expected(module, target), promises_bytes(op), []
    with fake_gpu(target) as compiled:
        for call in calls(op, module, names):
            result = functools.partial(Result, op, backend, call.case.name, target)
            if call.skipped:
                results.append(result(skipped=call.skipped))
                continue
            try:
                code = _compile(compiled, target, fn, call.args, call.kwargs)
            except Exception as error:  # whatever a compiler raises; the other cases still have something to say
                causes = [error, *([error.__cause__] if error.__cause__ else [])]
                results.append(result(problems=tuple(f"{type(e).__name__}: {e}" for e in causes)))
                continue
            wrong = problems(code, regexes, [*call.args, *call.kwargs.values()], is_edge(call.case))
            wrong += [f"{c.kernel} has a sum of floats, and promises bytes" for c in code if exact and c.has_float_sum]
            results.append(result(code=tuple(code), problems=tuple(wrong)))
    return results


def kernels() -> list[tuple[str, str]]:
    """Every `(op, backend)` that has a kernel file."""
    return [(op, backend) for op in ops() for backend in backends() if has_kernel(op, backend)]
