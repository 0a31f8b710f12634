"""mx_grouped_gemm: literal sums, the weights that each token meets, and rows of no group."""

import pytest
import torch

import mxspec
from mxspec import dispatch
from mxspec.shapes import Shapes
from tests.helpers import ends, full

E4M3FN, E8M0FNU = torch.float8_e4m3fn, torch.float8_e8m0fnu


def mx_grouped_gemm(a, a_scale, b, b_scale, offs, **options):
    a_scale, b_scale = None if a_scale is None else a_scale.view(E8M0FNU), b_scale.view(E8M0FNU)
    return mxspec.mx_grouped_gemm(a, a_scale, b, b_scale, offs, backend="reference", **options)


def tokens_and_weights():
    """Tokens 1, 2, 3, 4, 5 and weights 1 (expert 0), 10 (expert 1) and 100 (expert 2), in one element of 64."""
    a, b = torch.zeros(5, 64), torch.zeros(3, 2, 64)
    a[:, 40] = torch.arange(1, 6)
    b[:, 1, 40] = torch.tensor([1.0, 10.0, 104.0])
    return a.to(E4M3FN), b.to(E4M3FN)


def test_golden_each_token_meets_its_experts_weights():
    a, b = tokens_and_weights()
    a_scale, b_scale = full(127, 5, 2), full(127, 3, 2, 2)
    a_scale[4, 1], b_scale[2, 1, 1] = 128, 126  # 2, 1/2
    out = mx_grouped_gemm(a, a_scale, b, b_scale, ends(1, 3, 5), scale_layout="plain")
    assert (out.dtype, out.stride()) == (torch.bfloat16, (2, 1))
    assert out.tolist() == [[0.0, 1.0], [0.0, 20.0], [0.0, 30.0], [0.0, 208.0], [0.0, 520.0]]


def test_golden_an_empty_group_and_tokens_of_none():
    a, b = tokens_and_weights()
    a[3:] = torch.nan
    a_scale, b_scale = full(127, 5, 2), full(127, 3, 2, 2)
    a_scale[3:], b_scale[1] = 255, 255  # expert 1 has no tokens
    out = mx_grouped_gemm(a, a_scale, b, b_scale, ends(1, 1, 3), out_dtype=torch.float32, scale_layout="plain")
    assert out.tolist() == [[0.0, 1.0], [0.0, 208.0], [0.0, 312.0], [0.0, 0.0], [0.0, 0.0]]


def test_golden_a_groups_blocked_scales_begin_at_a_multiple_of_128_rows():
    a, b = tokens_and_weights()
    a_scale, b_scale = full(255, 5 + 3 * 128, 4), full(255, 3, 512)
    # Token 0 is row 0 of the first tile, tokens 1 and 2 rows 0 and 1 of the second, 3 and 4 of the third.
    for row, place in enumerate([0, 512, 512 + 16, 1024, 1024 + 16]):
        a_scale.view(-1)[place : place + 2] = torch.tensor([127, 127 + row])
    b_scale[:, 16:18] = 127  # row 1 of each expert
    b_scale[:, 0:2] = 127
    out = mx_grouped_gemm(a, a_scale, b, b_scale, ends(1, 3, 5))
    assert out[:, 1].tolist() == [1.0, 40.0, 120.0, 4.0 * 104 * 8, 5.0 * 104 * 16]
    assert out[:, 0].tolist() == 5 * [0.0]


def test_golden_a_nan_stays_with_its_expert():
    a, b = tokens_and_weights()
    b[1, 0, 0] = torch.nan
    out = mx_grouped_gemm(a, full(127, 5, 2), b, full(127, 3, 2, 2), ends(1, 3, 5), scale_layout="plain")
    assert out.isnan().tolist() == [[False, False], [True, False], [True, False], [False, False], [False, False]]


@pytest.mark.parametrize("layout", ["blocked", "plain"])
def test_golden_bfloat16_and_codes_by_e2m1_weights(layout):
    b = torch.zeros(3, 2, 32, dtype=torch.uint8)
    b[:, 1, 20] = torch.tensor([0x02, 0x0E, 0x70])  # elements 40 and 41: (1, 0), (-4, 0), (0, 6)
    b = b.view(torch.float4_e2m1fn_x2)
    plain = full(127, 3, 2, 2)
    plain[2, 1, 1] = 126  # 1/2
    b_scale = plain if layout == "plain" else mxspec.to_blocked(plain)
    tokens = torch.zeros(5, 64, dtype=torch.bfloat16)
    tokens[:, 40], tokens[:, 41] = torch.arange(1, 6), 0.015625
    offs = ends(1, 3, 4)
    out = mx_grouped_gemm(tokens, None, b, b_scale, offs, out_dtype=torch.float32, scale_layout=layout)
    assert out[:, 1].tolist() == [1.0, -8.0, -12.0, 0.046875, 0.0]
    assert out[:, 0].tolist() == 5 * [0.0]

    a_scale = full(128, 5, 2)  # 2
    codes = tokens.to(E4M3FN)
    if layout == "blocked":
        a_scale, _ = mxspec.to_blocked_m_groups(a_scale.view(E8M0FNU), offs)
    out = mx_grouped_gemm(codes, a_scale, b, b_scale, offs, scale_layout=layout)
    assert out[:, 1].tolist() == [2.0, -16.0, -24.0, 0.09375, 0.0]


def test_what_the_quantizer_of_groups_gives_fits_as_it_is():
    x, w = torch.randn(50, 64), torch.randn(3, 40, 64)
    for layout in ("blocked", "plain"):
        a, a_scale, start, end = mxspec.mx_quantize_groups(x, ends(7, 7, 45), scale_layout=layout)
        b, b_scale = mxspec.mx_quantize(w, scale_layout=layout)
        out = mxspec.mx_grouped_gemm(a, a_scale, b, b_scale, end, scale_layout=layout, out_dtype=torch.float32)
        rows = mxspec.unpad_token_groups(out, ends(7, 7, 45), start, 50)
        q, s = mxspec.mx_quantize(x)
        for first, last, e in ((0, 7, 0), (7, 45, 2)):
            of_one = mxspec.mx_gemm(q[first:last], s[first:last], *mxspec.mx_quantize(w[e]), out_dtype=torch.float32)
            torch.testing.assert_close(rows[first:last], of_one, rtol=0, atol=1e-5)
        assert rows[45:].count_nonzero() == 0


def test_bench_cases_are_the_grouped_shapes():
    op = dispatch.reference("mx_grouped_gemm")
    few, even, ragged = op.spec.bench_cases(Shapes(grouped=((64, 40, 96, 4),)))
    a, a_scale, b, b_scale, offs = few.args()
    assert (few.name, few.kwargs) == ("16x40x96, E 4, bfloat16 by e2m1", {"scale_layout": "plain"})
    assert (a.shape, a.dtype, a_scale) == ((16, 96), torch.bfloat16, None)
    assert (b.shape, b.dtype, b_scale.shape, offs[-1]) == ((4, 40, 48), torch.float4_e2m1fn_x2, (4, 40, 3), 16)
    assert op.spec.flops((a, a_scale, b, b_scale, offs), ()) == 2 * 16 * 40 * 96
    args = even.args()
    assert (even.name, args[4].tolist()) == ("64x40x96, E 4, even", [16, 32, 48, 64])
    assert op.spec.flops(args, ()) == 2 * 64 * 40 * 96
    assert op(*args).count_nonzero(1).min() > 0
    args = ragged.args()
    assert args[0].shape[0] == args[4][-1]
    assert op(*args, check_offs=True).shape == (args[0].shape[0], 40)


def test_the_errors_say_how_to_view_the_bytes_of_a_checkpoint():
    offs, tokens = ends(1), torch.zeros(1, 32, dtype=torch.bfloat16)
    b, b_scale = torch.zeros(1, 4, 16, dtype=torch.uint8), torch.zeros(1, 4, 1, dtype=torch.uint8)
    with pytest.raises(TypeError, match=r"view bytes of packed e2m1 codes as torch\.float4_e2m1fn_x2"):
        mxspec.mx_grouped_gemm(tokens, None, b, b_scale, offs, scale_layout="plain")
    b = b.view(torch.float4_e2m1fn_x2)
    with pytest.raises(TypeError, match=r"view bytes of E8M0 scales as torch\.float8_e8m0fnu"):
        mxspec.mx_grouped_gemm(tokens, None, b, b_scale, offs, scale_layout="plain")
    out = mxspec.mx_grouped_gemm(tokens, None, b, b_scale.view(E8M0FNU), offs, scale_layout="plain")
    assert out.tolist() == [[0.0] * 4]


def test_scales_of_the_other_layout_are_refused_with_its_name():
    x, w, offs = torch.ones(5, 64), torch.ones(2, 8, 64), torch.tensor([2, 5], dtype=torch.int32)
    (a, a_scale), (b, b_scale) = mxspec.mx_quantize(x), mxspec.mx_quantize(w)
    with pytest.raises(ValueError, match=r"a_scale .*; this is the shape of scale_layout='plain'"):
        mxspec.mx_grouped_gemm(a, a_scale, b, b_scale, offs)
    blocked = mxspec.to_blocked(b_scale)
    with pytest.raises(ValueError, match=r"b_scale .*; this is the shape of scale_layout='blocked'"):
        mxspec.mx_grouped_gemm(a, a_scale, b, blocked, offs, scale_layout="plain")
