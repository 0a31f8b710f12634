"""swiglu_backward_fp8_quantize_rowcol_groups: d_gate before d_up, the roundings, and PyTorch's own kernels."""

import pytest
import torch

import mxspec
from mxspec import dispatch
from mxspec.cases.common.swiglu import gates
from mxspec.reference.common.swiglu import sigmoid, swiglu_backward
from mxspec.shapes import Shapes
from mxspec.spec import random_normal
from tests.helpers import ends, u8

BF16 = torch.bfloat16
OF_ZEROS = 0x2720D7C5  # 1e-12 / 448, the stored scale of a block of zeros
WITH_S_OF_0 = [-87.5, -88.0, -88.5]  # here PyTorch's s is subnormal, and its gradient a number of bfloat16


def quantize(*args, **options):
    return mxspec.swiglu_backward_fp8_quantize_rowcol_groups(*args, backend="reference", **options)


def zeros(M):
    return torch.zeros(M, 256, dtype=BF16), torch.zeros(M, 128, dtype=BF16)


def other_bits(a, b):
    """Where bfloat16 numbers differ in a bit; NaN equals NaN."""
    return (a.view(torch.int16) != b.view(torch.int16)) & ~(a.isnan() & b.isnan())


def test_golden_a_block_may_hold_both_gradients():
    """I is 16: the 32 columns of the gradient are one block, whose amax is that of d_gate and d_up together."""
    gate_up, dh = torch.zeros(1, 32, dtype=BF16), torch.zeros(1, 16, dtype=BF16)
    gate_up[0, 15], dh[0, 15] = 128.0, 14.0  # d_up = 14 * 128 = 4 * 448, d_gate = 0
    gate_up[0, 16 + 3], dh[0, 3] = 448.0, 2.0  # d_gate = 2 * 448 * 0.5, d_up = 0
    q_row, s_row, *_ = quantize(gate_up, dh, ends(1))
    assert (q_row.shape, s_row.tolist()) == ((1, 32), [[4.0]])
    assert q_row[0, [3, 31]].tolist() == [112.0, 448.0]
    assert u8(q_row).nonzero().tolist() == [[0, 3], [0, 31]]


def test_golden_the_gradient_of_the_gate_comes_first():
    """The derivative of silu is 0.5 at 0 and 1 at 128. silu(0) is 0, and silu(128) is 128."""
    gate_up, dh = zeros(2)
    gate_up[0, 5], gate_up[0, 128 + 5], dh[0, 5] = 0.0, 896.0, 2.0  # d_gate = 2 * 896 * 0.5, d_up = 0
    gate_up[1, 6], gate_up[1, 128 + 6], dh[1, 6] = 128.0, 0.0, 14.0  # d_gate = 0, d_up = 14 * 128
    q_row, s_row, q_col, s_col, start, end = quantize(gate_up, dh, ends(1, 2))
    assert (q_row.shape, s_row.shape, q_col.shape, s_col.shape) == ((2, 256), (2, 2), (256, 384), (256, 3))
    assert (start.tolist(), end.tolist()) == ([0, 128], [128, 256])
    assert u8(q_row).nonzero().tolist() == [[0, 5], [1, 128 + 6]]
    assert (q_row[0, 5].item(), q_row[1, 128 + 6].item()) == (448.0, 448.0)
    assert (s_row[0, 0].item(), s_row[1, 1].item()) == (2.0, 4.0)
    assert s_row.contiguous().view(torch.int32)[[0, 1], [1, 0]].tolist() == [OF_ZEROS] * 2
    # Each group is a matrix of 256 features and 128 tokens.
    places = [5 * 128, 256 * 128 + (128 + 6) * 128]
    assert u8(q_col).flatten().nonzero().flatten().tolist() == places
    assert (s_col[5, 0].item(), s_col[128 + 6, 1].item()) == (2.0, 4.0)
    assert not s_col[:, 2].any()


def test_golden_both_halves_of_one_token():
    """At a gate of 128, d_gate = dh * up and d_up = dh * 128."""
    gate_up, dh = zeros(1)
    gate_up[0, 0], gate_up[0, 128], dh[0, 0] = 128.0, -7.0, 64.0
    q_row, s_row, *_ = quantize(gate_up, dh, ends(1))
    assert (q_row[0, 0].item(), q_row[0, 128].item()) == (-448.0, 448.0)
    assert s_row[0].tolist() == [1.0, pytest.approx(64 * 128 / 448)]


def test_golden_a_negative_gate_may_turn_the_sign():
    """At -2, s = 0.1192 and `1 - 2 * 0.8808` is -0.7616: the derivative is -0.0908, and silu is -0.2384."""
    gate_up, dh = zeros(1)
    gate_up[0, 0], gate_up[0, 128], dh[0, 0] = -2.0, 1.0, 1.0
    q_row, s_row, *_ = quantize(gate_up, dh, ends(1))
    assert u8(q_row)[0, [0, 128]].tolist() == [0xFE, 0xFE]
    assert (s_row[0] * 448).tolist() == [pytest.approx(0.0908, rel=4e-3), pytest.approx(0.2384, rel=4e-3)]


def test_golden_a_sigmoid_of_0_leaves_zeros_with_signs():
    """s is 0 at -88: d_gate is `0 * (1 - 88)`, which is -0, and d_up is -0."""
    gate_up, dh = zeros(2)
    gate_up[:, 0], gate_up[:, 128] = -88.0, 2.0**100
    dh[:, 0] = torch.tensor([1.0, -1.0])
    q_row, s_row, q_col, *_ = quantize(gate_up, dh, ends(2))
    assert u8(q_row)[:, [0, 128]].tolist() == [[0x80, 0x80], [0, 0]]
    assert (s_row.contiguous().view(torch.int32) == OF_ZEROS).all()
    assert u8(q_col).flatten()[[0, 1, 128 * 128, 128 * 128 + 1]].tolist() == [0x80, 0, 0x80, 0]


def test_golden_d_silu_is_rounded_to_bfloat16():
    """129/128 * 129/128 is 130.008/128, rounded 130/128. Beyond bfloat16's range it is Inf, and d_gate too."""
    gate_up, dh = zeros(2)
    gate_up[:, 0] = 128.0
    gate_up[:, 128] = torch.tensor([129 / 128, 2.0**127])
    dh[:, 0] = torch.tensor([129 / 128, 2.0])
    _, s_row, *_ = quantize(gate_up, dh, ends(1, 2))
    assert s_row[0, 0].item() * 448 == pytest.approx(130 / 128, rel=1e-6)
    assert s_row.isnan().tolist() == [[False, False], [True, False]]


@pytest.mark.parametrize("gate", [torch.inf, -torch.inf, torch.nan])
def test_golden_a_gate_that_is_no_number_makes_both_gradients_nan(gate):
    """Inf * (1 - 1) is NaN, and `-Inf * 0` too. dh * silu(Inf) is Inf, which makes its block NaN."""
    gate_up, dh = zeros(130)
    gate_up[129, 1], dh[129, 1] = gate, 1.0
    q_row, s_row, q_col, s_col, *_ = quantize(gate_up, dh, ends(130))
    assert s_row.isnan().nonzero().tolist() == [[129, 0], [129, 1]]
    assert s_col.isnan().nonzero().tolist() == [[1, 1], [128 + 1, 1]]
    assert u8(q_row)[129].tolist() == [0x7F] * 256
    assert u8(q_col).flatten()[256:512].tolist() == [0] * 128 + [0x7F] * 128


def test_golden_rows_of_no_group_and_empty_groups():
    gate_up, dh = zeros(3)
    gate_up[:, 128], dh[:, 0] = 448.0, torch.tensor([2.0, 4.0, 8.0])
    q_row, s_row, q_col, s_col, start, end = quantize(gate_up, dh, ends(0, 1, 1, 2), scale_format="pow2")
    assert (start.tolist(), end.tolist()) == ([0, 0, 128, 128], [0, 128, 128, 256])
    assert (u8(q_row)[:, 0].tolist(), s_row[:, 0].tolist()) == ([0x7E] * 3, [1.0, 2.0, 4.0])
    assert u8(q_col).flatten().nonzero().flatten().tolist() == [0, 256 * 128]
    assert s_col[0].tolist() == [1.0, 2.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("scale_format", ["fp32", "pow2"])
def test_it_is_pytorchs_kernels_and_todays_quantizers(scale_format):
    gate_up, dh, offs = gates(400, 768), random_normal(400, 384, seed=3), ends(130, 130, 391)
    gate, up = gate_up.chunk(2, -1)
    d_up, d_gate = dh * torch.nn.functional.silu(gate), torch.ops.aten.silu_backward(dh * up, gate)
    gradient = torch.cat([d_gate, d_up], -1)
    rows = mxspec.fp8_quantize_1x128(gradient, scale_major="mn", scale_format=scale_format)
    columns = mxspec.fp8_quantize_k_groups(gradient, offs, scale_format=scale_format)
    for one, other in zip(quantize(gate_up, dh, offs, scale_format=scale_format), (*rows, *columns), strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        assert u8(one.contiguous()).equal(u8(other.contiguous()))


def test_autograd_gives_the_same_gradient():
    gate_up, dh = gates(64, 512), random_normal(64, 256, seed=3)
    leaf = gate_up.clone().requires_grad_()
    gate, up = leaf.chunk(2, -1)
    (torch.nn.functional.silu(gate) * up).backward(dh)
    assert swiglu_backward(*gate_up.chunk(2, -1), dh).equal(leaf.grad)


@pytest.fixture(scope="module")
def pairs():
    """Every finite gate beside every mantissa of d_silu: `(gate, d_silu, d_gate)`, each `(65280, 128)`."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(BF16)
    gate = every[every.isfinite()][:, None].repeat(1, 128)
    d_silu = (1 + torch.arange(128) / 128).bfloat16().repeat(len(gate), 1)
    return gate, d_silu, swiglu_backward(gate, torch.ones_like(gate), d_silu)[:, :128]


def test_every_gate_and_every_mantissa_is_as_pytorch_has_it(pairs):
    gate, d_silu, d_gate = pairs
    assert gate.numel() == 255 * 2**8 * 2**7
    differ = other_bits(d_gate, torch.ops.aten.silu_backward(d_silu, gate))
    assert gate[:, 0][differ.any(1)].tolist() == WITH_S_OF_0


def with_sigmoid(pairs, s, fused):
    gate, d_silu, _ = pairs
    gate, one = gate.double() if fused else gate.float(), 1 - s
    return ((d_silu.float() * s) * (1 + gate * one).float()).bfloat16()


def test_a_fused_multiply_add_gives_the_same_bits(pairs):
    """`1 + gate * (1 - s)` with one rounding in place of two. A float64 holds the product exactly."""
    s = sigmoid(pairs[0])
    assert not other_bits(with_sigmoid(pairs, s, fused=False), pairs[2]).any()
    assert not other_bits(with_sigmoid(pairs, s, fused=True), pairs[2]).any()


def test_a_sigmoid_that_is_off_by_one_does_not(pairs):
    """So a kernel needs a sigmoid that is right in its last bit for some gates. The test finds such pairs."""
    s = sigmoid(pairs[0])
    between = (s > 0) & (s < 1)
    for toward in (0.0, 2.0):
        off = torch.where(between, torch.nextafter(s, torch.full_like(s, toward)), s)
        differ = other_bits(with_sigmoid(pairs, off, fused=False), pairs[2])
        assert 0 < differ.sum() < 20


def test_bench_cases_are_the_matrices():
    op = dispatch.reference("swiglu_backward_fp8_quantize_rowcol_groups")
    (case,) = op.spec.bench_cases(Shapes(matrices=((128, 128), (1024, 128))))
    args = case.args()
    assert (case.name, args[0].shape, args[1].shape) == ("1024x128, G 8", (1024, 256), (1024, 128))
    assert [tuple(t.shape) for t in op(*args, check_offs=True)][:3] == [(1024, 256), (1024, 2), (256, 2048)]
