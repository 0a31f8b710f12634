"""The pytest plugin in a test suite outside of this repository."""

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib

import pytest

from mxspec import dispatch
from tests.helpers import ROOT

MINE = """
from mxspec.reference.to_blocked import to_blocked
import torch

def right(scale):
    if scale.dtype == torch.float8_e8m0fnu:
        raise NotImplementedError("uint8 only")
    return to_blocked(scale)

def wrong(scale):
    out = right(scale)
    out[..., :1] ^= scale.shape[-1] == 70
    return out

def nothing(scale):
    raise NotImplementedError("not yet")
"""


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    folder = tmp_path_factory.mktemp("suite")
    (folder / "mine.py").write_text(MINE)
    (folder / "test_own.py").write_text("def test_own(): pass\n")
    return folder


def run(folder, *arguments):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    clean["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), clean.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "pytest", "-p", "mxspec_pytest", "-p", "no:cacheprovider", "-rfs", *arguments]
    return subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True, check=False)


def test_without_the_options_it_adds_nothing_and_imports_nothing(suite):
    (suite / "test_imports.py").write_text(
        "import sys\ndef test_none(): assert not {'torch', 'mxspec'} & set(sys.modules)\n"
    )
    done = run(suite)
    (suite / "test_imports.py").unlink()
    assert "2 passed" in done.stdout


@pytest.mark.turns(3)
def test_each_case_is_a_test_with_the_report_of_check(suite):
    done = run(suite, "--mxspec-op", "to_blocked", "--mxspec-fn", "mine:wrong", "-k", "not more")  # "more than 2^31"
    assert done.returncode == 1
    assert "mine:wrong::to_blocked[300x70]" in done.stdout
    assert "elements differ, first at [0]: got" in done.stdout
    assert "reproduce: python -m mxspec check --op to_blocked mine:wrong --case 300x70" in done.stdout
    assert "mine:wrong: uint8 only" in done.stdout
    *_, summary = done.stdout.splitlines()
    failed, passed, skipped = map(int, re.findall(r"(\d+) (?:failed|passed|skipped)", summary))
    assert failed == 1
    assert failed + passed + skipped == len(
        list(dispatch.reference("to_blocked").spec.cases())
    )  # one case is deselected, and test_own takes its place


def test_its_tests_are_chosen_like_others(suite):
    done = run(suite, "--mxspec-op", "to_blocked", "--mxspec-fn", "mine:right", "-k", "3x130x6")
    others = len(list(dispatch.reference("to_blocked").spec.cases()))  # test_own is deselected too
    assert f"1 passed, {others} deselected" in done.stdout


@pytest.mark.turns(3)
@pytest.mark.parametrize("more", [(), ("-n", "1")], ids=["one process", "xdist"])
def test_a_function_that_ran_on_nothing_fails_the_session(suite, more):
    if more:
        pytest.importorskip("xdist")
    done = run(suite, "--mxspec-op", "to_blocked", "--mxspec-fn", "mine:nothing", *more)
    assert done.returncode == 1
    assert "mxspec: mine:nothing ran on no valid case: every case was skipped or must be refused" in done.stdout
    assert " failed" not in done.stdout


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--mxspec-op", "to_blocked"), "mxspec: got only one of --mxspec-op and --mxspec-fn; needs both"),
        (("--mxspec-op", "to_bloked", "--mxspec-fn", "mine:right"), "mxspec: unknown op 'to_bloked'"),
        (("--mxspec-op", "to_blocked", "--mxspec-fn", "mine"), "mxspec: 'mine' names no function"),
    ],
)
def test_it_says_what_is_wrong_with_the_options(suite, arguments, words):
    done = run(suite, *arguments)
    assert done.returncode == 4
    assert words in done.stderr
    assert "INTERNALERROR" not in done.stdout + done.stderr


def test_the_distribution_declares_it():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    [(name, module)] = project["project"]["entry-points"]["pytest11"].items()
    assert name == module  # so that `-p` and the entry point are one plugin and not two
    assert importlib.metadata.EntryPoint(name, module, "pytest11").load().pytest_addoption
    assert f"{module}.py" in project["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]
