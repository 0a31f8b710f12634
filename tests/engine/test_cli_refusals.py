"""If a command fails, one line says why, without a traceback, and the exit code is 2. Ctrl-C gives 130."""

import hashlib
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mxspec import vectors
from mxspec.__main__ import main
from mxspec.bench import cli, record
from mxspec.machine_code import cli as compile_cli
from mxspec.machine_code.compile import Result
from tests.helpers import plain_environment


@pytest.fixture
def refused(capsys, monkeypatch, tmp_path):
    """A function that runs a command that must be refused, and returns the one line of its error."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        code = main([str(argument) for argument in arguments])
        [line] = capsys.readouterr().err.splitlines()
        assert code == 2
        assert line.startswith("mxspec: ")
        return line

    return run


# --- vectors ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Vectors of one op, with the right answer to one test."""
    folder = tmp_path_factory.mktemp("exported")
    manifest = vectors.export(folder, ["to_blocked"])["to_blocked"]
    test, stored = manifest["tests"][0], load_file(folder / "to_blocked.safetensors")
    (folder / "results").mkdir()
    answer = {f"{test['id']}.out": stored[test["outputs"][0]["stored"]].clone()}
    save_file(answer, folder / "results" / "to_blocked.safetensors")
    return folder


def invalid(manifest):
    return next(test for test in manifest["tests"] if test["result"] == "invalid")


def without(*path):
    def change(manifest):
        *way, last = path
        for key in way:
            manifest = manifest[key]
        del manifest[last]

    return change


def other(value, *path):
    def change(manifest):
        *way, last = path
        for key in way:
            manifest = manifest[key]
        manifest[last] = value

    return change


OUTPUT = ("tests", 0, "outputs", 0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without(*OUTPUT, "stored"), "output 0 of test 1 has no 'stored' that is text"),
        (without("tests", 0, "inputs", 0, "stored"), "input 0 of test 1 has no 'stored' that is text"),
        (other("nowhere", *OUTPUT, "stored"), "output or input 'out' of test 1 is not in the file of tensors"),
        (without("tests", 0, "outputs"), "test 1 has no 'outputs' that is a list"),
        (other(None, "tests", 0, "outputs"), "test 1 has no 'outputs' that is a list"),
        (other(["out"], "tests", 0, "outputs"), "output 0 of test 1 is text; needs an object"),
        (lambda manifest: invalid(manifest).pop("error"), "has no 'error' that is an object"),
        (without("version"), "it has no 'version' that is an integer"),
        (other(999, "version"), "it has version 999; this release judges 1 to "),
        (other([2, 3, 4], *OUTPUT, "shape"), "'out' of test 1 is not in the file of tensors"),
        (other([-1], *OUTPUT, "strides"), "'out' of test 1 is not in the file of tensors"),
        (other([1000], *OUTPUT, "strides"), "'out' of test 1 is not in the file of tensors"),
        (other(None, "tests", 0, "inputs"), "test 1 has no 'inputs' that is a list"),
        (other([], "tests", 0, "options"), "test 1 has no 'options' that is an object"),
        (other("maybe", "tests", 0, "result"), "test 1 has the result 'maybe'; needs valid or invalid"),
        (other(2, "tests", 0, "id"), "it has no tests, or two of one id"),
    ],
)
def test_a_manifest_that_lacks_something_is_refused(refused, exported, tmp_path, change, words):
    folder = shutil.copytree(exported, tmp_path / "vectors")
    manifest = json.loads((folder / "to_blocked.json").read_text())
    change(manifest)
    (folder / "to_blocked.json").write_text(json.dumps(manifest))
    line = refused("vectors", "check", folder)
    assert line.startswith(f"mxspec: vectors: {folder / 'to_blocked.json'}")
    assert words in line


@pytest.mark.parametrize("text", ["{", "[1, 2]", "3", "[" * 100_000, '{"tests": [1]}'])
def test_what_is_no_manifest_is_refused(refused, exported, tmp_path, text):
    folder = shutil.copytree(exported, tmp_path / "vectors")
    (folder / "to_blocked.json").write_text(text)
    assert str(folder / "to_blocked.json") in refused("vectors", "check", folder)


@pytest.mark.parametrize(
    "name",
    ["to_blocked.json", "to_blocked.safetensors", "results/to_blocked.json", "results/to_blocked.safetensors"],
)
def test_a_folder_for_a_file_of_vectors_is_refused(refused, exported, tmp_path, name):
    folder = shutil.copytree(exported, tmp_path / "vectors")
    (folder / name).unlink(missing_ok=True)
    (folder / name).mkdir()
    assert str(folder / name) in refused("vectors", "check", folder)


def test_tensors_that_cannot_be_read_are_refused(refused, exported, tmp_path):
    folder = shutil.copytree(exported, tmp_path / "vectors")
    (folder / "to_blocked.safetensors").write_bytes(b"short")
    manifest = json.loads((folder / "to_blocked.json").read_text())
    manifest["sha256"] = hashlib.sha256(b"short").hexdigest()
    (folder / "to_blocked.json").write_text(json.dumps(manifest))
    assert f"vectors: {folder / 'to_blocked.safetensors'}: " in refused("vectors", "check", folder)


def test_vectors_are_not_exported_to_where_files_or_folders_lie(refused, tmp_path):
    (tmp_path / "file").touch()
    assert "needs a folder to write to" in refused("vectors", "export", "file", "--op", "to_blocked")
    assert "needs a folder to write to" in refused("vectors", "export", "file/inside", "--op", "to_blocked")
    for end in ("json", "safetensors"):
        (tmp_path / end / f"to_blocked.{end}").mkdir(parents=True)
        line = refused("vectors", "export", end, "--op", "to_blocked")
        assert line == f"mxspec: vectors: {end}/to_blocked.{end} is a folder; needs a place for a file"


# --- bench --------------------------------------------------------------------------------------------------------


def test_what_bench_cannot_write_to_is_refused_before_anything_is_timed(refused, monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "run_all", None)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # because root may write anywhere
    assert "--json new.json: needs a file that may be written" in refused("bench", "--json", "new.json")
    assert "--plot new: needs a folder that may be written to" in refused("bench", "--plot", "new")
    (tmp_path / "file").touch()
    assert "needs a file name in a folder that exists" in refused("bench", "--json", "file/new.json")
    assert "Not a directory" in refused("bench", "--plot", "file/new")


def test_what_bench_could_not_write_is_said_after_the_figures(refused, monkeypatch, capsys, tmp_path):
    run = record.Run("CPU", "2026-01-01", "bench", {"mxspec": "0"}, not_timed={"mx_quantize": "no kernel"})
    monkeypatch.setattr(cli, "run_all", lambda options: run)
    shown = []
    monkeypatch.setattr(cli.tables, "show", lambda run, console: shown.append(run))
    assert "/dev/full: No space left on device" in refused("bench", "--json", "/dev/full")
    assert shown == [run]


def test_a_picture_where_a_folder_lies_is_refused(refused, monkeypatch, tmp_path):
    entry = record.Entry("triton", "backend", 1.0, 1.0, 0.0, 10, 10)
    race = record.Race("mx_quantize", "1x32", (entry,))
    run = record.Run("CPU", "2026-01-01", "bench", {"mxspec": "0"}, races=(race,))
    monkeypatch.setattr(cli, "run_all", lambda options: run)
    (tmp_path / "pictures" / "roofline.png").mkdir(parents=True)
    assert "Is a directory: 'pictures/roofline.png'" in refused("bench", "--plot", "pictures")


def test_sizes_that_no_tensor_has_are_refused(refused, tmp_path):
    (tmp_path / "shapes.json").write_text('{"matrices": [[1099511627775, 1099511627775]]}')
    line = refused("bench", "--model", "--op", "mx_quantize", "--shapes", "shapes.json")
    assert line.startswith("mxspec: mx_quantize, 1099511627775x1099511627775, ")


# --- demo ---------------------------------------------------------------------------------------------------------


def of_dtype(name, data):
    header = json.dumps({"a": {"dtype": name, "shape": [64, 64], "data_offsets": [0, len(data)]}}).encode()
    return struct.pack("<Q", len(header)) + header + data


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is not a safetensors file"),
        (b"not safetensors" * 100, "is not a safetensors file"),
        (of_dtype("F32", bytes(4 * 64 * 64))[:-100], "is not a safetensors file"),
        (of_dtype("U4", bytes(32 * 64)), "is not a safetensors file"),
        (of_dtype("F6_E2M3", bytes(48 * 64)), "it holds tensors of dtype F6_E2M3, not one of BF16, F16, F32"),
        (of_dtype("F64", bytes(8 * 64 * 64)), "it holds tensors of dtype F64, not one of BF16, F16, F32"),
        (struct.pack("<Q", 2) + b"{}", "it holds nothing"),
    ],
)
def test_demo_refuses_weights_that_it_cannot_read(refused, tmp_path, data, words):
    (tmp_path / "weights").write_bytes(data)
    line = refused("demo", "--weights", "weights")
    assert line.startswith("mxspec: demo: weights ")
    assert words in line


@pytest.mark.parametrize("shape", [(0, 64), (4, 0), (4, 33), (64,)])
def test_demo_refuses_weights_without_a_whole_block(refused, tmp_path, shape):
    save_file({"a": torch.zeros(shape)}, tmp_path / "weights")
    assert "weights has no matrix to quantize; it holds tensors " in refused("demo", "--weights", "weights")


def test_demo_refuses_a_folder_and_a_missing_file(refused, tmp_path):
    for name in (tmp_path, "missing"):
        assert f"demo: no file {name}; run `pip install" in refused("demo", "--weights", name)


def test_demo_refuses_an_output_that_it_cannot_write(refused, tmp_path):
    save_file({"a": torch.zeros(2, 32)}, tmp_path / "weights")
    (tmp_path / "folder").mkdir()
    for output, words in [
        ("folder", "needs a file that may be written"),
        ("weights/inside", "File exists; needs a file name in a folder"),
        ("weights", "is the file of weights; needs another file"),
    ]:
        assert words in refused("demo", "--weights", "weights", "--output", output)
    assert load_file(tmp_path / "weights")["a"].shape == (2, 32)


# --- devices ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [("check", "--op", "to_blocked"), ("explain", "to_blocked")])
@pytest.mark.parametrize("device", ["mps", "xpu", "meta", "xla", "hpu", "lazy"])
def test_other_devices_are_refused(refused, command, device):
    assert refused(*command, "--device", device) == (
        f"mxspec: --device {device}: mxspec runs only on cpu and cuda devices"
    )


def test_a_gpu_that_is_not_there_is_refused(refused, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    line = refused("explain", "to_blocked", "--device", "cuda:7")
    assert line == "mxspec: --device cuda:7: the GPUs here are cuda:0 to cuda:1"


# --- compile ------------------------------------------------------------------------------------------------------


def test_compile_is_not_green_when_there_is_nothing_to_compile(capsys):
    with pytest.raises(SystemExit, match="2"):
        compile_cli.main(["--op", "from_blocked"])
    assert "no kernel is of that op and that backend" in capsys.readouterr().err


def test_compile_is_not_green_when_everything_is_skipped(monkeypatch, capsys):
    skipped = [Result("fp8_gemm", "deepgemm", "all", "sm90", skipped="another library's code")]
    monkeypatch.setattr(compile_cli, "compile_all", lambda jobs: skipped)
    for json_too in ([], ["--json"]):
        assert compile_cli.main(["--op", "fp8_gemm", "--backend", "deepgemm", *json_too]) == 1
        assert "compile: nothing was compiled: every case is skipped" in capsys.readouterr().err


# --- Ctrl-C, and a reader that goes -------------------------------------------------------------------------------


def test_ctrl_c_ends_a_command_without_a_traceback(monkeypatch, capsys):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("mxspec.dispatch.ops", interrupted)
    assert main(["list"]) == 130
    assert capsys.readouterr().err == "mxspec: interrupted\n"


def started(*arguments, cwd):
    command = [sys.executable, "-W", "ignore", "-m", "mxspec", *arguments]
    return subprocess.Popen(
        command,
        cwd=cwd,
        env=plain_environment(),
        text=True,
        start_new_session=True,
        stdout=-1,
        stderr=-1,
        preexec_fn=hears_ctrl_c,
    )


def hears_ctrl_c():
    """Make the process react to SIGINT. A shell's background job, and whatever it starts, ignores SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def is_running(pid):
    """Whether a process runs. An ended process stays in /proc until its parent, or process 1, reads its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(there, process):
    """Wait until `there()` is true. The process must run all the time."""
    while not there():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


@pytest.mark.turns(2)
def test_ctrl_c_ends_the_processes_of_a_demo(tmp_path):
    save_file({"a": torch.zeros(64, 256)}, tmp_path / "weights")
    with started("demo", "--weights", "weights", cwd=tmp_path) as process:
        until(lambda: children(process.pid), process)
        [worker] = children(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate()
    assert (process.returncode, said) == (130, "mxspec: interrupted\n")
    deadline = time.monotonic() + 10  # the demo ends first, and its worker a little later
    while is_running(worker):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_ctrl_c_ends_the_processes_of_compile(tmp_path):
    def catches(pid):  # whether Python handles the SIGINT of the process, and not the system
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        [caught] = [int(line.split()[1], 16) for line in lines if line.startswith("SigCgt")]
        return bool(caught >> (signal.SIGINT - 1) & 1)

    def imports_torch(pid):
        return "libtorch" in Path(f"/proc/{pid}/maps").read_text()

    def ready():
        workers = [pid for pid in children(process.pid) if imports_torch(pid)]
        return bool(workers) and not any(map(catches, workers))

    options = ("--op", "mx_quantize", "--backend", "helion", "--target", "sm90")  # one job, so one worker
    with started("compile", *options, cwd=tmp_path) as process:
        until(ready, process)
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate()
    assert (process.returncode, said) == (130, "mxspec: interrupted\n")


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_reader_that_goes_is_no_error(tmp_path, form):
    with started("check", "--op", "to_blocked", "--list", *form, cwd=tmp_path) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


def test_compile_says_which_ops_it_left_and_why_cases_were_skipped(capsys):
    asked = ["--op", "mx_quantize", "--op", "fp8_gemm", "--backend", "deepgemm", "--cover", "0", "--target", "sm100"]
    assert compile_cli.main(asked) == 1
    printed = capsys.readouterr()
    assert "mx_quantize was not compiled: it has no kernel in deepgemm" in printed.err
    assert "1 skipped: no: DeepGEMM compiles its kernels itself" in printed.out
    assert compile_cli.main(["--bound", "--op", "swiglu", "mx_gemm", "--backend", "triton", "--target", "sm90"]) == 0
    assert "mx_gemm has no bound: it is no quantizer" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        compile_cli.main(["--bound", "--cover", "0"])
    assert "got --bound and --cover" in capsys.readouterr().err
