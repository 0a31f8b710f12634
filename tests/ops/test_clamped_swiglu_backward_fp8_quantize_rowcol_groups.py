"""clamped_swiglu_backward_fp8_quantize_rowcol_groups: literal gradients, limits, roundings, and autograd's gradient."""

from decimal import Decimal, localcontext

import pytest
import torch

import mxspec
from mxspec import dispatch
from mxspec.check import sqnr_db
from mxspec.reference.common.clamped_swiglu import clamped_swiglu_backward, slope
from mxspec.shapes import Shapes
from tests.helpers import ends, u8

BF16, NAN, INF = torch.bfloat16, torch.nan, torch.inf
EVERY = torch.arange(-(2**15), 2**15).to(torch.int16).view(BF16)


def quantize(*args, **options):
    return mxspec.clamped_swiglu_backward_fp8_quantize_rowcol_groups(*args, backend="reference", **options)


def zeros(M, columns):
    return torch.zeros(M, columns, dtype=BF16)


def gradients(*rows):
    """The gradients of the gates and of the ups."""
    out = clamped_swiglu_backward(*(torch.tensor([row], dtype=BF16) for row in rows))
    return out[0, ::2], out[0, 1::2]


def test_golden_the_gradients_alternate():
    """At a gate of 0 the derivative is 0.5 and glu is 0: d_gate is 2 * (6 + 1) * 0.5, in column 4."""
    gate_up, dh = zeros(1, 32), zeros(1, 16)
    gate_up[0, 5], dh[0, 2] = 6.0, 2.0
    q_row, s_row, q_col, s_col, start, end = quantize(gate_up, zeros(1, 32), dh, ends(1))
    assert (q_row.shape, s_row.shape, q_col.shape, s_col.shape) == ((1, 32), (1, 1), (32, 256), (32, 2))
    assert (start.tolist(), end.tolist()) == ([0], [128])
    assert u8(q_row).nonzero().tolist() == [[0, 4]]
    assert (q_row[0, 4].item(), s_row[0, 0].item()) == (448.0, 0.015625)  # 448 / 64 is 7
    assert u8(q_col).flatten().nonzero().tolist() == [[4 * 128]]
    gate_up[0, 4] = 7.5  # above the limit: d_gate is 0; d_up is 2 * 7, in column 5
    q_row, s_row, *_ = quantize(gate_up, zeros(1, 32), dh, ends(1))
    assert u8(q_row).nonzero().tolist() == [[0, 5]]
    assert s_row.item() == 0.03125


def test_golden_each_group_has_its_bias_and_a_row_without_a_group_has_none():
    bias = zeros(2, 32)
    bias[:, 1] = torch.tensor([6.0, 2.5])  # up
    dh = zeros(3, 16)
    dh[:, 0] = 2.0
    _, s_row, _, s_col, *_ = quantize(zeros(3, 32), bias, dh, ends(1, 2))
    assert s_row.flatten().tolist() == pytest.approx([7 / 448, 3.5 / 448, 1 / 448], rel=1e-6)
    assert s_col[0].tolist() == [*s_row.flatten().tolist()[:2], 0.0]


def test_golden_at_a_limit_the_gradient_passes_and_beyond_it_is_0():
    gate, up = [7.0, 7.03125, INF, 0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 7.0, -7.0, 7.03125, -INF]
    d_gate, d_up = gradients(gate, up, [1.0] * 7)
    assert d_gate.tolist() == [2.0, 0.0, 0.0, 4.0, -3.0, 4.0, -3.0]
    assert d_up.tolist() == [7.0, 7.0, 7.0, 0.0, 0.0, 0.0, 0.0]
    _, d_up = gradients([7.0] * 4, [7.0, -7.0, 7.03125, -7.03125], [1.0] * 4)
    assert d_up.tolist() == [7.0, 7.0, 0.0, 0.0]


def test_golden_roundings():
    """s(1) is 0.8457956, so glu(1) is 217/256 in bfloat16, and slope(1) is s + 1.702 * s * (1 - s) = 1.0677766.

    In bfloat16 this is 137/128. d_glu is 1.0078125 * 1.0078125 = 1.01568604, in bfloat16 130/128. Times 137/128 this is
    139.14/128.
    """
    d_gate, d_up = gradients([1.0, 1.0], [0.0, 0.0078125], [1.0, 1.0078125])
    assert d_gate.tolist() == [137 / 128, 139 / 128]
    assert d_up.tolist() == [217 / 256, 219 / 256]


def test_golden_special_values():
    d_gate, d_up = gradients([NAN, 1.0, -INF, 1.0], [1.0, NAN, 1.0, 1.0], [1.0, 1.0, 1.0, NAN])
    assert [str(v) for v in d_gate.tolist()] == ["0.0", "nan", "nan", "nan"]
    assert [str(v) for v in d_up.tolist()] == ["nan", "0.0", "nan", "nan"]
    d_gate, d_up = gradients([-51.5, -51.5, 0.0], [1.0, 1.0, 6.0], [2.0, INF, 2.0**127])
    assert [str(v) for v in (*d_gate.tolist(), *d_up.tolist())] == ["0.0", "nan", "inf", "-0.0", "nan", "0.0"]


def test_slope_is_the_real_number_rounded():
    some = EVERY[EVERY.isfinite() & (EVERY <= 7) & (EVERY > -51.5) & (EVERY.abs() > 2.0**-20)]
    got = slope(some)
    middles = [(got.view(torch.int16) + step).view(BF16).double() for step in (-1, 1)]
    alpha = Decimal("1.702")
    with localcontext() as context:
        context.prec = 40
        for i, (g, mine) in enumerate(zip(some.tolist(), got.tolist(), strict=True)):
            s = 1 / (1 + (-alpha * Decimal(g)).exp())
            real = s + alpha * Decimal(g) * s * (1 - s)
            ends_of_rounding = sorted((Decimal(mine) + Decimal(end[i].item())) / 2 for end in middles)
            assert ends_of_rounding[0] < real < ends_of_rounding[1], g


def autograd(gate, up, dh):
    """The gradient of `GptOssExperts._apply_gate`, in the dtype of the arguments."""
    gate, up = (t.detach().clone().requires_grad_() for t in (gate, up))
    g, u = gate.clamp(min=None, max=7.0), up.clamp(min=-7.0, max=7.0)
    ((u + 1) * (g * torch.sigmoid(g * 1.702))).backward(dh)
    return torch.stack([gate.grad, up.grad], -1).flatten(1)


def test_it_is_nearer_to_the_real_numbers_than_autograd_in_bfloat16():
    torch.manual_seed(0)
    args = [(torch.randn(256, 1024) * scale).to(BF16) for scale in (3, 3, 1)]
    real = autograd(*(t.double() for t in args))
    ours, theirs = sqnr_db(clamped_swiglu_backward(*args), real), sqnr_db(autograd(*args), real)
    assert theirs + 1 < ours < theirs + 8
    assert ours > 47


def test_the_limits_pass_the_gradient_as_autograd_does():
    numbers = torch.tensor([6.96875, 7.0, 7.03125, -6.96875, -7.0, -7.03125, INF, NAN, 0.5]).to(BF16)
    gate, up = (t.reshape(1, -1) for t in torch.meshgrid(numbers, numbers, indexing="ij"))
    dh = torch.ones_like(gate)
    ours, theirs = clamped_swiglu_backward(gate, up, dh), autograd(gate, up, dh)
    assert (ours == 0).equal(theirs == 0)
    assert ours.isnan().equal(theirs.isnan())


def test_bench_cases_are_the_matrices():
    op = dispatch.reference("clamped_swiglu_backward_fp8_quantize_rowcol_groups")
    (case,) = op.spec.bench_cases(Shapes(matrices=((128, 128), (1024, 128))))
    args = case.args()
    assert (case.name, *(tuple(t.shape) for t in args)) == ("1024x128, G 8", (1024, 256), (8, 256), (1024, 128), (8,))
    assert [tuple(t.shape) for t in op(*args, check_offs=True)][:3] == [(1024, 256), (1024, 2), (256, 2048)]
