"""Compile the kernels of one op, case by case, and check them.

The cases of the op are the inputs, and the kernel's own host function is the launcher.

A kernel module says with `PTX` which instructions its machine code must contain. `PTX` holds regular expressions, as a
tuple for both targets or as a dict by target. They are searched in the PTX of every case that has contiguous, 16-byte
aligned tensors and no flag `edge` or `generated`. A module without machine code of its own says `PTX = "no: reason"`.

Three more rules hold for all cases:

- No kernel may use local memory, because spilled registers go there.
- On Hopper, the assembler may leave out no matmul, and may not take sums for the 0 with which they begin.
- A kernel that promises bytes may not add a product of floats to another float: the rounding would depend on whether
  the compiler fuses the sum with the product.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from mxspec.dispatch import backends, has_kernel, kernel_module, ops
from mxspec.machine_code.fake_gpu import fake_gpu
from mxspec.machine_code.measure import MachineCode, measure
from mxspec.machine_code.planner import calls, expected, has_no_code, is_edge, is_searched, promises_bytes
from mxspec.spec import Case, meta


def _compile(compiled: list[Any], target: str, fn: Callable[..., Any], args: Any, kwargs: Any) -> list[MachineCode]:
    compiled.clear()
    fn(*args, **kwargs)
    return [measure(kernel, target) for kernel in dict.fromkeys(compiled)]


def compile_call(fn: Callable[..., Any], *args: Any, target: str, **kwargs: Any) -> list[MachineCode]:
    """Compile the kernels that `fn(*args, **kwargs)` would launch on a GPU.

    Only the metadata of the tensors is read.
    """
    with fake_gpu(target) as compiled:
        return _compile(compiled, target, fn, map(meta, args), {name: meta(arg) for name, arg in kwargs.items()})


def compile_case(op: str, backend: str, case: Case, target: str) -> list[MachineCode]:
    """Compile the kernels that a backend would launch for one case of an op."""
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
    """The problems with the machine code of one case."""
    found = [f"{c.kernel} keeps {c.local_bytes} bytes a thread in local memory" for c in code if c.local_bytes]
    found += [f"{c.kernel} lacks {c.dropped_matmuls} matmuls of its PTX" for c in code if c.dropped_matmuls]
    found += [f"{c.kernel} computes with 0 in place of the sums of matmuls" for c in code if c.lost_sums]
    found += [f"{c.kernel} makes Inf and NaN of e5m2 finite: convert to fp32 first" for c in code if c.loses_inf]
    if not code and not edge:
        found.append("launches nothing")
    elif is_searched(args, edge):
        ptx = "\n".join(c.ptx for c in code)
        found += [f"no {regex!r} in the PTX of {code[0].kernel}" for regex in regexes if not re.search(regex, ptx)]
    return found


def compile_op(op: str, backend: str, target: str, names: Collection[str] | None = None) -> list[Result]:
    """Compile and check every case of an op, or the cases with these names (`planner.plan`)."""
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
            except Exception as error:  # a compiler may raise anything, and the other cases still count
                causes = [error, *([error.__cause__] if error.__cause__ else [])]
                results.append(result(problems=tuple(f"{type(e).__name__}: {e}" for e in causes)))
                continue
            wrong = problems(code, regexes, [*call.args, *call.kwargs.values()], is_edge(call.case))
            wrong += [
                f"{c.kernel} adds a product of floats, and promises bytes"
                for c in code
                if exact and c.has_sum_of_product
            ]
            results.append(result(code=tuple(code), problems=tuple(wrong)))
    return results


def kernels() -> list[tuple[str, str]]:
    """Every `(op, backend)` that has a kernel file."""
    return [(op, backend) for op in ops() for backend in backends() if has_kernel(op, backend)]
