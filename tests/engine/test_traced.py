"""The outputs of ops on fake tensors. The reference runs once for all calls of one kind, and gives the answer."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import mxspec
from mxspec import dispatch
from mxspec.dispatch import traced

X = torch.randn(64, 128)
OFFS = torch.tensor([16, 48], dtype=torch.int32)


@pytest.fixture
def ran(monkeypatch):
    """The names of the ops whose reference ran on fake tensors."""
    names = []
    outputs = traced.outputs

    def counted(name, fn, args, kwargs):
        return outputs(name, lambda *a, **kw: (names.append(name), fn(*a, **kw))[1], args, kwargs)

    monkeypatch.setattr(traced, "outputs", counted)
    monkeypatch.setattr(traced, "_KNOWN", {})
    return names


def on_fake(op, *args, **kwargs):
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(arg) if isinstance(arg, Tensor) else arg for arg in args]
        return dispatch.public(op)(*fake, **kwargs)


@pytest.mark.turns(6)
@pytest.mark.parametrize("op", dispatch.ops())
def test_the_second_answer_is_the_first(op, ran):
    spec = dispatch.reference(op).spec
    cases = [case for case in spec.cases() if not case.raises and "large" not in case.flags][:2]
    for case in cases:
        args = case.args()
        first, second = (spec.outputs(args, on_fake(op, *args, **case.kwargs)) for _ in range(2))
        for one, other in zip(first, second, strict=True):
            for fact in (Tensor.size, Tensor.stride, Tensor.storage_offset):
                assert fact(one) == fact(other)
            assert (one.dtype, one.device, type(one)) == (other.dtype, other.device, type(other))
    calls = 2 * len(cases)  # at least one of them is answered without the reference, but for an op in place
    assert (len(ran) == calls) if spec.in_place else (0 < len(ran) < calls)


def test_the_reference_runs_once_for_the_calls_of_one_kind(ran):
    for values in (X, torch.zeros(64, 128)):
        on_fake("mx_quantize", values, axis=-1)
    assert ran == ["mx_quantize"]


@pytest.mark.parametrize(
    ("args", "options"),
    [
        ((X[:32],), {}),
        ((X.bfloat16(),), {}),
        ((X.mT.contiguous().mT,), {}),
        ((X.to("meta"),), {}),
        ((X,), {"scale_layout": "blocked"}),
        ((X,), {"elem_dtype": torch.float8_e5m2}),
    ],
)
def test_it_runs_again_for_another_kind(args, options, ran):
    on_fake("mx_quantize", X)
    on_fake("mx_quantize", *args, **options)
    assert ran == ["mx_quantize"] * 2


def test_it_runs_for_a_part_of_a_tensor_and_once_for_a_flag(ran):
    for _ in range(2):
        on_fake("mx_quantize", X[1:33])
        on_fake("mx_quantize_groups", X, OFFS, check_offs=True)
        on_fake("fp8_quantize_128x128", X, with_transpose=True)
    assert ran == ["mx_quantize", "mx_quantize_groups", "fp8_quantize_128x128", "mx_quantize"]


def test_a_number_may_change_between_the_calls_of_a_compiled_function():
    """From the second number on, torch traces a symbolic number beside static tensors."""
    torch._dynamo.reset()
    compiled = torch.compile(mxspec.place_token_groups, backend="aot_eager", fullgraph=True)
    starts = torch.tensor([0, 128], dtype=torch.int32)
    for rows in (256, 384, 512):
        assert compiled(X, OFFS, starts, rows).equal(mxspec.place_token_groups(X, OFFS, starts, rows))


def test_it_runs_for_symbolic_sizes(ran):
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: mxspec.mx_quantize(x)[0], dynamic=True, backend="aot_eager", fullgraph=True)
    compiled(X)
    assert ran
    assert not traced._KNOWN


def test_a_refused_call_is_refused_again(ran):
    for _ in range(2):
        with pytest.raises(ValueError, match="mx_quantize: K = 7 is not a multiple"):
            on_fake("mx_quantize", X[:, :7])
    assert not traced._KNOWN


def test_a_call_in_place_runs_each_time(ran):
    args = next(iter(dispatch.reference("zero_unused_").spec.cases())).args()
    for _ in range(2):
        on_fake("zero_unused_", *args)
    assert ran == ["zero_unused_"] * 2


def test_old_kinds_are_forgotten(ran, monkeypatch):
    monkeypatch.setattr(traced, "_MOST", 2)
    for rows in (32, 64, 32, 64):
        on_fake("mx_quantize", X[:rows])
    assert len(ran) == 2
    on_fake("mx_quantize", X[:16])
    on_fake("mx_quantize", X[:32])
    assert len(ran) == 4
    assert len(traced._KNOWN) <= 2
