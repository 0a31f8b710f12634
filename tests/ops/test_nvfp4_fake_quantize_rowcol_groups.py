"""nvfp4_fake_quantize_rowcol_groups: values by hand, and the ops that it consists of, group by group."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import pad

import mxspec
from mxspec import dispatch
from mxspec.reference.common.philox import bytes_of_blocks
from mxspec.shapes import Shapes
from mxspec.spec import random_normal
from tests.helpers import DEVICE, ends, runs_kernels, u8

BF16 = torch.bfloat16


def values(*args, **options):
    return mxspec.nvfp4_fake_quantize_rowcol_groups(*args, backend="reference", **options)


def test_golden_values_in_units_of_the_tensor_scale():
    """The largest magnitude 6 gives the tensor scale 6/2688 and, in its block, the scale 448 and the value 6 * 448.

    2.4 beside it is 2.4 steps of 448 and becomes 2. In its own column it is the largest: 448 * 2.4 / 6 = 179.2 becomes
    the scale 176 of e4m3, 2.4 / 6 * 2688 / 176 = 6.1 becomes 6, and 6 * 176 = 1056.
    """
    x = torch.zeros(3, 32)
    x[0, 0], x[0, 1], x[1, 17] = 6.0, 2.4, -6.0
    rows, row_scale, columns, column_scale, start, end = values(x, ends(2))
    assert (rows.dtype, rows.shape, rows.stride()) == (BF16, (3, 32), (32, 1))
    assert (columns.dtype, columns.shape, columns.stride()) == (BF16, (32, 32), (32, 1))
    assert (start.tolist(), end.tolist()) == ([0], [16])
    assert rows[0, :3].tolist() == [2688.0, 896.0, 0.0]
    assert columns[0, :3].tolist() == [2688.0, 1056.0, 0.0]
    assert rows[1, 17].item() == columns[1, 17].item() == -2688.0
    assert row_scale.tolist() == column_scale.tolist() == [torch.tensor(6 / 2688).item()]


def test_golden_each_group_has_its_own_scales_and_begins_a_block():
    x = torch.ones(20, 16)
    x[17:] = 0.5
    rows, row_scale, columns, column_scale, start, end = values(x, ends(17, 17, 19))
    assert (row_scale * 2688).tolist() == (column_scale * 2688).tolist() == [1.0, 0.0, 0.5]
    assert (start.tolist(), end.tolist()) == ([0, 32, 32], [32, 32, 48])
    assert rows[:, 3].tolist() == 19 * [2688.0] + [0.0]  # the last row has no group
    assert columns[:, 3].tolist() == 17 * [2688.0] + 15 * [0.0] + 2 * [2688.0] + 46 * [0.0]  # R = 16 * ceil(68 / 16)


def test_golden_a_transform_fills_the_padding():
    """A 4 at the first token of a group becomes 1 in all of its 16 rows. Token 1 has a negative sign and alternates."""
    x = torch.zeros(2, 16)
    x[0, 0], x[1, 1] = 4.0, 4.0
    rows, row_scale, columns, column_scale, *_ = values(x, ends(2), signs=0b10)
    assert (row_scale * 2688).tolist() == [4.0]
    assert (column_scale * 2688).tolist() == [1.0]
    assert rows[0, 0].item() == rows[1, 1].item() == 2688.0
    assert columns[:16, 0].tolist() == 16 * [2688.0]
    assert columns[:16, 1].tolist() == 8 * [-2688.0, 2688.0]
    assert not columns[16:].any()


def test_golden_a_byte_decides():
    """2.5 between 2 and 3 becomes 3 for bytes from 128 on: those of Philox with the key 0 and the counters 0 and 1.

    Random123 gives the words 6627e8d5 e169c58d bc57ac4c 9b00dbd8 for the counter 0.
    """
    x = torch.full((16, 16), 2.5)
    x[:, 15], x[15] = 6.0, 6.0
    rows, _, columns, *_ = values(x, ends(16), torch.zeros(2, dtype=torch.int64))
    of_counter_0 = bytes.fromhex("d5e82766 8dc569e1 4cac57bc d8db009b")
    expected = [1344.0 if byte >= 128 else 896.0 for byte in of_counter_0[:15]]
    assert rows[:15, 0].tolist() == expected
    assert columns[:15, 0].tolist() != expected, "the columns take other bytes"


def test_golden_special_values_reach_their_whole_group():
    x = torch.ones(40, 16)
    x[33, 0], x[2, 3] = torch.nan, -torch.inf
    rows, row_scale, columns, column_scale, *_ = values(x, ends(20, 30, 40))
    assert row_scale.isnan().tolist() == column_scale.isnan().tolist() == [True, False, True]
    for found, bad in ((rows, [*range(20), *range(30, 40)]), (columns, [*range(32), *range(48, 64)])):
        assert found.isnan().all(1).nonzero().flatten().tolist() == bad
        assert found.isnan().any(1).nonzero().flatten().tolist() == bad


@settings(max_examples=20, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 40), max_size=5),
    rest=st.integers(0, 3),
    signs=st.sampled_from((None, 0xD7E8, 3)),
    random=st.booleans(),
)
def test_each_group_is_quantized_and_read_back_as_if_alone(sizes, rest, signs, random):
    x, offs = random_normal(sum(sizes) + rest, 48), torch.tensor(sizes).cumsum(0, dtype=torch.int32)
    state = torch.tensor([77, 2**32 - 1])
    rows, row_scale, columns, column_scale, start, end = values(x, offs, state if random else None, signs=signs)
    byte = [bytes_of_blocks(state + torch.tensor([0, i]), (len(columns) // 16, 48)).mT.flatten(0, 1) for i in (0, 1)]

    def read(x, axis, byte):
        if random:
            codes, scale, T = mxspec.nvfp4_quantize_stochastic(x, byte.to(torch.uint8), axis=axis)
        else:
            codes, scale, T = mxspec.nvfp4_quantize(x, axis=axis)
        return mxspec.nvfp4_dequantize(codes, scale, torch.ones(()), axis=axis), T

    for g, size in enumerate(sizes):
        first, last, place = int(offs[g]) - size, int(offs[g]), slice(int(start[g]), int(end[g]))
        padded = pad(x[first:last], (0, 0, 0, -size % 16))
        alone, T = read(padded, -1, byte[0][place])
        assert rows[first:last].equal(alone[:size])
        assert row_scale[g].equal(T)
        turned = padded if signs is None else mxspec.hadamard_16(padded, axis=-2, signs=signs)
        alone, T = read(turned, -2, byte[1][place])
        assert columns[place].equal(alone)
        assert column_scale[g].equal(T)
    assert not rows[sum(sizes) :].any()
    assert not columns[int(end[-1]) if sizes else 0 :].any()


@pytest.mark.parametrize("signs", [0, 0xD7E8])
def test_two_transforms_cancel_in_a_sum_over_the_tokens(signs):
    dy, x, offs = random_normal(40, 32, seed=1), random_normal(40, 48, seed=2), ends(40)
    (*_, d, d_scale, _, _), (*_, v, v_scale, _, _) = (values(t, offs, signs=signs) for t in (dy, x))
    exact = dy.double().mT @ x.double()
    sums = d.double().mT @ v.double() * (d_scale * v_scale).double()
    assert (sums - exact).norm() < 0.2 * exact.norm()


def test_bench_cases_are_the_matrices():
    op = dispatch.reference("nvfp4_fake_quantize_rowcol_groups")
    found = list(op.spec.bench_cases(Shapes(matrices=((64, 32), (1024, 64)), experts=())))
    assert [case.name for case in found] == [
        "1024x64, G 8", "1024x64, G 8, transformed", "1024x64, G 8, transformed, stochastic",
    ]  # fmt: skip
    for case in found:
        rows, *_ = op(*case.args(), **case.kwargs, check_offs=True)
        assert rows.shape == (1024, 64)


def same_as_the_reference(x, offs, signs):
    got = mxspec.nvfp4_fake_quantize_rowcol_groups(x.to(DEVICE), offs.to(DEVICE), signs=signs, backend="triton")
    want = mxspec.nvfp4_fake_quantize_rowcol_groups(x.to(DEVICE), offs.to(DEVICE), signs=signs, backend="reference")
    return all(u8(mine).equal(u8(theirs)) for mine, theirs in zip(got, want, strict=True))


@runs_kernels
@pytest.mark.parametrize("columns", [256, 272, 512, 784])
@pytest.mark.parametrize("signs", [None, 0xD7E8])
def test_a_program_finds_the_magnitude_of_several_tiles(columns, signs):
    """The largest magnitude is in the first tile, in the second, or in the next program's."""
    x = random_normal(48, columns).bfloat16().clamp(-4, 4)
    for group, column in enumerate((0, 255, columns - 1)):
        x[16 * group + 5, column] = -50.0 - group
    assert same_as_the_reference(x, ends(16, 32, 48), signs)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; the interpreter would take minutes")
def test_programs_of_several_tiles():
    """A large matrix, in which the last program has fewer tiles."""
    offs = ends(1, 1, 200, 5000, 5128, 20000, 20001, 31000)
    assert same_as_the_reference(random_normal(32768, 7184).bfloat16(), offs, 0xD7E8)
