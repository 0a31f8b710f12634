"""swiglu_fp8_quantize_rowcol_groups: its roundings, gate and up, and PyTorch's own kernels for every gate."""

from decimal import Decimal, localcontext

import pytest
import torch

import mxspec
from mxspec import dispatch
from mxspec.cases.common.swiglu import every_gate, gates
from mxspec.reference.common.swiglu import sigmoid, silu, swiglu
from mxspec.shapes import Shapes
from tests.helpers import ends, u8

BF16 = torch.bfloat16
OF_ZEROS = 0x2720D7C5  # 1e-12 / 448, the stored scale of a block of zeros
EVERY = torch.arange(-(2**15), 2**15).to(torch.int16).view(BF16)
WITH_S_OF_0 = [-87.5, -88.0, -88.5]  # here PyTorch's s is subnormal, and silu is a number of bfloat16


def quantize(*args, **options):
    return mxspec.swiglu_fp8_quantize_rowcol_groups(*args, backend="reference", **options)


def zeros(M, columns):
    return torch.zeros(M, columns, dtype=BF16)


def other_bits(a, b):
    """Where bfloat16 numbers differ in a bit; NaN equals NaN."""
    return (a.view(torch.int16) != b.view(torch.int16)) & ~(a.isnan() & b.isnan())


def test_golden_the_gate_is_the_first_half():
    """silu(128) is 128, since s is 1. A gate of 0 gives 0, whatever up is. I is 256."""
    gate_up = zeros(2, 512)
    gate_up[0, 130], gate_up[0, 256 + 130] = 128.0, 7.0
    gate_up[1, 3], gate_up[1, 256 + 4] = 128.0, 7.0  # no up beside this gate, no gate beside this up
    q_row, s_row, q_col, s_col, start, end = quantize(gate_up, ends(2))
    assert (q_row.shape, s_row.shape, q_col.shape, s_col.shape) == ((2, 256), (2, 2), (256, 256), (256, 2))
    assert (start.tolist(), end.tolist()) == ([0], [128])
    assert u8(q_row).nonzero().tolist() == [[0, 130]]
    assert (q_row[0, 130].item(), s_row[0, 1].item()) == (448.0, 2.0)
    assert u8(q_col).flatten().nonzero().tolist() == [[130 * 128]]  # feature 130, token 0 of 128
    assert s_col[130].tolist() == [2.0, 0.0]


def test_golden_silu_is_rounded_before_it_is_multiplied():
    """silu(1) is 0.731 = 187.15 / 256, rounded 187 / 256. Times 180 / 128 it is 131.48 / 128, and not 131.59 / 128."""
    gate_up = zeros(1, 256)
    gate_up[0, 0], gate_up[0, 128] = 1.0, 180 / 128
    _, s_row, _, s_col, *_ = quantize(gate_up, ends(1))
    assert s_row[0, 0].item() * 448 == pytest.approx(131 / 128, rel=1e-6)
    assert s_col[0, 0].item() == s_row[0, 0].item()


def test_golden_a_sigmoid_below_the_smallest_normal_number_is_0():
    """e^-87 is above 2^-126, and e^-87.5 below: -87 * e^-87 * 2^120 is about -1.9, and the other results are -0."""
    gate_up = zeros(3, 256)
    gate_up[:, 0] = torch.tensor([-87.0, -87.5, -1000.0])
    gate_up[:, 128] = 2.0**120
    q_row, s_row, q_col, *_ = quantize(gate_up, ends(1, 2, 3))
    assert u8(q_row)[:, 0].tolist() == [0xFE, 0x80, 0x80]
    assert s_row[0, 0].item() * 448 == pytest.approx(1.9, rel=0.01)
    assert s_row[1:].view(torch.int32).tolist() == [[OF_ZEROS]] * 2
    # Each group begins at 128 * 128 codes, with feature 0.
    assert u8(q_col).flatten()[[0, 128 * 128, 2 * 128 * 128]].tolist() == [0xFE, 0x80, 0x80]


@pytest.mark.parametrize(("gate", "up"), [(-torch.inf, 1.0), (torch.inf, 1.0), (torch.nan, 0.0), (2.0**127, 2.0)])
def test_golden_special_values_make_two_blocks_nan(gate, up):
    """-Inf * 0 is NaN, and 2^127 * 2 is Inf in bfloat16."""
    gate_up = zeros(130, 512)
    gate_up[129, 0], gate_up[129, 256] = gate, up
    q_row, s_row, q_col, s_col, *_ = quantize(gate_up, ends(130))
    assert s_row.isnan().nonzero().tolist() == [[129, 0]]
    assert s_col.isnan().nonzero().tolist() == [[0, 1]]
    assert u8(q_row)[129].tolist() == [0x7F] * 128 + [0] * 128
    assert u8(q_col).flatten()[:512].tolist() == [0] * 128 + [0x7F] * 128 + [0] * 256


def test_golden_rows_of_no_group_and_empty_groups():
    gate_up = zeros(3, 256)
    gate_up[:, 0], gate_up[:, 128] = 64.0, torch.tensor([7.0, 14.0, 28.0])
    q_row, s_row, q_col, s_col, start, end = quantize(gate_up, ends(0, 1, 1, 2), scale_format="pow2")
    assert (start.tolist(), end.tolist()) == ([0, 0, 128, 128], [0, 128, 128, 256])
    assert (u8(q_row)[:, 0].tolist(), s_row.flatten().tolist()) == ([0x7E] * 3, [1.0, 2.0, 4.0])
    assert u8(q_col).flatten().nonzero().flatten().tolist() == [0, 128 * 128]
    assert s_col[0].tolist() == [1.0, 2.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("scale_format", ["fp32", "pow2"])
def test_it_is_pytorchs_silu_and_todays_quantizers(scale_format):
    gate_up, offs = gates(400, 768), ends(130, 130, 391)
    gate, up = gate_up.chunk(2, -1)
    h = torch.nn.functional.silu(gate) * up
    rows = mxspec.fp8_quantize_1x128(h, scale_major="mn", scale_format=scale_format)
    columns = mxspec.fp8_quantize_k_groups(h, offs, scale_format=scale_format)
    for one, other in zip(quantize(gate_up, offs, scale_format=scale_format), (*rows, *columns), strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        assert u8(one.contiguous()).equal(u8(other.contiguous()))


def test_every_gate_is_as_pytorch_has_it():
    differ = other_bits(silu(EVERY), torch.nn.functional.silu(EVERY))
    assert EVERY[differ].tolist() == WITH_S_OF_0
    assert silu(EVERY)[differ].view(torch.int16).tolist() == [-(2**15)] * 3  # -0


def test_the_case_of_every_gate_has_every_gate():
    gate_up = every_gate()
    assert gate_up[:, :128].reshape(-1).view(torch.int16).unique().numel() == 2**16
    gate, up = gate_up.chunk(2, -1)
    theirs = torch.nn.functional.silu(gate) * up
    assert sorted(gate[other_bits(swiglu(*gate_up.chunk(2, -1)), theirs)].tolist(), reverse=True) == WITH_S_OF_0


def exact_sigmoids(gate):
    """For each gate the real `1 / (1 + e^-gate)` rounded to fp32, and its distance to the nearest tie in ulps."""
    near = sigmoid(gate)
    below, above = (torch.nextafter(near, torch.full_like(near, end)) for end in (0.0, 2.0))
    rounded, distances = near.clone(), []
    with localcontext() as context:
        context.prec = 80
        for i, g in enumerate(gate.tolist()):
            s = 1 / (1 + (-Decimal(g)).exp())
            here, ulp = Decimal(near[i].item()), Decimal(above[i].item()) - Decimal(near[i].item())
            ties = [(here + Decimal(end[i].item())) / 2 for end in (below, above)]
            if not ties[0] < s < ties[1]:
                rounded[i] = (below if s < ties[0] else above)[i]
            distances.append(float(min(abs(s - tie) for tie in ties) / ulp))
    return rounded, torch.tensor(distances, dtype=torch.float64)


def test_sigmoid_is_the_real_number_rounded():
    """Below 2^-12 some gates lie so near to a tie that float64 alone cannot tell its side."""
    some = EVERY[EVERY.isfinite() & (EVERY.abs() < 90) & (EVERY.abs() > 2**-30) & (EVERY > -87.5)]
    exact, distance = exact_sigmoids(some)
    assert exact.equal(sigmoid(some))
    assert distance[some.abs() >= 2**-12].min() > 2**-20  # float64 has 2^-29 of such a unit
    assert distance.min() < 2**-40


def test_bench_cases_are_the_matrices():
    op = dispatch.reference("swiglu_fp8_quantize_rowcol_groups")
    (case,) = op.spec.bench_cases(Shapes(matrices=((128, 128), (1024, 128))))
    args = case.args()
    assert (case.name, args[0].shape) == ("1024x128, G 8", (1024, 256))
    assert [tuple(t.shape) for t in op(*args, check_offs=True)][:3] == [(1024, 128), (1024, 1), (128, 2048)]
