"""The counts of a watch as a table, as text and as a picture."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from mxspec.nn.watched_operand import WatchedOperand

_COLUMNS = ("layer", "operand", "elements", "saturated", "underflow", "NaN blocks", "scales", "SQNR, dB")
_SHOWN = 10  # rows of the text
_TENSORS = {"activation": ("tab:blue", "o"), "weight": ("tab:gray", "s"), "gradient": ("tab:orange", "^")}
_NAMED = 40  # with more layers than this, the axis shows no names
_LEAST = 1e-7  # where the picture draws a share of zero


def table(rows: Sequence[WatchedOperand]) -> Table:
    made = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for place, name in enumerate(_COLUMNS):
        made.add_column(name, justify="left" if place < 2 else "right", overflow="fold")
    for row in rows:
        made.add_row(*map(Text, _cells(row)))  # as Text: rich would read brackets as markup
    return made


def text(worst: Sequence[WatchedOperand], unwatched: dict[str, str]) -> str:
    layers = len({row.layer for row in worst})
    said = f"{len(worst)} operands of {layers} layers counted"
    out = io.StringIO()
    if worst:
        shown = worst[:_SHOWN]
        said += f"; the {len(shown)} that lose most:" if len(shown) < len(worst) else ", most loss first:"
        Console(file=out, width=160, color_system=None).print(table(shown))
    lines = [said, *(line.rstrip() for line in out.getvalue().splitlines()), f"modules not watched: {len(unwatched)}"]
    return "\n".join(lines + [f"  {name or 'the model itself'}: {why}" for name, why in unwatched.items()])


def _cells(row: WatchedOperand) -> tuple[str, ...]:
    scales = "-" if math.isnan(row.scale_min) else f"{row.scale_min:.2g} .. {row.scale_max:.2g}"
    lost = (_share(count, row.elements) for count in (row.saturated, row.underflowed))
    nonfinite = f"{row.nonfinite_blocks:,}"
    return (
        row.name, f"{row.tensor} for {row.matmul}", f"{row.elements:,}", *lost, nonfinite, scales,
        _decibels(row.sqnr_db),
    )  # fmt: skip


def _share(count: int, of: int) -> str:
    """A count as a share. A count that is not zero is never shown as zero."""
    if not count:
        return "0"
    return f"{count / of:.2%}" if count / of >= 1e-4 else "< 0.01%"


def _decibels(value: float) -> str:
    return "-" if math.isnan(value) else "exact" if value == math.inf else f"{value:.1f}"


def draw(rows: Sequence[WatchedOperand], worst: Sequence[WatchedOperand], count: int) -> Figure:
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        needs = "needs matplotlib: pip install 'mxspec[notebooks]'; WatchReport.table gives the same as text"
        raise ImportError(f"WatchReport.draw: {needs}") from error
    if not rows:
        raise ValueError("WatchReport.draw: nothing was counted. Run a forward of a converted layer in the with-block.")
    names = list(dict.fromkeys(row.name for row in rows))
    figure, (upper, lower) = plt.subplots(
        2, sharex=True, figsize=(min(6 + 0.3 * len(names), 16), 6), dpi=100, layout="constrained"
    )
    for tensor, (color, marker) in _TENSORS.items():
        of = [row for row in rows if row.tensor == tensor]
        place = [names.index(row.name) for row in of]
        style = {"color": color, "marker": marker, "linestyle": "none", "alpha": 0.8, "markersize": 5}
        upper.plot(
            place, [row.sqnr_db if math.isfinite(row.sqnr_db) else math.nan for row in of], label=tensor, **style
        )
        lower.plot(place, [max(row.underflowed / max(row.elements, 1), _LEAST) for row in of], **style)
    upper.set_ylabel("SQNR, dB")
    lower.set_ylabel("underflowed elements")
    lower.set_yscale("log")
    lower.set_ylim(_LEAST / 2, 2)
    lower.minorticks_off()
    lower.set_yticks([_LEAST, 1e-6, 1e-4, 1e-2, 1], ["0", "0.0001%", "0.01%", "1%", "100%"])
    named = names if len(names) <= _NAMED else []
    lower.set_xticks(range(len(named)), named, rotation=60, ha="right")
    lower.set_xlabel("layers in the order of the model" + ("" if named else f" ({len(names)})"))
    for axes in (upper, lower):
        axes.grid(axis="y", alpha=0.3)
    _name_worst(upper, lower, names, worst, count)
    upper.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    return figure


def _name_worst(upper: Axes, lower: Axes, names: Sequence[str], worst: Sequence[WatchedOperand], count: int) -> None:
    """Shade the places of the layers that lose most, number them, and say beside the picture what they lose."""
    of_layer: dict[str, WatchedOperand] = {}
    for row in worst:
        of_layer.setdefault(row.name, row)
    said = ["most loss:"]
    for number, (name, row) in enumerate(list(of_layer.items())[:count], 1):
        place = names.index(name)
        for axes in (upper, lower):
            axes.axvspan(place - 0.4, place + 0.4, color="tab:red", alpha=0.12, linewidth=0)
        upper.annotate(str(number), (place, 1.01), xycoords=("data", "axes fraction"), ha="center", color="tab:red")
        lost = f"SQNR {_decibels(row.sqnr_db)} dB, {_share(row.underflowed, row.elements)} underflow"
        if row.nonfinite_blocks:
            lost = f"{row.nonfinite_blocks:,} of {row.blocks:,} blocks with NaN or Inf"
        said.append(f"{number}. {name}\n    {row.tensor} for {row.matmul}\n    {lost}")
    lower.annotate("\n".join(said), (1.02, 1), xycoords="axes fraction", va="top", fontsize=9, annotation_clip=False)
