"""swiglu: literal values, its roundings, special values, any strides, and PyTorch's own kernels."""

import pytest
import torch

import mxspec
from mxspec import dispatch
from mxspec.cases.common.swiglu import gates
from mxspec.reference.swiglu_fp8_quantize_rowcol_groups import swiglu_fp8_quantize_rowcol_groups
from mxspec.shapes import Shapes
from tests.helpers import DEVICE, ends, runs_kernels, u8

BF16, NAN, INF = torch.bfloat16, torch.nan, torch.inf
EVERY = torch.arange(-(2**15), 2**15).to(torch.int16).view(BF16)
KERNELS = pytest.mark.parametrize("backend", ["triton", "helion"])
gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")


def h(gate, up):
    gate, up = torch.tensor([gate], dtype=BF16), torch.tensor([up], dtype=BF16)
    return mxspec.swiglu(gate, up, backend="reference")[0]


def bits(t):
    return [b & 0xFFFF for b in t.view(torch.int16).tolist()]


def test_golden_silu_is_0_at_0_and_the_gate_at_128():
    assert h([0.0, -0.0, 128.0, 128.0], [5.0, 5.0, 7.0, -0.5]).tolist() == [0.0, 0.0, 896.0, -64.0]
    assert bits(h([0.0, -0.0], [5.0, 5.0])) == [0, 0x8000]


def test_golden_silu_of_1():
    """The sigmoid of 1 is 0.7310586. In bfloat16, silu(1) is 187/256, and silu(-1) is -0.2689414, which is -138/512."""
    assert h([1.0, -1.0], [1.0, 1.0]).tolist() == [187 / 256, -138 / 512]
    assert bits(h([1.0, -1.0], [1.0, 1.0])) == [0x3F3B, 0xBE8A]


def test_golden_silu_is_rounded_before_the_product():
    """silu(1) is 187.15/256 and silu(2) is 450.97/256. In bfloat16 they are 187/256 and 450/256.

    The products are 188.46/256 and 896.48/256. Without the first rounding they would be 188.61/256 and 898.4/256, and
    the results 189/256 and 900/256.
    """
    assert h([1.0, 2.0], [1.0078125, 1.9921875]).tolist() == [188 / 256, 896 / 256]


def test_golden_a_sigmoid_below_the_smallest_normal_number_is_0():
    """e^-87 is above 2^-126, and e^-87.5 below."""
    got = h([-87.0, -87.5, -1000.0, -88.0], [2.0**120, 2.0**120, 2.0**120, -1.0])
    assert got[0].item() == pytest.approx(-87 * 1.6458115e-38 * 2.0**120, rel=4e-3)
    assert bits(got[1:]) == [0x8000, 0x8000, 0]


def test_golden_special_values():
    got = h([NAN, 1.0, -INF, INF, INF, INF, 2.0**127, 1.0], [1.0, NAN, 0.0, 2.0, -2.0, 0.0, 4.0, -INF]).tolist()
    assert [str(v) for v in got] == ["nan", "nan", "nan", "inf", "-inf", "nan", "inf", "-inf"]


def test_golden_subnormal_numbers_keep_their_values():
    """silu(g) is g / 2 near 0. A tie is rounded to even: half of 2^-133 is 0, and half of 3 * 2^-133 is 2 * 2^-133."""
    assert bits(h([2.0**-132, 2.0**-133, 3 * 2.0**-133, -(2.0**-126)], [1.0] * 4)) == [1, 0, 2, 0x8040]
    assert bits(h([128.0, -128.0], [2.0**-133, 2.0**-133])) == [128, 0x8000]


def test_golden_shapes():
    for shape in ((0, 5), (3, 0), (0, 0), (1, 1)):
        out = mxspec.swiglu(torch.zeros(shape, dtype=BF16), torch.zeros(shape, dtype=BF16), backend="reference")
        assert (out.shape, out.dtype) == (shape, BF16)
    turned = torch.ones(4, 3, dtype=BF16).mT
    assert mxspec.swiglu(turned, turned, backend="reference").stride() == (4, 1)


def test_every_gate_is_as_pytorch_has_it():
    up = torch.ones_like(EVERY)[None]
    got = mxspec.swiglu(EVERY[None], up, backend="reference")[0]
    wanted = torch.nn.functional.silu(EVERY)
    differ = (got.view(torch.int16) != wanted.view(torch.int16)) & ~(got.isnan() & wanted.isnan())
    assert EVERY[differ].tolist() == [-87.5, -88.0, -88.5]


def test_these_are_the_values_that_the_quantizer_quantizes():
    gate_up, offs = gates(200, 512), ends(130, 190)
    codes = swiglu_fp8_quantize_rowcol_groups(gate_up, offs)
    values = mxspec.swiglu(*gate_up.chunk(2, -1), backend="reference")
    for one, other in zip(codes, mxspec.fp8_quantize_rowcol_groups(values, offs, backend="reference"), strict=True):
        assert u8(one.contiguous()).equal(u8(other.contiguous()))


def test_it_has_no_gradient():
    gate = torch.ones(2, 8, dtype=BF16, requires_grad=True)
    out = mxspec.swiglu(gate, gate)
    with pytest.raises(RuntimeError, match="swiglu has no gradient"):
        out.sum().backward()


def test_compiled_it_gives_the_same():
    torch._dynamo.reset()
    gate_up = gates(5, 80)
    fn = lambda t: mxspec.swiglu(*t.chunk(2, -1)) + 1  # noqa: E731
    assert torch.compile(fn, fullgraph=True, backend="aot_eager")(gate_up).equal(fn(gate_up))


@runs_kernels
@KERNELS
def test_rows_beyond_2_to_the_31(backend):
    """Rows lie 2^28 elements apart, in one tensor with both halves."""
    memory = torch.empty(10 * 2**28, dtype=BF16, device=DEVICE)
    gate, up = (memory.as_strided((10, 40), (2**28, 1), start) for start in (0, 40))
    gate.copy_(gates(10, 80)[:, :40])
    up.copy_(gates(10, 80)[:, 40:])
    got = mxspec.swiglu(gate, up, backend=backend)
    assert got.equal(mxspec.swiglu(gate.contiguous(), up.contiguous(), backend="reference"))


@gpu
@KERNELS
@pytest.mark.parametrize("shape", [(2**31 + 8, 1), (1, 2**31 + 8), (2**20 + 1, 2048)], ids=str)
def test_more_than_2_to_the_31_elements(shape, backend):
    gate = torch.full(shape, 128.0, dtype=BF16, device=DEVICE)
    assert bool((mxspec.swiglu(gate, gate, backend=backend) == 2.0**14).all())


def test_bench_cases_are_the_matrices():
    op = dispatch.reference("swiglu")
    (case,) = op.spec.bench_cases(Shapes(matrices=((64, 128),)))
    args = case.args()
    assert (case.name, *(t.shape for t in args)) == ("64x128", (64, 128), (64, 128))
    assert args[0].untyped_storage().data_ptr() == args[1].untyped_storage().data_ptr()
    assert op.spec.bytes_moved(args, (op(*args),)) == 64 * 128 * 6
