"""Times calls that all ranks make together: the calls take turns, and every rank makes the same calls in one order."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Pace:
    """How long a call runs before it is timed, and how often it is timed."""

    rounds: int  # the calls take turns, so that a drift of the clocks affects all of them
    samples: int  # timed calls in each round
    settle_us: float  # how long a call runs, untimed, before each of its rounds; see MATMUL in mxspec/bench/timing.py
    repeats: int = 1  # calls between two readings of the clock


# A step of a layer has matmuls, which take a GPU to its power limit. The jitter of a launch is larger than an
# exchange, so that several exchanges are timed together.
STEPS = {"cuda": Pace(7, 5, 200_000), "cpu": Pace(3, 1, 0)}
MESSAGES = {"cuda": Pace(7, 10, 20_000, repeats=4), "cpu": Pace(3, 3, 0)}


class Clock:
    """CUDA events on a GPU, the host's clock on a CPU. It also makes the ranks begin together."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.on_gpu = device, device.type == "cuda"
        self._token = torch.zeros(dist.get_world_size(), dtype=torch.int32, device=device)

    def together(self) -> None:
        """Wait until every rank is here. On a GPU the device waits, and the host does not.

        A message to every rank does this. An all-reduce would too, but NCCL may send it by NVLink's multicast.
        """
        dist.all_to_all_single(torch.empty_like(self._token), self._token)

    def stamp(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def us(self, begin: Any, end: Any) -> float:
        if not self.on_gpu:
            return (end - begin) * 1e6
        end.synchronize()
        return begin.elapsed_time(end) * 1e3


def gathered(value: Any) -> list[Any]:
    """The value of each rank. Every rank must call this."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return every


def first_problem(problem: str | None) -> str | None:
    """The problem of the first rank that has one, the same on every rank. Every rank must call this."""
    return next((f"rank {rank}: {found}" for rank, found in enumerate(gathered(problem)) if found), None)


class Entrant:
    """A call that all ranks make together.

    Attributes:
        rounds: for each round, the times of its calls in us. A time is that of the slowest rank.
    """

    def __init__(self, name: str, call: Callable[[], Any], before: Callable[[], Any] | None = None) -> None:
        self.name, self.call, self.before = name, call, before
        self.rounds: list[list[float]] = []
        self.settling = 0

    def sample(self, clock: Clock, repeats: int) -> tuple[Any, Any]:
        """Make the call, and return the stamps before and after it. `before` is not timed."""
        if self.before:
            assert repeats == 1
            self.before()
        clock.together()
        begin = clock.stamp()
        for _ in range(repeats):
            self.call()
        return begin, clock.stamp()

    @property
    def us(self) -> float:
        return statistics.median(us for times in self.rounds for us in times)

    @property
    def spread(self) -> float:
        """(max - min) / median over the medians of the rounds."""
        medians = [statistics.median(times) for times in self.rounds]
        return (max(medians) - min(medians)) / self.us


def race(entrants: Sequence[Entrant], pace: Pace, clock: Clock) -> None:
    """Time all entrants in turn, round after round. Every rank must call this with the same entrants."""
    for entrant in entrants:
        for _ in range(2):  # compile, and fill all caches
            begin, end = entrant.sample(clock, 1)
        once = max(gathered(clock.us(begin, end)))  # the same on every rank, so that each makes as many calls
        entrant.settling = math.ceil(pace.settle_us / once)
    for i in range(pace.rounds):  # forward and back, so that no entrant always follows the same entrant
        for entrant in entrants if i % 2 == 0 else reversed(entrants):
            for _ in range(entrant.settling):
                entrant.sample(clock, 1)
            stamps = [entrant.sample(clock, pace.repeats) for _ in range(pace.samples)]
            entrant.rounds.append([clock.us(*stamp) / pace.repeats for stamp in stamps])
    every = gathered([entrant.rounds for entrant in entrants])
    for entrant, *of_ranks in zip(entrants, *every, strict=True):
        entrant.rounds = [[max(each) for each in zip(*times, strict=True)] for times in zip(*of_ranks, strict=True)]


@contextmanager
def peak_memory(device: torch.device) -> Iterator[list[int]]:
    """The most bytes that the device's allocator held inside the block, in a list. Empty on a CPU."""
    found: list[int] = []
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    yield found
    if device.type == "cuda":
        torch.cuda.synchronize()
        found.append(torch.cuda.max_memory_allocated())
