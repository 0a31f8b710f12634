"""The conformance engine: does a backend, or any function, give the bytes that the reference gives?

One engine for pytest, the command line and the notebooks. It knows what `@spec` says and no op by name.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import inspect
import math
import shlex
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor

from mxspec import dispatch, interpreter, rules
from mxspec.formats import BY_DTYPE, INT_OF_BYTES, MX_BLOCK_SIZE, may_be_nan
from mxspec.spec import Case, MinSqnr, Reference

interpreter.install()  # a stranger's Triton kernel is interpreted as rightly as our own

Candidate = str | Callable[..., Any]  # a backend's name, or a function with the op's signature
Status = Literal["passed", "failed", "skipped", "missing"]  # missing: a program left no result beside the vectors

# Two different bytes, so that a byte that was never written differs from the expected one in at least one run.
_POISONS = (0xFF, 0x5A)


@dataclass(frozen=True)
class Result:
    """What became of one case. `message` says why it was skipped or how it failed."""

    op: str
    backend: str
    case: str
    status: Status
    message: str = ""
    number: int | None = None  # of a test of the published vectors


def default_device() -> torch.device:
    """The GPU where there is one, unless the kernels of this process run in an interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() and not dispatch.interpreters() else "cpu")


def check(op: str, candidate: Candidate, device: torch.device | None = None) -> Iterator[Result]:
    """Run every case of an op."""
    for case in dispatch.reference(op).spec.cases():
        yield check_case(op, case, candidate, device)


def check_case(
    op: str, case: Case, candidate: Candidate, device: torch.device | None = None, name: str | None = None
) -> Result:
    """Run one case: as given and with its inputs embedded in poisoned memory, outputs poisoned both times.

    What an op changes in place is its output, and what lies around that must stay as it was.
    A function may raise NotImplementedError for what it does not support; the case is then skipped. `name` is what
    a report calls the candidate, `module:function` if that is where the command line finds it.
    """
    device = device or default_device()
    if device.type == "meta":
        raise ValueError("check: device = meta; needs one whose tensors have bytes")
    reference = dispatch.reference(op)
    spec = reference.spec
    name = name or (candidate if isinstance(candidate, str) else _name_of(candidate))
    reproduce = _reproduce(op, f"--backend {candidate}" if isinstance(candidate, str) else name, case)
    result = functools.partial(Result, op, name, case.name)
    call: Callable[..., Any] = (
        functools.partial(dispatch.public(op), backend=candidate) if isinstance(candidate, str) else candidate
    )
    args = on_device(device, case.args())
    if case.raises:
        problem = _refusal_problem(case, args, call, reference, same_words=isinstance(candidate, str))
        return result("failed", f"{problem}\n{reproduce}") if problem else result("passed")
    if isinstance(candidate, str) and (reason := dispatch.refusal(op, candidate, args, dict(case.kwargs))):
        return result("skipped", f"{candidate} {reason}")
    if "large" in case.flags and (reason := _too_large(device, args)):
        fake_problem = _fake_problem(op, case, args, None)
        return result("failed", fake_problem) if fake_problem else result("skipped", reason)

    own = spec.own(args)
    expected = spec.outputs(own, reference(*own, **case.kwargs))
    problem = _fake_problem(op, case, args, expected) if candidate == "reference" else None
    for poison, embed in zip(_POISONS, (False, True), strict=True):
        if problem or (embed and "large" in case.flags):
            break
        given = _embedded(args, reference, case.kwargs) if embed else spec.own(args)
        if embed and isinstance(candidate, str) and dispatch.refusal(op, candidate, given, dict(case.kwargs)):
            break  # it says that it takes no such strides, and nobody gets a wrong output
        try:
            before = spec.own(given)
            inputs = {name: memory.clone() for name, memory in _memory_of_inputs(reference, given).items()}
            with poisoned(poison) as overrun:
                got = spec.outputs(given, call(*given, **case.kwargs))
            wanted = (spec.own(given)[0].copy_(expected[0]),) if spec.in_place else expected  # with its strides
            # What it has done elsewhere comes first: wrong outputs may be no more than what follows from that.
            problem = _changed(inputs, _memory_of_inputs(reference, given)) or overrun()
            problem = problem or difference(got, wanted, spec.min_sqnr_db)
            if spec.in_place and not problem:
                problem = _strayed(given[0], before[0])
        except NotImplementedError as error:
            return result("skipped", f"{name}: {error}")
        except (Exception, SystemExit) as error:  # whatever a kernel raises on a valid call is the finding
            problem = f"raised on a valid call\n{traceback.format_exc(limit=-3)}"
            if "0 active drivers" in str(error):
                problem += "there is no GPU here; Triton's kernels run on the CPU under TRITON_INTERPRET=1\n"
        if problem and embed:
            problem = f"inputs embedded in larger, poisoned memory (strides, offset): {problem}"
    if problem is None:
        return result("passed")
    by_rule = spec.peer_rules and "elements differ" in problem
    whose = rules.report(op, call, args, case.kwargs) if by_rule else None
    return result("failed", "\n".join(filter(None, [problem, whose, reproduce])))


def assert_conforms(
    fn: Candidate,
    *,
    op: str,
    cases: str | Callable[[Case], bool] | None = None,
    device: torch.device | None = None,
) -> dict[str, int]:
    """Assert that a function gives the bytes, or for a matmul the SQNR, that an op promises: a test of one line.

    Args:
        fn: a function with the op's signature; it may raise NotImplementedError for what it does not support.
        op: the op that it claims to be, such as `mx_quantize`.
        cases: the name of one case, or a function that takes a `Case` and says whether to run it; all by default.
        device: where the tensors are; by default the GPU if there is one.

    Returns:
        How many cases it passed, and how many it skipped.

    Raises:
        AssertionError: for the cases that it failed, with a report of each of the first three; or when it ran on none
            that is to be answered.
        TypeError: fn or cases.
        ValueError: op, or a name that no case has.

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
        raise TypeError(f"assert_conforms: fn = {fn!r}; needs a function, or a backend's name")
    if not (cases is None or isinstance(cases, str) or callable(cases)):
        raise TypeError(f"assert_conforms: cases = {cases!r}; needs the name of one, or a function of a Case")
    chosen = cases_of(op, cases)
    results = [check_case(op, case, fn, device) for case in chosen]
    failed = [r for r in results if r.status == "failed"]
    counts = {status: sum(r.status == status for r in results) for status in ("passed", "skipped")}
    said = f"{counts['passed']} passed, {counts['skipped']} skipped"
    if failed:
        reports = [f"\ncase {r.case!r}: {r.message}" for r in failed[:3]]
        if len(failed) > 3:
            reports.append("\nand " + ", ".join(repr(r.case) for r in failed[3:]))
        count = f"{len(failed)} case{'s' if len(failed) > 1 else ''} failed"
        raise AssertionError("\n".join([f"{op}: {count}, {said}", *reports]))
    if not any(r.status == "passed" and not case.raises for r, case in zip(results, chosen, strict=True)):
        reasons = dict.fromkeys(r.message for r in results if r.message)
        raise AssertionError("\n".join([f"{op}: it ran on no case that is to be answered: {said}", *reasons]))
    return counts


def cases_of(op: str, chosen: str | Callable[[Case], bool] | None = None) -> list[Case]:
    """The cases of an op: the one of a name, those that a function takes, or all."""
    cases = list(dispatch.reference(op).spec.cases())
    if not isinstance(chosen, str):
        return [case for case in cases if chosen is None or chosen(case)]
    if found := [case for case in cases if case.name == chosen]:
        return found
    near = difflib.get_close_matches(chosen, [case.name for case in cases], 3, 0)
    raise ValueError(f"{op} has no case named {chosen!r}; among its {len(cases)} are {', '.join(map(repr, near))}")


def load(target: str) -> Callable[..., Any]:
    """The function named `module:function`."""
    module, _, function = target.partition(":")
    if not function:
        raise ValueError(f"{target!r} names no function; needs module:function")
    try:
        found = getattr(importlib.import_module(module), function)
    except (Exception, SystemExit) as error:  # a stranger's module may fail to load in any way that it likes
        raise ValueError(f"{target}: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise ValueError(f"{target} is a {type(found).__name__}; needs a function")
    return found


# --- inputs and outputs -----------------------------------------------------------------------------------------


def on_device(device: torch.device, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Tensors on the device, with their strides; a meta tensor stays: it is how a case says 'another device'."""
    return tuple(_moved(a, device) if isinstance(a, Tensor) else a for a in args)


def _moved(t: Tensor, device: torch.device) -> Tensor:
    """A tensor on the device: its dimensions of stride 0 get no memory, what lies between its rows comes along."""
    if t.device.type == "meta" or t.layout != torch.strided or not t.numel():
        return t if t.device.type == "meta" else t.to(device)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return t.as_strided((extent,), (1,)).to(device).as_strided(t.shape, t.stride())


def _embedded(args: tuple[Any, ...], reference: Reference[..., Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The same values as views into larger buffers of 0xFF bytes (NaN, for a float): other strides, odd offsets.

    A tensor's dimensions keep their order in memory, and, where the contract refuses the other strides, lie as dense.
    """

    def embed(t: Tensor, gap: int) -> Tensor:
        order = sorted(range(t.ndim), key=lambda d: t.stride(d) or math.inf, reverse=True)
        sizes = [t.shape[d] + gap for d in order]
        buffer = torch.empty(math.prod(sizes) + 2, dtype=t.dtype, device=t.device)
        buffer.view(torch.uint8).fill_(0xFF)
        inner = buffer[1:-1].view(sizes)[tuple(slice(gap // 2, gap // 2 + t.shape[d]) for d in order)]
        view = inner.permute(sorted(range(t.ndim), key=order.index))
        bits = INT_OF_BYTES[t.element_size()]
        view.view(bits).copy_(t.resolve_neg().view(bits))  # as bytes: torch copies no strided float4
        return view

    for gap in (3, 0):
        embedded = tuple(embed(a, gap) if isinstance(a, Tensor) and a.ndim else a for a in args)
        try:
            reference.spec.check_args(*embedded, **kwargs)
        except ValueError:
            continue
        break
    return embedded


def fill_bytes(t: Tensor, byte: int) -> None:
    """Fill all the memory of a tensor's storage, whatever its dtype."""
    _bytes(t).fill_(byte)


_ALLOCATORS = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (Tensor, "new_empty"),
    (Tensor, "new_empty_strided"),
)


_GUARD_BYTES = 1024  # a multiple of what any kernel asks for: a tensor begins behind them as aligned as it was


@contextlib.contextmanager
def poisoned(byte: int) -> Iterator[Callable[[], str | None]]:
    """Inside, memory that torch hands out uninitialised holds `byte` in every byte, and so does what lies around it.

    Gives a function that says whether that is still what lies around.
    """
    empty, guarded = torch.empty, list[tuple[Tensor, int]]()

    def filling(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(allocate)
        def filled(*args: Any, **kwargs: Any) -> Tensor:
            out = allocate(*args, **kwargs)
            if type(out) is not Tensor or out.is_meta or not out.numel():  # a FakeTensor has no bytes
                return out
            size = out.untyped_storage().nbytes()
            memory = empty(size + 2 * _GUARD_BYTES, dtype=torch.uint8, device=out.device)
            fill_bytes(memory, byte)
            guarded.append((memory, size))
            where = memory.untyped_storage(), _GUARD_BYTES // out.element_size(), out.shape, out.stride()
            return empty(0, dtype=out.dtype, device=out.device).set_(*where)

        return filled

    def overrun() -> str | None:
        around: dict[torch.device, list[Tensor]] = {}
        for memory, size in guarded:
            around.setdefault(memory.device, []).extend((memory[:_GUARD_BYTES], memory[_GUARD_BYTES + size :]))
        wrong = sum(int((torch.cat(parts) != byte).sum()) for parts in around.values())  # one wait a device
        return f"{wrong} bytes around memory that it allocated were written" if wrong else None

    with contextlib.ExitStack() as patches:
        for place, name in _ALLOCATORS:
            patches.enter_context(mock.patch.object(place, name, filling(getattr(place, name))))
        yield overrun


def _too_large(device: torch.device, args: tuple[Any, ...]) -> str | None:
    needed = 24 * max(arg.numel() for arg in args if isinstance(arg, Tensor))  # the reference's fp32 temporaries
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] > needed:
        return None
    return f"needs a GPU with {needed / 2**30:.0f} GiB free; its shapes were checked"


# --- verdicts ---------------------------------------------------------------------------------------------------


def _refusal_problem(
    case: Case, args: tuple[Any, ...], call: Callable[..., Any], reference: Callable[..., Any], same_words: bool
) -> str | None:
    """A case that must be refused: what is wrong with how it was. Outside functions need not use our words."""
    assert case.raises is not None

    def error_of(fn: Callable[..., Any]) -> Exception | None:
        try:
            fn(*args, **case.kwargs)
        except Exception as error:
            return error
        return None

    expected, got = error_of(reference), error_of(call)
    if type(expected) is not case.raises or case.match not in str(expected):
        return f"the reference gives {expected!r}; the case wants {case.raises.__name__} with {case.match!r}"
    if got is None:
        return f"accepted what must be refused: {expected}"
    if same_words and (type(got), str(got)) != (type(expected), str(expected)):
        return f"raised {got!r}; needs {expected!r}"
    return None


def _fake_problem(op: str, case: Case, args: tuple[Any, ...], real: tuple[Tensor, ...] | None) -> str | None:
    """Whether FakeTensor, and so torch.compile, sees the shapes, strides and dtypes that come out for real."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        fake_args = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args]
        result = dispatch.public(op)(*fake_args, **case.kwargs)
        fake = dispatch.reference(op).spec.outputs(tuple(fake_args), result)
    if real is None:
        return None
    problems = [_form_problem(i, f, r) for i, (f, r) in enumerate(zip(fake, real, strict=True))]
    return next((f"under FakeTensor, {problem}" for problem in problems if problem), None)


def _memory_of_inputs(reference: Reference[..., Any], args: tuple[Any, ...]) -> dict[str, Tensor]:
    """The memory of each tensor that a call has to leave as it is, by the parameter's name."""
    names = list(inspect.signature(reference).parameters)[: len(args)]
    kept = list(zip(names, args, strict=True))[1 if reference.spec.in_place else 0 :]
    return {name: _memory(t) for name, t in kept if isinstance(t, Tensor)}


def _memory(t: Tensor) -> Tensor:
    """All the memory that a tensor is a view of; of rows gigabytes apart the pages of 4096 bytes that hold an element.

    Nothing has touched the pages between: to read them all takes seconds, and to keep what they hold as much memory.
    A write to one of them is not seen.
    """
    memory = _bytes(t)
    if memory.numel() - t.numel() * t.element_size() < 2**28:
        return memory
    places = torch.tensor(t.storage_offset(), device=t.device)
    for size, stride in zip(t.shape, t.stride(), strict=True):
        places = places[..., None] + torch.arange(size, device=t.device) * stride
    pages = (places * t.element_size() // 4096).unique()
    return memory[(pages[:, None] * 4096 + torch.arange(4096, device=t.device)).clamp(max=memory.numel() - 1)]


def _changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> str | None:
    found = [name for name, memory in before.items() if not memory.equal(after[name])]
    return f"it changed its input {', '.join(found)}" if found else None


def _bytes(t: Tensor) -> Tensor:
    """All the memory that a tensor is a view of."""
    return torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())


def _strayed(after: Tensor, before: Tensor) -> str | None:
    """Whether a call wrote around what it is to change: with that put back, all of the memory is what it was."""
    after.copy_(before)
    now, then = _bytes(after), _bytes(before)
    wrong = int((now != then).sum())
    return f"{wrong} bytes around what it is to change were written" if wrong else None


def _form_problem(i: int, got: Tensor, expected: Tensor) -> str | None:
    for attribute in ("shape", "dtype", "device"):
        if getattr(got, attribute) != getattr(expected, attribute):
            return f"output {i}: {attribute} {getattr(got, attribute)}; needs {getattr(expected, attribute)}"
    # A stride says something only where a dimension has more than one element and the tensor any.
    strides = [
        [stride for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1 and t.numel()]
        for t in (got, expected)
    ]
    return None if strides[0] == strides[1] else f"output {i}: strides {got.stride()}; needs {expected.stride()}"


def form_difference(got: tuple[Any, ...], expected: tuple[Tensor, ...]) -> str | None:
    """What tells the outputs from the reference's in number, shape, dtype, device or strides, or None."""
    if len(got) != len(expected):
        return f"{len(got)} outputs; needs {len(expected)}"
    for i, (g, e) in enumerate(zip(got, expected, strict=True)):
        problem = _form_problem(i, g, e) if isinstance(g, Tensor) else f"output {i}: {type(g).__name__}; needs a tensor"
        if problem:
            return problem
    return None


def difference(got: tuple[Any, ...], expected: tuple[Tensor, ...], min_sqnr_db: MinSqnr = math.inf) -> str | None:
    """What tells the outputs from the reference's, or None: bytes with NaN as a class, or SQNR below a finite bound."""
    if problem := form_difference(got, expected):
        return problem
    for i, (g, e) in enumerate(zip(got, expected, strict=True)):
        bound = min_sqnr_db[e.dtype] if isinstance(min_sqnr_db, Mapping) else min_sqnr_db
        if problem := _byte_problem(i, g, e) if math.isinf(bound) else _sqnr_problem(i, g, e, bound):
            return problem
    return None


def _byte_problem(i: int, got: Tensor, expected: Tensor) -> str | None:
    bits = INT_OF_BYTES[expected.element_size()]
    wrong = got.view(bits) != expected.view(bits)
    if wrong.any() and may_be_nan(expected.dtype):
        wrong &= ~(got.float().isnan() & expected.float().isnan())
    if not wrong.any():
        return None
    flat, index = wrong.reshape(-1), _first(wrong)
    # The block: the aligned run of 32 elements that holds the index, along the dimension of stride 1.
    fmt = BY_DTYPE.get(expected.dtype)
    size = MX_BLOCK_SIZE // fmt.per_byte if fmt else MX_BLOCK_SIZE
    along = next((d for d, stride in enumerate(expected.stride()) if stride == 1), expected.ndim - 1)
    start = index[along] // size * size
    block: tuple[Any, ...] = (*index[:along], slice(start, start + size), *index[along + 1 :])
    shown = ", ".join(map(str, (*index[:along], f"{start}:{start + size}", *index[along + 1 :])))
    one, run = ([_hex(t.view(bits)[where]) for t in (got, expected)] for where in (index, block))
    return (
        f"output {i}: {int(flat.sum())} of {flat.numel()} elements differ, first at {list(index)}: "
        f"got {one[0]}, expected {one[1]}\n  block [{shown}]\n  got      {run[0]}\n  expected {run[1]}"
    )


def _first(found: Tensor) -> tuple[int, ...]:
    """The index of the first element that is true."""
    first = int(found.reshape(-1).to(torch.uint8).argmax())
    return tuple(int(n) for n in torch.unravel_index(torch.tensor(first), found.shape))


def _hex(bits: Tensor) -> str:
    digits = 2 * bits.element_size()
    return " ".join(f"{value & (16**digits - 1):0{digits}x}" for value in bits.reshape(-1).tolist())


def sqnr_db(got: Tensor, expected: Tensor) -> float:
    """Signal-to-quantization-noise ratio, `10 log10(sum e^2 / sum (g - e)^2)` in float64; `inf` where equal."""
    g, e = got.double(), expected.double()
    noise, signal = float((g - e).square().sum()), float(e.square().sum())
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal and math.isfinite(noise) else -math.inf


def _sqnr_problem(i: int, got: Tensor, expected: Tensor, min_sqnr_db: float) -> str | None:
    """NaN and Inf stand where the reference has them, and all other elements are near enough."""
    finite = got.isfinite() & expected.isfinite()
    wrong = ~finite & (got != expected) & ~(got.isnan() & expected.isnan())
    if wrong.any():
        index = _first(wrong)
        values = f"got {float(got[index])}, expected {float(expected[index])}"
        return f"output {i}: {int(wrong.sum())} of {wrong.numel()} NaN or Inf differ, first at {list(index)}: {values}"
    zero = torch.zeros((), dtype=got.dtype, device=got.device)
    measured = sqnr_db(got.where(finite, zero), expected.where(finite, zero))
    return None if measured >= min_sqnr_db else f"output {i}: {measured:.1f} dB; needs {min_sqnr_db} dB"


def _name_of(fn: Callable[..., Any]) -> str:
    return f"{fn.__module__}:{getattr(fn, '__qualname__', type(fn).__name__)}"


def _reproduce(op: str, candidate: str, case: Case) -> str:
    environment = "".join(f"{variable}=1 " for variable in dispatch.interpreters())
    return f"reproduce: {environment}python -m mxspec check --op {op} {candidate} --case {shlex.quote(case.name)}"
