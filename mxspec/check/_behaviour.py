"""Behaviours: checks of a candidate over several calls. Each behaviour runs once for a candidate, not once per case.

A case judges one answer. The behaviours judge the rest: a second call gives the same bits, every answer has its own
memory, no answer comes from an earlier call, the process stays unchanged, and gradients flow if the op has them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mxspec import cases, dispatch
from mxspec.check._answers import copies, equal_bits, overlap, quietly, shared
from mxspec.check._compare import difference, magnitudes_of
from mxspec.check._facts import Fact, facts_of
from mxspec.check._memory import on_device, tensors_of
from mxspec.formats import INT_OF_BYTES, same_bits
from mxspec.spec import Case, Reference, answer_of

Call = Callable[..., Any]


@dataclass(frozen=True)
class Trial:
    """A candidate, and a few calls of its op on which the behaviours watch it."""

    reference: Reference[..., Any]
    call: Call
    device: torch.device
    cases: tuple[Case, ...]
    refused: Case | None

    def args(self, case: Case) -> tuple[Any, ...]:
        return self.reference.spec.own(on_device(self.device, case.args()))

    def outputs(self, args: tuple[Any, ...], case: Case) -> tuple[Tensor, ...]:
        """The outputs of a call. For an op in place, the output is the first argument after the call."""
        with quietly():
            return self.reference.spec.outputs(args, self.call(*args, **case.kwargs))

    def expected(self, args: tuple[Any, ...], case: Case) -> tuple[Tensor, ...]:
        return answer_of(self.reference, args, case.kwargs)

    def wrong(self, got: tuple[Tensor, ...], args: tuple[Any, ...], case: Case) -> str | None:
        """How outputs differ from the reference's. `args` are the arguments as they were before the call."""
        spec = self.reference.spec
        magnitudes = magnitudes_of(self.reference, args, case.kwargs)
        return difference(got, self.expected(args, case), spec.min_sqnr_db, magnitudes, spec.inf_is_free)


SMALL = 2**15  # the tensors of a small case have at most 4 * SMALL bytes together


@functools.cache
def chosen(op: str) -> tuple[Case, ...]:
    """A few small valid cases that together show every value of every option, every dtype and every rank.

    The choice covers only what small cases show. Hand-written cases come before generated cases.
    """
    cases = [case for case in dispatch.reference(op).spec.cases() if not case.raises and "large" not in case.flags]
    missing: dict[str, set[Fact]] = {}
    for case in sorted(cases, key=lambda case: ("generated" in case.flags, "edge" in case.flags)):
        args = case.args()
        sizes = [a.untyped_storage().nbytes() for a in args if isinstance(a, Tensor)]
        many = any(a.dtype == torch.int32 and len(a) > 32 for a in args if isinstance(a, Tensor) and a.ndim == 1)
        if not many and min(a.numel() for a in args if isinstance(a, Tensor)) > 0 and sum(sizes) <= 4 * SMALL:
            found = facts_of(op, args, case.kwargs)
            missing[case.name] = {
                fact for fact in found if "." not in fact.about or fact.about.endswith((".dtype", ".rank"))
            }
    by_name, enough = {case.name: case for case in cases}, list[Case]()
    while missing and len(enough) < 6:
        best = max(missing, key=lambda name: len(missing[name]))  # the first, if several are equal
        if enough and not missing[best]:
            break
        enough.append(by_name[best])
        shown = missing.pop(best)
        missing = {name: facts - shown for name, facts in missing.items()}
    return tuple(enough)


def same_bits_again(trial: Trial) -> str | None:
    for case in trial.cases:
        one = copies(trial.outputs(trial.args(case), case))
        if not equal_bits(one, copies(trial.outputs(trial.args(case), case))):
            return f"case {case.name!r}: two calls on the same inputs give different bits"
    return None


def memory_of_its_own(trial: Trial) -> str | None:
    """Every answer has its own memory, and a later call does not change it."""
    if trial.reference.spec.in_place:
        return None
    kept: list[tuple[Case, tuple[Tensor, ...], tuple[Tensor, ...]]] = []
    for case in (*trial.cases, *trial.cases):
        args = trial.args(case)
        outputs = trial.outputs(args, case)
        if problem := shared(outputs, tensors_of(trial.reference, args)):
            return f"case {case.name!r}: {problem}"
        for before, earlier, then in kept:
            if any(overlap(a, b) for a in earlier for b in outputs):
                return f"case {case.name!r}: its outputs share memory with the outputs of an earlier call"
            if not equal_bits(then, copies(earlier)):
                return f"case {case.name!r}: it changed the outputs of an earlier call (case {before.name!r})"
        kept.append((case, outputs, copies(outputs)))
    return None


def no_stale_answer(trial: Trial) -> str | None:
    """Every call is computed anew, also after new values in the same memory, after other shapes, or after an error."""
    for case in trial.cases:
        args = trial.args(case)
        trial.outputs(trial.reference.spec.own(args), case)
        for t in args:
            if isinstance(t, Tensor) and t.dtype != torch.int32 and not t.is_neg():  # int32: offs stay as they are
                bits = t.data.view(INT_OF_BYTES[t.element_size()])  # through `.data`: the version does not change
                if 0 in [stride for size, stride in zip(bits.shape, bits.stride(), strict=True) if size > 1]:
                    continue
                if t.ndim == 0:
                    bits.bitwise_xor_(1 << (8 * t.element_size() - 4))  # a bit of the exponent
                else:
                    bits.copy_(bits.flip(0).clone() if len(t) > 1 else bits.flip(-1).clone())
        given = trial.reference.spec.own(args)
        if problem := trial.wrong(trial.outputs(args, case), given, case):
            return f"case {case.name!r}, with new values in the tensors of an earlier call: {problem}"
    for case in (*trial.cases, *trial.cases[::-1]):
        if trial.refused:
            with contextlib.suppress(Exception), quietly():
                trial.call(*trial.refused.args(), **trial.refused.kwargs)
        args = trial.args(case)
        given = trial.reference.spec.own(args)
        if problem := trial.wrong(trial.outputs(args, case), given, case):
            return f"case {case.name!r}, after calls of other shapes: {problem}"
    return None


def same_in_every_mode(trial: Trial) -> str | None:
    """The mode of autograd and the default dtype do not change the bits."""
    for case in trial.cases:
        expected = copies(trial.outputs(trial.args(case), case))
        for name, mode in _MODES.items():
            args = trial.args(case)
            with mode():
                got = trial.outputs(args, case)
            if not equal_bits(expected, copies(got)):
                return f"case {case.name!r}: it gives other bits {name}"
    return None


@contextlib.contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


_MODES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "under torch.no_grad": torch.no_grad,
    "under torch.inference_mode": torch.inference_mode,
    "if the default dtype is float64": functools.partial(_default, torch.float64),
    "if the default dtype is float16": functools.partial(_default, torch.float16),
}


def leaves_the_process_alone(trial: Trial) -> str | None:
    """A call does not change the process: its modes, its defaults and its random numbers stay as they were."""
    for case in trial.cases[:1]:
        args, before = trial.args(case), _process_state(trial.device)
        trial.outputs(args, case)
        after = _process_state(trial.device)
        for name, value in before.items():
            same = value.equal(after[name]) if isinstance(value, Tensor) else value == after[name]
            if not same:
                return f"case {case.name!r}: it changed {name}"
    return None


def _process_state(device: torch.device) -> dict[str, Any]:
    state: dict[str, Any] = {
        "torch's random numbers": torch.get_rng_state(),
        "whether gradients are enabled": torch.is_grad_enabled(),
        "the default dtype": torch.get_default_dtype(),
        "the default device": torch.get_default_device(),
        "the number of threads": torch.get_num_threads(),
        "whether algorithms are deterministic": torch.are_deterministic_algorithms_enabled(),
        "the precision of float32 matmuls": torch.get_float32_matmul_precision(),
    }
    if device.type == "cuda":
        state["CUDA's random numbers"] = torch.cuda.get_rng_state(device)
        state["the current CUDA device"] = torch.cuda.current_device()
    return state


def waits_for_nothing(trial: Trial) -> str | None:
    """On a GPU, a call launches work and returns. It does not wait for the device, except with `check_offs=True`."""
    if trial.device.type != "cuda":
        return None
    for case in trial.cases:
        if case.kwargs.get("check_offs"):
            continue
        trial.outputs(trial.args(case), case)  # the first call compiles, and may wait
        args = trial.args(case)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            trial.outputs(args, case)
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            return f"case {case.name!r}: it waits for the device"
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return None


def gradients_flow(trial: Trial) -> str | None:
    """If the op has gradients, a candidate gives the same gradients as the op, in the hand-written cases."""
    op = trial.reference.__name__
    public = dispatch.public(op)
    for case in dispatch.reference(op).spec.cases():
        if case.raises or set(case.flags) - {"edge"} or "far apart" in case.name:
            continue
        args = trial.args(case)
        if not args[0].dtype.is_floating_point or args[0].element_size() < 2:
            continue
        got, wanted = (
            _gradient(fn, args, case) for fn in (trial.call, lambda *a, **k: public(*a, backend="reference", **k))
        )
        assert isinstance(wanted, Tensor)
        if isinstance(got, str):
            return f"case {case.name!r}: {got}"
        if problem := difference((got,), (wanted,)):
            return f"case {case.name!r}: the gradient of the first argument: {problem}"
    return None


def no_gradient_in_place(trial: Trial) -> str | None:
    """An op in place has no gradient, and raises if its first argument requires one."""
    for case in trial.cases[:1]:
        args = trial.args(case)
        acc = args[0].clone().requires_grad_()
        try:
            with quietly():
                trial.call(acc, *args[1:], **case.kwargs)
        except (RuntimeError, NotImplementedError):
            continue
        return f"case {case.name!r}: it accepted a first argument that requires a gradient; needs an error"
    return None


def _gradient(fn: Call, args: tuple[Any, ...], case: Case) -> Tensor | str:
    x = args[0].detach().clone().requires_grad_()
    with quietly():
        result = fn(x, *args[1:], **case.kwargs)
    out = result[0] if isinstance(result, tuple) else result
    if not out.requires_grad:
        raise NotImplementedError(
            "its output requires no gradient although the first argument does, so its gradients were not judged"
        )
    upstream = torch.arange(out.numel(), dtype=torch.float32, device=out.device).view(out.shape) % 64 + 1
    (gradient,) = torch.autograd.grad(out, x, upstream.to(out.dtype))
    return gradient


def rows_keep_their_bits(trial: Trial) -> str | None:
    """A row of the output has the same bits whatever other rows the call has: fewer, or many more.

    Calls with blocked scales, or with groups that begin at multiples of a number, are left out.
    """
    if trial.device.type == "cpu" and dispatch.interpreters():
        raise NotImplementedError(
            "an interpreter multiplies matrices by numpy, whose order of sums depends on the number of rows, so batch "
            "invariance was not judged"
        )
    take = cases.rows_taken(trial.reference.__name__)
    assert take is not None
    judged = False
    for case in trial.cases:
        args = trial.args(case)
        M = trial.expected(trial.reference.spec.own(args), case)[0].shape[0]
        every = torch.arange(M, device=trial.device)
        if (whole := take(args, case.kwargs, every)) is None:
            continue
        judged = True
        (expected,) = copies(trial.outputs(trial.reference.spec.own(whole), case))
        many = 300 if trial.device.type == "cpu" else 40_000  # a kernel for large outputs must run, too
        for rows in (every[:1], every[-1:], every[1::3], every.repeat_interleave(-(-many // M))):
            some = take(args, case.kwargs, rows)
            assert some is not None
            (got,) = trial.outputs(trial.reference.spec.own(some), case)
            if changed := int((~same_bits(expected[rows], got)).any(-1).sum()):
                return f"case {case.name!r}: of {M} rows, a call with {len(rows)} changes the bits of {changed}"
    if not judged:
        raise NotImplementedError("no small case of the op has plain scales, so batch invariance was not judged")
    return None


def unpromised(op: str, name: str, candidate: Any) -> str | None:
    """Why a candidate need not keep a behaviour, or None. A kernel promises batch invariance by a flag of its own."""
    if BEHAVIOURS[name.removeprefix(PREFIX)] is not rows_keep_their_bits:
        return None
    if isinstance(candidate, str):
        promised = dispatch.is_batch_invariant(op, candidate)
    else:
        promised = getattr(candidate, "batch_invariant", False)
    return None if promised else "does not promise batch invariance"


PREFIX = "behaviour: "
BEHAVIOURS: dict[str, Callable[[Trial], str | None]] = {
    "the same bits at every call": same_bits_again,
    "memory of its own": memory_of_its_own,
    "no stale answer": no_stale_answer,
    "the same bits in every mode": same_in_every_mode,
    "the process left as it was": leaves_the_process_alone,
    "no wait for the device": waits_for_nothing,
    "gradients": gradients_flow,
    "no gradient in place": no_gradient_in_place,
    "batch invariance": rows_keep_their_bits,
}


def names(op: str, device: torch.device) -> Iterator[str]:
    """The names of the behaviours that an op promises on a device. A report shows them like names of cases."""
    spec = dispatch.reference(op).spec
    for name, judge in BEHAVIOURS.items():
        if (judge is gradients_flow and spec.gradient is None) or (judge is no_gradient_in_place and not spec.in_place):
            continue
        if judge is waits_for_nothing and device.type != "cuda":
            continue
        if judge is memory_of_its_own and spec.in_place:
            continue
        if judge is rows_keep_their_bits and cases.rows_taken(op) is None:
            continue
        yield PREFIX + name


def problem_of(op: str, name: str, call: Call, device: torch.device) -> str | None:
    """How a candidate breaks a behaviour, in words. None if it keeps it."""
    refused = next((case for case in dispatch.reference(op).spec.cases() if case.raises), None)
    trial = Trial(dispatch.reference(op), call, device, chosen(op), refused)
    return BEHAVIOURS[name.removeprefix(PREFIX)](trial)
