"""The rules of docs/house.md: the names of files, and which modules each folder may import."""

import ast
import base64
import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

import mxspec
from mxspec import cases, dispatch
from tests.helpers import ROOT

PACKAGE = Path(mxspec.__file__).parent
KERNEL_FILES = [path for b in dispatch.backends() for path in sorted((PACKAGE / f"{b}_kernels").glob("[!_]*.py"))]


def imported(path: Path) -> set[str]:
    """Every module that a file imports, at any depth of its code."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


@pytest.mark.parametrize("path", KERNEL_FILES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_a_kernel_file_has_the_name_of_an_op_and_a_function_of_that_name(path):
    assert path.stem in dispatch.ops()
    functions = {n.name for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef)}
    assert path.stem in functions


@pytest.mark.parametrize("op", dispatch.ops())
def test_an_op_is_public_documented_and_has_goldens(op):
    assert op in mxspec.__all__
    assert dispatch.reference(op).spec.in_place == op.endswith("_")
    doc = dispatch.reference(op).__doc__ or ""
    sections = ("Args:", "Returns:", "Special values:", "Raises:", "Example:", "Source:")
    places = [doc.find(section) for section in sections]
    assert -1 not in places, f"{op}: docstring lacks {sections[places.index(-1)]}"
    assert places == sorted(places)
    goldens = (ROOT / "tests" / "ops" / f"test_{op}.py").read_text()
    many = re.search(r"parametrize\([^@]*def test_golden", goldens)
    assert many or goldens.count("def test_golden") >= 3


def test_references_import_torch_formats_and_spec_only():
    allowed = (
        "torch",
        "mxspec.formats",
        "mxspec.reference",
        "mxspec.spec",
        "collections",
        "functools",
        "itertools",
        "random",
        "typing",
    )
    for path in (PACKAGE / "reference").rglob("*.py"):
        strangers = {n for n in imported(path) if not n.startswith((*allowed, "__future__"))}
        assert not strangers, f"{path.name}: {strangers}"


def test_a_reference_holds_its_contract_alone():
    """A reference file has the docstring, the checks and the definition. The cases lie in `cases/<op>.py`."""
    for op in dispatch.ops():
        lines = (PACKAGE / "reference" / f"{op}.py").read_text().splitlines()
        assert len(lines) <= 170, op
        assert not {"Case", "Shapes"} & {
            name.rpartition(".")[2] for name in imported(PACKAGE / "reference" / f"{op}.py")
        }
        assert {"cases", "bench_cases", "SPACE"} <= set(vars(cases.of(op)))


def walls():
    """The rows of the table in docs/house.md: a folder, and the modules of mxspec that it may import."""
    rows = re.findall(r"^\| (`[^|]*) \| (`[^|]*) \|$", (ROOT / "docs" / "house.md").read_text(), re.MULTILINE)
    cells = [[re.findall(r"`([\w.]+)`", cell) for cell in row] for row in rows if "/" not in "".join(row)]
    return [(folder, allowed) for folders, allowed in cells for folder in folders]


@pytest.mark.parametrize(("folder", "allowed"), walls())
def test_a_wall_of_the_house_stands(folder, allowed):
    known = tuple(f"mxspec.{name}." for name in (folder, *allowed))
    files = sorted((PACKAGE / folder).rglob("*.py"))
    assert files
    for path in files:
        strangers = {n for n in imported(path) if n.startswith("mxspec.") and not f"{n}.".startswith(known)}
        assert not strangers, f"{path.relative_to(PACKAGE)}: {strangers}"


def test_every_folder_with_rules_of_its_own_is_in_the_table():
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert {folder for folder, _ in walls()} == folders


def test_tests_lie_in_folders_of_the_map_and_import_no_other_test():
    page, files = (ROOT / "docs" / "house.md").read_text(), sorted((ROOT / "tests").rglob("test_*.py"))
    for path in files:
        assert f"`{path.relative_to(ROOT).parts[1]}/`" in page.replace("`tests/", "`"), path
        assert (path.parent / "__init__.py").exists(), path
        assert not [n for n in imported(path) if n.startswith("tests.") and "test_" in n], path
    slow = re.search(r"^SLOW = .*?test_,(.*?)\)\)$", (ROOT / "Makefile").read_text(), re.MULTILINE | re.DOTALL)
    assert set(slow[1].replace("\\", "").split()) <= {path.stem.removeprefix("test_") for path in files}


def test_importing_mxspec_imports_no_framework():
    code = "import torch, sys; before = set(sys.modules); import mxspec; print(*(set(sys.modules) - before))"
    new = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "mxspec.dispatch" in new
    assert not {"triton", "helion", "rich", "safetensors", "matplotlib"} & {name.split(".")[0] for name in new}


def test_import_takes_less_than_a_twelfth_of_the_cpu_time_of_importing_torch():
    # Not in ms, because machines differ. Not by a wall clock, which also measures the other tests.
    times = "from time import process_time as now; a = now(); import torch; b = now(); import mxspec; c = now()"
    code = f"{times}; print((c - b) / (b - a))"
    # With bytecode, like an installed package: the first run writes the missing bytecode.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    run = partial(subprocess.run, env=environment, capture_output=True, text=True, check=True)
    assert any(float(run([sys.executable, "-c", code]).stdout) < 1 / 12 for _ in range(8))


def test_the_readmes_picture_is_the_one_that_the_notebook_draws():
    notebook = json.loads((ROOT / "notebooks" / "03_the_blocked_scale_layout.ipynb").read_text())
    outputs = [o for cell in notebook["cells"] for o in cell.get("outputs", []) if "image/png" in o.get("data", {})]
    drawn = [base64.b64decode(o["data"]["image/png"]) for o in outputs]
    assert (ROOT / "docs" / "blocked_scale_tile.png").read_bytes() in drawn
    assert "docs/blocked_scale_tile.png" in (ROOT / "README.md").read_text()


def test_a_module_is_imported_when_it_is_first_named():
    code = "import sys, mxspec; assert 'mxspec.layouts' not in sys.modules; mxspec.layouts.convert; mxspec.nn.Recipe"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="module 'mxspec' has no attribute 'mx_quantise'"):
        mxspec.mx_quantise  # noqa: B018


def test_the_switch_is_in_small_rooms():
    for path in (PACKAGE / "dispatch").glob("*.py"):
        assert len(path.read_text().splitlines()) <= 150, path.name


def test_the_readme_counts_the_ops():
    assert f"- {len(dispatch.ops())} ops quantize," in (ROOT / "README.md").read_text()
