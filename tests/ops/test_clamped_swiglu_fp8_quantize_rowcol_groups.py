"""clamped_swiglu_fp8_quantize_rowcol_groups: literal values, roundings, limits, biases, and eager kernels."""

from decimal import Decimal, localcontext

import pytest
import torch

import mxspec
from mxspec import dispatch
from mxspec.check import sqnr_db
from mxspec.reference.common.clamped_swiglu import clamped_swiglu, glu
from mxspec.shapes import Shapes
from tests.helpers import ends, u8

BF16 = torch.bfloat16
EVERY = torch.arange(-(2**15), 2**15).to(torch.int16).view(BF16)


def quantize(*args, **options):
    return mxspec.clamped_swiglu_fp8_quantize_rowcol_groups(*args, backend="reference", **options)


def zeros(M, columns):
    return torch.zeros(M, columns, dtype=BF16)


def h(gate, up):
    return clamped_swiglu(*(torch.tensor(t, dtype=BF16) for t in (gate, up)))


def bits(t):
    return [b & 0xFFFF for b in t.view(torch.int16).tolist()]


def test_golden_gate_and_up_alternate():
    """glu(7) is 7 * 0.9999933, in bfloat16 7. Times 6 + 1 this is 49. A gate of 0 gives 0, whatever up is."""
    gate_up = zeros(2, 512)
    gate_up[0, 2 * 130], gate_up[0, 2 * 130 + 1] = 7.0, 6.0
    gate_up[1, 2 * 3 + 1] = 6.0
    q_row, s_row, q_col, s_col, start, end = quantize(gate_up, zeros(1, 512), ends(2))
    assert (q_row.shape, s_row.shape, q_col.shape, s_col.shape) == ((2, 256), (2, 2), (256, 256), (256, 2))
    assert (start.tolist(), end.tolist()) == ([0], [128])
    assert u8(q_row).nonzero().tolist() == [[0, 130]]
    assert (q_row[0, 130].item(), s_row[0, 1].item()) == (448.0, pytest.approx(49 / 448, rel=1e-6))
    assert u8(q_col).flatten().nonzero().tolist() == [[130 * 128]]


def test_golden_each_group_has_its_bias_and_a_row_without_a_group_has_none():
    """The biases 7 and 3.5 of up, beside gates of 7: 7 * 8 and 7 * 4.5, and 7 * 1 without a bias."""
    gate_up, bias = zeros(3, 32), zeros(2, 32)
    gate_up[:, 0] = 7.0
    bias[:, 1] = torch.tensor([7.0, 3.5])
    _, s_row, _, s_col, *_ = quantize(gate_up, bias, ends(1, 2))
    assert s_row.flatten().tolist() == pytest.approx([56 / 448, 31.5 / 448, 7 / 448], rel=1e-6)
    assert s_col[0].tolist() == [*s_row.flatten().tolist()[:2], 0.0]


def test_golden_the_sum_with_the_bias_is_rounded_to_bfloat16():
    """7 + 2^-6 is a tie between 7 and 7 + 2^-5 and becomes 7; -1 + 2^-9 is a tie, and becomes -1: u + 1 is then 0."""
    gate_up, bias = zeros(1, 32), zeros(1, 32)
    gate_up[0, :2], bias[0, :2] = torch.tensor([7.0, -1.0]), torch.tensor([2.0**-6, 2.0**-10])
    assert u8(quantize(gate_up, bias, ends(1))[0])[0, 0].item() == 0


def test_golden_limits():
    """A gate above 7 counts as 7, an up above 7 as 7, and an up below -7 as -7. A gate has no lower limit."""
    inf = torch.inf
    assert h([8.0, inf, 7.0, 7.0, 7.0, 7.0], [0.0, 0.0, 9.0, inf, -9.0, -inf]).tolist() == [7, 7, 56, 56, -42, -42]
    assert h([-10.0], [0.0]).item() == pytest.approx(-10 / (1 + 2.718281828**17.02), rel=4e-3)


def test_golden_roundings():
    """1.702 and sigmoid(1.702) = 0.845796 are not rounded to bfloat16. glu(1) is 216.52/256, in bfloat16 217/256.

    1.0078125 + 1 is a tie between 2 and 2.015625, and becomes 2. 3.984375 + 1 is 4.984375, a tie, and becomes 5.
    """
    assert h([1.0, 1.0, 1.0], [0.0, 1.0078125, 3.984375]).tolist() == [217 / 256, 434 / 256, 1088 / 256]


def test_golden_special_values():
    nan, inf = torch.nan, torch.inf
    assert h([nan, 1.0, -inf], [1.0, nan, 1.0]).isnan().all()
    assert bits(h([-51.5, -1e38, -51.5, 0.0, -0.0], [0.0, 0.0, -3.0, 1.0, 1.0])) == [0x8000, 0x8000, 0, 0, 0x8000]
    assert h([-51.25], [0.0]).item() == pytest.approx(-51.25 * 1.3073e-38, rel=1e-2)
    # glu(g) is g / 2 near 0. A tie is rounded to even.
    assert bits(h([2.0**-132, 2.0**-133, 3 * 2.0**-133], [0.0] * 3)) == [1, 0, 2]
    gate_up = zeros(130, 512)
    gate_up[129, 0] = nan
    q_row, s_row, q_col, s_col, *_ = quantize(gate_up, zeros(1, 512), ends(130))
    assert s_row.isnan().nonzero().tolist() == [[129, 0]]
    assert s_col.isnan().nonzero().tolist() == [[0, 1]]
    assert u8(q_row)[129].tolist() == [0x7F] * 128 + [0] * 128
    assert u8(q_col).flatten()[:384].tolist() == [0] * 128 + [0x7F] * 128 + [0] * 128


def test_glu_is_the_real_number_rounded():
    some = EVERY[EVERY.isfinite() & (EVERY <= 7) & (EVERY > -51.5) & (EVERY.abs() > 2.0**-20)]
    got = glu(some)
    middles = [(got.view(torch.int16) + step).view(BF16).double() for step in (-1, 1)]
    with localcontext() as context:
        context.prec = 40
        for i, (g, mine) in enumerate(zip(some.tolist(), got.tolist(), strict=True)):
            real = Decimal(g) / (1 + (Decimal("-1.702") * Decimal(g)).exp())
            ends_of_rounding = sorted((Decimal(mine) + Decimal(end[i].item())) / 2 for end in middles)
            assert ends_of_rounding[0] < real < ends_of_rounding[1], g


def transformers_chain(gate_up, bias):
    """`GptOssExperts._apply_gate` of `gate_up + bias`, in the dtype of gate_up."""
    gate, up = (gate_up + bias)[:, ::2], (gate_up + bias)[:, 1::2]
    gate, up = gate.clamp(min=None, max=7.0), up.clamp(min=-7.0, max=7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


def test_it_is_nearer_to_the_real_numbers_than_the_eager_chain_in_bfloat16():
    torch.manual_seed(0)
    total = (torch.randn(256, 2048) * 2).to(BF16)
    real = transformers_chain(total.double(), 0)
    ours, theirs = (
        sqnr_db(clamped_swiglu(total[:, ::2], total[:, 1::2]), real),
        sqnr_db(transformers_chain(total, 0), real),
    )
    assert theirs + 0.3 < ours < theirs + 6
    assert ours > 50


def test_bench_cases_are_the_matrices():
    op = dispatch.reference("clamped_swiglu_fp8_quantize_rowcol_groups")
    (case,) = op.spec.bench_cases(Shapes(matrices=((128, 128), (1024, 128))))
    args = case.args()
    assert (case.name, *(tuple(t.shape) for t in args)) == ("1024x128, G 8", (1024, 256), (8, 256), (8,))
    assert [tuple(t.shape) for t in op(*args, check_offs=True)][:3] == [(1024, 128), (1024, 1), (128, 2048)]
