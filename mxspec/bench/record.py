"""The stored form of a run of the benchmarks: the times, the machine, and the limits and peers to compare with."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from mxspec import devices

Kind = Literal["backend", "peer", "baseline"]
Operands = Literal["bf16", "fp8"]
FORMAT = 1  # the version of the stored file's format


@dataclass(frozen=True)
class Entry:
    """One contender in a race."""

    name: str  # a backend, a peer's label, `copy` or `bare cast`
    kind: Kind
    us: float  # the time of one call without the launch: the kernel alone
    call_us: float  # the time of one plain call, as a user sees it: the slower of host and device
    spread: float  # (max - min) / median of `us` over the rounds
    bytes_moved: int
    flops: int
    operands: Operands = "bf16"
    bytes_differ: str = ""  # for a peer: how its outputs differ from the reference's; empty if they are equal

    @property
    def gbps(self) -> float:
        return self.bytes_moved / self.us / 1e3

    @property
    def tflops(self) -> float:
        return self.flops / self.us / 1e6


@dataclass(frozen=True)
class Race:
    """Contenders timed in turn on the same inputs. `absent` says why a contender has no time."""

    op: str
    case: str
    entries: tuple[Entry, ...]
    absent: dict[str, str] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)  # backends with wrong bytes, which were not timed

    def entry(self, name: str) -> Entry | None:
        return next((e for e in self.entries if e.name == name), None)

    def is_matmul(self, device: str) -> bool:
        """Whether the matrix units bound the call, so that TFLOP/s say more than GB/s."""
        peaks = devices.balance(device)
        return any(peaks.is_matmul(e.flops, e.bytes_moved) for e in self.entries if e.kind != "baseline")

    def ratio(self, entry: Entry, beside: str) -> float | None:
        """How many times as fast one contender is as another. None if there is nothing to compare.

        It compares times. A baseline moves another number of bytes, so with a baseline it compares rates.
        """
        other = self.entry(beside)
        if other is None or (entry.kind == "baseline" != other.kind):
            return None
        return entry.gbps / other.gbps if other.kind == "baseline" else other.us / entry.us


@dataclass(frozen=True)
class Step:
    """One kernel of a grouped linear. `us` is None if the kernel was wrong; `wrong` says how."""

    layer: str
    phase: str  # forward, dgrad or wgrad
    what: str
    backend: str  # the backend that `auto` takes, or `torch bf16`
    us: float | None
    bytes_moved: int
    flops: int
    is_matmul: bool
    wrong: str = ""


@dataclass(frozen=True)
class Run:
    """All results of one run of the benchmarks."""

    device: str
    date: str  # the day, in ISO 8601
    command: str
    versions: dict[str, str]
    peers: dict[str, str] = field(default_factory=dict)  # library -> its version, or why it is absent
    # The machine's own rates: copy_gbps, cast_gbps, and bf16_tflops of an 8192^3 matmul.
    machine: dict[str, float] = field(default_factory=dict)
    races: tuple[Race, ...] = ()
    not_timed: dict[str, str] = field(default_factory=dict)  # op, or op and case -> why it was not timed
    overhead_us: dict[str, dict[str, float]] = field(default_factory=dict)
    moe: tuple[Step, ...] = ()
    seconds: float = 0.0
    note: str = ""  # more that a reader must know, such as which figures come from another run
    format: int = FORMAT

    @property
    def wrong(self) -> list[str]:
        """The contenders and steps that have no figure because they were wrong, with the reason."""
        found = [f"{r.op}, {name}, {r.case}: {problem}" for r in self.races for name, problem in r.wrong.items()]
        return found + [f"MoE, {s.layer}, {s.phase}, {s.what}: {s.wrong}" for s in self.moe if s.wrong]

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def read(path: Path) -> Run:
    """A run that was stored with `write`."""
    try:
        stored: dict[str, Any] = json.loads(path.read_text())
        if not isinstance(stored, dict) or stored.get("format") != FORMAT:
            raise TypeError(f"needs an object with format {FORMAT}, the only format that this mxspec reads")
        races = tuple(
            Race(**{**race, "entries": tuple(Entry(**entry) for entry in race["entries"])}) for race in stored["races"]
        )
        run = Run(**{**stored, "races": races, "moe": tuple(Step(**step) for step in stored["moe"])})
        timed = [("us", e.us) for race in races for e in race.entries]
        timed += [("call_us", e.call_us) for race in races for e in race.entries]
        timed += [("us", step.us) for step in run.moe if step.us is not None]
        for name, us in [*timed, *run.machine.items()]:
            if not (isinstance(us, (int, float)) and math.isfinite(us) and us > 0):
                raise TypeError(f"{name} = {us!r}; needs a positive number")
        return run
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"bench: {path} is not a stored run: {error}") from error
