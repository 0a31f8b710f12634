"""Launch plans on a GPU: a planned call gives the bytes of an ordinary call, wherever it is made."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from torch import Tensor

import mxspec
from mxspec import check, dispatch, plans
from mxspec.plans import PLANS, Plan, described
from tests.helpers import INTERPRETED

if INTERPRETED or not torch.cuda.is_available() or torch.cuda.get_device_capability() not in ((9, 0), (10, 0)):
    pytest.skip("needs a Hopper or Blackwell GPU, and compiled kernels", allow_module_level=True)

DEVICE = torch.device("cuda", torch.cuda.current_device())
OPS = [(backend, op) for op in dispatch.ops() for backend in ("triton", "helion") if dispatch.has_kernel(op, backend)]


@pytest.fixture
def runs(monkeypatch):
    """The plans that ran."""
    seen, run = [], Plan.run

    def watched(self, addresses):
        seen.append(self)
        return run(self, addresses)

    monkeypatch.setattr(Plan, "run", watched)
    return seen


def outputs(op, args, kwargs, backend="triton") -> tuple[Tensor, ...]:
    """The outputs of a call. An op in place works on a copy."""
    spec = dispatch.reference(op).spec
    own = spec.own(args)
    return spec.outputs(own, dispatch.public(op)(*own, backend=backend, **kwargs))


def same(got, expected) -> bool:
    def bits(t):
        return torch.atleast_1d(t).clone(memory_format=torch.contiguous_format).view(torch.uint8)

    forms = [[(t.shape, t.stride(), t.dtype, t.device) for t in some] for some in (got, expected)]
    return forms[0] == forms[1] and all(bits(a).equal(bits(b)) for a, b in zip(got, expected, strict=True))


def ordinary(op, args, kwargs, byte: int | None = None, backend="triton") -> tuple[Tensor, ...]:
    with plans.turned_off(), contextlib.nullcontext() if byte is None else check.poisoned(byte):
        return outputs(op, args, kwargs, backend)


def plan_of(op, args, kwargs, asked="triton"):
    """Make calls until a plan is known. Gives the plan, or the reason why there is none."""
    for _ in range(2):
        outputs(op, args, kwargs, asked)
    found = described(op, asked, args, {**kwargs})
    assert found is not None
    return PLANS.find(found[0])


def moved(args):
    """The same values at other addresses. Rows keep their distance."""
    return check.on_device(DEVICE, check.on_device(torch.device("cpu"), args))  # `.cpu()` would close the gaps


@pytest.mark.parametrize(("backend", "op"), OPS)
def test_a_planned_call_gives_the_bytes_of_an_ordinary_one(backend, op, runs):
    """Both write to poisoned memory. The plan was recorded from tensors at other addresses."""
    fn, taken, refused = dispatch.reference(op), 0, 0
    cases = [case for case in fn.spec.cases() if not case.flags]
    for case in cases[:: max(1, len(cases) // 3)]:
        first = check.on_device(DEVICE, case.args())
        for args in (first, check.embedded(first, fn, case.kwargs)):
            if case.kwargs.get("check_offs") or dispatch.refusal(op, backend, args, case.kwargs):
                continue
            plan = plan_of(op, args, case.kwargs, backend)
            if backend == "helion" and plan == "the call uses aten.linalg_vector_norm.default":
                assert op.startswith(("nvfp4_quantize", "nvfp4_fake_quantize"))  # without an amax, PyTorch finds it
                refused += 1
                continue
            assert isinstance(plan, Plan), f"{case.name}: {plan}"
            again = args if args is not first else moved(args)
            expected = ordinary(op, again, case.kwargs, 0xA5, backend)
            runs.clear()
            with check.poisoned(0xA5) as overrun:
                got = outputs(op, again, case.kwargs, backend)
            assert runs == [plan], case.name
            assert same(got, expected), case.name
            assert overrun() is None, case.name
            taken += 1
    assert taken + refused >= 2
    if (backend, op) == ("helion", "nvfp4_fake_quantize"):
        assert not taken  # no call of this op gives an amax
    else:
        assert taken or (backend, op) == ("helion", "nvfp4_quantize_groups")


SHAPES = [(8, 7168, 2048), (300, 264, 384), (2048, 1024, 1024)]


def operands(M, N, K, seed=0):
    torch.manual_seed(seed)
    x, w = (torch.randn(rows, K, device=DEVICE, dtype=torch.bfloat16) for rows in (M, N))
    return *mxspec.fp8_quantize_1x128(x, scale_major="mn"), *mxspec.fp8_quantize_128x128(w)


@pytest.mark.parametrize("shape", SHAPES)
def test_tiles_of_every_size(shape, runs):
    args = operands(*shape)
    assert isinstance(plan_of("fp8_gemm", args, {}), Plan)
    for seed in range(1, 4):
        other = operands(*shape, seed)
        runs.clear()
        got = outputs("fp8_gemm", other, {})
        assert len(runs) == 1
        assert same(got, ordinary("fp8_gemm", other, {}))


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_a_matmul_of_cublas_among_kernels(out_dtype, runs):
    """A large `mx_gemm` multiplies values by cuBLAS. Autocast to another dtype changes no bit of it."""
    from mxspec.triton_kernels.hopper.mx import by_memory

    processors = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    M, N, K = 512, 128 * -(-processors // 2), 256
    torch.manual_seed(0)
    x, w = (torch.randn(rows, K, device=DEVICE, dtype=torch.bfloat16) for rows in (M, N))
    args = *mxspec.mx_quantize(x), *mxspec.mx_quantize(w)
    if torch.cuda.get_device_capability() == (9, 0):
        assert by_memory.pays(M, N, DEVICE)
    expected = ordinary("mx_gemm", args, {"out_dtype": out_dtype})
    assert isinstance(plan_of("mx_gemm", args, {"out_dtype": out_dtype}), Plan)
    for enabled in (False, True):
        with torch.autocast("cuda", torch.float16, enabled):
            assert same(ordinary("mx_gemm", args, {"out_dtype": out_dtype}), expected)
            runs.clear()
            assert same(outputs("mx_gemm", args, {"out_dtype": out_dtype}), expected)
            assert len(runs) == 1


def test_auto_and_the_switch(runs):
    args = operands(*SHAPES[0])
    expected = ordinary("fp8_gemm", args, {})
    for _ in range(3):
        assert same((mxspec.fp8_gemm(*args),), expected)
    assert len(runs) == 1
    for _ in range(3):
        assert same((mxspec.fp8_gemm(*args, backend="triton"),), expected)
    assert len(runs) == 2  # a plan belongs to the choice that was asked for
    with mxspec.use_backend("triton"):
        mxspec.fp8_gemm(*args)
    assert len(runs) == 3
    with mxspec.use_backend("reference"):
        for _ in range(4):
            mxspec.fp8_gemm(*args)
    assert len(runs) == 3
    with plans.turned_off():
        mxspec.fp8_gemm(*args)
    assert len(runs) == 3


def test_options_and_keywords(runs):
    x = torch.randn(256, 512, device=DEVICE).bfloat16()
    for kwargs in ({"elem_dtype": "e5m2"}, {"elem_dtype": torch.float8_e5m2}, {"axis": -2}, {"scaling": "floor"}):
        assert isinstance(plan_of("mx_quantize", (x,), kwargs), Plan)
        runs.clear()
        assert same(outputs("mx_quantize", (x,), kwargs), ordinary("mx_quantize", (x,), kwargs))
        assert len(runs) == 1
    a, a_scale, b, b_scale = operands(*SHAPES[1])
    for _ in range(3):
        out = mxspec.fp8_gemm(a, a_scale, b=b, b_scale=b_scale)
    assert same((out,), ordinary("fp8_gemm", (a, a_scale, b, b_scale), {}))
    assert len(runs) == 2


def test_alignments_have_plans_of_their_own(runs):
    memory = torch.randn(64 * 256 + 16, device=DEVICE).bfloat16()
    for begin in (0, 1, 4, 8):
        x = memory[begin : begin + 64 * 256].view(64, 256)
        plan = plan_of("fp8_quantize_1x128", (x,), {})
        assert isinstance(plan, Plan)
        runs.clear()
        assert same(outputs("fp8_quantize_1x128", (x,), {}), ordinary("fp8_quantize_1x128", (x,), {}))
        assert runs == [plan]
    assert len(PLANS) == 3  # 8 elements are 16 bytes


def test_one_tensor_in_two_places(runs):
    a, a_scale, b, _ = operands(256, 256, 512)
    twice, apart = (a, a_scale, a, a_scale), (a, a_scale, b, a_scale.mT.clone().mT)
    for _ in range(4):
        mxspec.fp8_gemm(*twice, backend="triton")
    assert not runs  # the recorder cannot tell them apart
    for args in (apart, apart, twice):
        got = outputs("fp8_gemm", args, {})
    assert len(runs) == 1  # a plan can
    assert same(got, ordinary("fp8_gemm", twice, {}))


def test_values_that_are_read_are_read_at_every_call(runs):
    x, good = torch.randn(256, 256, device=DEVICE).bfloat16(), torch.tensor([100, 256], dtype=torch.int32)
    offs = good.to(DEVICE)
    for _ in range(4):
        mxspec.fp8_quantize_k_groups(x, offs, check_offs=True)
    assert not runs
    offs.copy_(torch.tensor([200, 100], dtype=torch.int32))
    with pytest.raises(ValueError, match=r"offs\[1\] = 100 after 200"):
        mxspec.fp8_quantize_k_groups(x, offs, check_offs=True)
    for _ in range(3):
        mxspec.fp8_quantize_k_groups(x, good.to(DEVICE))
    assert len(runs) == 1


def test_refused_calls_stay_refused():
    x = torch.randn(64, 256, device=DEVICE).bfloat16()
    plan_of("fp8_quantize_1x128", (x,), {"axis": -1})
    for axis in (-1.0, 1):
        for _ in range(3):
            with pytest.raises(ValueError, match="axis = "):
                mxspec.fp8_quantize_1x128(x, axis=axis)


@pytest.mark.parametrize("when", ["recorded before", "recorded inside"])
def test_a_cuda_graph(when, runs):
    x, w = (torch.randn(rows, 512, device=DEVICE).bfloat16() for rows in (64, 256))
    of_w = mxspec.fp8_quantize_128x128(w)

    def product():
        return mxspec.fp8_gemm(*mxspec.fp8_quantize_1x128(x, scale_major="mn"), *of_w)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3 if when == "recorded before" else 1):
            product()
    torch.cuda.current_stream().wait_stream(stream)
    runs.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = product()
    assert len(runs) == (2 if when == "recorded before" else 0)
    for seed in range(3):
        torch.manual_seed(seed)
        x.copy_(torch.randn_like(x))
        graph.replay()
        with plans.turned_off():
            assert same((out,), (product(),))
    runs.clear()
    assert same((product(),), (out,))  # the plan that was recorded inside, outside
    assert len(runs) == 2


def test_streams(runs):
    shape = SHAPES[2]
    inputs = [operands(*shape, seed) for seed in range(4)]
    expected = [ordinary("fp8_gemm", args, {}) for args in inputs]
    plan_of("fp8_gemm", inputs[0], {})
    streams, got = [torch.cuda.Stream() for _ in inputs], [[] for _ in inputs]
    torch.cuda.synchronize()
    runs.clear()
    for _ in range(20):
        for stream, args, into in zip(streams, inputs, got, strict=True):
            with torch.cuda.stream(stream):
                into.append(mxspec.fp8_gemm(*args, backend="triton"))
    torch.cuda.synchronize()
    assert len(runs) == 80
    assert all(same((out,), e) for into, e in zip(got, expected, strict=True) for out in into)


def test_threads():
    """Threads record, find and use plans at the same time."""
    inputs = [operands(*SHAPES[i % 2], seed=i) for i in range(4)]
    expected = [ordinary("fp8_gemm", args, {}) for args in inputs]
    torch.cuda.synchronize()
    wrong, start = [], threading.Barrier(len(inputs))

    def work(i):
        start.wait()
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                out = mxspec.fp8_gemm(*inputs[i], backend="triton")
                torch.cuda.current_stream().synchronize()
                if not same((out,), expected[i]):
                    wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_launch_hooks_see_every_launch(runs):
    from triton import knobs

    args, seen = operands(*SHAPES[0]), []
    plan_of("fp8_gemm", args, {})
    runs.clear()

    def hook(metadata):
        seen.append(metadata.get()["name"])

    before = knobs.runtime.launch_enter_hook
    try:
        if hasattr(before, "add"):
            before.add(hook)
        else:
            knobs.runtime.launch_enter_hook = hook
        for _ in range(3):
            mxspec.fp8_gemm(*args, backend="triton")
    finally:
        if hasattr(before, "remove"):
            before.remove(hook)
        knobs.runtime.launch_enter_hook = before
    assert (len(seen), runs) == (3, [])
    mxspec.fp8_gemm(*args, backend="triton")
    assert (len(seen), len(runs)) == (3, 1)


def test_an_op_in_place_adds_at_each_call_and_tells_autograd(runs):
    a, a_scale, b, _ = operands(64, 256, 512)
    b_scale = torch.rand(256, 4, device=DEVICE) + 0.5
    acc = torch.zeros(64, 256, device=DEVICE)
    expected = acc.clone()
    for i in range(5):
        assert mxspec.fp8_gemm_(acc, a, a_scale, b, b_scale, backend="triton") is None
        with plans.turned_off():
            mxspec.fp8_gemm_(expected, a, a_scale, b, b_scale, backend="triton")
        assert acc._version == i + 1
    assert len(runs) == 3
    assert same((acc,), (expected,))


def test_inference_mode_and_gradients(runs):
    x = torch.randn(64, 256, device=DEVICE).bfloat16()
    plan_of("fp8_quantize_1x128", (x,), {})
    runs.clear()
    with torch.inference_mode():
        assert all(t.is_inference() for t in outputs("fp8_quantize_1x128", (x,), {}))
    with torch.no_grad():
        outputs("fp8_quantize_1x128", (x.clone().requires_grad_(),), {})
    assert len(runs) == 2
    with pytest.raises(RuntimeError, match="has no gradient"):
        outputs("fp8_quantize_1x128", (x.clone().requires_grad_(),), {})[1].sum().backward()


def test_a_compiled_function_uses_plans(runs):
    x, w = (torch.randn(rows, 512, device=DEVICE).bfloat16() for rows in (64, 256))
    of_w = mxspec.fp8_quantize_128x128(w)

    def product(x):
        return mxspec.fp8_gemm(*mxspec.fp8_quantize_1x128(x * 2, scale_major="mn"), *of_w)

    compiled = torch.compile(product, fullgraph=True)
    for seed in range(4):
        torch.manual_seed(seed)
        x.copy_(torch.randn_like(x))
        with plans.turned_off():
            expected = product(x)
        assert same((compiled(x),), (expected,))
    assert len(runs) == 4  # two ops, from the third call on


def test_a_layer_has_the_same_bits(runs):
    """The backward runs on a thread of its own."""
    torch.manual_seed(0)
    linear = mxspec.nn.Float8BlockwiseLinear(256, 384, device=DEVICE, dtype=torch.bfloat16)

    def step():
        torch.manual_seed(1)
        x = torch.randn(128, 256, device=DEVICE).bfloat16().requires_grad_()
        linear.zero_grad()
        out = linear(x)
        out.backward(torch.randn_like(out))
        return out.detach(), x.grad, linear.weight.grad

    with mxspec.use_backend("triton"):
        with plans.turned_off():
            expected = [t.clone() for t in step()]
        for _ in range(4):
            got = step()
        assert len(runs) > 8
        assert same(got, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device(runs):
    for device in range(2):
        args = tuple(a.to(f"cuda:{device}") for a in operands(*SHAPES[0]))
        for _ in range(3):
            out = mxspec.fp8_gemm(*args, backend="triton")
        with plans.turned_off():
            assert same((out,), (mxspec.fp8_gemm(*args, backend="triton"),))
        assert out.device.index == device
    assert len(runs) == 2
    assert torch.cuda.current_device() == DEVICE.index
