"""The lessons as files: the functions that a notebook defines."""

from __future__ import annotations

import ast
import json
import linecache
from pathlib import Path
from typing import Any


def definitions(lesson: Path) -> dict[str, Any]:
    """The functions that a notebook defines and its imports, without its calls.

    Args:
        lesson: the notebook.

    Returns:
        Functions, kernels and modules by their names.
    """
    found: dict[str, Any] = {"__name__": lesson.stem}
    for i, cell in enumerate(json.loads(lesson.read_text(encoding="utf-8"))["cells"]):
        if cell["cell_type"] == "code":
            define("".join(cell["source"]), f"<{lesson.stem}, cell {i}>", found)
    return found


def define(source: str, name: str, found: dict[str, Any]) -> None:
    """Add the functions and the imports of a cell to what is found already.

    Args:
        source: the cell's code.
        name: what a traceback calls it.
        found: where the functions look for each other, and where they are put.
    """
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name  # Triton reads it there
    tree = ast.parse(source)
    tree.body = [s for s in tree.body if isinstance(s, (ast.FunctionDef, ast.Import, ast.ImportFrom))]
    exec(compile(tree, name, "exec"), found)
