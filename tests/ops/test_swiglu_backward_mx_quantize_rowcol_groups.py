"""swiglu_backward_mx_quantize_rowcol_groups: d_gate before d_up, the roundings, and the ops that it consists of."""

import pytest
import torch

import mxspec
from mxspec import dispatch
from mxspec.cases.common.swiglu import gates
from mxspec.shapes import Shapes
from mxspec.spec import random_normal
from tests.helpers import ends, u8

BF16 = torch.bfloat16


def quantize(*args, **options):
    options = {"scale_layout": "plain", **options}
    return mxspec.swiglu_backward_mx_quantize_rowcol_groups(*args, backend="reference", **options)


def zeros(M, I=32):  # noqa: E741
    return torch.zeros(M, 2 * I, dtype=BF16), torch.zeros(M, I, dtype=BF16)


def test_golden_the_gradient_of_the_gate_comes_first():
    """The derivative of silu is 0.5 at 0 and 1 at 128. silu(0) is 0, and silu(128) is 128."""
    gate_up, dh = zeros(2)
    gate_up[0, 5], gate_up[0, 32 + 5], dh[0, 5] = 0.0, 896.0, 2.0  # d_gate = 2 * 896 * 0.5, d_up = 0
    gate_up[1, 6], gate_up[1, 32 + 6], dh[1, 6] = 128.0, 0.0, 14.0  # d_gate = 0, d_up = 14 * 128
    q_row, s_row, q_col, s_col, start, end = quantize(gate_up, dh, ends(1, 2))
    assert (q_row.shape, s_row.shape, q_col.shape, s_col.shape) == ((384, 64), (384, 2), (384, 64), (64, 12))
    assert (start.tolist(), end.tolist()) == ([0, 128], [128, 256])
    assert u8(q_row).nonzero().tolist() == u8(q_col).nonzero().tolist() == [[0, 5], [128, 32 + 6]]
    assert u8(q_row)[[0, 128], [5, 38]].tolist() == u8(q_col)[[0, 128], [5, 38]].tolist() == [0x7E, 0x7E]
    assert u8(s_row).nonzero().tolist() == [[0, 0], [128, 1]]
    assert u8(s_row)[[0, 128], [0, 1]].tolist() == [128, 129]
    assert u8(s_col).nonzero().tolist() == [[5, 0], [38, 4]]
    assert u8(s_col)[[5, 38], [0, 4]].tolist() == [128, 129]


def test_golden_both_halves_of_one_token():
    """At a gate of 128, d_gate = dh * up and d_up = dh * 128. Each has a block of its own."""
    gate_up, dh = zeros(1)
    gate_up[0, 0], gate_up[0, 32], dh[0, 0] = 128.0, -7.0, 64.0
    q_row, s_row, *_ = quantize(gate_up, dh, ends(1))
    assert (q_row[0, 0].item(), q_row[0, 32].item()) == (-448.0, 256.0)
    assert u8(s_row)[0].tolist() == [127, 127 + 5]  # 8192 / 448 is 18.3, and 2^5 is the next power of two


def test_golden_a_negative_gate_may_turn_the_sign():
    """At -2, s = 0.1192 and `1 - 2 * 0.8808` is -0.7616: the derivative is -0.0908, and silu is -0.2384.

    0.0908 / 448 is above 2^-13, and 0.2384 / 448 above 2^-11: the scales are 2^-12 and 2^-10.
    """
    gate_up, dh = zeros(1)
    gate_up[0, 0], gate_up[0, 32], dh[0, 0] = -2.0, 1.0, 1.0
    q_row, s_row, *_ = quantize(gate_up, dh, ends(1))
    assert u8(s_row)[0].tolist() == [127 - 12, 127 - 10]
    assert q_row[0, [0, 32]].float().tolist() == [-384.0, -240.0]  # -371.9 and -244.1, to 4 significant bits


def test_golden_a_sigmoid_of_0_leaves_zeros_with_signs():
    """s is 0 at -88: d_gate is `0 * (1 - 88)`, which is -0, and d_up is -0."""
    gate_up, dh = zeros(2)
    gate_up[:, 0], gate_up[:, 32] = -88.0, 2.0**100
    dh[:, 0] = torch.tensor([1.0, -1.0])
    q_row, s_row, q_col, s_col, *_ = quantize(gate_up, dh, ends(2))
    assert u8(q_row)[:2, [0, 32]].tolist() == u8(q_col)[:2, [0, 32]].tolist() == [[0x80, 0x80], [0, 0]]
    assert not u8(s_row).any()
    assert not u8(s_col).any()


@pytest.mark.parametrize("gate", [torch.inf, -torch.inf, torch.nan])
def test_golden_a_gate_that_is_no_number_makes_both_gradients_nan(gate):
    """Inf * (1 - 1) is NaN, and `-Inf * 0` too. dh * silu(Inf) is Inf, which makes its block NaN."""
    gate_up, dh = zeros(40)
    gate_up[35, 1], dh[35, 1] = gate, 1.0
    q_row, s_row, q_col, s_col, *_ = quantize(gate_up, dh, ends(40))
    assert (u8(s_row) == 255).nonzero().tolist() == [[35, 0], [35, 1]]
    assert (u8(s_col) == 255).nonzero().tolist() == [[1, 1], [33, 1]]
    assert u8(q_row)[35].tolist() == [0x7F] * 64
    assert u8(q_col)[:, 33].tolist() == [0] * 32 + [0x7F] * 32 + [0] * 192


@pytest.mark.parametrize("options", [{"scale_layout": "blocked"}, {"pad_to": 256}, {"elem_dtype": "e5m2"}])
def test_it_is_the_gradient_and_the_quantizer(options):
    gate_up, dh, offs = gates(400, 320), random_normal(400, 160, seed=3), ends(130, 130, 391)
    options = {"scale_layout": "plain", **options}
    gradient = mxspec.swiglu_backward(*gate_up.chunk(2, -1), dh)
    expected = mxspec.mx_quantize_rowcol_groups(gradient, offs, **options)
    for one, other in zip(quantize(gate_up, dh, offs, **options), expected, strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        assert u8(one.contiguous()).equal(u8(other.contiguous()))


def test_bench_cases_are_the_matrices():
    op = dispatch.reference("swiglu_backward_mx_quantize_rowcol_groups")
    (case,) = op.spec.bench_cases(Shapes(matrices=((128, 128), (1024, 128))))
    args = case.args()
    assert (case.name, args[0].shape, args[1].shape) == ("1024x128, G 8", (1024, 256), (1024, 128))
    assert [tuple(t.shape) for t in op(*args, check_offs=True)][:3] == [(2048, 256), (3072, 8), (2048, 256)]
