"""The notebooks' conftest refuses a notebook that proves nothing, and its message names the fault."""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CONFTEST = Path(__file__).with_name("conftest.py")
problems = runpy.run_path(str(CONFTEST))["problems"]  # `import conftest` may find another folder's


def code(source: str, count: int | None, *tags: str) -> dict[str, Any]:
    return {
        "cell_type": "code",
        "source": source.splitlines(keepends=True),
        "execution_count": count,
        "metadata": {"tags": list(tags)} if tags else {},
        "outputs": [],
    }


def text() -> dict[str, Any]:
    return {"cell_type": "markdown", "source": ["a claim; 100 %timely; # NBVAL_SKIP is text here;"], "metadata": {}}


def test_accepts_a_notebook_that_was_run_from_top_to_bottom():
    cells = [text(), code("x = 7 % 4", 1), text(), code("print(x);\nprint(x)  # a time; a marker", 2)]
    assert list(problems({"cells": cells}, 250_000)) == []


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        (code("x = 1", None), "Cell 1: execution_count None; needs 2: run `make notebooks`"),
        (code("x = 1", 3), "Cell 1: execution_count 3; needs 2: run `make notebooks`"),
        (code("ax.plot(x);\n", 2), "Cell 1: a trailing `;`; needs none: nbval compares the output that it hides"),
        (code("%time f()", 2), "Cell 1: %time; needs no timing: it differs at every run"),
        (code("%%time\nf()", 2), "Cell 1: %time; needs no timing: it differs at every run"),
        (code("t = %timeit -o f()", 2), "Cell 1: %timeit; needs no timing: it differs at every run"),
        (
            code("# NBVAL_SKIP\nf()", 2),
            "Cell 1: the marker NBVAL_SKIP; needs an output that can be compared as it is",
        ),
        (
            code("f()  #PYTEST_VALIDATE_IGNORE_OUTPUT", 2),
            "Cell 1: the marker PYTEST_VALIDATE_IGNORE_OUTPUT; needs an output that can be compared as it is",
        ),
        (
            code("f()", 2, "nbval-ignore-output"),
            "Cell 1: the tag nbval-ignore-output; needs an output that can be compared as it is",
        ),
        (
            code("f()", 2, "slides", "raises-exception"),
            "Cell 1: the tag raises-exception; needs an output that can be compared as it is",
        ),
    ],
)
def test_refuses_a_cell(cell, expected):
    assert list(problems({"cells": [code("x = 0", 1), text(), cell]}, 1)) == [expected]


def test_refuses_a_large_notebook():
    assert list(problems({"cells": [text()] * 26}, 250_001)) == [
        "26 cells; needs at most 25: one contract a notebook",
        "250001 bytes; needs at most 250000: fewer figures, or a lower dpi",
    ]


def test_pytest_stops_at_collection(tmp_path):
    shutil.copy(CONFTEST, tmp_path)
    notebook = {"cells": [code("x = 1", 1), code("x", None)], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    (tmp_path / "never_run.ipynb").write_text(json.dumps(notebook))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert "never_run.ipynb: Cell 1: execution_count None; needs 2: run `make notebooks`" in run.stdout
    assert run.returncode == pytest.ExitCode.INTERRUPTED


@pytest.mark.parametrize("interpreter", [None, "HELION_INTERPRET", "TRITON_INTERPRET"])
@pytest.mark.parametrize("gpu", [False, True])
def test_a_lesson_is_left_out_if_it_would_ignore_the_requested_interpreter(tmp_path, monkeypatch, interpreter, gpu):
    ignored = runpy.run_path(str(CONFTEST))["pytest_ignore_collect"]
    for name in ("HELION_INTERPRET", "TRITON_INTERPRET"):
        monkeypatch.delenv(name, raising=False)
    if interpreter:
        monkeypatch.setenv(interpreter, "1")
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    for source, lesson in (("device = course.start()", True), ("import mxspec", False)):
        (tmp_path / "one.ipynb").write_text(json.dumps({"cells": [code(source, 1)]}))
        assert bool(ignored(tmp_path / "one.ipynb")) == (lesson and bool(interpreter) and not gpu)
    if interpreter:  # the kernels read the value 0 as: no interpreter
        monkeypatch.setenv(interpreter, "0")
        (tmp_path / "one.ipynb").write_text(json.dumps({"cells": [code("device = course.start()", 1)]}))
        assert not ignored(tmp_path / "one.ipynb")
    assert not ignored(tmp_path)
