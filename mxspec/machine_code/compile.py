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
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from mxspec.dispatch import backends, has_kernel, kernel_module, ops, reference
from mxspec.machine_code.fake_gpu import fake_gpu, meta
from mxspec.machine_code.measure import MachineCode, measure
from mxspec.machine_code.planner import calls, covered, is_edge, is_searched
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


def _expected(module: ModuleType, target: str) -> tuple[str, ...]:
    ptx = getattr(module, "PTX", ())
    if isinstance(ptx, str):
        raise TypeError(f"{module.__name__}: PTX is a tuple, a dict by target, or a string that begins with 'no: '")
    return tuple(ptx.get(target, ()) if isinstance(ptx, Mapping) else ptx)


def problems(code: Sequence[MachineCode], expected: Sequence[str], args: Sequence[Any], edge: bool) -> list[str]:
    """What is wrong with the machine code of one case."""
    found = [f"{c.kernel} keeps {c.local_bytes} bytes a thread in local memory" for c in code if c.local_bytes]
    if not code and not edge:
        found.append("launches nothing")
    elif is_searched(args, edge):
        ptx = "\n".join(c.ptx for c in code)
        found += [f"no {regex!r} in the PTX of {code[0].kernel}" for regex in expected if not re.search(regex, ptx)]
    return found


def compile_op(op: str, backend: str, target: str, cover: int | None = None) -> list[Result]:
    """Compile and check every case of an op, or as many as show any `cover` options together (`covering.py`).

    With 0 that is each kernel once.
    """
    module = kernel_module(op, backend)
    ptx = getattr(module, "PTX", None)
    if isinstance(module, str) or (isinstance(ptx, str) and ptx.startswith("no: ")):
        return [Result(op, backend, "all", target, skipped=module if isinstance(module, str) else str(ptx))]
    fn, expected, results = getattr(module, op), _expected(module, target), []
    exact = reference(op).spec.min_sqnr_db == math.inf
    with fake_gpu(target) as compiled:
        chosen = calls(op, module) if cover is None else covered(calls(op, module, generated=False), fn, cover)
        for call in chosen:
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
            wrong = problems(code, expected, [*call.args, *call.kwargs.values()], is_edge(call.case))
            wrong += [f"{c.kernel} has a sum of floats, and promises bytes" for c in code if exact and c.has_float_sum]
            results.append(result(code=tuple(code), problems=tuple(wrong)))
    return results


def kernels() -> list[tuple[str, str]]:
    """Every `(op, backend)` that has a kernel file."""
    return [(op, backend) for op in ops() for backend in backends() if has_kernel(op, backend)]
