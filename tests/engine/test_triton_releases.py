"""The other Triton releases that mxspec takes: kernels compile under them, and give the reference's results.

`make` installs each release in a folder. The tests put that folder first on PYTHONPATH.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

import mxspec
from mxspec import dispatch
from mxspec.machine_code.compile import Result, kernels
from mxspec.machine_code.covering import covering, recorded
from mxspec.machine_code.fake_gpu import fake_gpu, unavailable
from mxspec.machine_code.planner import calls
from tests.helpers import COMPLETE

if reason := unavailable():
    pytest.skip(reason, allow_module_level=True)

import triton

from mxspec.bench import limits
from mxspec.triton_kernels.blackwell import mx_matmul
from mxspec.triton_kernels.hopper import releases

ROOT = Path(mxspec.__file__).parents[1]
FOLDER = Path(os.environ.get("MXSPEC_TRITONS") or ROOT / ".venv")
OTHERS = re.findall(r"^OTHER_TRITONS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[0].split()
PINNED = re.findall(r"^triton==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[0]
OLDEST, *BETWEEN, NEWEST = OTHERS
TRITON_OPS = [op for op, backend in kernels() if backend == "triton"]
TARGET = "sm90"  # those releases are used on sm_90; only one kernel is compiled for sm_100 under them


def under(version: str, *arguments: str, **options) -> subprocess.CompletedProcess[str]:
    """Run Python with another release of Triton."""
    folder = FOLDER / f"triton-{version}"
    if triton.__version__ == version:
        pytest.skip(f"this is triton {version}")
    if not (folder / "triton").is_dir():
        pytest.skip(f"no triton in {folder} (MXSPEC_TRITONS)")
    # The outer test has had its turn. So the tests of a pytest inside take none, unless `env` says so.
    own = {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]), "MXSPEC_TURN": ""}
    environment = os.environ | own | options.pop("env", {})
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, **options)


def bounds(specifier: str) -> list[tuple[int, int]]:
    """The bounds of a range `>=a.b,<c.d`."""
    return [(int(major), int(minor)) for major, minor in re.findall(r"[<>]=?(\d+)\.(\d+)", specifier)]


def test_gluon_is_offered_where_it_is_compiled_and_nowhere_else():
    tried = sorted(tuple(map(int, version.split(".")[:2])) for version in (PINNED, *OTHERS))
    assert [f"{major}.{minor}" for major, minor in tried] == list(releases.COMPILED_UNDER)
    requirement = re.findall(r'"triton([^;"]*)', (ROOT / "pyproject.toml").read_text())[0]
    first, beyond = bounds(requirement)
    assert (first, beyond) == (tried[0], (tried[-1][0], tried[-1][1] + 1)), "pyproject.toml takes what nobody tried"


@pytest.mark.turns(16)
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("share", range(4))
@pytest.mark.parametrize(("version", "cover"), [(OLDEST, 0), (NEWEST, 1 if COMPLETE else 0)])
def test_machine_code(version: str, cover: int, share: int) -> None:
    """A quarter of the ops in one run, because its processes then import torch once and not once for each op.

    Helion's generated code is tested on a GPU with that release, where it runs. So are the options under the oldest
    release. Gluon's language differs between the two releases.
    """
    ops = TRITON_OPS[share::4]
    chosen = ["--cover", str(cover), "--target", TARGET, "--backend", "triton", "--op", *ops]
    run = under(version, "-m", "mxspec", "compile", "--json", *chosen)
    assert run.returncode in (0, 1), run.stderr
    assert "FP_FUSION" not in run.stderr
    report = json.loads(run.stdout)
    assert report["triton"] == version
    results = [Result(**row) for row in report["results"]]
    assert not [(r.op, r.backend, r.target, r.case, r.problems) for r in results if r.problems]
    assert {r.target for r in results} == {TARGET}
    compiled: dict[str, list[str]] = {}
    for r in results:
        compiled.setdefault(r.op, []).append(r.case)
    assert compiled.keys() == set(ops)
    for op, found in compiled.items():
        assert found in ([case.name for case in dispatch.reference(op).spec.cases()], ["all"])


BLACKWELL = "blackwell/test_mx_matmul_sm100"
HOPPER = [f"hopper/test_{name}_sm90" for name in ("fp8_gemm", "fp8_grouped_gemm", "mx_gemm", "nvfp4_gemm", "weights")]


@pytest.mark.turns(8)
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("version", "name"),
    [(OLDEST, BLACKWELL)]
    + [(version, name) for version in (*(BETWEEN if COMPLETE else ()), NEWEST) for name in (*HOPPER, BLACKWELL)],
)
def test_tiles_of_hopper_and_the_kernel_with_tma_for_blackwell(version: str, name: str) -> None:
    """The tests of a file that knows more than the ops' cases.

    For Hopper, the ops' cases are too small to choose these tiles. The oldest release is tested on a GPU, where the
    same files run all tiles. For Blackwell, the compiler makes barriers and a pipeline, so each release may make
    others. The tests inside take turns, too: a file compiles for up to two minutes.
    """
    file = f"tests/kernels/{name}.py"
    chosen = "test_mx_matmul_sm100 or without_spilling"
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-rp", "-k", chosen, file)
    run = under(version, *command, cwd=ROOT, env={"MXSPEC_TURN": os.environ.get("MXSPEC_TURN", "")})
    assert run.returncode == 0, run.stdout
    assert f"PASSED {file}" in run.stdout


# --- results that no release may change ---------------------------------------------------------------------------


@pytest.mark.turns(6)
def test_every_launch_says_whether_sums_are_fused(monkeypatch):
    from triton.runtime.jit import JITFunction

    from mxspec.triton_kernels.hopper.mx import by_memory

    said: dict[str, set[bool | None]] = {}

    def run(self, *args, grid, warmup, enable_fp_fusion=None, **options):
        said.setdefault(self.fn.__qualname__, set()).add(enable_fp_fusion)

    for target, waves in (("sm90", by_memory.WAVES), ("sm90", 0), ("sm100", 0)):
        monkeypatch.setattr(by_memory, "WAVES", waves)
        for op in TRITON_OPS:
            module, exact = dispatch.kernel_module(op, "triton"), dispatch.reference(op).spec.min_sqnr_db == math.inf
            before, said = said, {}
            with fake_gpu(target), mock.patch.object(JITFunction, "run", run):
                for call in calls(op, module, generated=False):
                    if not call.skipped:
                        getattr(module, op)(*call.args, **call.kwargs)
            assert not exact or set().union(*said.values()) <= {False}, f"{op}: {said}"
            said = {name: before.get(name, set()) | said.get(name, set()) for name in before | said}
    with fake_gpu("sm90"), mock.patch.object(JITFunction, "run", run):
        limits.copy(torch.empty(64, device="meta"))
        limits.bare_cast(torch.empty(64, device="meta"))
    sums = {"fp8_gemm_sm90", "mx_gemm_sm90", "_tiles", "_marked_tiles", "_flagged_tiles", "mx_matmul_sm100"}
    sums |= {"nvfp4_gemm_sm90", "weights_sm90", "_mx_weights"}
    assert said.keys() >= {*sums, "mx_values", "_bf16_values", "_prepare", "_bare_cast", "_copy"}
    assert {name: {name in sums} for name in said} == said


UNKNOWN = """
import torch, triton
from triton.experimental.gluon.language.nvidia import hopper
from mxspec.machine_code.compile import compile_op
from mxspec.machine_code.fake_gpu import fake_gpu
from mxspec.machine_code.planner import plan
triton.__version__ = "3.99.0"
del hopper.warpgroup_mma, hopper.fence_async_shared  # as where Gluon is no more what it was
for op in ("fp8_gemm", "fp8_grouped_gemm_wgrad", "mx_gemm"):
    results = compile_op(op, "triton", "sm90", plan((op,), "triton", "sm90", 1)[op])
    assert not [r for r in results if r.problems], results
    print({code.kernel for r in results for code in r.code})
from mxspec.triton_kernels.fp8_gemm import note
with fake_gpu("sm90"):
    print(note(torch.empty(1, device="meta")))
with fake_gpu("sm100"):
    print(note(torch.empty(1, device="meta")))
"""


@pytest.mark.turns(8)
def test_under_an_unknown_release_matmuls_are_plain_tiles():
    run = subprocess.run([sys.executable, "-c", UNKNOWN], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    *kernels_of_ops, hopper, blackwell = run.stdout.splitlines()
    assert len(kernels_of_ops) == 3
    for kernels_of_op in kernels_of_ops:  # e2m1 weights have plain kernels of their own
        assert "'_tiles'" in kernels_of_op
        assert "sm90" not in kernels_of_op
    known = ", ".join(releases.COMPILED_UNDER)
    assert hopper == f"by plain tiles: the Gluon kernels are compiled under Triton {known}, and this is 3.99.0"
    assert blackwell == "None"


# --- interpreted --------------------------------------------------------------------------------------------------

CHECK = """
import json, sys
import triton
from mxspec import check
wrong, passed = [], 0
for op, names in json.load(sys.stdin).items():
    for case in check.cases_of(op, lambda case: case.name in names):
        result = check.check_case(op, case, "triton")
        passed += result.status == "passed"
        wrong += [] if result.status in ("passed", "skipped") else [f"{op}, {case.name}: {result.message}"]
print(json.dumps([triton.__version__, passed, wrong]))
"""


def shown_once(op: str, together: int) -> list[str]:
    """The names of enough cases to show each kernel, or every value of every option of each kernel."""
    module = dispatch.kernel_module(op, "triton")
    # Without TMA, Blackwell's matmuls are plain tiles, as on a CPU.
    with fake_gpu("sm100"), recorded() as seen, mock.patch.object(mx_matmul, "reads", return_value=False):
        names, launches = [], []
        for call in calls(op, module, generated=False):
            if not call.skipped and "large" not in call.case.flags:
                seen.clear()
                getattr(module, op)(*call.args, **call.kwargs)
                names.append(call.case.name)
                launches.append(tuple(seen))
    return [names[i] for i in sorted(covering(launches, together))]


@pytest.mark.turns(6)
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("version", "together"), [(OLDEST, 0), (NEWEST, 1 if COMPLETE else 0)])
def test_interpreted(version: str, together: int) -> None:
    chosen = {op: shown_once(op, together) for op in TRITON_OPS}
    run = under(version, "-c", CHECK, input=json.dumps(chosen), env={"TRITON_INTERPRET": "1"})
    assert run.returncode == 0, run.stderr
    used, passed, wrong = json.loads(run.stdout.splitlines()[-1])
    assert used == version
    assert not wrong, "\n".join(wrong)
    assert passed == sum(map(len, chosen.values()))
