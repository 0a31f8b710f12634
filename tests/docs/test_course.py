"""The course: what its helper says of a function, and whether the kernels of the lessons are machine code too."""

from __future__ import annotations

import ast
import json
import linecache
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import mxspec
from mxspec import course
from mxspec.machine_code.compile import compile_call
from mxspec.machine_code.fake_gpu import unavailable
from tests.helpers import ROOT

LESSONS = sorted((ROOT / "notebooks").glob("1[0-5]_*.ipynb"))


def test_verdict_names_what_is_left_out(capsys):
    def matrices(scale):
        if scale.ndim == 3:
            raise NotImplementedError("only 2-D")
        return mxspec.to_blocked(scale)

    course.verdict(matrices, op="to_blocked")
    assert capsys.readouterr().out == (
        "right: matrices keeps the contract of to_blocked in every case that it takes\nleft out, as it says: only 2-D\n"
    )


def test_verdict_of_an_exercise_that_nobody_has_done(capsys):
    def mine(scale):
        raise NotImplementedError("fill in")

    course.verdict(mine, op="to_blocked", case="128x4")
    assert capsys.readouterr().out == "not yet: fill in\n"


def test_verdict_shows_the_first_wrong_block_and_nothing_of_this_machine(capsys):
    def zeros(scale):
        return torch.zeros_like(mxspec.to_blocked(scale))

    course.verdict(zeros, op="to_blocked")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "wrong in the case '128x4'"
    assert lines[1].startswith("output 0: ")
    assert lines[3].startswith("  got      00 00 00 00")
    assert not any("reproduce" in line for line in lines)


def test_verdict_refuses_an_unknown_case():
    with pytest.raises(ValueError, match=r"to_blocked has no case named '128x5'"):
        course.verdict(mxspec.to_blocked, op="to_blocked", case="128x5")


def test_start_comes_before_triton():
    code = "import triton; from mxspec import course; course.start()"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("TRITON_INTERPRET", None)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert "RuntimeError: start: triton was imported before" in ran.stderr


def test_race_times_only_what_writes_all_of_its_outputs(capsys):
    x = torch.ones(64, 64, dtype=torch.bfloat16)
    course.race({"mine": mxspec.mx_quantize}, x)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["mine", "bare", "copy"]

    def half(x):
        out = torch.empty_like(x)
        out[:32] = x[:32]
        return out

    with pytest.raises(AssertionError, match=r"half: 4096 bytes of its outputs depend on what was there before"):
        course.race({"half": half}, x)


def definitions(lesson: Path) -> dict[str, Any]:
    """The functions that a lesson defines and what it imports, without its calls."""
    found: dict[str, Any] = {"__name__": lesson.stem}
    for i, cell in enumerate(json.loads(lesson.read_text())["cells"]):
        if cell["cell_type"] == "code":
            source, name = "".join(cell["source"]), f"<{lesson.stem}, cell {i}>"
            linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name  # Triton reads it there
            tree = ast.parse(source)
            tree.body = [s for s in tree.body if isinstance(s, (ast.FunctionDef, ast.Import, ast.ImportFrom))]
            exec(compile(tree, name, "exec"), found)
    return found


def bf16() -> torch.Tensor:
    return torch.zeros(1024, 2048, dtype=torch.bfloat16)


def operands() -> tuple[torch.Tensor, ...]:
    return mxspec.mx_quantize(bf16()) * 2


# What the interpreter cannot show: that a solution is machine code, keeps to its registers and moves 16 bytes at once.
SOLUTIONS = {
    "10": lambda of: [(of["copy"], (bf16().flatten(), bf16().flatten()), {})],
    "12": lambda of: [(of[name], (bf16(),), {}) for name in ("triton_quantize", "helion_quantize")],
    "13": lambda of: [(of["columns"], (bf16(),), {"axis": -2})],
    "14": lambda of: [(of["quantize"], (bf16(),), {"scale_layout": "blocked"})],
    "15": lambda of: [(of["triton_matmul"], operands(), {})],
}


@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
@pytest.mark.parametrize("lesson", [path for path in LESSONS if path.name[:2] in SOLUTIONS], ids=lambda path: path.stem)
def test_a_lessons_solution_is_sound_machine_code(lesson):
    for fn, args, kwargs in SOLUTIONS[lesson.name[:2]](definitions(lesson)):
        (code,) = compile_call(fn, *args, target="sm90", **kwargs)
        assert (code.local_bytes, code.load_bytes, code.store_bytes) == (0, 16, 16)
        if fn.__name__ == "columns":  # the lesson says so: 128 x 64 codes of one byte, and no fp32
            assert code.shared_bytes == 128 * 64
