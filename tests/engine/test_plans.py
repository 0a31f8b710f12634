"""Launch plans without a GPU: which calls may share a plan, what the recorder sees, and what Triton's launcher gets."""

from __future__ import annotations

import gc
import inspect
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import mxspec
from mxspec import dispatch, plans
from mxspec.dispatch import planned
from mxspec.machine_code.fake_gpu import unavailable
from mxspec.plans import Plan, Plans, described
from mxspec.plans.plan import Descriptor, Device, Memory, Part, Pointer, Refused, TorchCall
from mxspec.plans.recording import Recorder
from tests.helpers import COMPLETE, INTERPRETED, ROOT, plain_environment

X = torch.zeros(64, 32)
needs_triton = pytest.mark.skipif(bool(unavailable()), reason=str(unavailable()))
compiled_only = pytest.mark.skipif(INTERPRETED, reason="plans are off under the interpreter")


# --- the description of a call ------------------------------------------------------------------------------------


def facts(*args, name="op", asked="auto", **kwargs):
    found = described(name, asked, args, kwargs)
    return found and found[0]


def odd(tensor: Tensor) -> Tensor:
    """A copy whose address is no multiple of 16."""
    memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    return memory[1:].view(tensor.shape).copy_(tensor)


def strided(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, (tensor.shape[1] + 4, 1), dtype=tensor.dtype).copy_(tensor)


@compiled_only
@pytest.mark.parametrize(
    "other",
    [
        lambda: facts(X[:32]),
        lambda: facts(X.mT.contiguous().mT),
        lambda: facts(strided(X)),
        lambda: facts(X.bfloat16()),
        lambda: facts(odd(X)),
        lambda: facts(X, name="other_op"),
        lambda: facts(X, asked="triton"),
        lambda: facts(X, axis=-1),
        lambda: facts(X, -1),
        lambda: facts(X, X.clone()),
    ],
)
def test_calls_that_differ_have_plans_of_their_own(other):
    assert facts(X) is not None
    assert facts(X) != other()


@compiled_only
def test_options_are_compared_with_their_types():
    options = [1, True, 1.0, "1", 0, False, 0.0, -0.0, None, torch.bfloat16, "bfloat16"]
    assert len({facts(X, option=option) for option in options}) == len(options)
    assert facts(X, a=1, b=2) != facts(X, a=2, b=1)
    assert facts(X, a=1) != facts(X, b=1)
    assert facts(X, float("nan")) == facts(X, float("nan"))


@compiled_only
def test_calls_with_other_values_at_other_addresses_share_a_plan():
    others = torch.ones(64, 32), torch.nn.Parameter(torch.ones(64, 32), requires_grad=False), torch.ones(128, 32)[64:]
    assert [facts(other, eps=1e-12) for other in others] == [facts(X, eps=1e-12)] * 3
    with torch.no_grad():
        assert facts(torch.ones(64, 32, requires_grad=True)) == facts(X)
    assert described("op", "auto", (X, 3), {"y": others[0]})[1] == [X.data_ptr(), others[0].data_ptr()]


class Subclass(Tensor):
    pass


@compiled_only
@pytest.mark.parametrize(
    "args",
    [
        lambda: (torch.ones(4, 4, requires_grad=True),),
        lambda: (torch.ones(4, 4, dtype=torch.complex64).conj().imag,),
        lambda: (X.as_subclass(Subclass),),
        lambda: (X.to_sparse(),),
        lambda: (X, [1]),
        lambda: (X, X.numpy()),
    ],
)
def test_these_arguments_have_no_plan(args):
    assert facts(*args()) is None
    assert facts(X) is not None


@compiled_only
def test_modes_and_transforms_have_no_plan():
    with FlopCounterMode(display=False):
        assert facts(X) is None
    seen = []
    torch.func.vmap(lambda x: (seen.append(facts(x)), seen.append(facts(X)), x)[-1])(X)
    assert seen == [None, None]
    torch.use_deterministic_algorithms(True)
    try:
        assert facts(X) is None
    finally:
        torch.use_deterministic_algorithms(False)
    with plans.turned_off():
        assert facts(X) is None
        elsewhere = []
        thread = threading.Thread(target=lambda: elsewhere.append(facts(X)))
        thread.start()
        thread.join()
        assert elsewhere[0] is not None
    assert facts(X) is not None


@pytest.mark.parametrize(("variable", "on"), [("1", True), ("0", False)])
def test_the_environment_variable(variable, on):
    code = "import torch; from mxspec.plans import described; print(described('op', 'auto', (torch.ones(4),), {}))"
    environment = plain_environment(MXSPEC_LAUNCH_PLANS=variable)
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert (run.stdout.strip() != "None") == on


# --- the memory of plans ------------------------------------------------------------------------------------------


def test_the_number_of_plans_is_bounded_and_the_oldest_goes_first():
    kept = Plans(most=3)
    for i in range(10):
        assert not kept.is_due(i)
        kept.see(i)
        assert kept.is_due(i)
        kept.keep(i, f"plan {i}")
        assert not kept.is_due(i)
        assert len(kept) <= 3
    assert [kept.find(i) for i in range(10)] == [None] * 7 + ["plan 7", "plan 8", "plan 9"]
    for i in range(100, 200):  # sizes that come once
        kept.see(i)
        assert len(kept._seen) <= 3
    assert kept.find(9) == "plan 9"
    kept.clear()
    assert (len(kept), kept.is_due(199)) == (0, False)


def test_threads_may_keep_and_find_plans_at_the_same_time():
    kept, wrong = Plans(most=8), []

    def work(first):
        for i in range(first, first + 2000):
            kept.see(i)
            kept.keep(i, f"plan {i}")
            if kept.find(i) not in (None, f"plan {i}"):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(1 + 10_000 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(kept) == 8


# --- the recorder -------------------------------------------------------------------------------------------------


def kernel_function(*names, hooks=(), module="mxspec.triton_kernels.to_blocked"):
    """A function of Triton, as far as the recorder looks at it."""
    signature = inspect.Signature([inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in names])
    function = SimpleNamespace(__module__=module, __name__="kernel")
    return SimpleNamespace(fn=function, signature=signature, pre_run_hooks=list(hooks))


def compiled(scratch=0):
    return SimpleNamespace(packed_metadata=(4, 1, 0), run=SimpleNamespace(global_scratch_size=scratch))


@pytest.fixture
def launched(monkeypatch):
    """What the recorder gives to `launchers.launcher`. The launches do nothing."""
    import mxspec.triton_kernels  # noqa: F401
    from mxspec.plans import launchers

    seen = []

    def launcher(kernel, grid, values, scratch):
        seen.append((grid, values, scratch))
        return lambda stream, addresses: None

    monkeypatch.setattr(launchers, "launcher", launcher)
    return seen


def recorded(inputs, host, **options):
    """The plan of a host function that gets the inputs and a function `launch(*arguments)`."""
    recorder = Recorder(list(inputs))

    def launch(*arguments, grid=(4, 2), scratch=0, **function):
        first = len(recorder.memory)
        if scratch:
            torch.empty(scratch, dtype=torch.int8)
        names = [f"a{i}" for i in range(len(arguments))]
        called = kernel_function(*names, **function), compiled(scratch), arguments, grid, {"num_warps": 4}
        recorder.launches.append((*called, range(first, len(recorder.memory))))

    with recorder.watching():
        result = host(*inputs, launch, **options)
    return recorder.plan(result)


@needs_triton
def test_the_recorder_finds_each_pointer_again(launched):
    x, scale, offs = torch.zeros(8, 16), torch.zeros(8, 4, dtype=torch.uint8), torch.zeros(4, dtype=torch.int32)

    def host(x, scale, offs, launch):
        out, start = x.new_empty(16, 8), offs.new_empty(4)
        described = SimpleNamespace(base=x.view(-1, 4), block_shape=[1])
        launch(x.mT, described, scale.view(torch.int32)[2:], (out, (offs, 7), None), start, 1.5, "flat", True, None)
        launch(out.view(torch.uint8), torch.bfloat16, grid=(3,), scratch=64)
        return out.mT, start

    plan = recorded((x, scale, offs), host)
    (first, values, none), (second, more, scratch) = launched
    assert (first, second) == ((4, 2, 1), (3, 1, 1))
    assert values[0] == Pointer(0, 0)
    assert type(values[1]) is Descriptor
    assert values[1].pointer == Pointer(0, 0)
    assert values[2:] == (
        Pointer(1, 8),
        (Pointer(3, 0), (Pointer(2, 0), 7), None),
        Pointer(4, 0),
        1.5,
        None,
        True,
        None,
    )
    assert more == (Pointer(3, 0), None)
    assert (none, scratch) == (None, Pointer(5, 0))
    assert plan.memory == (
        Memory((8, 16), (1, 8), torch.float32),
        Memory((4,), (1,), torch.int32),
        Memory((64,), (1,), torch.int8),
    )
    assert plan.results == (Part(0), Part(1))
    assert (plan.alone, len(plan.launches)) == (False, 2)


@needs_triton
def test_an_output_may_be_a_part_of_its_memory(launched, monkeypatch):
    def host(x, launch):
        out, scale = x.new_empty(10, 4), x.new_empty(6, dtype=torch.uint8)
        launch(x, out, scale)
        return out[:7].view(14, 2), scale.view(torch.float8_e8m0fnu)

    plan = recorded((torch.zeros(8, 16),), host)
    assert plan.results == (Part(0, ((14, 2), (2, 1), 0)), Part(1))
    assert plan.memory[1].dtype == torch.float8_e8m0fnu
    monkeypatch.setattr(Device, "empty", lambda m: torch.empty_strided(*m[:2], dtype=m[2]))
    monkeypatch.setattr(Device, "current", lambda: plan.device)
    monkeypatch.setattr(Device, "stream", lambda device: 0)
    addresses = [X.data_ptr()]
    out, scale = plan.run(addresses)
    assert (out.shape, out.stride(), out.untyped_storage().nbytes()) == ((14, 2), (2, 1), 160)
    assert (scale.shape, scale.dtype) == ((6,), torch.float8_e8m0fnu)
    assert addresses == [X.data_ptr(), out.data_ptr(), scale.data_ptr()]


@needs_triton
def test_calls_of_torch_on_memory_of_the_call_are_repeated(launched, monkeypatch):
    def host(x, launch):
        values, out = x.new_empty(3, 8, 4), x.new_empty(8, 8)
        flags = torch.zeros(5, dtype=torch.int32)
        launch(x, values, flags)
        torch.mm(values[1], values[2].t(), out=out)
        launch(out)
        return out, flags

    plan = recorded((torch.zeros(8, 16),), host)
    assert [type(step) is TorchCall for step in plan.launches] == [True, False, True, False]
    assert plan.launches[2].arguments == (Part(0, ((8, 4), (4, 1), 32)), Part(0, ((4, 8), (1, 4), 64)))
    values = torch.randn(3, 8, 4)
    memory = {(3, 8, 4): values, (8, 8): torch.empty(8, 8), (5,): torch.ones(5, dtype=torch.int32)}
    monkeypatch.setattr(Device, "empty", lambda needed: memory[needed.shape])
    monkeypatch.setattr(Device, "current", lambda: plan.device)
    monkeypatch.setattr(Device, "stream", lambda device: 0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, flags = plan.run([X.data_ptr()])
    assert out.equal(values[1] @ values[2].t())
    assert flags.equal(torch.zeros(5, dtype=torch.int32))


@needs_triton
def test_a_call_in_place_allocates_nothing_and_returns_none(launched):
    plan = recorded((torch.zeros(8), torch.zeros(8)), lambda acc, x, launch: launch(acc, x))
    assert (plan.memory, plan.results) == ((), None)
    assert launched[0][1] == (Pointer(0, 0), Pointer(1, 0))


OUTSIDE = torch.zeros(4)


def after(*work):
    """A host function that does some work and then launches a kernel."""

    def host(x, y, launch):
        for do in work:
            do(x, y)
        out = x.new_empty(4)
        launch(x, y, out)
        return out

    return host


@needs_triton
@pytest.mark.parametrize(
    ("host", "reason"),
    [
        (after(lambda x, y: x.sum()), "the call uses aten.sum.default"),
        (after(lambda x, y: x.zero_()), "aten.zero_.default gets a tensor that is no part of the call's memory"),
        (after(lambda x, y: x.new_empty(4).fill_(0)), "the call uses aten.fill_.Scalar"),
        (after(lambda x, y: x[0, 0].item()), "the call reads values by item"),
        (after(lambda x, y: y.tolist()), "the call reads values by tolist"),
        (after(lambda x, y: bool(y[0])), "the call reads values by __bool__"),
        (after(lambda x, y: y.numpy()), "the call reads values by numpy"),
        (after(lambda x, y: x.mT.contiguous()), "the call uses aten.clone.default"),
        (after(lambda x, y: x.new_empty(0)), "a tensor is empty or on another device"),
        (after(lambda x, y: x.new_empty(4, device="meta")), "a tensor is empty or on another device"),
        (after(lambda x, y: torch.mm(x, x.t())), "the call uses aten.mm.default"),
        (after(lambda x, y: torch.mm(x, x.t(), out=x.new_empty(4, 4))), "aten.mm.out gets a tensor that is no part of"),
        (lambda x, y, launch: x.new_empty(4), "the call launches no kernel of Triton"),
        (lambda x, y, launch: launch(OUTSIDE), "memory that is neither an input nor allocated"),
        (lambda x, y, launch: launch(x.data_ptr()), "address that is not passed as a tensor"),
        (lambda x, y, launch: launch(SimpleNamespace(data_ptr=x.data_ptr)), "address that is not passed as a tensor"),
        (lambda x, y, launch: (launch(x), x)[1], "an output is an input"),
        (lambda x, y, launch: (launch(x), [x.new_empty(4)])[1], "the result is neither a tensor nor a tuple"),
        (
            lambda x, y, launch: (launch(x), x.new_empty(8)[:4].view(torch.int32))[1],
            "a part of memory of another dtype",
        ),
        (lambda x, y, launch: launch(x, hooks=[print]), "the launch has a hook"),
        (lambda x, y, launch: launch(x, grid=lambda meta: (1,)), "a computed grid"),
        (lambda x, y, launch: launch(x, module="mxspec.plans"), "mxspec.plans says nothing about plans"),
    ],
)
def test_the_recorder_refuses(launched, host, reason):
    inputs = torch.ones(4, 2), torch.ones(4)
    recorded(inputs, after())
    with pytest.raises(Refused, match=reason):
        recorded(inputs, host)


@needs_triton
def test_the_recorder_refuses_inputs_that_it_cannot_tell_apart(launched):
    memory = torch.zeros(64)
    inputs = memory[:32].view(8, 4)[:, :2], memory[2:34].view(8, 4)[:, :2]  # columns of one matrix
    with pytest.raises(Refused, match="two inputs share memory"):
        recorded(inputs, lambda x, y, launch: launch(x, y))
    apart = memory[:16], memory[16:32]
    recorded(apart, lambda x, y, launch: launch(x, y))
    assert launched[-1][1] == (Pointer(0, 0), Pointer(1, 0))


@needs_triton
def test_the_recorder_knows_the_releases_of_triton_that_were_tried(launched, monkeypatch):
    import triton

    monkeypatch.setattr(triton, "__version__", "3.99.0")
    with pytest.raises(Refused, match=r"plans are tested under Triton 3\.6, 3\.7, 3\.8, 3\.9"):
        recorded((torch.ones(4), torch.ones(4)), after())


@needs_triton
def test_a_recording_leaves_triton_as_it_was_and_sees_its_own_thread_only(monkeypatch):
    from triton.runtime.jit import JITFunction

    from mxspec.plans import recording

    ran, seen = [], []
    monkeypatch.setattr(JITFunction, "run", lambda self, *args, grid, warmup, **options: ran.append(args))
    before = JITFunction.run

    class Watching(Recorder):
        def plan(self, result):
            seen.extend(launch[2] for launch in self.launches)
            raise Refused("only watching")

    monkeypatch.setattr(recording, "Recorder", Watching)

    def call():
        JITFunction.run(None, "mine", grid=(1,), warmup=False)
        other = threading.Thread(target=lambda: JITFunction.run(None, "theirs", grid=(1,), warmup=False))
        other.start()
        other.join()
        assert recording.record(lambda: "not watched", []) == ("not watched", None)  # one recording at a time
        return "result"

    assert recording.record(call, []) == ("result", "only watching")
    assert JITFunction.run is before
    assert (ran, seen) == ([("mine",), ("theirs",)], [("mine",)])
    with pytest.raises(ZeroDivisionError):
        recording.record(lambda: 1 / 0, [])
    assert JITFunction.run is before
    assert recording.record(call, [])[0] == "result"


# --- the switch ---------------------------------------------------------------------------------------------------


@pytest.fixture
def on_cpu(monkeypatch):
    """Let calls on CPU tensors have plans, recorded from the reference. Gives the recordings and the plans' runs."""
    monkeypatch.setattr(
        planned,
        "describe",
        lambda name, args, kwargs, backend: described(name, backend or mxspec.current_backend(), args, kwargs),
    )
    monkeypatch.setitem(sys.modules, "mxspec.reference_kernels", SimpleNamespace(PLANNED=True))
    seen = SimpleNamespace(recorded=[], run=[], watched=False)

    def record(call, inputs):
        seen.recorded.append(inputs)
        result = call()
        plan = Plan(-1, (), (), None, False, lambda: seen.watched)
        object.__setattr__(plan, "run", lambda addresses: (seen.run.append(addresses), result)[1])
        return result, plan

    monkeypatch.setattr(planned, "record", record)
    return seen


@compiled_only
def test_the_third_call_runs_a_plan(on_cpu):
    results = [mxspec.mx_quantize(X, axis=-1) for _ in range(4)]
    assert ([list(map(id, inputs)) for inputs in on_cpu.recorded], len(on_cpu.run)) == ([[id(X)]], 2)
    assert on_cpu.run == [[X.data_ptr()]] * 2
    assert results[1] is results[2] is results[3]
    mxspec.mx_quantize(X, axis=-2)
    mxspec.mx_quantize(X, axis=-1, backend="reference")
    with mxspec.use_backend("reference"):
        mxspec.mx_quantize(X, axis=-1)
    assert (len(on_cpu.recorded), len(on_cpu.run)) == (2, 2)  # use_backend asks for what backend= asked for
    on_cpu.watched = True
    mxspec.mx_quantize(X, axis=-1)
    assert len(on_cpu.run) == 2


@compiled_only
def test_two_tensors_at_one_address_are_not_recorded(on_cpu):
    a, a_scale = mxspec.fp8_quantize_1x128(torch.randn(128, 128))
    b, b_scale = mxspec.fp8_quantize_128x128(torch.randn(128, 128))
    for _ in range(4):
        mxspec.fp8_gemm(a, a_scale, a, b_scale)
    assert (on_cpu.recorded, on_cpu.run) == ([], [])
    for _ in range(3):
        mxspec.fp8_gemm(a, a_scale, b, b_scale)
    mxspec.fp8_gemm(a, a_scale, a, b_scale)  # a plan tells them apart by their places
    assert (len(on_cpu.recorded), len(on_cpu.run)) == (1, 2)


@compiled_only
def test_a_refused_call_is_refused_again_and_again(on_cpu):
    for _ in range(4):
        with pytest.raises(ValueError, match="axis = 1"):
            mxspec.mx_quantize(X, axis=1)
        with pytest.raises(ValueError, match="unknown backend 'cuda'"):
            mxspec.mx_quantize(X, backend="cuda")
        with pytest.raises(ValueError, match=r"axis = -1\.0"):
            mxspec.mx_quantize(X, axis=-1.0)
        mxspec.mx_quantize(X, axis=-1)
    assert len(on_cpu.recorded) == 1
    assert len(plans.PLANS) == 1


@compiled_only
def test_a_plan_of_an_op_in_place_tells_autograd(on_cpu):
    case = next(c for c in dispatch.reference("fp8_gemm_").spec.cases() if not c.raises)
    args = case.args()
    versions = []
    for _ in range(4):
        mxspec.fp8_gemm_(*args)
        versions.append(args[0]._version)
    assert len(on_cpu.run) == 2
    assert len(set(versions)) == 4


@compiled_only
def test_kernels_that_say_nothing_about_plans_are_not_watched(on_cpu, monkeypatch):
    monkeypatch.delitem(sys.modules, "mxspec.reference_kernels")
    for _ in range(4):
        mxspec.mx_quantize(X)
    assert (on_cpu.recorded, on_cpu.run) == ([], [])
    assert plans.PLANS.find(facts(X, name="mx_quantize")) == "the kernels of 'reference' have no plans"


@compiled_only
def test_values_that_are_read_are_read_at_every_call(monkeypatch):
    """The real recorder, on a call whose check reads `offs`."""
    import mxspec.triton_kernels  # noqa: F401

    offs, x = torch.tensor([32, 64], dtype=torch.int32), torch.zeros(64, 128)
    call = lambda: dispatch.reference("fp8_quantize_k_groups").spec.check_args(x, offs, check_offs=True)  # noqa: E731
    if unavailable():
        pytest.skip(str(unavailable()))
    _, plan = plans.record(call, [x, offs])
    assert plan == "the call reads values by tolist"


def test_every_op_with_a_flag_for_checks_reads_values_only_with_it():
    """What `described` leaves out: no check and no host function may depend on values, unless the recorder sees it."""
    for name in dispatch.ops():
        fn = dispatch.reference(name)
        case = next(c for c in fn.spec.cases() if not c.raises and not c.flags)
        args = case.args()
        recorder = Recorder([a for a in args if isinstance(a, Tensor)])
        with recorder:
            fn.spec.check_args(
                *args, **{**case.kwargs, **({"check_offs": False} if "check_offs" in case.kwargs else {})}
            )
        assert not recorder.refusal, name


# --- Triton's launcher --------------------------------------------------------------------------------------------

FOLDER = Path(os.environ.get("MXSPEC_TRITONS") or ROOT / ".venv")
# Descriptors, memory of Triton's own, several launches, arguments in tuples, floats: one case of each.
OPS = (
    "fp8_quantize_1x128",
    "to_blocked_k_groups",
    "fp8_gemm",
    "fp8_gemm_",
    "fp8_grouped_gemm_wgrad",
    "mx_grouped_gemm",
)
# Descriptors, several launches, memory that torch sets to 0. Helion writes the same kinds of calls for all ops.
BY_HELION = ("mx_quantize", "fp8_gemm_", "mx_grouped_gemm_wgrad")
RELEASES = ["installed", "3.6.0", *(["3.8.0"] if COMPLETE else []), "3.9.0"]
# What a release gives its launcher does not depend on the GPU.
ON_BLACKWELL = RELEASES if COMPLETE else RELEASES[:1]


@pytest.mark.turns(10)
@needs_triton
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc, for the stub of the driver")
@pytest.mark.skipif(torch.version.cuda is not None, reason="a CUDA build of torch would load the stub, too")
@pytest.mark.parametrize(
    ("backend", "major", "release"),
    [
        *(("triton", "9", release) for release in RELEASES),
        *(("triton", "10", release) for release in ON_BLACKWELL),
        ("helion", "9", "installed"),
    ],
)
def test_a_planned_launch_gives_the_driver_what_an_ordinary_one_gives(backend, major, release, tmp_path):
    import triton

    if backend == "helion":
        pytest.importorskip("helion")

    folder = FOLDER / f"triton-{release}"
    if release != "installed" and not (folder / "triton").is_dir():
        pytest.skip(f"no triton in {folder} (MXSPEC_TRITONS)")
    headers = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    library = tmp_path / "libcuda.so.1"
    command = ["gcc", "-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1", f"-I{headers}"]
    subprocess.run([*command, str(ROOT / "tests/engine/stub_cuda.c"), "-o", str(library)], check=True)
    (tmp_path / "libcuda.so").symlink_to(library)
    environment = plain_environment(STUB_CUDA=str(library), TRITON_LIBCUDA_PATH=str(tmp_path), STUB_MAJOR=major)
    environment["LD_LIBRARY_PATH"] = str(tmp_path)
    if release != "installed":
        environment["PYTHONPATH"] = os.pathsep.join([str(folder), environment["PYTHONPATH"]])
    ops = OPS if major == "9" else ["mx_gemm", "mx_grouped_gemm", "mx_grouped_gemm_wgrad"]
    if backend == "helion":
        ops = [op for op in dispatch.ops() if dispatch.has_kernel(op, "helion")] if COMPLETE else BY_HELION
        ops = [op for op in ops if op != "nvfp4_quantize_groups"]  # torch finds the amax of each group
    command = [sys.executable, "-m", "tests.engine.planned_launches", backend, "1", *ops]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr[-3000:]
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("[")]
    assert [line for line in lines if line[3]] == []
    assert {line[0] for line in lines} == set(ops)
    assert all(line[2] > 10 for line in lines)
    if major == "10":  # the kernel with TMA, from tensors whose rows begin at multiples of 16 bytes
        assert {line[0] for line in lines if line[4] == ["mx_matmul_sm100"]} == set(ops)


@needs_triton
def test_descriptors_are_bounded_and_found_by_address(monkeypatch):
    from mxspec.plans import launchers

    made = []

    def make(descriptor, meta, *more):
        made.append(descriptor.base.data_ptr())
        return [("map", descriptor.base.data_ptr(), meta)]

    monkeypatch.setattr(launchers.nvidia, "make_tensordesc_arg", make)
    monkeypatch.setattr(launchers, "_descriptors", {})
    monkeypatch.setattr(launchers, "_MOST_DESCRIPTORS", 4)
    tensor = torch.zeros(4)
    one, two = (launchers._descriptor_at(SimpleNamespace(base=tensor), meta) for meta in ("one", "two"))
    assert one(16) == one(16) == ("map", 16, "one")
    assert two(16) == ("map", 16, "two")
    assert made == [16, 16]
    for address in range(0, 640, 16):
        assert one(address) == ("map", address, "one")
        assert len(launchers._descriptors) <= 4
    del one, two
    assert not [r for r in gc.get_referrers(tensor) if isinstance(r, SimpleNamespace)]  # no memory is kept alive


@needs_triton
def test_hooks_and_debugging_take_the_ordinary_path(monkeypatch):
    from triton import knobs

    from mxspec.plans import launchers

    assert not launchers.watched()
    for name in ("launch_enter_hook", "launch_exit_hook"):
        hooks = getattr(knobs.runtime, name)
        hooks.add(print)
        assert launchers.watched()
        hooks.remove(print)
        monkeypatch.setattr(knobs.runtime, name, print)
        assert launchers.watched()
        monkeypatch.setattr(knobs.runtime, name, None)
        assert not launchers.watched()
    monkeypatch.setattr(knobs.runtime, "debug", True)
    assert launchers.watched()
