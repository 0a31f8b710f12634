"""The figures of a run on several ranks: the stored form, and the tables."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mxspec.bench.tables import Sheet

FORMAT = "parallel 1"  # the version of the stored file's format; `bench --from` reads another format
NO_GPU = "no GPU: these ranks are processes on a CPU, connected by gloo, and their times say nothing about GPUs"


@dataclass(frozen=True)
class Step:
    """One arm of the layer's step."""

    recipe: str
    wire: str
    us: float | None = None  # the median; each time is that of the slowest rank
    spread: float | None = None
    peak_bytes: int | None = None  # of the rank that needs most; None on a CPU
    parts_us: dict[str, float] = field(default_factory=dict)  # the mean over the ranks
    wrong: str = ""

    @property
    def name(self) -> str:
        return f"{self.recipe}, {self.wire}"


@dataclass(frozen=True)
class Transfer:
    """One collective alone: what it moves, and how long it takes."""

    what: str
    form: str  # values or codes
    row_bytes: int  # of an exchange: the bytes of a row's message; otherwise 0
    bytes_out: list[int]  # for each rank, the bytes that leave it; what stays on the rank does not count
    bytes_in: list[int]  # for each rank, the bytes that come to it from other ranks
    us: float | None
    spread: float | None
    wrong: str = ""

    @property
    def most_bytes(self) -> int:
        """The bytes of the busiest rank in the direction in which it moves more."""
        return max(*self.bytes_out, *self.bytes_in)

    @property
    def gbps(self) -> float | None:
        """The rate of the busiest rank."""
        return self.most_bytes / self.us / 1e3 if self.us else None


@dataclass(frozen=True)
class ParallelRun:
    """All figures of one run."""

    device: str
    ranks: int
    backend: str  # nccl or gloo
    date: str
    command: str
    versions: dict[str, str]
    environment: dict[str, str]  # the variables of NCCL that were set
    topology: str  # what `nvidia-smi topo -m` printed
    shape: dict[str, int | str]
    counts: list[int]  # a rank's rows for each expert
    checked_rows: int  # the rows of each rank in the check against one process
    steps: tuple[Step, ...] = ()
    exchanges: tuple[Transfer, ...] = ()
    gathers: tuple[Transfer, ...] = ()
    not_timed: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    format: str = FORMAT

    @property
    def wrong(self) -> list[str]:
        found = [f"{step.name}: {step.wrong}" for step in self.steps if step.wrong]
        return found + [f"{t.what}, {t.form}: {t.wrong}" for t in (*self.exchanges, *self.gathers) if t.wrong]

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def heading(run: ParallelRun) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    sizes, rows = run.shape, run.shape["rows"]
    lines = [
        f"{run.ranks} x {run.device}, {run.backend}",
        f"{versions}; {run.date}; {run.seconds:.0f} s; `{run.command}`",
        f"{rows} rows on each rank, {sizes['dim']} wide; {sizes['experts']} experts on each rank, {sizes['hidden']} "
        f"wide; routing {sizes['routing']}; bfloat16",
        "an arm has a time only if its output and gradients have the bits of one process on the rows of all ranks",
    ]
    if run.checked_rows != rows:
        lines.append(
            f"one process has no memory for {rows} rows of each rank, so the check took {run.checked_rows} rows; with "
            f"{rows} rows, the steps over two poisons and after the timing gave the same bits"
        )
    if run.backend != "nccl":
        lines.append(NO_GPU)
    lines += [f"not timed: {what}: {reason}" for what, reason in run.not_timed.items()]
    return "\n".join(f"- {line}" for line in lines)


def sheets(run: ParallelRun) -> Iterator[Sheet]:
    yield _steps(run)
    timed = [step for step in run.steps if step.parts_us]
    if timed:
        yield _parts(timed)
    yield _exchanges(run)
    if run.gathers:
        yield _gathers(run)


def _steps(run: ParallelRun) -> Sheet:
    beside = next((step.us for step in run.steps if step.recipe == "bf16"), None)
    rows = []
    for step in run.steps:
        times = f"{beside / step.us:.3f}" if beside and step.us else ""
        memory = f"{step.peak_bytes / 1e9:.2f}" if step.peak_bytes else ""
        rows.append((step.recipe, step.wire, _us(step.us, step.wrong), times, _percent(step.spread), memory))
    header = ("recipe", "on the wire", "us", "times as fast as bf16", "spread", "peak GB")
    note = "the slowest rank's time; the gradients of the weights are means over the ranks; peak GB: weights included"
    return Sheet("One step of the experts, forward and backward", header, tuple(rows), 2, note)


def _parts(steps: list[Step]) -> Sheet:
    names = list(steps[0].parts_us)
    rows = [(name, *(f"{step.parts_us[name]:.0f}" for step in steps)) for name in names]
    rows.append(("the sum", *(f"{sum(step.parts_us.values()):.0f}" for step in steps)))
    rows.append(("the step above", *(f"{step.us:.0f}" if step.us else "" for step in steps)))
    note = (
        "the mean over the ranks; counts and plan have the quantizing of tokens for the wire, and combine that of the "
        "gradient; dispatch and combine have the sorting, and the wait for a slower rank"
    )
    return Sheet("Its parts, us", ("part", *(step.name for step in steps)), tuple(rows), 1, note)


def _exchanges(run: ParallelRun) -> Sheet:
    rows = [
        (t.what, t.form, str(t.row_bytes), _mb(t), _us(t.us, t.wrong), _rate(t), _percent(t.spread))
        for t in run.exchanges
    ]
    header = ("exchange", "as", "bytes of a row", "MB", "us", "GB/s", "spread")
    note = (
        "all_to_all_single alone, without quantizing; MB: what the busiest rank sends or receives, without the "
        "rows that stay on the rank"
    )
    return Sheet("The four exchanges of a step, alone", header, tuple(rows), 2, note)


def _gathers(run: ParallelRun) -> Sheet:
    rows = []
    for t in run.gathers:
        values = next(o for o in run.gathers if o.what == t.what and o.form == "values")
        times = f"{values.us / t.us:.3f}" if values.us and t.us else ""
        rows.append((t.what, t.form, _mb(t), _us(t.us, t.wrong), times, _percent(t.spread)))
    header = ("the weights", "as", "MB", "us", "times as fast as values", "spread")
    experts = run.shape["experts"]
    note = f"FSDP2 gathers {experts} experts, each rank has a share; codes: gather_codes, fp8_128, quantizing included"
    return Sheet("FSDP2's gather of the experts' weights", header, tuple(rows), 2, note)


def _us(us: float | None, wrong: str) -> str:
    return "wrong" if wrong else f"{us:.1f}" if us else ""


def _mb(t: Transfer) -> str:
    return f"{t.most_bytes / 1e6:.3f}"


def _rate(t: Transfer) -> str:
    return "" if t.gbps is None else f"{t.gbps:.2f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}%"


def markdown(run: ParallelRun) -> str:
    return heading(run) + "\n\n" + "\n".join(sheet.markdown() for sheet in sheets(run))
