"""The course: what its helper says of a function, and whether the kernels of the lessons are machine code too."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mxspec
from mxspec import course
from mxspec.machine_code.compile import compile_call
from mxspec.machine_code.fake_gpu import unavailable
from tests.helpers import ROOT, plain_environment

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


def test_verdict_of_a_function_that_returns_nothing_or_raises(capsys):
    def nothing(scale):
        return None

    def unlucky(scale):
        return scale.unheard_of

    course.verdict(nothing, op="to_blocked", case="128x4")
    course.verdict(unlucky, op="to_blocked", case="128x4")
    assert capsys.readouterr().out.splitlines() == [
        "not yet: nothing returns None",
        "not yet: unlucky, at `return scale.unheard_of`, raises AttributeError: "
        "'Tensor' object has no attribute 'unheard_of'",
    ]


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


def bf16() -> torch.Tensor:
    return torch.zeros(1024, 2048, dtype=torch.bfloat16)


def operands() -> tuple[torch.Tensor, ...]:
    return mxspec.mx_quantize(bf16()) * 2


# What the interpreter cannot show: that a solution is machine code, keeps to its registers and moves 16 bytes at once.
SOLUTIONS: dict[str, Any] = {
    "10": lambda of: [(of["copy"], (bf16().flatten(), bf16().flatten()), {})],
    "12": lambda of: [(of[name], (bf16(),), {}) for name in ("triton_quantize", "helion_quantize")],
    "13": lambda of: [(of["columns"], (bf16(),), {"axis": -2})],
    "14": lambda of: [(of["quantize"], (bf16(),), {"scale_layout": "blocked"})],
    "15": lambda of: [(of["triton_matmul"], operands(), {})],
}


@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
@pytest.mark.parametrize("lesson", [path for path in LESSONS if path.name[:2] in SOLUTIONS], ids=lambda path: path.stem)
def test_a_lessons_solution_is_sound_machine_code(lesson):
    for fn, args, kwargs in SOLUTIONS[lesson.name[:2]](course.definitions(lesson)):
        (code,) = compile_call(fn, *args, target="sm90", **kwargs)
        assert (code.local_bytes, code.load_bytes, code.store_bytes) == (0, 16, 16)
        if fn.__name__ == "columns":  # the lesson says so: 128 x 64 codes of one byte, and no fp32
            assert code.shared_bytes == 128 * 64


# --- the exercises ----------------------------------------------------------------------------------------------


def cells(lesson: Path) -> Any:
    return json.loads(lesson.read_text())["cells"]


def tagged(lesson: Path, tag: str) -> list[str]:
    return ["".join(cell["source"]) for cell in cells(lesson) if tag in cell["metadata"].get("tags", ())]


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda path: path.stem)
def test_a_lesson_has_a_picture_in_words_too_and_an_exercise_whose_solution_is_collapsed_and_right(lesson):
    outputs: list[list[dict[str, Any]]] = [cell.get("outputs", []) for cell in cells(lesson)]
    pictures = [i for i, of_cell in enumerate(outputs) if any("image/png" in o.get("data", {}) for o in of_cell)]
    assert pictures
    for i in pictures:
        assert "".join(cells(lesson)[i + 1]["source"]).startswith("*The picture in words.*")
    assert len(tagged(lesson, "exercise")) == 2
    (solution,) = [cell for cell in cells(lesson) if "hide-input" in cell["metadata"].get("tags", ())]
    assert solution["metadata"]["jupyter"]["source_hidden"]
    printed = "".join("".join(output["text"]) for output in solution["outputs"])
    assert printed.startswith("right: ")
    assert not any(word in printed for word in ("wrong", "not yet"))


# An exercise in each state of a reader's work: as it stands, with a name that nothing defines in place of every `...`.
# "32 bits" is the worked solution without its 64-bit offsets.
SCRIPT = """
import contextlib, io, json, sys
from collections.abc import Callable
from pathlib import Path
from mxspec import course
device = course.start()
said = {}
lesson, states, answers = sys.argv[1:]
for state, sources in json.load(open(states)).items():
    found = {"__name__": f"{lesson} {state}", "device": device}
    printed = io.StringIO()
    for i, source in enumerate(sources):
        course.define(source, f"<{lesson}, {state}, {i}>", found)
    with contextlib.redirect_stdout(printed):
        for line in sources[-1].splitlines():
            if line.startswith(("course.verdict", "check_copy")):
                exec(line, found)
    said[state] = printed.getvalue()
json.dump(said, open(answers, "w"))
"""
NARROW = {"10": "def copy_kernel", "13": "def columns_kernel", "14": "def tiles_kernel"}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, str]]:
    """What a lesson's checks say of its exercises in each state, by one process for a lesson that interprets Triton."""

    @functools.cache
    def of_lesson(number: str) -> dict[str, str]:
        (lesson,) = (path for path in LESSONS if path.name.startswith(number))
        code = ["".join(cell["source"]) for cell in cells(lesson) if cell["cell_type"] == "code"]
        states = dict[str, list[str]]()
        for which, source in zip(("worked", "alone"), tagged(lesson, "exercise"), strict=True):
            before = code[: code.index(source)]
            states[f"{which}, as it stands"] = [*before, source]
            states[f"{which}, a name"] = [*before, source.replace("...", "unheard_of")]
        if (name := NARROW.get(number)) is not None:
            at = next(i for i, source in enumerate(code) if name in source)
            states["32 bits"] = [*code[:at], code[at].replace(".to(tl.int64)", "")]
        folder = tmp_path_factory.mktemp(f"lesson_{number}")
        (folder / "states.json").write_text(json.dumps(states))
        environment = plain_environment(CUDA_VISIBLE_DEVICES="")
        command = [sys.executable, "-c", SCRIPT, number, str(folder / "states.json"), str(folder / "said.json")]
        ran = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert ran.returncode == 0, ran.stderr[-3000:]
        return json.loads((folder / "said.json").read_text())

    return of_lesson


@pytest.mark.turns(3)
@pytest.mark.parametrize("lesson", [path.name[:2] for path in LESSONS])
def test_an_unfinished_exercise_gets_a_sentence_and_no_traceback(said, lesson):
    for state, printed in said(lesson).items():
        if state != "32 bits":
            assert printed.startswith("not yet: "), (state, printed)
            assert printed.count("\n") == 1, (state, printed)
            assert "Traceback" not in printed
    for which in ("worked", "alone"):
        assert "(`...`); the first: " in said(lesson)[f"{which}, as it stands"]
        assert "unheard_of" in said(lesson)[f"{which}, a name"]


@pytest.mark.turns(3)
@pytest.mark.parametrize("lesson", NARROW)
def test_a_kernel_with_offsets_of_32_bits_is_wrong(said, lesson):
    assert said(lesson)["32 bits"].startswith("wrong where offsets pass 2^31: are they 64-bit?\n")


BROKEN = """
import triton
import triton.language as tl


@triton.jit
def broken_kernel(x, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), tl.unheard_of(BLOCK))


def broken(x):
    broken_kernel[(1,)](x, BLOCK=32)
"""


@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
def test_what_triton_does_not_compile_is_named():
    import triton

    found: dict[str, Any] = {"__name__": "broken"}
    course.define(BROKEN, "<broken>", found)
    with pytest.raises(triton.CompilationError) as caught:
        compile_call(found["broken"], bf16(), target="sm90")
    words = course.in_words(caught.value, found["broken"])
    assert words.startswith("Triton does not compile broken_kernel, at `tl.store(x + tl.arange(0, BLOCK), ")
    assert "unheard_of" in words


def test_the_newest_stored_run_is_printed(tmp_path, capsys):
    course.stored("10", tmp_path)
    assert capsys.readouterr().out.startswith("no run is stored yet; ")
    entry = {"lesson": "10", "shape": "2 x 3", "name": "copy", "us": 1.25, "rate": 4000.4, "unit": "GB/s"}
    for date in ("2026-01-01", "2026-01-02"):
        run = {
            "device": "a GPU",
            "date": date,
            "versions": {"triton": "3.7"},
            "entries": [entry, {**entry, "lesson": "11"}],
        }
        (tmp_path / f"lessons-gpu-{date}.json").write_text(json.dumps(run))
    course.stored("10", tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "a GPU, 2026-01-02, triton 3.7"
    assert [line.split() for line in lines[1:]] == [["2", "x", "3", "copy", "1.2", "us", "4000", "GB/s"]]
