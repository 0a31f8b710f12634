"""Runs the cases one by one, gives the verdicts, and writes the reports."""

from __future__ import annotations

import difflib
import functools
import importlib
import shlex
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from mxspec import dispatch, interpreters, rules
from mxspec.check import _behaviour
from mxspec.check._answers import quietly, returned_problem, shared
from mxspec.check._compare import difference, form_difference, magnitudes_of, minus_zero_problem
from mxspec.check._memory import changed, embedded, memory_of_inputs, on_device, poisoned, strayed, tensors_of
from mxspec.spec import Case, answer_of

interpreters.install()  # so that the interpreter's fixes also serve Triton kernels from outside of mxspec

Candidate = str | Callable[..., Any]  # a backend's name, or a function with the op's signature
Status = Literal["passed", "failed", "skipped", "missing"]  # missing: a program wrote no result for a vector

# Two different bytes. A byte that the kernel never wrote then differs from the expected byte in at least one run.
_POISONS = (0xFF, 0x5A)


@dataclass(frozen=True)
class Result:
    """The verdict on one case. `message` says why the case was skipped, or how it failed."""

    op: str
    backend: str
    case: str
    status: Status
    message: str = ""
    number: int | None = None  # the number of the test, if the case is a test of the published vectors


def default_device() -> torch.device:
    """The GPU if there is one. The CPU if there is none, or if this process runs its kernels in an interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() and not dispatch.interpreters() else "cpu")


def check(op: str, candidate: Candidate, device: torch.device | None = None) -> Iterator[Result]:
    """Run every case of an op, and check each behaviour that the op promises."""
    for case in dispatch.reference(op).spec.cases():
        yield check_case(op, case, candidate, device)
    for name in _behaviour.names(op, device or default_device()):
        yield check_behaviour(op, name, candidate, device)


def check_case(
    op: str, case: Case, candidate: Candidate, device: torch.device | None = None, name: str | None = None
) -> Result:
    """Run one case twice: with its inputs as given, and with its inputs embedded in poisoned memory.

    Both times, new memory for outputs is poisoned. If the op works in place, its first argument is the output, and the
    memory around it must stay as it was. A function may raise NotImplementedError for a call that it does not support;
    the case is then skipped. `name` is the candidate's name in reports; from the command line it is `module:function`.
    """
    device = device or default_device()
    if device.type == "meta":
        raise ValueError("check: device = meta; needs a device whose tensors have bytes, such as cpu or cuda")
    reference = dispatch.reference(op)
    spec = reference.spec
    name = name or (candidate if isinstance(candidate, str) else _name_of(candidate))
    reproduce = _reproduce(op, f"--backend {candidate}" if isinstance(candidate, str) else name, case.name)
    result = functools.partial(Result, op, name, case.name)
    call: Callable[..., Any] = (
        functools.partial(dispatch.public(op), backend=candidate) if isinstance(candidate, str) else candidate
    )
    args = on_device(device, case.args())
    if isinstance(candidate, str) and candidate != "reference" and not dispatch.has_kernel(op, candidate):
        return result("skipped", f"{candidate} has no kernel for {op}")  # the case tests nothing of this backend
    if case.raises:
        problem = _refusal_problem(op, case, args, call, same_words=isinstance(candidate, str))
        return result("failed", f"{problem}\n{reproduce}") if problem else result("passed")
    if isinstance(candidate, str) and (reason := dispatch.refusal(op, candidate, args, dict(case.kwargs))):
        return result("skipped", f"{candidate} {reason}")
    if "large" in case.flags and (reason := _too_large(device, args)):
        fake_problem = _fake_problem(op, case, args, None)
        return result("failed", fake_problem) if fake_problem else result("skipped", reason)

    try:
        expected = answer_of(reference, args, case.kwargs)
        # The reference equals itself, so it needs no bound.
        magnitudes = None if candidate == "reference" else magnitudes_of(reference, args, case.kwargs)
    except torch.OutOfMemoryError:
        if "large" not in case.flags:
            raise
        return result("skipped", _out_of_memory("the reference", device))
    problem = _fake_problem(op, case, args, expected) if candidate == "reference" else None
    for poison, embed in zip(_POISONS, (False, True), strict=True):
        if problem or (embed and "large" in case.flags):
            break
        given = embedded(args, reference, case.kwargs) if embed else spec.own(args)
        if embed and isinstance(candidate, str) and dispatch.refusal(op, candidate, given, dict(case.kwargs)):
            break  # the backend refuses these strides, so a user gets an error and no wrong output
        try:
            before = spec.own(given)
            inputs = {name: memory.clone() for name, memory in memory_of_inputs(reference, given).items()}
            with poisoned(poison) as overrun, quietly():
                answer = call(*given, **case.kwargs)
            got = spec.outputs(given, answer)
            wanted = (spec.own(given)[0].copy_(expected[0]),) if spec.in_place else expected  # with `given`'s strides
            # Report writes to other memory first: they may be the cause of wrong outputs.
            problem = changed(inputs, memory_of_inputs(reference, given)) or overrun()
            problem = problem or returned_problem(reference, answer)
            problem = problem or difference(got, wanted, spec.min_sqnr_db, magnitudes, spec.inf_is_free)
            problem = problem or shared(got, tensors_of(reference, given))
            if spec.in_place and not problem:
                problem = minus_zero_problem(got[0], before[0], reference, args, case.kwargs)
                problem = problem or strayed(given[0], before[0])
        except NotImplementedError as error:
            return result("skipped", f"{name}: {error}")
        except (Exception, SystemExit) as error:  # a valid call must not raise, so any error is the finding
            if isinstance(error, torch.OutOfMemoryError) and "large" in case.flags:
                return result("skipped", _out_of_memory(name, device))
            problem = f"raised on a valid call\n{traceback.format_exc(limit=-3)}"
            if "0 active drivers" in str(error):
                problem += "There is no GPU here. Set TRITON_INTERPRET=1 to run Triton kernels on the CPU.\n"
        if problem and embed:
            problem = f"inputs embedded in larger, poisoned memory (strides, offset): {problem}"
    if problem is None:
        return result("passed")
    by_rule = spec.peer_rules and "elements differ" in problem
    whose = rules.report(op, call, args, case.kwargs) if by_rule else None
    return result("failed", "\n".join(filter(None, [problem, whose, reproduce])))


def check_behaviour(
    op: str, behaviour: str, candidate: Candidate, device: torch.device | None = None, name: str | None = None
) -> Result:
    """Check one behaviour. `behaviours` gives the names."""
    device = device or default_device()
    name = name or (candidate if isinstance(candidate, str) else _name_of(candidate))
    result = functools.partial(Result, op, name, behaviour)
    call: Callable[..., Any] = candidate  # type: ignore[assignment]
    if reason := _behaviour.unpromised(op, behaviour, candidate):
        return result("skipped", f"{name} {reason}")
    if isinstance(candidate, str):
        call = functools.partial(dispatch.public(op), backend=candidate)
        for case in _behaviour.chosen(op):
            if reason := dispatch.refusal(op, candidate, on_device(device, case.args()), dict(case.kwargs)):
                return result("skipped", f"{candidate} {reason}")
    try:
        problem = _behaviour.problem_of(op, behaviour, call, device)
    except NotImplementedError as error:
        return result("skipped", f"{name}: {error}")
    except (Exception, SystemExit):
        problem = f"raised on a valid call\n{traceback.format_exc(limit=-3)}"
    if problem is None:
        return result("passed")
    target = f"--backend {candidate}" if isinstance(candidate, str) else name
    return result("failed", f"{problem}\n{_reproduce(op, target, behaviour)}")


def behaviours(op: str, device: torch.device | None = None) -> list[str]:
    """The names of the behaviours that an op promises. Some of them need a GPU."""
    return list(_behaviour.names(op, device or default_device()))


def assert_conforms(
    fn: Candidate,
    *,
    op: str,
    cases: str | Callable[[Case], bool] | None = None,
    device: torch.device | str | None = None,
) -> dict[str, int]:
    """Assert that a function gives the bytes (for a matmul, the SQNR) that an op promises. A test in one line.

    Args:
        fn: a function with the op's signature, or a backend's name. A function may raise NotImplementedError for a
            call that it does not support.
        op: the name of the op that the function implements, such as `mx_quantize`.
        cases: the name of one case, or a function that takes a `Case` and returns whether to run it. Without it, all
            cases and all behaviours run.
        device: the device of the tensors, such as "cpu". Without it, the GPU if there is one.

    Returns:
        A dict with the number of passed and of skipped cases. A behaviour counts as a case.

    Raises:
        AssertionError: the function failed cases (the text reports the first three), or it ran on no valid case.
        TypeError: `fn` or `cases` has another type.
        ValueError: `op` is unknown, or no case has the name `cases`.

    Example:
        >>> def mine(scale):
        ...     return torch.zeros(512 * (scale.shape[0] // 128), dtype=scale.dtype)
        >>> assert_conforms(mine, op="to_blocked", cases="128x4")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        AssertionError: to_blocked: 1 case failed, 0 passed, 0 skipped
        ...
        >>> from mxspec import to_blocked
        >>> assert_conforms(to_blocked, op="to_blocked", cases="128x4")
        {'passed': 1, 'skipped': 0}
    """
    if not (callable(fn) or isinstance(fn, str)):
        raise TypeError(f"assert_conforms: fn = {fn!r}; needs a function or a backend's name")
    if not (cases is None or isinstance(cases, str) or callable(cases)):
        raise TypeError(f"assert_conforms: cases = {cases!r}; needs the name of a case, or a function of a Case")
    device = None if device is None else torch.device(device)
    chosen = cases_of(op, cases)
    results = [check_case(op, case, fn, device) for case in chosen]
    answered = any(r.status == "passed" and not case.raises for r, case in zip(results, chosen, strict=True))
    if cases is None:
        results += [check_behaviour(op, behaviour, fn, device) for behaviour in behaviours(op, device)]
    failed = [r for r in results if r.status == "failed"]
    counts = {status: sum(r.status == status for r in results) for status in ("passed", "skipped")}
    said = f"{counts['passed']} passed, {counts['skipped']} skipped"
    if failed:
        reports = [f"\ncase {r.case!r}: {r.message}" for r in failed[:3]]
        if len(failed) > 3:
            reports.append("\nand " + ", ".join(repr(r.case) for r in failed[3:]))
        count = f"{len(failed)} case{'s' if len(failed) > 1 else ''} failed"
        raise AssertionError("\n".join([f"{op}: {count}, {said}", *reports]))
    if not answered:
        reasons = dict.fromkeys(r.message for r in results if r.message)
        raise AssertionError("\n".join([f"{op}: the function ran on no valid case: {said}", *reasons]))
    return counts


def cases_of(op: str, chosen: str | Callable[[Case], bool] | None = None) -> list[Case]:
    """The cases of an op: the case with a name, the cases for which a function returns true, or all cases."""
    cases = list(dispatch.reference(op).spec.cases())
    if not isinstance(chosen, str):
        return [case for case in cases if chosen is None or chosen(case)]
    if found := [case for case in cases if case.name == chosen]:
        return found
    near = difflib.get_close_matches(chosen, [case.name for case in cases], 3, 0)
    raise ValueError(
        f"{op} has no case named {chosen!r}; among its {len(cases)} cases are {', '.join(map(repr, near))}"
    )


def load(target: str) -> Callable[..., Any]:
    """Import the function `module:function`."""
    module, _, function = target.partition(":")
    if not function:
        raise ValueError(f"{target!r} names no function; needs the form module:function")
    try:
        found = getattr(importlib.import_module(module), function)
    except (Exception, SystemExit) as error:  # an unknown module may raise any error when it is imported
        raise ValueError(f"{target}: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise ValueError(f"{target} is a {type(found).__name__}; needs a function")
    return found


def _too_large(device: torch.device, args: tuple[Any, ...]) -> str | None:
    needed = 24 * max(arg.numel() for arg in args if isinstance(arg, Tensor))  # the reference's fp32 temporaries
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] > needed:
        return None
    return f"needs a GPU with {needed / 2**30:.0f} GiB free; only the shapes of the outputs were checked"


def _out_of_memory(who: str, device: torch.device) -> str:
    """Why a call of 2^31 elements was not judged. `_too_large` cannot foresee every temporary of a reference."""
    return f"{who} ran out of memory on {device}; nothing was checked"


def _refusal_problem(
    op: str, case: Case, args: tuple[Any, ...], call: Callable[..., Any], same_words: bool
) -> str | None:
    """What is wrong with the answer to a case that must be refused. Outside functions need not use our error texts."""
    assert case.raises is not None

    def error_of(fn: Callable[..., Any]) -> BaseException | None:
        try:
            with quietly():
                fn(*args, **case.kwargs)
        except (Exception, SystemExit) as error:
            return error
        return None

    public = functools.partial(dispatch.public(op), backend="reference")  # the public op checks flags as well
    expected, got = error_of(public), error_of(call)
    if isinstance(got, SystemExit):
        return f"ended the process ({got!r}) on a call that must be refused; needs {expected!r}"
    if type(expected) is not case.raises or case.match not in str(expected):
        return f"the reference gives {expected!r}; the case needs {case.raises.__name__} with {case.match!r}"
    if got is None:
        return f"accepted a call that must be refused: {expected}"
    if same_words and (type(got), str(got)) != (type(expected), str(expected)):
        return f"raised {got!r}; needs {expected!r}"
    return None


def _fake_problem(op: str, case: Case, args: tuple[Any, ...], real: tuple[Tensor, ...] | None) -> str | None:
    """How FakeTensor's outputs, which torch.compile relies on, differ from the real ones in shape, strides or dtype."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        fake_args = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args]
        result = dispatch.public(op)(*fake_args, **case.kwargs)
        fake = dispatch.reference(op).spec.outputs(tuple(fake_args), result)
    if real is None:
        return None
    problem = form_difference(fake, real)
    return f"under FakeTensor, {problem}" if problem else None


def _name_of(fn: Callable[..., Any]) -> str:
    return f"{fn.__module__}:{getattr(fn, '__qualname__', type(fn).__name__)}"


def _reproduce(op: str, candidate: str, case: str) -> str:
    environment = "".join(f"{variable}=1 " for variable in dispatch.interpreters())
    return f"reproduce: {environment}python -m mxspec check --op {op} {candidate} --case {shlex.quote(case)}"
