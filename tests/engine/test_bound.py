"""What bounds a quantizer: instructions counted in machine code, and bytes. Compared with the stored run of an H200."""

import json
import re

import pytest
import triton

from mxspec import devices, dispatch
from mxspec.__main__ import main
from mxspec.machine_code import bound
from mxspec.machine_code.fake_gpu import unavailable
from tests.helpers import ROOT, module_of

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=str(unavailable()))

RUN = ROOT / "benchmarks" / "results" / "h200-2026-11-21.json"
OPS = ("mx_quantize", "fp8_quantize_1x128", "mx_quantize_rowcol")


@pytest.mark.turns(6)
@pytest.mark.parametrize("op", OPS)
def test_an_h200_is_never_faster_than_the_bound(op):
    measured = {
        (race["op"], race["case"], entry["name"]): entry["us"]
        for race in json.loads(RUN.read_text())["races"]
        for entry in race["entries"]
    }
    compared = 0
    for found in bound.bounds(op, "triton", "sm90"):
        if us := measured.get((op, found.case, "triton")):
            compared += 1
            share = found.us / us
            # Each of these kernels moves its bytes at 0.69 to 0.9 of the data sheet's rate.
            assert found.binds == "memory"
            assert 0.65 < share < 1, found.case
            assert found.issue_us < us, found.case
    assert compared >= 3


@pytest.mark.turns(6)
@pytest.mark.parametrize("op", ["mx_quantize", "fp8_quantize_1x128"])
def test_the_memory_of_a_b200_bounds_the_quantizers(op):
    found = list(bound.bounds(op, "triton", "sm100"))
    assert found
    for each in found:
        assert not each.loops
        assert each.binds == "memory", each
        assert each.an_element < 13.5, each


PAGE = (ROOT / "benchmarks" / "results" / "bounds.md").read_text()
ROWS = [line for line in PAGE.splitlines() if re.match(r"\| \w+, \d", line)]
VERSION = re.search(r"under Triton (\S+)\. It", PAGE)[1]
bounds_page = module_of(ROOT / "benchmarks" / "bounds.py")


def test_the_page_is_of_the_pinned_triton_and_of_ops_and_times_of_today():
    assert f"triton=={VERSION}\n" in (ROOT / "constraints.txt").read_text(), "run `python benchmarks/bounds.py`"
    assert PAGE.startswith(bounds_page.head(VERSION)), "run `python benchmarks/bounds.py`"
    assert PAGE.removeprefix(bounds_page.head(VERSION)).splitlines() == ROWS
    assert len({row.split(",")[0] for row in ROWS}) > 20
    for row in ROWS:
        name, _, _, us, *_ = (cell.strip() for cell in row.strip("|").split("|"))
        op, _, case = name.partition(", ")
        assert op in dispatch.ops()
        time, _ = bounds_page.measured().get((op, case), (None, ""))
        assert us == (f"{time:.0f}" if time else ""), "run `python benchmarks/bounds.py`"


@pytest.mark.turns(24)
@pytest.mark.parametrize("op", dispatch.ops())
def test_the_page_has_todays_bounds(op):
    if triton.__version__ != VERSION:
        pytest.skip(f"the page is of Triton {VERSION}")
    stored = [row for row in ROWS if row.startswith(f"| {op}, ")]
    assert bounds_page.rows(op) == stored, "run `python benchmarks/bounds.py`"


def test_instructions_bind_the_plain_tiles_of_a_gradient():
    """With 3 bytes read and 2 written for an element, a B200 has time for about 22 instructions."""
    (found,) = bound.bounds("swiglu_backward_mx_quantize_rowcol_groups", "triton", "sm100")
    assert found.binds == "instructions"
    assert found.an_element > 30


def test_a_loop_is_found_if_it_writes_memory():
    loop = [(0, "S2R R0, SR_TID.X"), (16, "STG.E [R2], R0"), (32, "@P0 BRA 0x10"), (48, "EXIT"), (64, "BRA 0x40")]
    assert bound.has_loop(loop)
    assert not bound.has_loop([loop[0], (16, "IADD3 R0, R0, 1, RZ"), *loop[2:]])
    assert not bound.has_loop([*loop[:2], (32, "@P0 BRA 0x30"), *loop[3:]])
    assert bound.has_loop([*loop[:2], (32, "BRA.U !UP0, 0x10"), *loop[3:]])


def test_the_small_kernel_of_a_table_does_not_hide_the_bound():
    (found,) = bound.bounds("swiglu_backward_mx_quantize_rowcol_groups", "triton", "sm90")
    assert found.binds == "memory"
    assert not found.loops


def test_padding_and_the_last_branch_are_no_instructions(monkeypatch):
    text = "\n".join(
        f"        /*{at:04x}*/    {code} ;" for at, code in enumerate(["LDC R1, c[0x0][0x28]", "BRA 0x1", "NOP"])
    )
    monkeypatch.setattr(bound, "dumped", lambda cubin, option: text)
    assert bound.sass_of(b"") == [(0, "LDC R1, c[0x0][0x28]")]


def test_the_rate_of_instructions_follows_from_the_data_sheet():
    h200 = devices.DEVICES["NVIDIA H200"]
    clock = h200.bf16_tflops * 1e12 / (h200.bf16_flops_a_cycle * h200.processors)
    assert 1.7e9 < clock < 2.0e9
    assert h200.issue_gips * 1e9 == pytest.approx(128 * h200.processors * clock)


def test_matmuls_have_no_such_bound():
    assert not list(bound.bounds("mx_gemm", "triton", "sm90"))


def test_the_command_line(capsys):
    command = ["compile", "--bound", "--op", "to_blocked", "--backend", "triton"]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "Compiled, not run." in text
    assert "B200" in text
    assert "H200" in text
    assert main([*command, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["target"] for row in rows} == {"sm90", "sm100"}
    assert main(["compile", "--bound", "--op", "mx_gemm"]) == 1
    assert "no quantizer" in capsys.readouterr().err
