"""Refuses, at collection, a notebook for which a green run of `pytest --nbval` would prove nothing.

nbval accepts a notebook that was never run, and it skips cells that ask to be skipped. If an output holds a timing, the
cell passes or fails by chance. `make notebooks` executes and strips a notebook so that it is accepted here.

Notebooks that call `course.start()` are lessons. Without a GPU, `course.start` always chooses Triton's interpreter,
even if another interpreter was requested. So a run that requests an interpreter leaves the lessons out on such a
machine. The plain run compares the lessons' calls of public ops.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

MAX_CELLS = 25
MAX_BYTES = 250_000

_TIMING = re.compile(r"%time(it)?\b")
_MARKER = re.compile(r"#\s*((?:NBVAL|PYTEST_VALIDATE)_\w+)")


def problems(notebook: dict[str, Any], size_bytes: int) -> Iterator[str]:
    """One message per problem: the cell, what it has, what it needs. `Cell 0` is the first code cell, as in nbval."""
    cells = notebook["cells"]
    if len(cells) > MAX_CELLS:
        yield f"{len(cells)} cells; needs at most {MAX_CELLS}: one contract a notebook"
    if size_bytes > MAX_BYTES:
        yield f"{size_bytes} bytes; needs at most {MAX_BYTES}: fewer figures, or a lower dpi"
    for i, cell in enumerate(cell for cell in cells if cell["cell_type"] == "code"):
        source = "".join(cell["source"])
        count = cell.get("execution_count")
        if count != i + 1:
            yield f"Cell {i}: execution_count {count}; needs {i + 1}: run `make notebooks`"
        if source.rstrip().endswith(";"):
            yield f"Cell {i}: a trailing `;`; needs none: nbval compares the output that it hides"
        if timing := _TIMING.search(source):
            yield f"Cell {i}: {timing[0]}; needs no timing: it differs at every run"
        if marker := _MARKER.search(source):
            yield f"Cell {i}: the marker {marker[1]}; needs an output that can be compared as it is"
        for tag in cell.get("metadata", {}).get("tags", ()):
            if tag.startswith("nbval-") or tag == "raises-exception":
                yield f"Cell {i}: the tag {tag}; needs an output that can be compared as it is"


class Verdict(pytest.File):
    """A second collector of the file, next to nbval's: it has no tests and only raises if the notebook is refused."""

    def collect(self) -> list[pytest.Item]:
        notebook = json.loads(self.path.read_text(encoding="utf-8"))
        if found := list(problems(notebook, self.path.stat().st_size)):
            raise self.CollectError("\n".join(f"{self.path.name}: {problem}" for problem in found))
        return []


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    if collection_path.suffix != ".ipynb" or "course.start()" not in collection_path.read_text(encoding="utf-8"):
        return None
    import torch

    from mxspec import dispatch

    return True if dispatch.interpreters() and not torch.cuda.is_available() else None


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> Verdict | None:
    return Verdict.from_parent(parent, path=file_path) if file_path.suffix == ".ipynb" else None
