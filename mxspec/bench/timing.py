"""Times calls, and first checks that they give the right results.

On a GPU, calls are captured into a CUDA graph over several sets of inputs, which together move four times the bytes of
the L2 cache. So a replay times the kernels, without the launches, and with inputs that are not in the cache.

The same graph must give the right outputs over memory full of 0xFF, then over memory full of 0x5A, and once more after
it was timed. Without this check, a launch that skips part of its work would look fast.
"""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mxspec import check
from mxspec.bench import model
from mxspec.spec import Case, MinSqnr, Reference, Spec, bytes_of, outputs_of

# The maximal number of sets of inputs. A call that moves less than 1/32 of four times the L2 finds its inputs in the
# cache, as in decoding.
MAX_SETS = 32


Outputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Pace:
    """How long all contenders warm up the card, and how long a round of one contender takes."""

    warm_up_s: float
    round_us: float
    call_round_us: float  # a round of plain calls
    settle_us: float = 0  # how long a contender runs, untimed, before each of its rounds
    rounds: int = 7  # the contenders take turns, so that a drift of the clocks affects all of them


# The warm-up is there because an H200 is slower for a short time after a pause (see benchmarks/results/decisions.md).
MEMORY = Pace(0.1, 6_000, 4_000)
# Matmuls take an H200 to its power limit. Its clock then falls, and steps between two values during a run, so short
# rounds spread more than long rounds. A contender also starts at the clock that the contender before it needed, and
# reads slow at first. So each contender runs until it has its own clock, and only then is timed (see
# benchmarks/results/decisions.md).
MATMUL = Pace(0, 160_000, 20_000, settle_us=200_000, rounds=3)


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Switch the garbage collector off: if it collects an older CUDA graph during a capture, the capture is invalid."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class Contender:
    """A call over sets of inputs, ready to be timed. On a GPU it is a CUDA graph, unless the call waits (`waits`).

    If the op changes its first argument in place (its `spec` says so), each set of inputs gets its own copy of this
    argument. Every replay changes each copy once.

    Attributes:
        given: the sets of inputs.
        inputs: the sets that the calls take: `given`, or for an op in place the sets with their own copies.
        outputs: the outputs of every call of a replay.
        rounds: the mean time of a call in each round, in us. Their median is `us`.
        call_rounds: the time of a plain call in each round, in us, with launches and allocations.
    """

    def __init__(
        self,
        name: str,
        call: Callable[..., Any],
        inputs: Sequence[tuple[Any, ...]],
        waits: bool = False,
        spec: Spec | None = None,
    ):
        self.name, self.call, self.given = name, call, inputs
        self.spec, self.in_place = spec, spec is not None and spec.in_place
        self.inputs = inputs = [spec.own(args) for args in inputs] if spec and spec.in_place else inputs
        self.on_gpu = inputs[0][0].is_cuda
        self.rounds: list[float] = []
        self.call_rounds: list[float] = []
        for args in inputs[:2]:
            call(*args)  # compile and fill all caches before the capture
        self.graph: torch.cuda.CUDAGraph | None = None
        if waits or not self.on_gpu:
            self.calls = len(inputs)
            self.outputs = [self._run(args) for args in inputs]
            return
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        # Repeat small calls, so that the time of the replay itself does not count.
        once = self.in_place or inputs[0][0].numel() >= 2**26
        self.calls = len(inputs) * (1 if once else max(1, 32 // len(inputs)))
        with _without_garbage_collection(), torch.cuda.graph(self.graph):
            self.outputs = [self._run(inputs[i % len(inputs)]) for i in range(self.calls)]

    def _run(self, args: tuple[Any, ...]) -> Outputs:
        result = self.call(*args)
        return self.spec.outputs(args, result) if self.spec else outputs_of(result)

    def replay(self) -> None:
        """Run all calls once, into the same outputs."""
        if self.graph:
            self.graph.replay()
        else:
            self.outputs = [self._run(args) for args in self.inputs]

    def mean_us(self, run: Callable[[], Any], times: int) -> float:
        """The mean time of a run in microseconds, over `times` runs that directly follow each other."""
        if not self.on_gpu:
            start = time.perf_counter()
            for _ in range(times):
                run()
            return (time.perf_counter() - start) / times * 1e6
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(times):
            run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / times * 1e3

    def set_replays(self, pace: Pace) -> None:
        """Set the number of replays in a round, from the pace and the faster of two replays."""
        once = min(self.mean_us(self.replay, 1) for _ in range(2))
        self.replays = max(3 if self.on_gpu else 1, round(pace.round_us / once))
        self.settling = round(pace.settle_us / once)

    def round(self) -> float:
        for _ in range(self.settling):
            self.replay()
        return self.mean_us(self.replay, self.replays) / self.calls

    def call_round(self, pace: Pace) -> float:
        """The time of a plain call, in a sequence without waits, as in a program: the slower of host and device."""

        def calls() -> None:
            for args in self.inputs:
                self.call(*args)

        # A plain call takes the host about 30 us.
        loops = max(1, round(pace.call_round_us / max(self.us, 30) / len(self.inputs)))
        return self.mean_us(calls, loops) / len(self.inputs)

    @property
    def us(self) -> float:
        return statistics.median(self.rounds)

    @property
    def call_us(self) -> float:
        return statistics.median(self.call_rounds)

    @property
    def spread(self) -> float:
        """(max - min) / median over the rounds."""
        return (max(self.rounds) - min(self.rounds)) / self.us

    def prove(self, expected: Sequence[Outputs] | None, min_sqnr_db: MinSqnr = math.inf) -> str | None:
        """The reason why this contender must not be timed. None if it may be timed.

        `expected` holds the reference's outputs for every set of inputs. A peer may have another rule and has no
        `expected`: then the outputs over the two poisons must have the same bytes.
        """
        if problem := self._shared_memory():
            return problem
        before = [[t.clone() for t in self._constant(args)] for args in self.inputs]
        written = []
        for poison in (0xFF, 0x5A):
            self._replay_over(poison)
            if expected is None:
                written.append([_bytes(out.clone()) for outs in self.outputs for out in outs])
            elif problem := self._difference(expected, min_sqnr_db):
                return problem
        if expected is None:
            left = sum(int((a != b).sum()) for a, b in zip(*written, strict=True))
            if left:
                return f"{left} bytes of its outputs depend on what was there before"
        else:
            self._restore()
            with check.poisoned(0x5A):
                plain = self._run(self.inputs[0])
            if problem := check.difference(plain, expected[0], min_sqnr_db):
                return f"called plainly: {problem}"
        for args, kept in zip(self.inputs, before, strict=True):
            for now, then in zip(self._constant(args), kept, strict=True):
                if not _bytes(now).equal(_bytes(then)):
                    return "it changes its inputs"
        return None

    def prove_again(self, expected: Sequence[Outputs], min_sqnr_db: MinSqnr = math.inf) -> str | None:
        """The same check after the timing, on the launches that were timed."""
        self._replay_over(0x5A)
        return self._difference(expected, min_sqnr_db)

    def _constant(self, args: tuple[Any, ...]) -> list[Tensor]:
        """The tensors of a set of inputs that a call must not change."""
        return [t for t in args[1 if self.in_place else 0 :] if isinstance(t, Tensor)]

    def _restore(self) -> None:
        """Put back the values that calls changed in place."""
        if self.in_place:
            for own, given in zip(self.inputs, self.given, strict=True):
                own[0].copy_(given[0])

    def _replay_over(self, poison: int) -> None:
        """Replay over outputs full of the poison. An argument that is changed in place gets its old values instead."""
        self._restore()
        if self.graph is None:
            with check.poisoned(poison):
                self.replay()
            return
        for outputs in () if self.in_place else self.outputs:
            for out in outputs:
                check.fill_bytes(out, poison)
        self.replay()

    def _difference(self, expected: Sequence[Outputs], min_sqnr_db: MinSqnr) -> str | None:
        for i, outputs in enumerate(self.outputs):
            if problem := check.difference(outputs, expected[i % len(self.inputs)], min_sqnr_db):
                return problem
        return None

    def _shared_memory(self) -> str | None:
        """Whether outputs share memory with an input or another call's outputs. Poison would then prove nothing."""
        if self.in_place:
            return None  # the outputs are the copies that the calls change, one in each set
        taken = {t.untyped_storage().data_ptr() for args in self.inputs for t in args if isinstance(t, Tensor)}
        for outputs in self.outputs:
            own = {t.untyped_storage().data_ptr() for t in outputs if t.numel()}
            if own & taken:
                return "its outputs share memory with its inputs, or with the outputs of another call"
            taken |= own
        return None


def _bytes(t: Tensor) -> Tensor:
    return t.reshape(-1).view(torch.uint8)


def race(contenders: Sequence[Contender], pace: Pace | None = None) -> None:
    """Time all contenders in turn, round after round."""
    pace = pace or MEMORY
    for c in contenders:
        c.set_replays(pace)
    warm = time.perf_counter() + (pace.warm_up_s if contenders[0].on_gpu else 0)
    while time.perf_counter() < warm:
        for c in contenders:
            c.round()
    for i in range(pace.rounds):  # forward and back, so that no contender always follows the same contender
        for c in contenders if i % 2 == 0 else reversed(contenders):
            c.rounds.append(c.round())
    for c in contenders:
        c.call_round(pace)
    for _ in range(pace.rounds):
        for c in contenders:
            c.call_rounds.append(c.call_round(pace))


def input_sets(reference: Reference[..., Any], case: Case, device: torch.device) -> list[tuple[Any, ...]]:
    """Sets of arguments that together move four times the bytes of the L2, at most MAX_SETS. On a CPU, one set."""

    def on_device(seed: int) -> tuple[Any, ...]:
        torch.manual_seed(seed)
        with device:  # a benchmark case makes its tensors on the default device
            return case.args()

    if device.type == "cpu":
        return [on_device(0)]
    moved = model.cost(reference, case).bytes_moved
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    return [on_device(seed) for seed in range(max(1, min(MAX_SETS, -(-4 * l2_bytes // max(1, moved)))))]


# --- the limits of the machine ----------------------------------------------------------------------------------


def copy(x: Tensor) -> Tensor:
    """Copy a tensor into a new one."""
    if not x.is_cuda:
        return torch.empty_like(x).copy_(x)
    from mxspec.bench import limits  # not at the top: it imports triton

    return limits.copy(x)


def bare_cast(x: Tensor) -> Tensor:
    """Cast a tensor to float8_e4m3fn, without scales: the upper limit of a quantizer's speed. Too large becomes 448."""
    if not x.is_cuda:
        return _saturated(x)
    from mxspec.bench import limits

    return limits.bare_cast(x)


def _saturated(x: Tensor) -> Tensor:
    """Hopper's conversion saturates, and PyTorch's makes NaN of values that are too large."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    return x.clamp(-largest, largest).to(torch.float8_e4m3fn)


def baselines(inputs: Sequence[tuple[Any, ...]]) -> list[Contender]:
    """A copy of the largest tensor of every set and, for bfloat16, its bare cast. Both are checked first."""
    largest = [max((a for a in args if isinstance(a, Tensor)), key=lambda t: t.nbytes) for args in inputs]
    xs = [(_in_memory_order(t),) for t in largest]
    found = [Contender("copy", copy, xs)]
    proofs = [found[0].prove(xs)]
    if xs[0][0].dtype == torch.bfloat16:
        found.insert(0, Contender("bare cast", bare_cast, xs))
        proofs.append(found[0].prove([(_saturated(x),) for (x,) in xs]))
    for problem in filter(None, proofs):
        raise AssertionError(f"the baseline is wrong: {problem}")
    return found


def _in_memory_order(t: Tensor) -> Tensor:
    """The tensor, or its transpose if the tensor is column-major. Rows that lie apart are copied together."""
    return t if t.is_contiguous() else t.mT if t.mT.is_contiguous() else t.contiguous()


def bytes_of_call(contender: Contender) -> int:
    """The bytes of the inputs and outputs of one call. For a baseline, the call reads and writes exactly these."""
    return bytes_of(contender.inputs[0], contender.outputs[0])
