"""swiglu_mx_quantize_rowcol_groups: gate and up, the roundings of silu, and the ops that it consists of."""

import pytest
import torch

import mxspec
from mxspec import dispatch
from mxspec.cases.common.swiglu import gates
from mxspec.shapes import Shapes
from tests.helpers import ends, u8

BF16 = torch.bfloat16


def quantize(*args, **options):
    return mxspec.swiglu_mx_quantize_rowcol_groups(*args, backend="reference", **options)


def zeros(M, columns):
    return torch.zeros(M, columns, dtype=BF16)


def test_golden_the_gate_is_the_first_half():
    """silu(128) is 128, since s is 1. A gate of 0 gives 0, whatever up is. I is 64."""
    gate_up = zeros(2, 128)
    gate_up[0, 40], gate_up[0, 64 + 40] = 128.0, 7.0  # 896 = 2 * 448
    gate_up[1, 3], gate_up[1, 64 + 4] = 128.0, 7.0  # no up beside this gate, no gate beside this up
    q_row, s_row, q_col, s_col, start, end = quantize(gate_up, ends(2), scale_layout="plain")
    assert (q_row.shape, s_row.shape, q_col.shape, s_col.shape) == ((256, 64), (256, 2), (256, 64), (64, 8))
    assert (start.tolist(), end.tolist()) == ([0], [128])
    assert u8(q_row).nonzero().tolist() == u8(q_col).nonzero().tolist() == [[0, 40]]
    assert (q_row[0, 40].item(), q_col[0, 40].item()) == (448.0, 448.0)
    assert u8(s_row).nonzero().tolist() == [[0, 1]]
    assert u8(s_col).nonzero().tolist() == [[40, 0]]
    assert (u8(s_row)[0, 1].item(), u8(s_col)[40, 0].item()) == (128, 128)


def test_golden_silu_is_rounded_before_it_is_multiplied():
    """silu(2) is 1.7616 = 225.48 / 128, rounded 225 / 128.

    Times 255 / 128 it is 448.2 / 128, rounded 448 / 128, which is 448 * 2^-7. Silu not rounded would give 449.2 / 128,
    rounded 450 / 128, whose scale is 2^-6.
    """
    gate_up = zeros(1, 64)
    gate_up[0, 0], gate_up[0, 32] = 2.0, 255 / 128
    q_row, s_row, q_col, s_col, *_ = quantize(gate_up, ends(1), scale_layout="plain")
    assert (u8(s_row)[0, 0].item(), u8(s_col)[0, 0].item()) == (120, 120)
    assert (q_row[0, 0].item(), q_col[0, 0].item()) == (448.0, 448.0)


def test_golden_a_sigmoid_below_the_smallest_normal_number_is_0():
    """e^-87 is above 2^-126, and e^-87.5 below: the results are about -1.9, and -0. Scales of -1.9: 2^-7."""
    gate_up = zeros(3, 64)
    gate_up[:, 0] = torch.tensor([-87.0, -87.5, -1000.0])
    gate_up[:, 32] = 2.0**120
    q_row, s_row, q_col, *_ = quantize(gate_up, ends(1, 2, 3), scale_layout="plain")
    assert u8(q_row)[[128, 256], 0].tolist() == u8(q_col)[[128, 256], 0].tolist() == [0x80, 0x80]
    assert u8(s_row)[[0, 128, 256], 0].tolist() == [120, 0, 0]
    assert q_row[0, 0].item() == pytest.approx(-1.9 * 128, rel=0.05)


@pytest.mark.parametrize(("gate", "up"), [(-torch.inf, 1.0), (torch.inf, 1.0), (torch.nan, 0.0), (2.0**127, 2.0)])
def test_golden_special_values_make_two_blocks_nan(gate, up):
    """-Inf * 0 is NaN, and 2^127 * 2 is Inf in bfloat16."""
    gate_up = zeros(40, 128)
    gate_up[35, 0], gate_up[35, 64] = gate, up
    q_row, s_row, q_col, s_col, *_ = quantize(gate_up, ends(40), scale_layout="plain")
    assert (u8(s_row) == 255).nonzero().tolist() == [[35, 0]]
    assert (u8(s_col) == 255).nonzero().tolist() == [[0, 1]]
    assert u8(q_row)[35].tolist() == [0x7F] * 32 + [0] * 32
    assert u8(q_col)[:, 0].tolist() == [0] * 32 + [0x7F] * 32 + [0] * 192


@pytest.mark.parametrize("options", [{}, {"scale_layout": "plain", "pad_to": 256}, {"elem_dtype": "e5m2"}])
def test_it_is_swiglu_and_the_quantizer(options):
    gate_up, offs = gates(400, 320), ends(130, 130, 391)
    expected = mxspec.mx_quantize_rowcol_groups(mxspec.swiglu(*gate_up.chunk(2, -1)), offs, **options)
    for one, other in zip(quantize(gate_up, offs, **options), expected, strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        assert u8(one.contiguous()).equal(u8(other.contiguous()))


def test_bench_cases_are_the_matrices():
    op = dispatch.reference("swiglu_mx_quantize_rowcol_groups")
    (case,) = op.spec.bench_cases(Shapes(matrices=((128, 128), (1024, 128))))
    args = case.args()
    assert (case.name, args[0].shape) == ("1024x128, G 8", (1024, 256))
    assert [tuple(t.shape) for t in op(*args, check_offs=True)][:3] == [(2048, 128), (3072, 4), (2048, 128)]
