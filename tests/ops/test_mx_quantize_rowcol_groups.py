"""mx_quantize_rowcol_groups: codes and scale bytes by hand in both directions, and the op that it consists of."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mxspec
from mxspec import dispatch
from mxspec.shapes import Shapes
from mxspec.spec import random_normal
from tests.helpers import ends, u8


def quantize(*args, **options):
    return mxspec.mx_quantize_rowcol_groups(*args, backend="reference", **options)


def test_golden_each_direction_has_its_own_places():
    """Groups of 40, 0 and 1 tokens take 128, 0 and 128 rows. Numbers whose scale is 2^0 have the byte 127."""
    x = torch.zeros(42, 32)
    x[0, 0], x[39, 31], x[40, 0] = 448.0, -448.0, 896.0
    x[41, 5] = 448.0  # a row of no group
    q_row, s_row, q_col, s_col, start, end = quantize(x, ends(40, 40, 41))
    assert (q_row.shape, q_row.stride(), q_col.shape, q_col.stride()) == ((512, 32), (32, 1), (512, 32), (1, 512))
    assert (s_row.shape, s_col.shape) == ((512 + 3 * 128, 4), (128, 16 + 3 * 4))
    assert (start.tolist(), end.tolist()) == ([0, 128, 128], [128, 128, 256])
    for codes in (u8(q_row), u8(q_col)):
        assert codes.nonzero().tolist() == [[0, 0], [39, 31], [128, 0]]
        assert codes[[0, 39, 128], [0, 31, 0]].tolist() == [0x7E, 0xFE, 0x7E]
    # Rows: row 39 is r % 32 = 7, r // 32 = 1. The tile of group 2 begins at byte 512.
    scale = u8(s_row).flatten()
    assert scale.nonzero().flatten().tolist() == [0, 7 * 16 + 4, 512]
    assert scale[[0, 7 * 16 + 4, 512]].tolist() == [127, 127, 128]
    # Columns: feature 31 is r % 32 = 31, and tokens 32 .. 63 are the block c = 1.
    scale = u8(s_col).flatten()
    assert scale.nonzero().flatten().tolist() == [0, 31 * 16 + 1, 512]
    assert scale[[0, 31 * 16 + 1, 512]].tolist() == [127, 127, 128]


def test_golden_plain_scales():
    """Row 0 holds 2^0 .. 2^31: one scale along the row, 2^(31 - 8), and each number its own along the column."""
    x = torch.arange(32.0).exp2()[None]
    q_row, s_row, q_col, s_col, *_ = quantize(x, ends(1), scaling="floor", scale_layout="plain")
    assert (s_row.shape, s_col.shape) == ((256, 1), (32, 8))
    assert u8(s_row).flatten().tolist() == [127 + 31 - 8] + [0] * 255
    assert u8(s_col).tolist() == [[127 + n - 8] + [0] * 7 for n in range(32)]
    assert q_row[0].float().tolist()[-3:] == [64.0, 128.0, 256.0]
    assert q_col[0].float().tolist() == [256.0] * 32


def test_golden_an_inf_makes_one_block_nan_in_each_direction():
    x = torch.full((40, 64), 448.0)
    x[35, 3] = -torch.inf
    q_row, s_row, q_col, s_col, *_ = quantize(x, ends(40), scale_layout="plain")
    assert u8(s_row)[[34, 35]].tolist() == [[127, 127], [255, 127]]
    assert u8(q_row)[35].tolist() == [0x7F] * 32 + [0x7E] * 32
    assert u8(s_col)[[2, 3], :3].tolist() == [[127, 127, 0], [127, 255, 0]]
    assert u8(q_col)[:, 3].tolist() == [0x7E] * 32 + [0x7F] * 32 + [0] * 192  # 24 rows of its padding included
    assert u8(q_row)[40:].unique().tolist() == [0]


def test_golden_a_nan_of_no_group_is_nowhere():
    x = torch.full((3, 32), 448.0)
    x[2, 7] = torch.nan
    q_row, s_row, q_col, s_col, *_ = quantize(x, ends(1, 2))
    assert [u8(t).unique().tolist() for t in (q_row, q_col)] == [[0, 0x7E]] * 2
    assert [u8(t).unique().tolist() for t in (s_row, s_col)] == [[0, 127]] * 2


def test_golden_groups_padded_to_256():
    """Two groups of one token of 57344, the largest e5m2, each in 256 rows: two tiles of scales a group."""
    q_row, s_row, q_col, s_col, start, end = quantize(
        torch.full((2, 32), 57344.0), ends(1, 2), pad_to=256, elem_dtype="e5m2"
    )
    assert (q_row.shape, s_row.shape, s_col.shape) == ((768, 32), (1024, 4), (128, 32))
    assert (start.tolist(), end.tolist()) == ([0, 256], [256, 512])
    assert u8(q_row).nonzero()[:, 0].unique().tolist() == u8(q_col).nonzero()[:, 0].unique().tolist() == [0, 256]
    assert u8(q_col)[[0, 256]].unique().tolist() == [0x7B]
    assert u8(s_row).flatten().nonzero().flatten().tolist() == [0, 1024]
    assert u8(s_col).flatten().nonzero().flatten().tolist() == [r * 16 + g for g in (0, 1024) for r in range(32)]


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 300), max_size=5),
    rest=st.integers(0, 3),
    dtype=st.sampled_from((torch.bfloat16, torch.float16, torch.float32)),
    options=st.sampled_from(({}, {"scale_layout": "plain"}, {"pad_to": 256, "scaling": "floor", "elem_dtype": "e5m2"})),
)
def test_it_is_two_quantizers(sizes, rest, dtype, options):
    x = random_normal(sum(sizes) + rest, 96, dtype=dtype)
    offs = torch.tensor(sizes).cumsum(0, dtype=torch.int32)
    q_row, s_row, *bounds = mxspec.mx_quantize_groups(x, offs, axis=-1, **options)
    columns = mxspec.mx_quantize_groups(x, offs, axis=-2, **options)
    assert all(one.equal(other) for one, other in zip(bounds, columns[2:], strict=True))
    for one, other in zip(quantize(x, offs, **options), (q_row, s_row, *columns), strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        assert u8(one.contiguous()).equal(u8(other.contiguous()))


def test_offs_are_read_only_where_that_is_asked_for():
    x = random_normal(20, 64)
    quantize(x, ends(9, 5))
    with pytest.raises(ValueError, match=r"offs\[1\] = 5 after 9"):
        quantize(x, ends(9, 5), check_offs=True)


def test_bench_cases_are_the_matrices():
    op = dispatch.reference("mx_quantize_rowcol_groups")
    (case,) = op.spec.bench_cases(Shapes(matrices=((128, 128), (1024, 128))))
    args = case.args()
    shapes = [tuple(t.shape) for t in op(*args, check_offs=True)]
    assert case.name == "1024x128, G 8"
    assert shapes == [(2048, 128), (3072, 4), (2048, 128), (128, 96), (8,), (8,)]
    assert op.spec.flops(args, ()) == 4 * 1024 * 128
