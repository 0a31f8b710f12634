"""swiglu_backward: literal gradients, the roundings, special values, and PyTorch's own kernels."""

import pytest
import torch

import mxspec
from mxspec import dispatch
from mxspec.cases.common.swiglu import gates
from mxspec.reference.swiglu_backward_fp8_quantize_rowcol_groups import swiglu_backward_fp8_quantize_rowcol_groups
from mxspec.shapes import Shapes
from mxspec.spec import random_normal
from tests.helpers import DEVICE, ends, runs_kernels, u8

BF16, NAN, INF = torch.bfloat16, torch.nan, torch.inf
KERNELS = pytest.mark.parametrize("backend", ["triton", "helion"])
gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")


def gradients(*rows):
    """The gradients of the gates and of the ups."""
    out = mxspec.swiglu_backward(*(torch.tensor([row], dtype=BF16) for row in rows), backend="reference")
    return out.unflatten(1, (2, -1))[0]


def bits(t):
    return [b & 0xFFFF for b in t.view(torch.int16).tolist()]


def test_golden_the_gradient_of_the_gate_comes_first():
    """The derivative of silu is 0.5 at 0 and 1 at 128. silu(0) is 0, and silu(128) is 128."""
    d_gate, d_up = gradients([0.0, 128.0, 128.0], [896.0, -7.0, 0.0], [2.0, 64.0, 14.0])
    assert d_gate.tolist() == [896.0, -448.0, 0.0]
    assert d_up.tolist() == [0.0, 8192.0, 1792.0]
    out = mxspec.swiglu_backward(*(torch.ones(3, 5, dtype=BF16) for _ in range(3)), backend="reference")
    assert (out.shape, out.stride(), out.dtype) == ((3, 10), (10, 1), BF16)


def test_golden_a_negative_gate_may_turn_the_sign():
    """At -2, s = 0.1192029 and `1 - 2 * 0.8807971` is -0.7615942: the derivative is -0.0907842, and silu is -0.2384058.

    In bfloat16 these are -186/2048 and -244/1024.
    """
    d_gate, d_up = gradients([-2.0], [1.0], [1.0])
    assert (d_gate.item(), d_up.item()) == (-186 / 2048, -244 / 1024)


def test_golden_d_silu_is_rounded_to_bfloat16():
    """129/128 * 129/128 is 130.008/128, rounded 130/128. Beyond bfloat16's range it is Inf, and d_gate too."""
    d_gate, d_up = gradients([128.0, 128.0], [129 / 128, 2.0**127], [129 / 128, 2.0])
    assert (d_gate.tolist(), d_up.tolist()) == ([130 / 128, INF], [129.0, 256.0])


def test_golden_a_sigmoid_of_0_leaves_zeros_with_signs():
    """s is 0 at -88: d_gate is `0 * (1 - 88)`, which is -0, and d_up is -0. A negative dh turns both signs."""
    d_gate, d_up = gradients([-88.0, -88.0], [2.0**100, 2.0**100], [1.0, -1.0])
    assert (bits(d_gate), bits(d_up)) == ([0x8000, 0], [0x8000, 0])
    assert gradients([-88.0], [2.0**100], [2.0**100])[0].isnan()  # d_silu is Inf, and Inf * 0 is NaN


def test_golden_special_values():
    """`Inf * (1 - 1)` is NaN, and `-Inf * 0` too. silu(Inf) is Inf."""
    gate, dh = [INF, INF, -INF, NAN, 1.0, 1.0, 1.0], [-2.0, 0.0, 1.0, 1.0, NAN, 1.0, 1.0]
    d_gate, d_up = gradients(gate, [1.0] * 5 + [NAN, INF], dh)
    assert [str(v) for v in d_gate.tolist()] == ["nan"] * 6 + ["inf"]
    assert [str(v) for v in d_up.tolist()] == ["-inf", "nan", "nan", "nan", "nan", "0.73046875", "0.73046875"]


def test_golden_subnormal_gradients():
    """At 0 the derivative is 0.5. A tie is rounded to even: half of 2^-133 is 0, half of 3 * 2^-133 is 2 * 2^-133."""
    d_gate, d_up = gradients([0.0] * 3, [1.0] * 3, [2.0**-132, 2.0**-133, 3 * 2.0**-133])
    assert (bits(d_gate), bits(d_up)) == ([1, 0, 2], [0, 0, 0])


def test_golden_no_rows_and_no_columns():
    for shape in ((0, 5), (3, 0), (0, 0)):
        out = mxspec.swiglu_backward(*(torch.zeros(shape, dtype=BF16) for _ in range(3)), backend="reference")
        assert (out.shape, out.dtype) == ((shape[0], 2 * shape[1]), BF16)


def test_autograd_gives_the_same_gradient():
    gate_up, dh = gates(64, 512), random_normal(64, 256, seed=3)
    leaf = gate_up.clone().requires_grad_()
    gate, up = leaf.chunk(2, -1)
    (torch.nn.functional.silu(gate) * up).backward(dh)
    assert mxspec.swiglu_backward(*gate_up.chunk(2, -1), dh, backend="reference").equal(leaf.grad)


def test_these_are_the_values_that_the_quantizer_quantizes():
    gate_up, dh, offs = gates(200, 512), random_normal(200, 256, seed=3), ends(130, 190)
    codes = swiglu_backward_fp8_quantize_rowcol_groups(gate_up, dh, offs)
    values = mxspec.swiglu_backward(*gate_up.chunk(2, -1), dh, backend="reference")
    for one, other in zip(codes, mxspec.fp8_quantize_rowcol_groups(values, offs, backend="reference"), strict=True):
        assert u8(one.contiguous()).equal(u8(other.contiguous()))


def test_it_has_no_gradient():
    t = torch.ones(2, 8, dtype=BF16, requires_grad=True)
    with pytest.raises(RuntimeError, match="swiglu_backward has no gradient"):
        mxspec.swiglu_backward(t, t, t).sum().backward()


def test_compiled_it_gives_the_same():
    torch._dynamo.reset()
    gate_up, dh = gates(5, 80), random_normal(5, 40)
    fn = lambda t, d: mxspec.swiglu_backward(*t.chunk(2, -1), d) + 1  # noqa: E731
    assert torch.compile(fn, fullgraph=True, backend="aot_eager")(gate_up, dh).equal(fn(gate_up, dh))


@runs_kernels
@KERNELS
def test_rows_beyond_2_to_the_31(backend):
    """Rows lie 2^28 elements apart, in one tensor."""
    memory = torch.empty(10 * 2**28, dtype=BF16, device=DEVICE)
    apart = [memory.as_strided((10, 40), (2**28, 1), 40 * place) for place in range(3)]
    for t, values in zip(apart, (*gates(10, 80).chunk(2, -1), random_normal(10, 40)), strict=True):
        t.copy_(values)
    got = mxspec.swiglu_backward(*apart, backend=backend)
    assert got.equal(mxspec.swiglu_backward(*(t.contiguous() for t in apart), backend="reference"))


@gpu
@KERNELS
@pytest.mark.parametrize("shape", [(2**31 + 8, 1), (1, 2**31 + 8), (2**20 + 1, 2048)], ids=str)
def test_more_than_2_to_the_31_elements(shape, backend):
    gate = torch.full(shape, 128.0, dtype=BF16, device=DEVICE)
    got = mxspec.swiglu_backward(gate, gate, gate, backend=backend)
    assert bool((got == 2.0**14).all())


def test_bench_cases_are_the_matrices():
    op = dispatch.reference("swiglu_backward")
    (case,) = op.spec.bench_cases(Shapes(matrices=((64, 128),)))
    args = case.args()
    assert (case.name, *(t.shape for t in args)) == ("64x128", *[(64, 128)] * 3)
    assert op.spec.bytes_moved(args, (op(*args),)) == 64 * 128 * 10
