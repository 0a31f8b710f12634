"""Shows a run as tables, on the terminal or as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mxspec import devices, dispatch
from mxspec.bench import model, moe
from mxspec.bench.record import Entry, Race, Run
from mxspec.shapes import Shapes


@dataclass(frozen=True)
class Sheet:
    """One table: a title, a header and rows of text. The first `text_columns` are left-aligned."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    text_columns: int = 2
    note: str = ""

    def rich(self) -> Table:
        table = Table(title=escape(self.title), title_justify="left", caption=escape(self.note), caption_justify="left")
        for i, name in enumerate(self.header):
            text = i < self.text_columns
            table.add_column(escape(name), justify="left" if text else "right", no_wrap=text)
        grouped = len({row[0] for row in self.rows}) < len(self.rows)
        for i, row in enumerate(self.rows):
            first = i == 0 or self.rows[i - 1][0] != row[0]
            last = i + 1 == len(self.rows) or self.rows[i + 1][0] != row[0]
            cells = row if first else ("", *row[1:])
            table.add_row(*(escape(cell) for cell in cells), end_section=grouped and last)
        return table

    def markdown(self) -> str:
        rule = ("---",) * self.text_columns + ("---:",) * (len(self.header) - self.text_columns)
        lines = ["| " + " | ".join(row) + " |" for row in (self.header, rule, *self.rows)]
        return "\n".join([f"### {self.title}", "", *lines, *(["", self.note] if self.note else [])]) + "\n"


def sheets(run: Run) -> Iterator[Sheet]:
    """Every table of a run."""
    for op in dict.fromkeys(race.op for race in run.races):
        races = [race for race in run.races if race.op == op]
        timed = [race for race in races if race.entries]
        notes = _absences(races)
        for matmul in (False, True):
            if some := [race for race in timed if race.is_matmul(run.device) == matmul]:
                yield race_sheet(op, some, run, matmul, notes)
                notes = ""
        if not timed:
            yield Sheet(op, ("nothing was timed",), (), 1, notes)
    yield from moe_sheets(run)
    if run.overhead_us:
        yield overhead_sheet(run)


def race_sheet(op: str, races: list[Race], run: Run, matmul: bool, note: str = "") -> Sheet:
    """The races of one op: either the races that memory bounds, or the races that the matrix units bound."""
    peers = tuple(dict.fromkeys(e.name for race in races for e in race.entries if e.kind == "peer"))
    casts = any(race.entry("bare cast") for race in races)
    beside = () if matmul else ("copy", "bare cast")[: 1 + casts]
    rate = ("TFLOP/s", "of dense peak", "of bf16 matmul") if matmul else ("GB/s",)
    differ = any(e.bytes_differ for race in races for e in race.entries)
    header = ("case", "contender", "us", "us, plain call", *rate, *(f"of {name}" for name in (*beside, *peers)))
    header += ("spread", "bytes") if differ else ("spread",)
    rows = []
    for race in races:
        for e in sorted(race.entries, key=lambda e: ("backend", "peer", "baseline").index(e.kind)):
            if matmul and e.kind == "baseline":
                continue
            cells = [race.case, e.name, f"{e.us:.2f}", f"{e.call_us:.1f}"]
            cells += _matmul_rates(e, run) if matmul else [f"{e.gbps:.0f}"]
            cells += [_ratio(race.ratio(e, name)) for name in (*beside, *peers)]
            cells += [f"{100 * e.spread:.1f}%"]
            if differ:
                cells += ["" if e.kind == "baseline" else _differing(e) if e.bytes_differ else "equal"]
            rows.append(tuple(cells))
    return Sheet(op + (", matmul-bound" if matmul else ""), header, tuple(rows), note=note)


def _matmul_rates(e: Entry, run: Run) -> list[str]:
    peaks, bf16 = devices.named(run.device), run.machine.get("bf16_tflops")
    of_peak = _ratio(e.tflops / (peaks.fp8_tflops if e.operands == "fp8" else peaks.bf16_tflops)) if peaks else ""
    return [f"{e.tflops:.0f}", of_peak, _ratio(e.tflops / bf16) if bf16 else ""]


def _differing(e: Entry) -> str:
    """How much a peer's outputs differ: the share of the elements that differ, or for a matmul the SQNR."""
    if found := re.search(r"(\d+) of (\d+) elements differ", e.bytes_differ):
        return f"{int(found[1]) / int(found[2]):.1e} differ"
    found = re.search(r"[-\d.]+ dB", e.bytes_differ)
    return found[0] if found else "differ"


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.3f}"


def _absences(races: list[Race]) -> str:
    """The contenders without a figure, in how many cases, and why."""
    found: dict[tuple[str, str], int] = {}
    for race in races:
        for name, reason in race.absent.items():
            found[name, reason] = found.get((name, reason), 0) + 1
    return "\n".join(f"{name}, {n} of {len(races)} cases: {reason}" for (name, reason), n in found.items())


def moe_sheets(run: Run) -> Iterator[Sheet]:
    """The kernels of each grouped linear. Each rate also as a share of the best rate of this machine."""
    peaks = devices.named(run.device)
    copy_gbps, bf16_tflops = run.machine.get("copy_gbps"), run.machine.get("bf16_tflops")
    for layer in dict.fromkeys(step.layer for step in run.moe):
        rows = []
        took = {"kernels": 0.0, "the reference, where there is no kernel": 0.0, "bf16 grouped matmuls": 0.0}
        for step in (s for s in run.moe if s.layer == layer):
            cost = model.Cost(step.bytes_moved, step.flops, fp8=False)
            expected = f"{model.expected_us(peaks, cost):.1f}" if peaks else ""
            if step.us is None:
                rows.append((step.phase, step.what, step.backend, "wrong", expected, "", ""))
                continue
            kind = 2 if step.is_matmul else int(step.backend == "reference")
            took[list(took)[kind]] += step.us
            rate, best, unit = (step.flops / step.us / 1e6, bf16_tflops, "TFLOP/s") if step.is_matmul else (
                step.bytes_moved / step.us / 1e3, copy_gbps, "GB/s")  # fmt: skip
            achieved = f"{rate / best:.2f}" if best else ""
            rows.append(
                (step.phase, step.what, step.backend, f"{step.us:.1f}", expected, f"{rate:.0f} {unit}", achieved)
            )
        spent = ", ".join(f"{us:.0f} us in {what}" for what, us in took.items() if us)
        note = f"{spent}; achieved: of a copy's rate, or of an 8192^3 bf16 matmul's, in this run"
        header = ("phase", "kernel", "backend", "us", "us expected", "rate", "achieved")
        yield Sheet(f"One grouped linear of an MoE layer, {layer}", header, tuple(rows), 3, note)


def overhead_sheet(run: Run) -> Sheet:
    """The host's time for a call."""
    parts = tuple(dict.fromkeys(part for parts in run.overhead_us.values() for part in parts))
    rows = tuple((name, *(f"{us[p]:.1f}" if p in us else "" for p in parts)) for name, us in run.overhead_us.items())
    return Sheet("Host time of a call, us", ("op, backend", *parts), rows, 1)


def model_sheets(shapes: Shapes, ops: Iterable[str], layers: Iterable[moe.Layer]) -> Iterator[Sheet]:
    """The expected time of each op and each grouped linear on every GPU of `devices.py`, in microseconds."""
    names = [name.removeprefix("NVIDIA ").split()[0] for name in devices.DEVICES]
    guesses = [n for n, d in zip(names, devices.DEVICES.values(), strict=True) if not d.measured]
    header = ("case", "MB", *names)
    note = (
        "computed from the data sheet and @spec; nothing was run. On an H200 the model is within 15% of the measured "
        "times for calls that move more than 100 MB and for large matmuls, except FP8 matmuls with scales for the rows "
        f"of both operands, which take 1.4 times as long. {' and '.join(guesses)}: unmeasured"
    )

    def times(cost: model.Cost) -> list[float]:
        return [model.expected_us(device, cost) for device in devices.DEVICES.values()]

    for op in ops:
        reference = dispatch.reference(op)
        rows = []
        for case in reference.spec.bench_cases(shapes):
            cost = model.cost(reference, case)
            rows.append((case.name, f"{cost.bytes_moved / 1e6:.1f}", *(f"{us:.1f}" for us in times(cost))))
        if rows:
            yield Sheet(f"{op}, us expected", header, tuple(rows), 1, note)
    for layer in layers:
        rows, totals = [], [0.0] * len(names)
        for kernel in moe.kernels(*layer):
            moved, flops = moe.cost_of(kernel, layer)
            each = times(model.Cost(moved, flops, fp8=False))
            totals = [total + us for total, us in zip(totals, each, strict=True)]
            rows.append((f"{kernel.phase}: {kernel.what}", f"{moved / 1e6:.1f}", *(f"{us:.1f}" for us in each)))
        rows.append(("the sum", "", *(f"{us:.1f}" for us in totals)))
        title = f"One grouped linear of an MoE layer, {moe.label(layer)}, bf16 matmuls, us expected"
        yield Sheet(title, header, tuple(rows), 1, note)


def heading(run: Run) -> str:
    """The machine, the versions and the command of a run, in lines of Markdown that also read well as plain text."""
    peaks = devices.named(run.device)
    roof = f"; its data sheet: {peaks.memory_gbps:.0f} GB/s, {peaks.bf16_tflops:.0f} bf16 TFLOP/s" if peaks else ""
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    lines = [f"{run.device}{roof}", f"{versions}; {run.date}; {run.seconds:.0f} s; `{run.command}`"]
    if run.device.startswith("CPU"):
        lines.append("no GPU: these are the references on a CPU, and say nothing about any kernel")
    names = {"copy_gbps": "copy {:.0f} GB/s", "cast_gbps": "bare bf16 -> e4m3 cast {:.0f} GB/s"}
    names["bf16_tflops"] = "bf16 matmul {:.1f} TFLOP/s"
    rates = [text.format(run.machine[name]) for name, text in names.items() if name in run.machine]
    lines += [f"the machine in this run: {', '.join(rates)}"] if rates else []
    if run.peers:
        lines.append("peers: " + "; ".join(f"{name} {version}" for name, version in run.peers.items()))
    lines += [f"not timed: {what}: {reason}" for what, reason in run.not_timed.items()]
    return "\n".join(f"- {line}" for line in lines)


def show(run: Run, console: Console) -> None:
    """Print a run on the terminal."""
    console.print(escape(heading(run)), highlight=False, soft_wrap=True)
    for sheet in sheets(run):
        print_sheet(sheet, console)


def print_sheet(sheet: Sheet, console: Console) -> None:
    """Print a table. If the output is not a terminal, the table is as wide as it needs to be."""
    table = sheet.rich()
    needed = console.measure(table).maximum
    console.print(table, width=None if console.is_terminal else max(needed, console.width))


def markdown(run: Run) -> str:
    """A run as Markdown."""
    return heading(run) + "\n\n" + "\n".join(sheet.markdown() for sheet in sheets(run))
