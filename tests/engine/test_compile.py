"""Every kernel file compiles to correct machine code for Hopper and Blackwell. Nothing here names an op."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mxspec import dispatch
from mxspec.dispatch import kernel_module
from mxspec.machine_code import cli, measure
from mxspec.machine_code import compile as mx_compile
from mxspec.machine_code.compile import Result, compile_call, compile_op, kernels, problems
from mxspec.machine_code.fake_gpu import TARGETS, fake_gpu, unavailable
from mxspec.machine_code.planner import plan
from mxspec.spec import meta
from tests.helpers import COMPLETE

if reason := unavailable():
    pytest.skip(reason, allow_module_level=True)

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

each_target = pytest.mark.parametrize("target", TARGETS)


def together(backend: str, target: str, module: Any) -> int:
    """How many options of a kernel are combined in the compiled cases. `python -m mxspec compile` compiles all cases.

    As a rule, two options that break a Triton kernel break it on both targets and under every release of Triton. So
    `make complete` compiles pairs of options for sm_90, and each option for sm_100. `make test` compiles each option
    for sm_90, and each kernel once for sm_100. A case costs Helion seconds. Helion generates the same code for sm_100
    as for sm_90, except for the matmuls: their PTX names other instructions for each target. `make test` compiles each
    kernel of Helion once for each target, and the interpreter runs the code that Helion generates for each option.
    """
    if not COMPLETE:
        return 1 if (backend, target) == ("triton", "sm90") else 0
    if backend == "helion" and target == "sm100":
        return 1 if isinstance(getattr(module, "PTX", None), dict) else 0
    return 2 if (backend, target) == ("triton", "sm90") else 1


@functools.cache
def planned(backend: str, target: str) -> dict[str, Collection[str]]:
    """The names of the cases of each op that are compiled."""
    every: dict[int, list[str]] = {}
    for op, having in kernels():
        if having == backend:
            every.setdefault(together(backend, target, kernel_module(op, backend)), []).append(op)
    return {op: names for some, ops in every.items() for op, names in plan(tuple(ops), backend, target, some).items()}


# Bytes of registers that only one release of Triton keeps in local memory. Under the other releases there are none.
KEPT = {
    ("3.6", "fp8_grouped_gemm_wgrad", "triton", "sm100"): "_tiles keeps 8",
    ("3.6", "fp8_grouped_gemm_wgrad_", "helion", "sm90"): "_helion__wgrad keeps 48",
    ("3.6", "mx_quantize", "triton", "sm100"): "_mx_tile keeps 16",
    ("3.6", "nvfp4_grouped_gemm", "triton", "sm100"): "_tiles keeps 16",
    ("3.6", "swiglu_fp8_quantize_rowcol_groups", "helion", "sm100"): "_helion__rowcol keeps 8",
    ("3.9", "nvfp4_quantize_groups", "triton", "sm100"): "_nvfp4_quantize_groups keeps 8",
}

# --- the kernels of the package -----------------------------------------------------------------------------------


@pytest.mark.turns(32)
@each_target
@pytest.mark.parametrize(("op", "backend"), kernels())
def test_machine_code(op: str, backend: str, target: str, monkeypatch) -> None:
    monkeypatch.setattr("builtins._", None, raising=False)  # a prompt or a doctest sets it, and then Helion finds it
    results = compile_op(op, backend, target, planned(backend, target)[op])
    kept = KEPT.get((triton.__version__.rpartition(".")[0], op, backend, target))
    wrong = [f"{r.case}: {p}" for r in results for p in r.problems if p != f"{kept} bytes a thread in local memory"]
    assert not wrong, "\n".join(wrong)
    if all(r.skipped for r in results):
        pytest.skip("; ".join(sorted({r.skipped for r in results})))


# --- the checks themselves ----------------------------------------------------------------------------------------


@triton.jit
def _copy(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i))


@triton.jit
def _sort(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.sort(tl.load(x + i)))


@triton.jit
def _shift(x, out, N: tl.constexpr, SUM: tl.constexpr):
    i = tl.arange(0, N)
    value = -tl.load(x + i) * 3
    tl.store(out + i, value + 1 if SUM else value)


@triton.jit
def _convert(x, out, FIRST: tl.constexpr):
    i = tl.arange(0, 1024)
    tl.store(out + i, tl.load(x + i).to(FIRST).to(tl.bfloat16))


@triton.jit
def _matmul(x, out, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)
    tile = tl.load(x + at)
    tl.store(out + at, tl.dot(tile, tl.trans(tile)))


@gluon.jit
def _gluon_copy(x, out):
    i = gl.arange(0, 1024, gl.BlockedLayout([8], [32], [4], [0]))
    gl.store(out + i, gl.load(x + i))


def copy(x: torch.Tensor) -> None:
    _copy[(1,)](x, torch.empty_like(x), N=1024)


def spill(x: torch.Tensor) -> None:
    _sort[(1,)](x, torch.empty_like(x), N=x.numel(), num_warps=1, maxnreg=24)


def shift(x: torch.Tensor) -> None:
    _shift[(1,)](x, torch.empty_like(x), N=1024, SUM=True)


def scale(x: torch.Tensor) -> None:
    _shift[(1,)](x, torch.empty_like(x), N=1024, SUM=False)


def gluon_copy(x: torch.Tensor) -> None:
    _gluon_copy[(1,)](x, torch.empty_like(x))


@each_target
@pytest.mark.parametrize("fn", [copy, gluon_copy])
def test_reads_widths_off_the_machine_code(fn, target: str) -> None:
    (code,) = compile_call(fn, torch.zeros(1024, dtype=torch.bfloat16), target=target)
    assert f".target sm_{TARGETS[target]}a" in code.ptx
    assert (code.load_bytes, code.store_bytes, code.local_bytes) == (16, 16, 0)
    assert not problems([code], (r"ld\.global\.v4\.b32",), (), edge=False)


@each_target
def test_a_misaligned_tensor_is_compiled_as_such(target: str) -> None:
    x = torch.zeros(1025, dtype=torch.bfloat16)[1:]
    (code,) = compile_call(copy, x, target=target)
    assert (code.load_bytes, code.store_bytes) == (2, 16)
    assert not problems([code], (r"ld\.global\.v4\.b32",), (x,), edge=False)


@each_target
def test_spilled_registers_are_a_problem(target: str) -> None:
    code = compile_call(spill, torch.zeros(512), target=target)
    assert "local memory" in problems(code, (), (), edge=False)[0]
    assert problems(code, (), (), edge=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_matmuls_that_the_assembler_left_out_are_a_problem(dtype: torch.dtype) -> None:
    """ptxas writes a matmul without operands in place of those that it leaves out."""
    x = meta(torch.zeros(64, 64, dtype=dtype))
    with fake_gpu("sm90") as compiled:
        _matmul[(1,)](x, x.new_empty(64, 64, dtype=torch.float32), N=64)
        (kernel,) = compiled
        cubin, ptx = kernel.asm["cubin"], kernel.asm["ptx"]
    there = re.findall(r".*GMMA\.64x64.*", measure.dumped(cubin, "--dump-sass"))
    asked = len(re.findall("wgmma.mma_async", ptx))
    assert measure.matmuls(cubin) == len(there) == asked > 1
    assert measure._dropped_matmuls(ptx, cubin) == 0
    assert measure._dropped_matmuls(ptx + "wgmma.mma_async", cubin) == 1
    assert measure._dropped_matmuls(ptx.replace("wgmma.mma_async", "", 1), cubin) == 0
    encoded = int(re.findall(r"/\* 0x(\w+) \*/", there[0])[0], 16)  # now the first one writes RZ, the register 255
    without = cubin.replace(encoded.to_bytes(8, "little"), (encoded | 0xFF << 16).to_bytes(8, "little"), 1)
    assert re.findall(r"GMMA\.64x64\S+ (RZ),", measure.dumped(without, "--dump-sass")) == ["RZ"]
    assert measure._dropped_matmuls(ptx, without) == 1
    assert measure._dropped_matmuls("", without) == 0
    code = compile_call(copy, torch.zeros(1024, dtype=torch.bfloat16), target="sm90")[0]
    assert problems([code], (), (), edge=True) == []
    assert problems([replace(code, dropped_matmuls=2)], (), (), edge=True) == ["_copy lacks 2 matmuls of its PTX"]


ARITHMETIC = {"VIMNMX": 0x248, "VIMNMX3": 0x20F, "FMNMX": 0x209, "FMUL": 0x220, "FADD": 0x221, "FFMA": 0x223}


@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic_on_zeros_in_place_of_the_sums_of_matmuls_is_a_problem(name: str) -> None:
    """ptxas has taken sums that begin with 0 for 0, also after the matmuls. RZ is the register 255."""
    x = meta(torch.zeros(64, 64, dtype=torch.bfloat16))
    with fake_gpu("sm90") as compiled:
        _matmul[(1,)](x, x.new_empty(64, 64, dtype=torch.float32), N=64)
        cubin, ptx = compiled[0].asm["cubin"], compiled[0].asm["ptx"]
    assert measure._lost_sums(ptx, cubin) == 0
    encoded = re.findall(r"GMMA\.64x64.*/\* 0x(\w+) \*/", measure.dumped(cubin, "--dump-sass"))[0]
    place = cubin.index(int(encoded, 16).to_bytes(8, "little"))
    for first, second in ((0xFF, 0xFF), (0xFF, 3), (3, 0xFF)):
        word = ARITHMETIC[name] | 7 << 12 | 15 << 16 | first << 24 | second << 32 | 0x000FE20003800000 << 64
        other = cubin[:place] + word.to_bytes(16, "little") + cubin[place + 16 :]
        assert measure._lost_sums(ptx, other) == (first == second)
        assert measure._lost_sums("", other) == 0
    shown = re.findall(rf"{name}\S* R15,.*?\b(R[Z\d]+), (R[Z\d]+)", measure.dumped(other, "--dump-sass"))
    assert ("R3", "RZ") in shown
    (code,) = compile_call(copy, torch.zeros(1024, dtype=torch.bfloat16), target="sm90")
    assert problems([replace(code, lost_sums=1)], (), (), edge=True) == [
        "_copy computes with 0 in place of the sums of matmuls"
    ]


@each_target
def test_a_conversion_that_makes_inf_finite_is_a_problem(target: str) -> None:
    def convert(x: torch.Tensor, first: tl.dtype) -> None:
        _convert[(1,)](x, x.new_empty(1024, dtype=torch.bfloat16), FIRST=first)

    e5m2, e4m3 = (torch.zeros(1024).to(dtype) for dtype in (torch.float8_e5m2, torch.float8_e4m3fn))
    code = compile_call(convert, e5m2, tl.bfloat16, target=target)
    assert problems(code, (), (), edge=True) == ["_convert makes Inf and NaN of e5m2 finite: convert to fp32 first"]
    for x, first in ((e5m2, tl.float32), (e5m2, tl.float16), (e4m3, tl.bfloat16)):
        assert problems(compile_call(convert, x, first, target=target), (), (), edge=True) == []


@each_target
def test_a_sum_of_floats_is_a_problem_where_bytes_are_promised(target: str, monkeypatch) -> None:
    assert not compile_call(scale, torch.zeros(1024), target=target)[0].has_sum_of_product
    assert compile_call(shift, torch.zeros(1024), target=target)[0].has_sum_of_product
    monkeypatch.setattr(mx_compile, "kernel_module", lambda op, backend: SimpleNamespace(**{op: shift_any}))

    def shift_any(x: torch.Tensor, *_: object, **__: object) -> None:
        shift(x.new_empty(1024, dtype=torch.float32))

    for op, promises_bytes in (("mx_quantize", True), ("mx_gemm", False)):
        results = compile_op(op, "triton", target, names=[next(iter(dispatch.reference(op).spec.cases())).name])
        said = {problem for r in results for problem in r.problems if not r.skipped}
        assert ("_shift adds a product of floats, and promises bytes" in said) == promises_bytes, said


def test_missing_instruction_is_a_problem() -> None:
    code = compile_call(copy, torch.zeros(1024), target="sm90")
    assert problems(code, (r"ld\.global", r"wgmma"), (), edge=False) == ["no 'wgmma' in the PTX of _copy"]


def test_no_launch_is_a_problem_where_the_case_is_no_edge() -> None:
    assert compile_call(torch.neg, torch.zeros(4), target="sm90") == []
    assert problems([], (), (), edge=False) == ["launches nothing"]
    assert not problems([], (), (), edge=True)


def test_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    results = [Result("op", "backend", "good", "sm90"), Result("op", "backend", "bad", "sm90", problems=("spills",))]
    monkeypatch.setattr(cli, "compile_all", lambda jobs: results)
    assert cli.main([]) == 1
    assert "spills\n  in: bad" in capsys.readouterr().out
    del results[1]
    assert cli.main([]) == 0


# --- nothing of the fake GPU stays --------------------------------------------------------------------------------


def test_nothing_of_the_fake_gpu_stays() -> None:
    from triton.runtime.driver import driver

    def state():
        return {**vars(torch.cuda), **os.environ}, driver._active, triton.JITFunction.run

    _copy.device_caches.clear()
    before = state()
    assert compile_call(copy, torch.zeros(1024), target="sm90")
    assert state() == before
    assert set(_copy.device_caches) == {"sm90"}, "a real device is a number, which finds no kernel under this name"


@pytest.mark.skipif(not importlib.util.find_spec("helion"), reason="helion is not installed")
def test_nothing_of_the_fake_gpu_stays_in_a_helion_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mxspec_test_helion.py").write_text(HELION)
    monkeypatch.syspath_prepend(tmp_path)
    import mxspec_test_helion
    from helion import _compat

    for target in TARGETS:
        (code,) = compile_call(mxspec_test_helion.double, torch.zeros(64, 64), target=target)
        assert f".target sm_{TARGETS[target]}a" in code.ptx
    assert not mxspec_test_helion.double._bound_kernels
    assert not mxspec_test_helion.double._dispatch_cache
    assert not any(f.cache_info().currsize for f in vars(_compat).values() if hasattr(f, "cache_info"))


HELION = """
import helion, helion.language as hl, torch

@helion.kernel(config=helion.Config(block_sizes=[1, 64]), static_shapes=False)
def double(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    for i in hl.tile(x.size()):
        out[i] = x[i] * 2
    return out
"""
