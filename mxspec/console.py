"""The terminal: a console for results, one for what is said on the way, and a progress bar where someone is looking."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

console = Console(width=None if Console().is_terminal else 160)
notices = Console(stderr=True)  # so that what is written to a file holds the results alone


def progress(items: Sequence[Any], title: str, label: Callable[[Any], str]) -> Iterator[Any]:
    """The items, under a progress bar on a terminal and without one elsewhere."""
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
