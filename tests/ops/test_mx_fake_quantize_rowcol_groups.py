"""mx_fake_quantize_rowcol_groups: values by hand, and the ops that it consists of, group by group."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mxspec
from mxspec import dispatch
from mxspec.shapes import Shapes
from mxspec.spec import random_normal
from tests.helpers import ends

BF16 = torch.bfloat16


def values(*args, **options):
    return mxspec.mx_fake_quantize_rowcol_groups(*args, backend="reference", **options)


def test_golden_values_are_rounded_to_the_grid_of_their_block():
    """e4m3fn under rceil: beside 448 the scale is 1, and the numbers from 1 to 2 are 1/8 apart.

    Alone, 1.03 has the scale 2^-8 and is 263.7 * 2^-8. The numbers from 256 to 448 are 32 apart. 0.3 has the scale
    2^-10 and is 307.2 * 2^-10, which becomes 320 * 2^-10.
    """
    x = torch.zeros(2, 64)
    x[0, 0], x[0, 1], x[0, 32], x[1, 1] = 448.0, 1.03, 1.03, 0.3
    rows, columns = values(x, ends(2))
    assert (rows.dtype, rows.shape, rows.stride()) == (BF16, (2, 64), (64, 1))
    assert (columns.dtype, columns.shape, columns.stride()) == (BF16, (2, 64), (64, 1))
    assert rows[0, [0, 1, 32]].tolist() == [448.0, 1.0, 1.0]
    assert rows[1, 1].item() == 0.3125
    # In its column, 0.3 is beside 1.03: 76.8 * 2^-8, between 72 and 80.
    assert columns[:, 1].tolist() == [1.0, 80 / 256]
    assert columns[0, [0, 32]].tolist() == [448.0, 1.0]


def test_golden_a_small_number_beside_a_large_one():
    """2^-10 beside 448 is a tie between 0 and the smallest code, 2^-9, and becomes 0. In its own block it stays."""
    x = torch.zeros(33, 32)
    x[0, 0], x[0, 1], x[1, 0] = 448.0, 2.0**-10, 2.0**-10
    rows, columns = values(x, ends(33))
    assert (rows[0, 1].item(), columns[0, 1].item()) == (0.0, 2.0**-10)
    assert (rows[1, 0].item(), columns[1, 0].item()) == (2.0**-10, 0.0)


def test_golden_blocks_of_columns_begin_with_their_group():
    """Tokens 0 to 31 of a group are one block. 448 makes the 2^-10 of its own block 0, and of no other block."""
    x = torch.full((70, 32), 2.0**-10)
    x[40, 5] = 448.0
    _, columns = values(x, ends(3, 69))  # group 1 has the blocks 3 to 34, 35 to 66, and 67 to 68
    of_feature = columns[:, 5].tolist()
    assert of_feature[:35] == [2.0**-10] * 35
    assert of_feature[35:67] == [448.0 if token == 40 else 0.0 for token in range(35, 67)]
    assert of_feature[67:] == [2.0**-10] * 2 + [0.0]  # the last row has no group
    assert columns[:69, 6].eq(2.0**-10).all()


def test_golden_special_values_stay_in_their_blocks():
    x = torch.ones(40, 64)
    x[33, 0], x[2, 40] = torch.nan, -torch.inf
    rows, columns = values(x, ends(33, 40))
    assert rows.isnan().nonzero().tolist() == [[2, k] for k in range(32, 64)] + [[33, k] for k in range(32)]
    assert columns.isnan().nonzero().tolist() == [[m, 40] for m in range(32)] + [[m, 0] for m in range(33, 40)]


def test_golden_the_ends_of_the_range():
    """2^-133 is the smallest bfloat16. Its own block is exact. The largest fp32 rounds to 2^128, which is Inf."""
    x = torch.zeros(3, 32)
    x[0, 0], x[1, 0], x[2, 0] = 2.0**-133, 2.0**-134, torch.finfo(torch.float32).max
    rows, _ = values(x, ends(3))
    assert rows[:, 0].tolist() == [2.0**-133, 0.0, torch.inf]


def test_golden_without_groups_columns_are_zeros():
    x = torch.ones(3, 32)
    rows, columns = values(x, ends())
    assert rows.eq(1).all()
    assert not columns.any()


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 70), max_size=5),
    rest=st.integers(0, 3),
    elem=st.sampled_from(("e4m3fn", "e5m2")),
    scaling=st.sampled_from(("floor", "rceil", "ceil", "even")),
)
def test_each_group_is_quantized_and_read_back_as_if_alone(sizes, rest, elem, scaling):
    x, offs = random_normal(sum(sizes) + rest, 64), torch.tensor(sizes).cumsum(0, dtype=torch.int32)
    options = {"elem_dtype": elem, "scaling": scaling}
    rows, columns = values(x, offs, **options)
    assert rows.equal(mxspec.mx_dequantize(*mxspec.mx_quantize(x, **options)))
    for g, size in enumerate(sizes):
        padded = torch.zeros(-(-size // 32) * 32, 64, dtype=x.dtype)
        padded[:size] = x[int(offs[g]) - size : int(offs[g])]
        alone = mxspec.mx_dequantize(*mxspec.mx_quantize(padded, axis=-2, **options), axis=-2)
        assert columns[int(offs[g]) - size : int(offs[g])].equal(alone[:size])
    assert not columns[sum(sizes) :].any()


@pytest.mark.parametrize("elem", ["e4m3fn", "e5m2"])
def test_values_stay_what_they_are(elem):
    """Values of a block are a fixed point of the same rule, if the block does not saturate."""
    x = random_normal(64, 64)
    rows, columns = values(x, ends(40, 64), elem_dtype=elem)
    assert values(rows, ends(40, 64), elem_dtype=elem)[0].equal(rows)
    assert values(columns, ends(40, 64), elem_dtype=elem)[1].equal(columns)


def test_bench_cases_are_the_matrices_and_the_weights():
    op = dispatch.reference("mx_fake_quantize_rowcol_groups")
    found = list(op.spec.bench_cases(Shapes(matrices=((64, 32), (1024, 64)), experts=((2, 32, 64),))))
    assert [case.name for case in found] == ["1024x64, G 8", "2x32x64 as one group"]
    for case in found:
        x, offs = case.args()
        rows, columns = op(x, offs, check_offs=True)
        assert rows.shape == columns.shape == x.shape
