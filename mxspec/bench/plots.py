"""A run as pictures: the roofline, bandwidth against size, and matmuls side by side. `tables` has the same as text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files only, with or without a display

from matplotlib import pyplot as plt
from matplotlib import ticker

from mxspec import devices
from mxspec.bench.record import Entry, Race, Run

# Okabe and Ito's colours, which most colour-blind readers can tell apart: one for each backend and each library.
_COLOURS = {
    "triton": "#0072B2",
    "helion": "#E69F00",
    "reference": "#000000",
    "torchao": "#D55E00",
    "cuBLAS": "#009E73",
    "torch": "#661100",
    "mxspec": "#882255",
    "DeepGEMM": "#CC79A7",
    "FBGEMM": "#56B4E9",
    "TransformerEngine": "#F0E442",
    "copy": "#999999",
    "bare": "#444444",
}


BASELINES = ("copy", "bare cast")


def _colour(name: str) -> str:
    return _COLOURS.get(name.split()[0], "#888888")


def _variant(name: str, names: list[str]) -> int:
    """The index of a name among the names of the same library."""
    return [n for n in names if n.split()[0] == name.split()[0]].index(name)


def figures(run: Run) -> dict[str, Any]:
    """Every picture that the run has figures for, by name."""
    drawn = {"bandwidth": _bandwidth(run), "roofline": _roofline(run), "matmul": _matmul(run)}
    return {name: figure for name, figure in drawn.items() if figure is not None}


def draw(run: Run, folder: Path) -> list[Path]:
    """Write the pictures into a folder; gives the files."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in figures(run).items():
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=110, bbox_inches="tight", metadata={"Software": None})
        plt.close(figure)
    return paths


def _titled(axes: Any, title: str, run: Run) -> None:
    axes.set_title(f"{title}\n{run.device}, {run.date}", fontsize=10, loc="left")
    axes.grid(True, which="both", alpha=0.25, linewidth=0.5)


def _entries(run: Run) -> Iterator[tuple[Race, Entry]]:
    for race in run.races:
        for e in race.entries:
            if e.kind != "baseline":
                yield race, e


def _roofline(run: Run) -> Any:
    """TFLOP/s of every contender against its flops per byte, below the limits of the memory and of the matrix units."""
    points = [(e.flops / e.bytes_moved, e.tflops, e.name) for _, e in _entries(run) if e.flops]
    if not points:
        return None
    figure, axes = plt.subplots(figsize=(8, 5))
    low, high = min(x for x, *_ in points) / 3, max(x for x, *_ in points) * 3
    peaks = devices.named(run.device)
    roofs = []
    if peaks:
        roofs += [("data sheet: memory, FP8", peaks.memory_gbps, peaks.fp8_tflops, "-")]
        roofs += [("data sheet: bf16", peaks.memory_gbps, peaks.bf16_tflops, ":")]
    if {"copy_gbps", "bf16_tflops"} <= run.machine.keys():
        roofs += [("this run: copy, bf16 matmul", run.machine["copy_gbps"], run.machine["bf16_tflops"], "--")]
    for label, gbps, tflops, style in roofs:
        ridge = tflops / gbps * 1e3
        corners = sorted({low, min(max(ridge, low), high), high})
        heights = [min(x * gbps / 1e3, tflops) for x in corners]
        axes.plot(corners, heights, style, color="#444444", linewidth=1, label=f"{label}, {tflops:.0f} TFLOP/s")
    for library in dict.fromkeys(name.split()[0] for *_, name in points):
        own = [(x, y) for x, y, n in points if n.split()[0] == library]
        marker = "o" if library in ("triton", "helion") else "^"
        axes.plot(*zip(*own, strict=True), marker, color=_colour(library), label=library, markersize=4, alpha=0.7)
    axes.set(xscale="log", yscale="log", xlabel="flops for a byte moved", ylabel="TFLOP/s")
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False)
    _titled(axes, "Roofline: every case that counts flops", run)
    return figure


def _bandwidth(run: Run) -> Any:
    """Rate against size, with a panel for each op and axis.

    A panel shows the options that were timed at the most sizes.
    """
    matmuls = {race.op for race in run.races if race.is_matmul(run.device)}
    variants: dict[str, dict[str, list[Race]]] = {}
    for race in run.races:
        if race.entries and race.op not in matmuls:
            options = race.case.partition(", ")[2]
            panel = f"{race.op}, axis -2" if "axis -2" in options else race.op
            variants.setdefault(panel, {}).setdefault(options, []).append(race)
    panels = {panel: max(found.items(), key=lambda item: len(item[1])) for panel, found in variants.items()}
    panels = {panel: found for panel, found in panels.items() if len(found[1]) > 2}
    if not panels:
        return None
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, grid = plt.subplots(
        rows,
        columns,
        figsize=(4.4 * columns, 2.9 * rows),
        squeeze=False,
        sharex=True,
        sharey=True,
        layout="constrained",
    )
    peaks, lines = devices.named(run.device), {}
    for axes, (panel, (options, races)) in zip(grid.flat, panels.items(), strict=False):
        names = list(dict.fromkeys(e.name for race in races for e in race.entries))
        for name in names:
            found = sorted((e.bytes_moved / 1e6, e.gbps) for race in races for e in race.entries if e.name == name)
            style = {"linestyle": "--"} if name in BASELINES else {"marker": "os^v"[_variant(name, names) % 4]}
            (lines[name],) = axes.plot(
                *zip(*found, strict=True), color=_colour(name), markersize=4, linewidth=1.2, **style
            )
        if peaks:
            lines["data sheet"] = axes.axhline(peaks.memory_gbps, color="black", linewidth=0.8)
        axes.set(xscale="log", ylim=(0, None))
        axes.set_title(f"{panel}\n{options.replace(', axis -2', '')}", fontsize=9, loc="left")
        axes.xaxis.set_major_locator(ticker.LogLocator(10, numticks=5))
        axes.xaxis.set_minor_locator(ticker.NullLocator())
        axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda mb, _: f"{mb:g}"))
        axes.grid(True, alpha=0.25, linewidth=0.5)
        axes.tick_params(labelbottom=True)
    for axes in grid[:, 0]:
        axes.set_ylabel("GB/s")
    for axes in grid[-1]:
        axes.set_xlabel("MB moved")
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    figure.suptitle(f"Rate against size: {run.device}, {run.date}", x=0.01, ha="left")
    figure.legend(lines.values(), lines, fontsize=9, ncols=5, loc="outside lower center", frameon=False)
    return figure


def _matmul(run: Run) -> Any:
    """Matmuls side by side: a panel for each op, in it a group of bars for each shape."""
    races = [race for race in run.races if race.entries and race.is_matmul(run.device)]
    if not races:
        return None
    ops = list(dict.fromkeys(race.op for race in races))
    names = list(dict.fromkeys(e.name for race in races for e in race.entries if e.kind != "baseline"))
    most = max(sum(race.op == op for race in races) for op in ops)
    size = (max(6, 0.6 * most + 2), 3.2 * len(ops))
    figure, panels = plt.subplots(len(ops), figsize=size, squeeze=False, layout="constrained")
    bars = {}
    for op, axes in zip(ops, panels[:, 0], strict=True):
        of_op = [race for race in races if race.op == op]
        there = [name for name in names if any(race.entry(name) for race in of_op)]
        width = 0.8 / len(there)
        for i, name in enumerate(there):
            at = [(j, e.tflops) for j, race in enumerate(of_op) if (e := race.entry(name))]
            bars[name] = axes.bar(
                [j + (i - (len(there) - 1) / 2) * width for j, _ in at], [y for _, y in at], width,
                color=_colour(name), hatch=("", "//", "..")[_variant(name, names) % 3],
            )  # fmt: skip
        if peaks := devices.named(run.device):
            for label, tflops in (("bf16", peaks.bf16_tflops), ("FP8", peaks.fp8_tflops)):
                axes.axhline(tflops, color="black", linewidth=0.8)
                place = axes.get_yaxis_transform()  # right of the bars, so that no bar is behind the words
                axes.text(1.01, tflops, f"data sheet,\n{label}", fontsize=7, va="center", transform=place)
        axes.set_xticks(range(len(of_op)), [race.case for race in of_op], fontsize=7, rotation=20, ha="right")
        axes.set_ylabel("TFLOP/s")
        _titled(axes, f"{op}: M x N x K", run)
    figure.legend(bars.values(), bars, fontsize=8, ncols=min(len(bars), 5), loc="outside lower center", frameon=False)
    return figure
