"""The terminal: one console for results, one for notices, and a progress bar if the output is a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

console = Console(width=None if Console().is_terminal else 160)
notices = Console(stderr=True)  # so that stdout, redirected to a file, holds only results


def progress(items: Sequence[Any], title: str, label: Callable[[Any], str]) -> Iterator[Any]:
    """Iterate over the items, with a progress bar if stderr is a terminal."""
    if not notices.is_terminal:
        yield from items
        return
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=notices, transient=True) as bar:
        task = bar.add_task("", total=len(items))
        for item in items:
            bar.update(task, description=escape(label(item)))
            yield item
            bar.advance(task)
