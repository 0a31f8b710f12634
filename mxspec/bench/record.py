"""A run of the benchmarks as it is stored: what was timed, on what machine, beside what."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from mxspec import devices

Kind = Literal["backend", "peer", "baseline"]
Operands = Literal["bf16", "fp8"]
FORMAT = 1  # of the stored file


@dataclass(frozen=True)
class Entry:
    """One contender in a race."""

    name: str  # a backend, a peer's label, `copy` or `bare cast`
    kind: Kind
    us: float  # of one call, launches not counted: the kernel's view
    call_us: float  # of one plain call: the user's view, the slower of host and device
    spread: float  # (max - min) / median of us over the rounds
    bytes_moved: int
    flops: int
    operands: Operands = "bf16"
    bytes_differ: str = ""  # for a peer: how its outputs differ from the reference's; empty where they are equal

    @property
    def gbps(self) -> float:
        return self.bytes_moved / self.us / 1e3

    @property
    def tflops(self) -> float:
        return self.flops / self.us / 1e6


@dataclass(frozen=True)
class Race:
    """Contenders timed in turn on the same inputs. `absent` says why others of them have no time."""

    op: str
    case: str
    entries: tuple[Entry, ...]
    absent: dict[str, str] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)  # backends that were not timed, since their bytes are wrong

    def entry(self, name: str) -> Entry | None:
        return next((e for e in self.entries if e.name == name), None)

    def is_matmul(self, device: str) -> bool:
        """Whether the call's matrix operations bound it, and so TFLOP/s say more than GB/s."""
        peaks = devices.balance(device)
        return any(peaks.is_matmul(e.flops, e.bytes_moved) for e in self.entries if e.kind != "baseline")

    def ratio(self, entry: Entry, beside: str) -> float | None:
        """How many times as fast one contender is as another: by time, and beside a baseline, which moves other bytes,
        by rate. None where there is nothing to compare."""
        other = self.entry(beside)
        if other is None or (entry.kind == "baseline" != other.kind):
            return None
        return entry.gbps / other.gbps if other.kind == "baseline" else other.us / entry.us


@dataclass(frozen=True)
class Step:
    """One kernel of a grouped linear. `us` is None where it was `wrong`."""

    layer: str
    phase: str  # forward, dgrad or wgrad
    what: str
    backend: str  # the one that `auto` takes, or `torch bf16`
    us: float | None
    bytes_moved: int
    flops: int
    is_matmul: bool
    wrong: str = ""


@dataclass(frozen=True)
class Run:
    """Everything that one run of the benchmarks found out."""

    device: str
    date: str  # of the day, ISO 8601
    command: str
    versions: dict[str, str]
    peers: dict[str, str] = field(default_factory=dict)  # library -> its version, or why it is absent
    # The machine's own rates: copy_gbps, cast_gbps, and bf16_tflops of an 8192^3 matmul.
    machine: dict[str, float] = field(default_factory=dict)
    races: tuple[Race, ...] = ()
    not_timed: dict[str, str] = field(default_factory=dict)  # op -> why no case of it was
    overhead_us: dict[str, dict[str, float]] = field(default_factory=dict)
    moe: tuple[Step, ...] = ()
    seconds: float = 0.0
    note: str = ""  # what a reader of a stored run must know besides, such as what of it is from another run
    format: int = FORMAT

    @property
    def wrong(self) -> list[str]:
        """Everything that was not timed, or is not reported, because it was wrong."""
        found = [f"{r.op}, {name}, {r.case}: {problem}" for r in self.races for name, problem in r.wrong.items()]
        return found + [f"MoE, {s.layer}, {s.phase}, {s.what}: {s.wrong}" for s in self.moe if s.wrong]

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def read(path: Path) -> Run:
    """A run that was stored with `write`."""
    try:
        stored: dict[str, Any] = json.loads(path.read_text())
        if not isinstance(stored, dict) or stored.get("format") != FORMAT:
            raise TypeError(f"it needs an object with format {FORMAT}, which this version writes")
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
