"""`bench --parallel` on 2 processes: what it prints and stores, what it refuses to time, and how it ends."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mxspec.bench import cli
from mxspec.bench.parallel import command, layer, steps, traffic, turns
from mxspec.bench.parallel.layer import ARMS, PARTS, REST, Shape
from mxspec.distributed._exchange import Plan
from tests.helpers import on_ranks, plain_environment

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
SMALL = {"rows": 48, "dim": 128, "hidden": 64, "experts": 2}
TABLES = (
    "One step of the experts, forward and backward", "Its parts, us", "The four exchanges of a step, alone",
    "FSDP2's gather of the experts' weights",
)  # fmt: skip


def options_of(sizes: dict[str, int]) -> list[str]:
    return [word for name, value in sizes.items() for word in (f"--{name}", str(value))]


def run_by_torchrun(file: Path, *more: str, **environment: str) -> tuple[subprocess.CompletedProcess, dict[str, Any]]:
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "mxspec", "bench"]
    given = [*start, "--parallel", "--json", str(file), *more]
    env = plain_environment(OMP_NUM_THREADS="1", **environment)
    run = subprocess.run(given, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return run, json.loads(file.read_text())


def check_figures(stored: dict[str, Any], rows: int, dim: int, hidden: int, experts: int) -> None:
    """The stored figures of a run on 2 ranks with even routing."""
    assert [(step["recipe"], step["wire"]) for step in stored["steps"]] == list(ARMS)
    for step in stored["steps"]:
        parts = step["parts_us"]
        assert list(parts) == [*PARTS, REST]
        assert min(parts.values()) > 0
        assert 0.2 < sum(parts.values()) / step["us"] < 5  # a shared CPU; on a GPU they are nearly equal
        assert not step["wrong"]
    half = rows // 2  # even routing: half of a rank's rows leave it
    out = {"values": half * dim * 2, "codes": half * -(-(dim + dim // 32) // 16) * 16}  # rows of whole 16 bytes
    assert [t["what"] for t in stored["exchanges"] if t["form"] == "values"] == list(traffic.EXCHANGES)
    for transfer in stored["exchanges"]:
        assert transfer["bytes_out"] == [out[transfer["form"].partition(" ")[0]]] * 2
        assert transfer["us"] > 0
    assert {t["what"] for t in stored["exchanges"] if "codes" in t["form"]} == {
        "dispatch, forward",
        "combine, backward",
    }
    assert 0.51 < out["codes"] / out["values"] < (0.52 if dim % 512 == 0 else 0.57)
    of_weight = [(2 * hidden, dim), (dim, hidden)]
    elements = sum(experts * N * K for N, K in of_weight)
    blocks = sum(experts * -(-N // 128) * -(-K // 128) for N, K in of_weight)
    share = {"values": elements * 2 // 2, "codes": (elements + 4 * blocks) // 2}
    assert [(t["form"], t["bytes_out"]) for t in stored["gathers"]] == [(f, [share[f]] * 2) for f in share] * 2
    assert all(t["us"] > 0 for t in stored["gathers"])


@pytest.mark.turns(3)
def test_torchrun_prints_every_table_once_and_stores_the_figures(tmp_path):
    # "" hides every GPU, so that this test is the same on every machine.
    run, stored = run_by_torchrun(tmp_path / "run.json", *options_of(SMALL), CUDA_VISIBLE_DEVICES="")
    for text in (
        *TABLES,
        "their times say nothing about GPUs",
        "48 rows on each rank, 128 wide; 2 experts on each rank",
    ):
        assert run.stdout.count(text) == 1, text
    assert "WRONG" not in run.stderr
    check_figures(stored, **SMALL)
    typed = "torchrun --nproc-per-node 2 -m mxspec bench --parallel --rows 48 --dim 128 --hidden 64 --experts 2"
    assert stored["command"] == typed
    assert (stored["backend"], stored["ranks"], stored["checked_rows"]) == ("gloo", 2, 48)
    assert {"mxspec", "torch"} <= set(stored["versions"])
    with pytest.raises(ValueError, match=r"is not a stored run: needs an object with format 1"):
        cli.main(["--from", str(tmp_path / "run.json")])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_two_gpus_over_nccl(tmp_path):
    sizes = {"rows": 1024, "dim": 512, "hidden": 256, "experts": 2}
    run, stored = run_by_torchrun(tmp_path / "run.json", *options_of(sizes))
    assert all(text in run.stdout for text in TABLES)
    assert "say nothing about GPUs" not in run.stdout
    check_figures(stored, **sizes)
    assert stored["backend"] == "nccl"
    assert all(step["peak_bytes"] > 0 for step in stored["steps"])


# --- what is wrong is not timed -----------------------------------------------------------------------------------


@contextlib.contextmanager
def _connected():
    yield torch.device("cpu")


def _wrong_on_rank_1(rank: int, file: Path) -> None:
    """On rank 1, the combine of codes brings rows to other tokens, and the exchange of values loses a byte."""
    combine, exchange = Plan.combine, traffic._exchange

    def rolled(plan: Plan, out: torch.Tensor) -> torch.Tensor:
        found = combine(plan, out)
        return found.roll(1, 0) if rank == 1 and plan.of_tokens else found

    def losing(out: torch.Tensor, *given: Any) -> None:
        exchange(out, *given)
        if rank == 1 and out.shape[1] == 2 * SMALL["dim"]:
            out[-1, -1] ^= 1

    given = [
        "--parallel",
        "--markdown",
        "--routing",
        "skewed",
        "--json",
        str(file),
        *options_of(SMALL | {"experts": 3}),
    ]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setattr(Plan, "combine", rolled)
        patch.setattr(traffic, "_exchange", losing)
        patch.setattr(steps, "_rows_of_check", lambda shape, *_: shape.rows // 2)
        patch.setattr(command, "connected", _connected)
        patch.setitem(turns.MESSAGES, "cpu", turns.Pace(2, 2, 1, repeats=3))
        assert command.main(cli.parser().parse_args(given)) == 1  # on both ranks
    if rank == 0:
        assert "so the check took 24 rows" in out.getvalue()
        assert "not timed: FSDP2's gather: values, because 3 experts are no multiple of 2 for 2 ranks" in out.getvalue()
        assert out.getvalue().count("| wrong |") == 6
    else:
        assert out.getvalue() == ""


@pytest.mark.turns(3)
def test_an_arm_and_an_exchange_that_are_wrong_get_no_time_and_the_exit_code_is_1(tmp_path):
    on_ranks(2, _wrong_on_rank_1, tmp_path / "run.json")
    stored = json.loads((tmp_path / "run.json").read_text())
    for step in stored["steps"]:
        is_wrong = step["wire"] == "codes"
        assert (step["us"] is None, step["parts_us"] == {}) == (is_wrong, is_wrong)
        # Rank 0 is the first rank that sees it: the gradients that rank 1 sends are those of other rows.
        assert step["wrong"].startswith("rank 0: gradient of w_gate_up: " if is_wrong else "")
        assert bool(step["wrong"]) == is_wrong
    shape = Shape(**(SMALL | {"experts": 3}), routing="skewed")
    to = [sum(shape.counts(2)[:3]), sum(shape.counts(2)[3:])]  # the rows of each rank for rank 0 and for rank 1
    assert to[0] > to[1] > 0 < sum(to) == shape.rows
    for transfer in stored["exchanges"]:
        is_wrong = transfer["form"] == "values"
        assert (transfer["us"] is None) == is_wrong
        assert transfer["wrong"].startswith("rank 1: output 0: 1 of" if is_wrong else "")
        to_experts = transfer["what"] in ("dispatch, forward", "combine, backward")
        rows = [to[1], to[0]] if to_experts else [to[0], to[1]]  # back: rank 0 returns what rank 1 sent it
        assert transfer["bytes_out"] == [n * transfer["row_bytes"] for n in rows]
        assert transfer["bytes_in"] == transfer["bytes_out"][::-1]
    assert stored["gathers"] == []


def test_a_digest_tells_other_bits_and_another_order():
    x = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    digests = [layer.digest([t]) for t in (x, x.flip(0), x.roll(1, 1), -x, x.clone())]
    assert digests[0] == digests[4]
    assert len(set(map(tuple, digests))) == 4


# --- how it ends --------------------------------------------------------------------------------------------------


def _dies_on_rank_1(rank: int) -> None:
    shape, began = Shape(**SMALL, routing="even"), time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(steps, "problem_of", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError if rank else RuntimeError):
            command.measure(shape, torch.device("cpu"), "")
    assert time.monotonic() - began < 30
    os._exit(0)  # as a program that ends with an error: no clean end of the group


def test_a_rank_that_fails_is_an_error_of_the_other_rank():
    on_ranks(2, _dies_on_rank_1)


def test_without_torchrun_the_error_names_the_command(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    words = r"needs 2 processes or more.*: torchrun --nproc-per-node 2 -m mxspec bench --parallel$"
    with pytest.raises(ValueError, match=words):
        cli.main(["--parallel"])
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=words):
        cli.main(["--parallel"])


def test_a_process_without_a_gpu_of_its_own_is_refused(monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(
        ValueError, match="process 1 of this host has no GPU, because the host has 1; needs at most one"
    ):
        cli.main(["--parallel"])


def test_the_help_names_the_default_sizes():
    on_gpu, on_cpu = (command.DEFAULTS[kind] for kind in ("cuda", "cpu"))
    for name, words in cli._SIZES.items():
        assert words.endswith(f"default: {getattr(on_gpu, name)}, without a GPU {getattr(on_cpu, name)}")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--parallel", "--op", "mx_quantize"], "got --parallel and --op; needs only one of them"),
        (["--parallel", "--plot", "pictures"], "got --parallel and --plot; needs only one of them"),
        (["--parallel", "--moe"], "argument --moe: not allowed with argument --parallel"),
        (["--rows", "5"], "got --rows without --parallel; needs both"),
        (["--routing", "even"], "got --routing without --parallel; needs both"),
        (["--parallel", "--dim", "0"], "argument --dim: got 0; needs an integer of at least 1"),
    ],
)
def test_options_that_do_not_fit_are_refused(given, words, capsys):
    with pytest.raises(SystemExit):
        cli.main(given)
    assert words in capsys.readouterr().err
