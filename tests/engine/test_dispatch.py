"""The switch: which choice comes first, its errors and explanations, and that torch sees an ordinary operator."""

import dataclasses
import functools
import inspect
import pickle
import re
import subprocess
import sys
import threading
import warnings

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import mxspec
from mxspec import dispatch
from mxspec.formats import may_be_nan, same_bits
from tests.helpers import COMPLETE, plain_environment

X = torch.linspace(-3, 3, 64 * 64).reshape(64, 64)
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
interpreted = bool(dispatch.interpreters())


@pytest.fixture(autouse=True)
def _leave_the_switch_as_it_was():
    yield
    mxspec.set_backend(None)


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=plain_environment(**environment), capture_output=True, text=True, check=False)


# --- calls that every op refuses --------------------------------------------------------------------------------

FLAGS = [
    pytest.param(op, p.name, id=f"{op}-{p.name}")
    for op in dispatch.ops()
    for p in inspect.signature(dispatch.reference(op)).parameters.values()
    if isinstance(p.default, bool)
]


@pytest.mark.parametrize(("op", "flag"), FLAGS)
def test_a_flag_that_is_no_bool_is_refused(op, flag):
    assert {p.values[1] for p in FLAGS} == {"check_offs", "with_transpose"}
    case = next(c for c in dispatch.reference(op).spec.cases() if not c.raises)
    for call in (getattr(mxspec, op), functools.partial(mxspec.explain, op)):
        for value in ("no", 0, 1, None, torch.tensor(True)):
            with pytest.raises(TypeError) as raised:
                call(*case.args(), **{**case.kwargs, flag: value})
            assert str(raised.value) == f"{op}: {flag} = {value!r}; needs True or False"
    meta = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in case.args()]  # these go through the operator
    with pytest.raises(TypeError, match=f"^{op}: {flag} = 'no'; needs True or False"):
        getattr(mxspec, op)(*meta, **{**case.kwargs, flag: "no"})


def _smallest_case(op):
    cases = [case for case in dispatch.reference(op).spec.cases() if not case.raises and not case.flags]
    return min(cases, key=lambda case: sum(a.numel() for a in case.args() if isinstance(a, torch.Tensor)))


def _raised(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except Exception as error:
        return type(error), str(error)
    return None, "nothing"


NO_TENSOR = [None, [1.0], np.zeros((2, 2)), 3.0, torch._nested_tensor_from_tensor_list([X[:2], X[:3]])]
NO_OPTION = [None, "x", 1.5, True, [1], float("nan"), torch.float64, -7, torch.tensor(1)]
TYPED = [
    pytest.param(op, p.name, id=f"{op}-{p.name}")
    for op in dispatch.ops()
    for p in inspect.signature(dispatch.reference(op)).parameters.values()
    if p.annotation != "bool"
]


@pytest.mark.parametrize(("op", "name"), TYPED)
def test_a_wrong_argument_is_refused_in_the_same_words_in_every_mode(op, name):
    reference, public, case = dispatch.reference(op), getattr(mxspec, op), _smallest_case(op)
    parameter = inspect.signature(reference).parameters[name]
    for value in NO_TENSOR if parameter.annotation == "Tensor" else NO_OPTION:
        if parameter.annotation == "float" and value == 1.5:
            continue  # 1.5 is a valid float
        if value is None and parameter.default is None:
            continue
        args, kwargs = list(case.args()), dict(case.kwargs)
        if parameter.kind is parameter.KEYWORD_ONLY:
            kwargs[name] = value
        else:
            position = list(inspect.signature(reference).parameters).index(name)
            if position >= len(args):  # the case leaves the argument out
                kwargs[name] = value
            elif value is None and args[position] is None:
                continue  # a valid call: the operand holds values, which have no scale
            else:
                args[position] = value
        expected = _raised(reference.spec.check_args, *args, **kwargs)
        assert expected[0] in (TypeError, ValueError)
        assert expected[1].startswith(f"{op}: ")
        assert _raised(public, *args, **kwargs) == expected
        floats = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor) and a.is_floating_point()]
        for i in floats[:1]:
            args[i] = args[i].detach().requires_grad_()
            assert _raised(public, *args, **kwargs) == expected
            with torch.no_grad():
                assert _raised(public, *args, **kwargs) == expected


def test_a_wrong_argument_is_refused_while_a_graph_is_traced():
    offs = torch.tensor([3, 64], dtype=torch.int32)
    for wrong in (True, 32.0, None, "32"):
        torch._dynamo.reset()
        pad = torch.compile(lambda x, wrong=wrong: mxspec.pad_token_groups(x, offs, wrong)[0], backend="aot_eager")
        words = re.escape(f"pad_token_groups: alignment = {wrong!r}; needs an integer")
        with pytest.raises(TypeError, match=words):
            pad(X)
        with FakeTensorMode() as mode, pytest.raises(TypeError, match=words):
            mxspec.pad_token_groups(mode.from_tensor(X), mode.from_tensor(offs), wrong)


# --- which choice comes first -----------------------------------------------------------------------------------


def test_the_innermost_choice_wins():
    assert mxspec.current_backend() == "auto"
    mxspec.set_backend("helion")
    assert mxspec.current_backend() == "helion"
    with mxspec.use_backend("triton"):
        assert mxspec.current_backend() == "triton"
        with mxspec.use_backend("reference"):
            assert mxspec.current_backend() == "reference"
        assert mxspec.current_backend() == "triton"
        assert mxspec.explain("mx_quantize", X, backend="reference").asked == "reference"
    assert mxspec.current_backend() == "helion"


def test_a_block_ends_with_an_exception_too():
    with pytest.raises(KeyError), mxspec.use_backend("reference"):
        raise KeyError
    assert mxspec.current_backend() == "auto"


def seen_by_another_thread() -> str:
    seen = []
    thread = threading.Thread(target=lambda: seen.append(mxspec.current_backend()))
    thread.start()
    thread.join()
    return seen[0]


def test_set_backend_reaches_other_threads_and_a_block_does_not():
    with mxspec.use_backend("triton"):
        assert seen_by_another_thread() == "auto"
    mxspec.set_backend("reference")
    assert seen_by_another_thread() == "reference"
    assert mxspec.explain("mx_quantize", X).asked == "reference"


def test_a_block_is_not_seen_by_other_threads_before_it_is_entered():
    block = mxspec.use_backend("triton")
    assert seen_by_another_thread() == "auto"
    with block:
        assert mxspec.current_backend() == "triton"
    assert mxspec.current_backend() == "auto"


def test_blocks_of_one_thread_never_reach_another():
    entered, done = threading.Event(), threading.Event()

    def enter_again_and_again():
        while not done.is_set():
            with mxspec.use_backend("triton"):
                entered.set()

    thread, interval = threading.Thread(target=enter_again_and_again), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        assert entered.wait(60)
        seen = {mxspec.current_backend() for _ in range(500_000)}
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert seen == {"auto"}


def test_none_gives_the_choice_back_to_the_environment():
    code = "import mxspec as m; m.set_backend('auto'); print(m.current_backend()); "
    code += "m.set_backend(None); print(m.current_backend())"
    assert run_python(code, MXSPEC_BACKEND="reference").stdout == "auto\nreference\n"


def test_use_backend_without_with_is_deprecated():
    with pytest.warns(DeprecationWarning, match=r"0\.3\. Call mxspec\.set_backend\('helion'\)") as warned:
        mxspec.use_backend("helion")
    assert [w.filename for w in warned] == [__file__]
    assert (mxspec.current_backend(), seen_by_another_thread()) == ("helion", "helion")
    held = mxspec.use_backend("triton")  # a notebook's `Out` holds an object like this
    with pytest.warns(DeprecationWarning, match="set_backend") as warned:
        assert mxspec.current_backend() == "triton"
    assert [w.filename for w in warned] == [__file__]
    mxspec.set_backend("reference")
    del held
    assert (mxspec.current_backend(), seen_by_another_thread()) == ("reference", "reference")


def test_a_later_choice_outdoes_one_without_with():
    held = mxspec.use_backend("helion")
    mxspec.set_backend("reference")
    assert mxspec.current_backend() == "reference"
    del held
    assert mxspec.current_backend() == "reference"


def test_a_block_raises_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with mxspec.use_backend("helion"), mxspec.use_backend("reference"):
            mxspec.mx_quantize(X)
        block = mxspec.use_backend("reference")
        with block, block:
            mxspec.mx_quantize(X)
        del block
    assert mxspec.current_backend() == "auto"


def test_use_backend_as_a_decorator():
    with warnings.catch_warnings():
        warnings.simplefilter("error")

        @mxspec.use_backend("reference")
        def choices(x: int, *, more: int) -> list[object]:
            """Its text."""
            return [x, more, mxspec.current_backend(), seen_by_another_thread()]

        assert mxspec.current_backend() == "auto"
        assert choices(1, more=2) == [1, 2, "reference", "auto"]
        assert (choices.__name__, choices.__doc__) == ("choices", "Its text.")
        with mxspec.use_backend("triton"):
            assert choices(1, more=2)[2] == "reference"
            assert mxspec.current_backend() == "triton"

        def generator():
            yield 1

        async def coroutine():
            return 1

        for wrong in (generator, coroutine, 1):
            with pytest.raises(TypeError, match=r"use_backend: decorates .*; needs a function that is no gen"):
                mxspec.use_backend("helion")(wrong)
    assert (mxspec.current_backend(), seen_by_another_thread()) == ("auto", "auto")


def test_a_block_inside_a_compiled_function_is_refused_and_around_it_holds():
    def in_block(x):
        with mxspec.use_backend("reference"):
            return mxspec.mx_quantize(x)[0]

    with pytest.raises(RuntimeError, match="put the block around the call of the compiled function, or pass backend="):
        torch.compile(in_block, fullgraph=True, backend="aot_eager")(X)
    assert torch.compile(in_block, backend="aot_eager")(X).dtype == torch.float8_e4m3fn  # the block breaks the graph
    around = torch.compile(lambda x: mxspec.mx_quantize(x)[0], fullgraph=True, backend="aot_eager")
    with mxspec.use_backend("reference"):
        assert around(X).dtype == torch.float8_e4m3fn
    with mxspec.use_backend("cublas"), pytest.raises(ValueError, match="backend 'cublas' has no kernel"):
        around(X)


def test_blocks_that_overlap_in_threads_leave_nothing_behind():
    first, second = mxspec.use_backend("triton"), mxspec.use_backend("reference")
    first.__enter__()
    second.__enter__()
    second.__exit__()
    first.__exit__()
    assert mxspec.current_backend() == "auto"

    def loop():
        for _ in range(200):
            with mxspec.use_backend("triton"):
                pass

    threads = [threading.Thread(target=loop) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert mxspec.current_backend() == "auto"


def test_the_environment_variable():
    code = "import mxspec; print(mxspec.current_backend())"
    assert run_python(code, MXSPEC_BACKEND="reference").stdout == "reference\n"
    refused = run_python(code, MXSPEC_BACKEND="tritn")
    assert refused.returncode == 1
    assert "MXSPEC_BACKEND: unknown backend 'tritn'; needs one of auto, reference" in refused.stderr


@pytest.mark.parametrize(
    "choose",
    [
        lambda: mxspec.use_backend("cuda"),
        lambda: mxspec.set_backend("cuda"),
        lambda: mxspec.mx_quantize(X, backend="cuda"),
        lambda: mxspec.mx_quantize(X.clone().requires_grad_(), backend="cuda"),
    ],
)
def test_an_unknown_backend_is_refused(choose):
    with pytest.raises(
        ValueError, match="unknown backend 'cuda'; needs one of auto, reference, cublas, deepgemm, helion, triton"
    ):
        choose()
    assert mxspec.current_backend() == "auto"


# --- a backend chosen by name runs or raises; auto warns if no kernel supports a call ----------------------------


@pytest.mark.skipif(interpreted, reason="the kernels run on the CPU in this process")
def test_a_backend_asked_for_by_name_never_falls_back():
    with pytest.raises(
        ValueError, match=r"mx_quantize: backend 'triton' runs on CUDA tensors; to run it on CPU tensors, set TRITON"
    ):
        mxspec.mx_quantize(X, backend="triton")
    with mxspec.use_backend("helion"), pytest.raises(ValueError, match="from_blocked: backend 'helion' has no kernel"):
        mxspec.from_blocked(torch.zeros(512, dtype=torch.uint8), 1, 1)


def test_explain_passes_on_what_a_kernel_notes_of_a_call(monkeypatch):
    noted = []

    def note(*args, **kwargs):
        noted.append((args, kwargs))
        return "by plain tiles"

    monkeypatch.setattr(dispatch.kernel_module("mx_quantize", "triton"), "note", note, raising=False)
    monkeypatch.setattr("mxspec.dispatch.explanation.refusal", lambda name, backend, args, kwargs: None)
    said = mxspec.explain("mx_quantize", X, backend="triton", axis=-2)
    assert noted == [((X,), {"axis": -2})]
    assert said.note == "by plain tiles"
    assert str(said).startswith("mx_quantize: 'triton' runs 'triton', by plain tiles\n")
    for backend in ("helion", "reference"):
        assert mxspec.explain("mx_quantize", X, backend=backend).note is None


def test_explain_says_what_was_measured_for_a_call_of_this_size(monkeypatch):
    """On tensors without data, with a GPU that is said to be a Hopper."""
    from mxspec.triton_kernels.hopper import releases
    from mxspec.triton_kernels.hopper.fp8 import launch

    for module in (releases, launch):
        monkeypatch.setattr(module, "capability", lambda device: (9, 0))
    monkeypatch.setattr("mxspec.dispatch.explanation.refusal", lambda name, backend, args, kwargs: None)
    codes = functools.partial(torch.empty, dtype=torch.float8_e4m3fn, device="meta")

    def said(M, rows=128, experts=0, stride=512):
        lead = (experts,) if experts else ()
        scales = torch.empty(M, 4, device="meta"), torch.empty(*lead, -(-640 // rows), 4, device="meta")
        offs = (torch.empty(experts, dtype=torch.int32, device="meta"),) if experts else ()
        args = codes(M, stride)[:, :512], scales[0], codes(*lead, 640, 512), scales[1], *offs
        return mxspec.explain("fp8_grouped_gemm" if experts else "fp8_gemm", *args, backend="triton")

    for M, words in (
        (16, "on an H100, 2 to 128 rows"),
        (256, "on an H100, 256 to 1024 rows"),
        (4096, "on an H100, more than 1024 rows"),
    ):
        assert said(M).measured.startswith(f"{words}: ")
        assert f", measured {words}: " in str(said(M)).splitlines()[0]
    assert said(64, experts=32).measured.startswith("on an H200, 8 to 32 experts: ")
    assert said(64, experts=128).measured.startswith("on an H200, 64 to 128 experts: ")
    assert said(1).measured is said(129).measured is said(64, experts=48).measured is None, "not measured"
    assert said(4096, rows=1).measured is None, "a scale for each column runs other tiles"
    assert said(4096, stride=520).measured is None, "TMA does not read such rows: plain tiles run"
    monkeypatch.setattr(launch, "capability", lambda device: (10, 0))
    assert said(4096).measured is None


def test_explain_says_what_was_measured_for_the_other_matmuls(monkeypatch):
    from mxspec.triton_kernels.hopper import releases
    from mxspec.triton_kernels.hopper.fp8 import launch as fp8
    from mxspec.triton_kernels.hopper.mx import by_memory
    from mxspec.triton_kernels.hopper.mx import launch as mx
    from mxspec.triton_kernels.hopper.nvfp4 import launch as nvfp4
    from mxspec.triton_kernels.hopper.weights import launch as weights

    for module in (releases, fp8, by_memory, weights, mx, nvfp4):
        monkeypatch.setattr(module, "capability", lambda device: (9, 0))
    for module in (by_memory, weights):
        monkeypatch.setattr(module, "processors", lambda device: 132)
    monkeypatch.setattr("mxspec.dispatch.explanation.refusal", lambda name, backend, args, kwargs: None)

    def of(*sizes, dtype=torch.float8_e4m3fn):
        return torch.empty(*sizes, dtype=dtype, device="meta")

    def said(op, *args, **options):
        return mxspec.explain(op, *args, backend="triton", **options).measured

    e8m0, bf16, fp4 = torch.float8_e8m0fnu, torch.bfloat16, torch.float4_e2m1fn_x2
    N, K = 2048, 1024

    def by_codes(M, *E):
        return of(M, K), of(M, K // 32, dtype=e8m0), of(*E, N, K), of(*E, N, K // 32, dtype=e8m0)

    def by_fp4(M, K=K, E=()):
        return of(M, K, dtype=bf16), None, of(*E, N, K // 2, dtype=fp4), of(*E, N, K // 32, dtype=e8m0)

    def offs(E):
        return of(E, dtype=torch.int32)

    def sums(E):
        tokens = of(N, 4096).mT, of(N, 128, dtype=e8m0), of(K, 4096).mT, of(K, 128, dtype=e8m0)
        return *tokens, offs(E)

    plain = {"scale_layout": "plain"}
    assert said("mx_gemm", *by_codes(8192)).startswith("on an H200, 4096 to 32768 rows: ")
    assert said("mx_gemm", *by_codes(64)).startswith("on an H200, 1 to 128 rows: ")
    assert said("mx_gemm", *by_codes(1024)) is None, "another kernel"
    assert said("mx_gemm", *by_fp4(64)).startswith("on an H200, 16 to 128 rows: ")
    assert said("mx_gemm", *by_fp4(64, 1056)) is None, "scales that are no words"
    odd = of(65, 1032, dtype=bf16)[:, :1028].as_strided((64, K), (1028, 1))
    assert said("mx_gemm", odd, *by_fp4(64)[1:]) is None, "plain tiles"
    for tokens, words in ((4, "up to 32"), (64, "64"), (128, "128")):
        of_experts = *by_fp4(32 * tokens, E=(32,)), offs(32)
        assert said("mx_grouped_gemm", *of_experts, **plain).startswith(f"on an H200, {words} tokens an expert: ")
    assert said("mx_grouped_gemm", *by_fp4(512 * 32, E=(32,)), offs(32), **plain) is None, "the values of the weights"
    sizes = (64, 256, "up to 32"), (32, 1, "up to 32"), (2048, 4, "128 to 1024"), (32768, 8, "4096 to 8192")
    for M, E, words in sizes:
        tokens = *by_codes(M, E), offs(E)
        assert said("mx_grouped_gemm", *tokens, **plain).startswith(f"on an H200, {words} tokens an expert: ")
        assert said("mx_grouped_gemm", *tokens, **plain, out_dtype=torch.float32) is None, "another kernel"
    assert said("mx_grouped_gemm", *by_codes(512, 4), offs(4), **plain).startswith("on an H200, 128 tokens an expert: ")
    assert "1.11 to 2.41" in said("mx_grouped_gemm", *by_codes(64, 256), offs(256), **plain)
    rows_apart = of(256 * N, K + 8)[:, :K].as_strided((256, N, K), (N * (K + 8), K + 8, 1))  # the weights are copied
    codes_apart = (*by_codes(64, 256)[:2], rows_apart, by_codes(64, 256)[3])
    assert said("mx_grouped_gemm", *codes_apart, offs(256), **plain) is None
    assert said("mx_grouped_gemm", *by_codes(64, 1), offs(1), **plain) is None, "not measured"
    far = of(8 * N + 1, K).as_strided((8, N, K), (N * K + 16, K, 1))
    strided = (*by_codes(64, 8)[:2], far, by_codes(64, 8)[3])
    assert said("mx_grouped_gemm", *strided, offs(8), **plain) is None, "the weights are copied first"
    assert said("mx_grouped_gemm", *by_codes(32768, 0), offs(0), **plain) is None, "nothing to multiply"
    assert said("mx_grouped_gemm_wgrad", *sums(8), **plain).startswith("on an H200, 8 to 64 experts: ")
    assert said("mx_grouped_gemm_wgrad", *sums(2), **plain) is None
    of_fp8 = of(N, 4096), of(N, 32, dtype=torch.float32), of(K, 4096), of(K, 32, dtype=torch.float32)
    assert said("fp8_grouped_gemm_wgrad", *of_fp8, offs(64)).startswith("on an H200, 8 to 64 experts: ")
    one = of((), dtype=torch.float32)
    fp8 = torch.float8_e4m3fn

    def nvfp4_codes(rows):
        return of(rows, K // 2, dtype=fp4), of(rows, K // 16, dtype=fp8), one

    dense = of(4096, K, dtype=bf16), None, one, of(N, K, dtype=bf16), None, one
    assert said("nvfp4_gemm", *dense).startswith("on an H100, 4096 to 8192 rows: 1.01")
    assert said("nvfp4_gemm", *nvfp4_codes(4096), *nvfp4_codes(N)).startswith("on an H100, 4096 to 8192 rows: 0.72")
    assert said("nvfp4_gemm", *nvfp4_codes(16), *nvfp4_codes(N)).startswith("on an H200, 1 to 128 rows: 0.41")
    K = 1040  # no whole number of scale words, so the values of the weights are written
    assert said("nvfp4_gemm", *nvfp4_codes(16), *nvfp4_codes(N)).startswith("on an H200, 1 to 128 rows: 0.35")
    K = 1024
    assert (
        said("nvfp4_gemm", *dense, out_dtype=torch.float32) is said("nvfp4_gemm", *dense[:3], *nvfp4_codes(N)) is None
    )
    one = of(16, dtype=torch.float32)
    values = of(4096, K, dtype=bf16), None, one, of(16, N, K, dtype=bf16), None, one, offs(16)
    assert said("nvfp4_grouped_gemm", *values).startswith("on an H100, 16 to 128 experts: ")
    assert said("nvfp4_grouped_gemm", *values, out_dtype=torch.float32) is None
    weights = of(16, N, K // 2, dtype=fp4), of(16, N, K // 16, dtype=fp8), one
    for M, words in ((32, "up to 32"), (2048, "128 to 256")):
        codes = *nvfp4_codes(M)[:2], one, *weights, offs(16)
        assert said("nvfp4_grouped_gemm", *codes, **plain).startswith(f"on an H200, {words} tokens an expert: ")
        assert said("nvfp4_grouped_gemm", *codes, **plain, out_dtype=torch.float32) is None
    of_values = of(32, K, dtype=bf16), None, one, *weights, offs(16)
    assert said("nvfp4_grouped_gemm", *of_values, **plain) is None, "values by codes were not measured"
    one = of(32, dtype=torch.float32)
    tokens = of(4096, N, dtype=bf16), None, one, of(4096, K, dtype=bf16), None, one, offs(32)
    assert "to bfloat16" in said("nvfp4_grouped_gemm_wgrad", *tokens)
    assert "in bfloat16" in said("nvfp4_grouped_gemm_wgrad", *tokens, out_dtype=bf16)


@pytest.mark.parametrize("backend", ["triton", "helion"])
def test_kernels_take_every_element(backend):
    checked = set()
    for op in ("mx_quantize", "mx_quantize_rowcol", "mx_dequantize"):
        supports = getattr(dispatch.kernel_module(op, backend), "supports", lambda *args, **kwargs: None)
        for case in dispatch.reference(op).spec.cases():
            if not case.raises and "large" not in case.flags:
                said = supports(*case.args(), **case.kwargs)
                assert said is None or "grid" in said, case.name
                checked.add((op, str(case.kwargs.get("elem_dtype"))))
    assert len(checked) > 18, "each op meets each of the six formats"


@gpu
def test_auto_takes_a_kernel_for_packed_elements():
    assert mxspec.explain("mx_quantize", X.cuda(), elem_dtype="e2m1").backend in ("triton", "helion")
    got = mxspec.mx_quantize(X.cuda(), elem_dtype="e2m1")
    for on_gpu, on_cpu in zip(got, mxspec.mx_quantize(X, elem_dtype="e2m1"), strict=True):
        assert torch.equal(on_gpu.view(torch.uint8).cpu(), on_cpu.view(torch.uint8))


@gpu
def test_auto_warns_once_when_a_gpu_tensor_meets_the_reference():
    dispatch.resolve._warn_of_reference.cache_clear()
    blocked = torch.zeros(512, dtype=torch.uint8, device="cuda")
    with pytest.warns(UserWarning, match="from_blocked: `auto` has no kernel for this call on the GPU"):
        mxspec.from_blocked(blocked, 1, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mxspec.from_blocked(blocked, 1, 1)


@gpu
def test_auto_takes_the_best_rank_on_a_gpu():
    explanation = mxspec.explain("mx_quantize", X.cuda())
    assert explanation.backend == "triton"
    assert explanation.reasons["helion"] == "ranks behind 'triton'"


def test_explain_says_that_a_kernel_is_batch_invariant(monkeypatch):
    monkeypatch.setattr("mxspec.dispatch.explanation.refusal", lambda name, backend, args, kwargs: None)
    said = mxspec.explain("mx_quantize", X, backend="triton")
    assert not said.batch_invariant
    assert "invariant" not in str(said)
    monkeypatch.setattr(dispatch.kernel_module("mx_quantize", "triton"), "BATCH_INVARIANT", True, raising=False)
    assert not mxspec.explain("mx_quantize", X, backend="triton").batch_invariant  # as an interpreter would run it
    if torch.cuda.is_available():
        assert mxspec.explain("mx_quantize", X.cuda(), backend="triton").batch_invariant
    said = dataclasses.replace(said, batch_invariant=True)
    assert str(said).startswith("mx_quantize: 'triton' runs 'triton', batch-invariant under the conditions")


def test_explain_needs_the_name_of_an_op():
    with pytest.raises(TypeError, match=r"explain: the op is <function mx_quantize .*; needs its name, such as"):
        mxspec.explain(mxspec.mx_quantize, X)


@pytest.mark.parametrize(
    ("op", "backend"),
    [(op, b) for op in dispatch.ops() for b in ("triton", "helion") if dispatch.has_kernel(op, b)],
)
def test_the_matmuls_along_rows_promise_batch_invariance(op, backend):
    of_rows = op in (
        "fp8_gemm", "fp8_gemm_", "fp8_grouped_gemm", "mx_gemm", "mx_grouped_gemm", "nvfp4_gemm", "nvfp4_grouped_gemm"
    )  # fmt: skip
    assert dispatch.is_batch_invariant(op, backend) == of_rows


def test_explain_names_every_other_backend():
    explanation = mxspec.explain("mx_quantize", X)
    assert explanation.backend == "reference"
    assert set(explanation.reasons) == set(dispatch.backends()) - {"reference"}
    raising = mxspec.explain("from_blocked", torch.zeros(512, dtype=torch.uint8), 1, 1, backend="triton")
    assert raising.backend is None
    assert raising.reasons["triton"] == "has no kernel for from_blocked"
    assert str(raising).startswith("from_blocked: 'triton' raises")
    with pytest.raises(TypeError, match="explain: mx_quantize: missing a required argument: 'x'; needs the arguments"):
        mxspec.explain("mx_quantize")


def test_a_misspelt_argument_names_the_op():
    with pytest.raises(TypeError, match=r"mx_quantize\(\) got an unexpected keyword argument 'scalling'"):
        mxspec.mx_quantize(X, scalling="floor")
    with pytest.raises(TypeError, match="mx_quantize: x is a list; needs a tensor"):
        mxspec.mx_quantize([1.0])


def test_a_name_and_a_dtype_mean_the_same():
    by_name = mxspec.mx_quantize(X, elem_dtype="e5m2")
    by_dtype = mxspec.mx_quantize(X, elem_dtype=torch.float8_e5m2)
    assert by_name[0].dtype == torch.float8_e5m2
    assert torch.equal(by_name[0].view(torch.uint8), by_dtype[0].view(torch.uint8))


# --- torch.library ----------------------------------------------------------------------------------------------


@functools.cache
def first_case(op):
    """The first case without NaN in its outputs. opcheck compares with assert_close, where NaN differs from NaN."""
    reference = dispatch.reference(op)
    for case in (case for case in reference.spec.cases() if not case.flags):
        args = case.args()
        outputs = reference.spec.outputs(args, reference(*args, **case.kwargs))
        if not any(may_be_nan(out.dtype) and out.float().isnan().any() for out in outputs):
            return case
    raise ValueError(f"{op} has no such case")


@pytest.mark.turns(8)
@pytest.mark.parametrize("op", dispatch.ops())
def test_opcheck(op):
    case = first_case(op)
    args, kwargs = case.args(), {k: str(v) if k == "elem_dtype" else v for k, v in case.kwargs.items()}
    utils = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if all(
        arg.dtype != torch.float8_e4m3fn for arg in args if isinstance(arg, torch.Tensor)
    ):  # test_schema compares inputs with allclose, which does not support float8
        utils.append("test_schema")
    torch.library.opcheck(getattr(torch.ops.mxspec, op).default, args, kwargs, test_utils=utils)


X4, S4 = mxspec.mx_quantize(X, elem_dtype="e2m1")


@pytest.mark.parametrize(
    ("op", "args", "kwargs"),
    [
        ("mx_quantize", (X,), {"elem_dtype": "e2m1"}),
        ("mx_quantize_rowcol", (X,), {"elem_dtype": "torch.float4_e2m1fn_x2"}),
        ("mx_dequantize", (X4, S4), {}),
    ],
)
def test_opcheck_of_packed_elements(op, args, kwargs):
    utils = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    torch.library.opcheck(getattr(torch.ops.mxspec, op).default, args, kwargs, test_utils=utils)


def test_packed_elements_inside_a_graph():
    def there_and_back(x):
        q, scale = mxspec.mx_quantize(2 * x, elem_dtype=torch.float4_e2m1fn_x2, axis=-2, scale_layout="blocked")
        return q, mxspec.mx_dequantize(q, scale, axis=-2, scale_layout="blocked") + 1

    torch._dynamo.reset()
    compiled = torch.compile(there_and_back, fullgraph=True, dynamic=True, backend="aot_eager")
    (q, out), (own_q, own) = compiled(X), there_and_back(X)
    assert (q.dtype, q.shape, q.stride()) == (own_q.dtype, own_q.shape, own_q.stride())
    assert torch.equal(q.view(torch.uint8), own_q.view(torch.uint8))
    assert torch.equal(out, own)


@pytest.mark.parametrize("op", dispatch.ops())
@pytest.mark.parametrize("dynamic", [False, True] if COMPLETE else [False])  # opcheck traces with dynamic shapes
def test_compile_fullgraph(op, dynamic):
    torch._dynamo.reset()
    public, case = getattr(mxspec, op), first_case(op)
    compiled = torch.compile(lambda *a: public(*a, **case.kwargs), fullgraph=True, dynamic=dynamic, backend="aot_eager")
    outputs, args, others = dispatch.reference(op).spec.outputs, case.args(), case.args()
    for got, expected in zip(
        outputs(args, compiled(*args)), outputs(others, public(*others, **case.kwargs)), strict=True
    ):
        assert (got.dtype, got.stride()) == (expected.dtype, expected.stride())
        assert same_bits(got, expected).all()


@pytest.mark.parametrize("flag", [lambda x: True, lambda x: False, lambda x: x.shape[0] > 4])
def test_a_flag_is_traced_whether_written_or_computed(flag):
    def pad(x):
        return mxspec.pad_token_groups(x, offs, 32, check_offs=flag(x))[0]

    torch._dynamo.reset()
    offs = torch.tensor([3, 64], dtype=torch.int32)
    compiled = torch.compile(pad, fullgraph=True, dynamic=True, backend="aot_eager")
    assert torch.equal(compiled(X), mxspec.pad_token_groups(X, offs, 32)[0])


def test_inductor_keeps_the_strides_that_a_kernel_was_promised():
    torch._dynamo.reset()
    fn = torch.compile(lambda x: mxspec.mx_dequantize(*mxspec.mx_quantize(x.mT + 1, axis=-2), axis=-2), fullgraph=True)
    expected = mxspec.mx_dequantize(*mxspec.mx_quantize(X.mT + 1, axis=-2), axis=-2)
    assert torch.equal(fn(X), expected)


def test_a_compiled_function_follows_the_switch_without_recompiling():
    torch._dynamo.reset()
    graphs = []

    def counting(graph, _):
        graphs.append(graph)
        return graph

    fn = torch.compile(lambda x: mxspec.to_blocked(x), fullgraph=True, backend=counting)
    scale = torch.zeros(4, 4, dtype=torch.uint8)
    fn(scale)
    with mxspec.use_backend("reference"):
        fn(scale)
    if not interpreted:
        with mxspec.use_backend("triton"), pytest.raises(ValueError, match="'triton' runs on CUDA tensors"):
            fn(scale)
    assert len(graphs) == 1


def test_meta_and_fake_tensors_have_the_real_shapes():
    real = mxspec.mx_quantize(X, axis=-2, scale_layout="blocked")
    meta = mxspec.mx_quantize(X.to("meta"), axis=-2, scale_layout="blocked")
    with FakeTensorMode() as mode:
        fake = mxspec.mx_quantize(mode.from_tensor(X), axis=-2, scale_layout="blocked")
    for r, m, f in zip(real, meta, fake, strict=True):
        assert (m.shape, m.stride(), m.dtype) == (r.shape, r.stride(), r.dtype)
        assert (f.shape, f.stride(), f.dtype) == (r.shape, r.stride(), r.dtype)


def test_more_than_2_to_the_31_elements_on_meta():
    qdata, scale = mxspec.mx_quantize(torch.empty(2**20, 8192, device="meta"), scale_layout="blocked")
    assert (qdata.numel(), scale.shape) == (2**33, (2**28,))


def _in_forward_mode(fn):
    with forward_ad.dual_level():
        return fn(forward_ad.make_dual(X, X))


def _loss(w):
    back = mxspec.mx_dequantize(*mxspec.mx_quantize(w), out_dtype=torch.float32)
    return (w * 3).sum() + back.sum()


@pytest.mark.parametrize(
    ("through", "words"),
    [
        ("eager", r"mx_\w*quantize has no gradient"),
        ("aot_eager", r"mx_\w*quantize has no gradient"),
        ("functorch", r"mx_\w*quantize has no gradient"),
        ("functorch, forward", r"mx_\w*quantize has no gradient"),
        ("dual tensors", r"mx_quantize has no gradient"),
    ],
)
def test_a_gradient_is_refused_and_never_lost(through, words):
    torch._dynamo.reset()
    w = X.clone().requires_grad_()
    compiled = torch.compile(_loss, backend="aot_eager", fullgraph=True)
    gradients = {
        "eager": lambda: _loss(w).backward(),
        "aot_eager": lambda: compiled(w).backward(),
        "functorch": lambda: torch.func.grad(_loss)(X),
        "functorch, forward": lambda: torch.func.jvp(_loss, (X,), (X,)),
        "dual tensors": lambda: _in_forward_mode(_loss),
    }
    with pytest.raises(RuntimeError, match=words):
        gradients[through]()


@pytest.mark.parametrize(
    "transform",
    [torch.func.grad, lambda fn: lambda x: torch.func.jvp(fn, (x,), (x,)), lambda fn: lambda _: _in_forward_mode(fn)],
)
def test_torch_func_is_told_that_it_has_no_gradient_of_an_op(transform):
    offs = torch.tensor([3, 64], dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"^pad_token_groups has a gradient for backward\(\) and torch\.autograd"):
        transform(lambda x: mxspec.pad_token_groups(x, offs, 32)[0].sum())(X)
    transform(lambda x: (x * mxspec.pad_token_groups(X, offs, 32)[0].sum()).sum())(X)  # nothing to differentiate


def test_a_parameter_is_quantized_like_its_values():
    w = torch.nn.Parameter(X.clone())
    with torch.no_grad():
        qdata, _ = mxspec.mx_quantize(w)
    assert not qdata.requires_grad
    assert torch.equal(qdata.view(torch.uint8), mxspec.mx_quantize(X)[0].view(torch.uint8))
    assert torch.equal(mxspec.mx_quantize(w)[0].detach().view(torch.uint8), qdata.view(torch.uint8))


def test_the_public_op_can_be_pickled():
    assert pickle.loads(pickle.dumps(mxspec.mx_quantize)) is mxspec.mx_quantize


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_goes_through_the_operator():
    scale = torch.arange(32, dtype=torch.uint8).reshape(2, 4, 4)
    assert torch.equal(torch.vmap(mxspec.to_blocked)(scale), mxspec.to_blocked(scale))


class _Quantize(torch.autograd.Function):
    """An autograd function that keeps one backend: it reads the backend in forward and passes it on in backward."""

    @staticmethod
    def forward(ctx, x, seen):
        ctx.backend, ctx.seen = mxspec.current_backend(), seen
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        ctx.seen.append((threading.get_ident(), mxspec.current_backend(), ctx.backend))
        mxspec.mx_quantize(grad.contiguous(), backend=ctx.backend)
        return grad, None


@gpu
def test_backward_on_cuda_runs_on_a_thread_that_sees_no_block():
    x, seen = X.cuda().requires_grad_(), []
    with mxspec.use_backend("triton"):
        _Quantize.apply(x, seen).sum().backward()
    [(thread, on_that_thread, passed_on)] = seen
    assert thread != threading.get_ident()
    assert (on_that_thread, passed_on) == ("auto", "triton")


@gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_tensor_on_another_gpu_than_the_current_one():
    qdata, _ = mxspec.mx_quantize(X.to("cuda:1"), backend="triton")
    assert torch.equal(qdata.cpu().view(torch.uint8), mxspec.mx_quantize(X)[0].view(torch.uint8))


@gpu
def test_an_op_in_a_cuda_graph():
    x = X.cuda()
    mxspec.mx_quantize(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        qdata, _ = mxspec.mx_quantize(x)
    x.copy_(X.flip(0))
    graph.replay()
    assert torch.equal(qdata.cpu().view(torch.uint8), mxspec.mx_quantize(X.flip(0))[0].view(torch.uint8))
