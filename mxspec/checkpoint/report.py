"""The report of an inspection as tables for a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from mxspec.checkpoint.loaders import WRONG
from mxspec.checkpoint.pairs import counted

SHOWN = 20  # problems of one kind; --json has all


def text(found: Any) -> str:
    """The report without colours."""
    console = Console(width=160, color_system=None)
    with console.capture() as capture:
        console.print(tables(found))
    return capture.get()


def tables(found: Any) -> Group:
    """The report of an `Inspection`: the weights, the defects, and what each loader does."""
    parts: list[Any] = []
    if found.groups:
        parts.append(_weights(found))
    if found.plain:
        parts.append(Text("plain tensors: " + ", ".join(f"{n} {dtype}" for dtype, n in found.plain.items())))
    if found.loaders and found.groups:
        parts.append(_loaders(found))
    parts += [Text(f"note: {note}") for note in found.notes]
    kinds: dict[str, int] = {}
    for problem in found.problems:
        kinds[problem.kind] = kinds.get(problem.kind, 0) + 1
        if kinds[problem.kind] <= SHOWN:
            parts.append(Text.from_markup(f"[red]{escape(problem.kind)}[/red]  {escape(str(problem))}"))
    parts += [Text(f"and {n - SHOWN} more of the kind {kind!r}") for kind, n in kinds.items() if n > SHOWN]
    cannot = "; the checkpoint cannot be read" if found.exit_code == 2 else ""
    wrong = ", ".join(loader for loader, verdict in found.loaders.items() if verdict == WRONG)
    wrong = wrong and f"; wrong in {wrong}, see the table"
    count = len(found.problems)
    parts.append(Text(f"{found.path}: {count or 'no'} problem{'' if count == 1 else 's'}{cannot}{wrong}"))
    return Group(*parts)


def _weights(found: Any) -> Table:
    columns = (Column("weights", overflow="fold"), "count", "family", "shape", "block", "scales", "codes")
    table = Table(*columns, title=escape(f"quantized weights of {found.path}"))
    for g in found.groups:
        shape = f"{' x '.join(map(str, g.shape))} {g.family.element}"
        block = f"{g.family.block[0]} x {g.family.block[1]}\ngrid {' x '.join(map(str, g.grid))}\n{g.family.direction}"
        table.add_row(*map(escape, (g.pattern, str(g.weights), g.family.name, shape, block, _scales(g), _codes(g))))
    return table


def _scales(g: Any) -> str:
    s = g.scales
    words = "powers of two" if s.powers_of_two else "exact in bf16" if s.exact_in_bf16 else "not exact in bf16"
    said = [f"{g.scale_stored}, {words}", f"{s.least:.3g} to {s.largest:.3g}" if s.largest else "none is positive"]
    bad = {"NaN": s.nan, "infinite": s.infinite, "negative": s.negative, "zero": s.zero, "bytes 0xFF": s.bytes_ff}
    said += [f"{n} {name}" for name, n in bad.items() if n]
    said += [f"{g.other_shard} in another shard"] if g.other_shard else []
    return "\n".join(said)


def _codes(g: Any) -> str:
    c = g.codes
    if c is None or not c.count:
        return f"{g.stored}, not counted"
    share = 100 * c.saturated / c.count
    said = [g.stored, f"{share:.2g}% saturated", f"{c.unused} of {c.numbers} codes unused"]
    return "\n".join([*said, f"{c.nan} NaN"] if c.nan else said)


def _loaders(found: Any) -> Table:
    table = Table("loader", "reads it as meant", Column("traps", overflow="fold"), title="loaders")
    for loader, verdict in found.loaders.items():
        mine = [t for t in found.traps if loader in t.loaders]
        said = "\n".join(f"{t.effect}: {t.message} [{counted(t.weights, 'weight')}; {t.source}]" for t in mine)
        table.add_row(escape(loader), escape(verdict), escape(said))
    return table
