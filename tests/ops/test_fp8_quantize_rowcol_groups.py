"""fp8_quantize_rowcol_groups: the place of each code and scale in both directions, and the ops that it consists of."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mxspec
from mxspec import dispatch
from mxspec.shapes import Shapes
from mxspec.spec import random_normal
from tests.helpers import ends, u8

OF_ZEROS = 0x2720D7C5  # 1e-12 / 448, the stored scale of a block of zeros


def quantize(*args, **options):
    return mxspec.fp8_quantize_rowcol_groups(*args, backend="reference", **options)


def bits(scale):
    return scale.contiguous().view(torch.int32)


def test_golden_each_direction_has_its_own_places():
    """Groups of 130, 0 and 1 tokens. Rows keep their places; in the other direction they take 256, 0 and 128 tokens."""
    x = torch.zeros(134, 128)
    x[0, 0], x[129, 0], x[130, 0], x[127, 127] = 448.0, -448.0, 896.0, 448.0
    x[133, 5] = 224.0  # a row of no group
    q_row, s_row, q_col, s_col, start, end = quantize(x, ends(130, 130, 131))
    assert (q_row.shape, s_row.shape, q_col.shape, s_col.shape) == ((134, 128), (134, 1), (128, 640), (128, 5))
    assert (start.tolist(), end.tolist()) == ([0, 256, 256], [256, 256, 384])
    assert u8(q_row).nonzero().tolist() == [[0, 0], [127, 127], [129, 0], [130, 0], [133, 5]]
    assert u8(q_row)[[0, 127, 129, 130, 133], [0, 127, 0, 0, 5]].tolist() == [0x7E, 0x7E, 0xFE, 0x7E, 0x7E]
    assert s_row[[0, 127, 129, 130, 133], 0].tolist() == [1.0, 1.0, 1.0, 2.0, 0.5]
    assert bits(s_row)[[1, 131, 132], 0].tolist() == [OF_ZEROS] * 3
    # Group 0: 256 tokens of each feature. Group 2 begins at 128 * 256, its features 128 apart.
    codes, places = u8(q_col).flatten(), [0, 129, 127 * 256 + 127, 128 * 256]
    assert codes.nonzero().flatten().tolist() == places
    assert codes[places].tolist() == [0x7E, 0xFE, 0x7E, 0x7E]
    assert s_col[0].tolist() == [1.0, 1.0, 2.0, 0.0, 0.0]
    assert bits(s_col)[5].tolist() == [OF_ZEROS] * 3 + [0, 0]


def test_golden_scales_are_mn_major_in_both_directions():
    x = torch.full((2, 256), 448.0)
    x[1] *= 2
    x[:, 128:] *= 8
    _, s_row, _, s_col, *_ = quantize(x, ends(1, 2))
    assert (s_row.shape, s_row.stride(), s_col.shape, s_col.stride()) == ((2, 2), (1, 2), (256, 3), (1, 256))
    assert s_row.tolist() == [[1.0, 8.0], [2.0, 16.0]]
    assert s_col[[0, 255]].tolist() == [[1.0, 2.0, 0.0], [8.0, 16.0, 0.0]]


def test_golden_without_groups_the_rows_are_quantized_all_the_same():
    x = torch.zeros(2, 128)
    x[1, 3] = -448.0
    q_row, s_row, q_col, s_col, start, end = quantize(x, ends())
    assert u8(q_row).nonzero().tolist() == [[1, 3]]
    assert (u8(q_row)[1, 3].item(), s_row[1].tolist()) == (0xFE, [1.0])
    assert (q_col.shape, s_col.shape, len(start), len(end)) == ((128, 128), (128, 1), 0, 0)
    assert not u8(q_col).any()
    assert not bits(s_col).any()


def test_golden_an_inf_makes_one_block_nan_in_each_direction():
    x = torch.ones(130, 256)
    x[129, 0] = -torch.inf
    q_row, s_row, q_col, s_col, *_ = quantize(x, ends(130))
    assert s_row.isnan().nonzero().tolist() == [[129, 0]]
    assert u8(q_row)[129].tolist() == [0x7F] * 128 + [0x7E] * 128
    assert (u8(q_row)[:129] == 0x7E).all()
    assert s_col.isnan().nonzero().tolist() == [[0, 1]]
    codes = u8(q_col).flatten()
    assert codes[:256].tolist() == [0x7E] * 128 + [0x7F] * 128  # its padding included
    assert codes[256:512].tolist() == [0x7E] * 130 + [0] * 126


def test_golden_a_nan_of_no_group_stays_in_its_row():
    x = torch.full((3, 128), 448.0)
    x[2, 7] = torch.nan
    q_row, s_row, q_col, s_col, *_ = quantize(x, ends(1, 2))
    assert s_row.isnan().flatten().tolist() == [False, False, True]
    assert u8(q_row)[2].tolist() == [0x7F] * 128
    assert not s_col.isnan().any()
    assert u8(q_col).unique().tolist() == [0, 0x7E]


def test_golden_powers_of_two_and_eps():
    x = torch.full((1, 128), 3.0)  # 448 / 3 = 149.3, down to 128: codes 384
    q_row, s_row, q_col, s_col, *_ = quantize(x, ends(1), scale_format="pow2")
    assert (q_row[0, 0].item(), s_row[0, 0].item(), q_col[0, 0].item(), s_col[0, 0].item()) == (384, 2**-7) * 2
    q_row, s_row, q_col, s_col, *_ = quantize(x, ends(1), eps=448.0)
    assert (q_row[0, 0].item(), s_row[0, 0].item(), q_col[0, 0].item(), s_col[0, 0].item()) == (3, 1) * 2


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 300), max_size=5),
    rest=st.integers(0, 3),
    dtype=st.sampled_from((torch.bfloat16, torch.float16, torch.float32)),
    options=st.sampled_from(({}, {"scale_format": "pow2"}, {"eps": 1e-4})),
)
def test_it_is_two_quantizers(sizes, rest, dtype, options):
    x = random_normal(sum(sizes) + rest, 256, dtype=dtype)
    offs = torch.tensor(sizes).cumsum(0, dtype=torch.int32)
    got = quantize(x, offs, **options)
    rows = mxspec.fp8_quantize_1x128(x, scale_major="mn", **options)
    columns = mxspec.fp8_quantize_k_groups(x, offs, **options)
    for one, other in zip(got, (*rows, *columns), strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        assert u8(one.contiguous()).equal(u8(other.contiguous()))


def test_offs_are_read_only_where_that_is_asked_for():
    x = random_normal(20, 128)
    quantize(x, ends(9, 5))
    with pytest.raises(ValueError, match=r"offs\[1\] = 5 after 9"):
        quantize(x, ends(9, 5), check_offs=True)


def test_bench_cases_are_the_matrices():
    op = dispatch.reference("fp8_quantize_rowcol_groups")
    (case,) = op.spec.bench_cases(Shapes(matrices=((128, 128), (1024, 128))))
    args = case.args()
    shapes = [tuple(t.shape) for t in op(*args, check_offs=True)]
    assert case.name == "1024x128, G 8"
    assert shapes == [(1024, 128), (1024, 1), (128, 2048), (128, 16), (8,), (8,)]
    assert op.spec.flops(args, ()) == 4 * 1024 * 128
