"""fp8_grouped_gemm: literal sums, the weights that each token meets, and rows of no group."""

import pytest
import torch

import mxspec
from mxspec import dispatch
from mxspec.shapes import Shapes
from tests.helpers import ends

E4M3FN = torch.float8_e4m3fn


def fp8_grouped_gemm(*args, **options):
    return mxspec.fp8_grouped_gemm(*args, backend="reference", **options)


def tokens_and_weights():
    """Tokens 1, 2, 3, 4, 5 and weights 1 (expert 0), 10 (expert 1) and 104 (expert 2).

    Only element 200 of 256 is not 0, and of the weights only column 1 of 130.
    """
    a, b = torch.zeros(5, 256), torch.zeros(3, 130, 256)
    a[:, 200] = torch.arange(1, 6)
    b[:, 1, 200] = torch.tensor([1.0, 10.0, 104.0])
    return a.to(E4M3FN), torch.ones(5, 2), b.to(E4M3FN), torch.ones(3, 2, 2)


def test_golden_each_token_meets_its_experts_weights():
    a, a_scale, b, b_scale = tokens_and_weights()
    a_scale[:, 0], b_scale[:, :, 0], b_scale[:, 1] = 100.0, 100.0, 100.0  # scales of blocks that must not count
    a_scale[4, 1], b_scale[2, 0, 1] = 3.0, 0.5
    out = fp8_grouped_gemm(a, a_scale, b, b_scale, ends(1, 3, 5))
    assert (out.dtype, out.stride()) == (torch.bfloat16, (130, 1))
    assert out[:, 1].tolist() == [1.0, 20.0, 30.0, 208.0, 780.0]  # 4 * 104 / 2, 5 * 3 * 104 / 2
    assert out[:, [0, *range(2, 130)]].count_nonzero() == 0


def test_golden_an_empty_group_and_tokens_of_none():
    a, a_scale, b, b_scale = tokens_and_weights()
    a[3:], a_scale[3:], b[1], b_scale[1] = torch.nan, torch.nan, torch.nan, torch.nan  # expert 1 has no tokens
    out = fp8_grouped_gemm(a, a_scale, b, b_scale, ends(1, 1, 3), out_dtype=torch.float32)
    assert out[:, 1].tolist() == [1.0, 208.0, 312.0, 0.0, 0.0]
    assert not out.isnan().any()


def test_golden_a_nan_scale_of_weights_reaches_columns_of_its_tokens():
    a, a_scale, b, b_scale = tokens_and_weights()
    b_scale[1, 1, 0] = torch.nan
    out = fp8_grouped_gemm(a, a_scale, b, b_scale, ends(1, 3, 5))
    assert out.isnan().nonzero().tolist() == [[1, 128], [1, 129], [2, 128], [2, 129]]


def test_golden_sums_are_rounded_once():
    """1 + 2^-8 + 2^-30 is above a tie of bfloat16; rounded to fp32 first, it would be the tie."""
    a, b = torch.zeros(1, 256), torch.zeros(1, 1, 256)
    a[0, [0, 1, 128]], b[0, 0, [0, 1, 128]] = torch.tensor([1.0, 2**-4, 1.0]), torch.tensor([1.0, 2**-4, 1.0])
    a_scale = torch.tensor([[1.0, 2**-30]])
    out = fp8_grouped_gemm(a.to(E4M3FN), a_scale, b.to(E4M3FN), torch.ones(1, 1, 2), ends(1))
    assert out.tolist() == [[1.0078125]]


def test_forward_and_dgrad_of_unpadded_groups_are_those_of_each_expert():
    x, dy, w, offs = torch.randn(60, 256), torch.randn(60, 384), torch.randn(3, 384, 256), ends(7, 7, 50)
    codes, scale, codes_t, scale_t = mxspec.fp8_quantize_128x128(w, with_transpose=True)
    for tokens, weights, weights_scale in ((x, codes, scale), (dy, codes_t, scale_t)):
        a, a_scale = mxspec.fp8_quantize_1x128(tokens, scale_major="mn")
        out = fp8_grouped_gemm(a, a_scale, weights, weights_scale, offs, out_dtype=torch.float32)
        for first, last, e in ((0, 7, 0), (7, 50, 2)):
            args = a[first:last], a_scale[first:last], weights[e], weights_scale[e]
            of_one = mxspec.fp8_gemm(*args, out_dtype=torch.float32)
            # Both sum in fp64, each in its own order.
            torch.testing.assert_close(out[first:last], of_one, rtol=0, atol=1e-5)
        assert out[50:].count_nonzero() == 0


def test_alignment_changes_nothing_and_is_checked_where_offs_is():
    args = tokens_and_weights()
    assert fp8_grouped_gemm(*args, ends(2, 2, 4), alignment=2).equal(fp8_grouped_gemm(*args, ends(2, 2, 4)))
    with pytest.raises(ValueError, match=r"offs\[1\] = 3; needs multiples of 2"):
        fp8_grouped_gemm(*args, ends(2, 3, 4), alignment=2, check_offs=True)


def test_bench_cases_are_the_grouped_shapes():
    op = dispatch.reference("fp8_grouped_gemm")
    even, ragged = op.spec.bench_cases(Shapes(grouped=((64, 40, 256, 4),)))
    args = even.args()
    assert (even.name, args[4].tolist()) == ("64x40x256, E 4, even", [16, 32, 48, 64])
    assert (even.kwargs, ragged.kwargs) == ({}, {"alignment": 128})
    assert op.spec.flops(args, ()) == 2 * 64 * 40 * 256
    assert args[1].stride() == (1, 64)
    assert op(*args).count_nonzero(1).min() > 0
    args = ragged.args()
    assert (args[4] % 128).tolist() == [0] * 4
    assert args[0].shape[0] == args[4][-1]
    assert op(*args, check_offs=True).shape == (args[0].shape[0], 40)
