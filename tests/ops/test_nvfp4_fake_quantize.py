"""nvfp4_fake_quantize: values by hand, what the transpose has, and what the matmuls make of the values."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mxspec
from mxspec import dispatch
from mxspec.shapes import Shapes
from mxspec.spec import random_normal
from tests.helpers import DEVICE, runs_kernels

BF16 = torch.bfloat16


def values(*args, **options):
    return mxspec.nvfp4_fake_quantize(*args, backend="reference", **options)


def test_golden_values_in_units_of_the_tensor_scale():
    """The largest magnitude 6 gives the tensor scale 6/2688 and, in its block, the scale 448 and the value 6 * 448.

    2.4 beside it is 2.4 steps of 448 and becomes 2. In a block of its own it is the largest: 448 * 2.4 / 6 = 179.2
    becomes the scale 176 of e4m3, 2.4 / 6 * 2688 / 176 = 6.1 becomes 6, and 6 * 176 = 1056.
    """
    x = torch.zeros(16, 32)
    x[0, 0], x[0, 1], x[1, 17] = 6.0, 2.4, -6.0
    along_rows, scale = values(x)
    along_columns, _ = values(x, axis=-2)
    assert (along_rows.dtype, along_rows.shape, along_rows.stride()) == (BF16, (16, 32), (32, 1))
    assert (along_columns.shape, along_columns.stride()) == ((16, 32), (32, 1))
    assert along_rows[0, :3].tolist() == [2688.0, 896.0, 0.0]
    assert along_columns[0, :3].tolist() == [2688.0, 1056.0, 0.0]
    assert along_rows[1, 17].item() == along_columns[1, 17].item() == -2688.0
    assert (scale.shape, scale.item()) == ((), torch.tensor(6 / 2688).item())


def test_golden_a_square_has_one_scale():
    """1.2 in another square than 6: 448 * 1.2 / 6 = 89.6 becomes the scale 88. In the square of 6, it is 1.2 steps."""
    x = torch.zeros(32, 32)
    x[3, 5], x[9, 1], x[20, 20] = 6.0, 1.2, 1.2
    got, _ = values(x, block="16x16")
    assert (got[3, 5].item(), got[9, 1].item(), got[20, 20].item()) == (2688.0, 448.0, 528.0)


def test_golden_special_values_reach_their_whole_matrix():
    x = torch.ones(4, 16, 32)
    x[1, 3, 2], x[3, 15, 31] = torch.nan, -torch.inf
    x[2] = -0.0
    got, scale = values(x, block="16x16")
    assert scale.isnan().tolist() == [False, True, False, True]
    assert got.isnan().all((-2, -1)).tolist() == got.isnan().any((-2, -1)).tolist() == [False, True, False, True]
    assert scale[2].item() == 0.0
    assert got[2].signbit().all()


@settings(max_examples=25, deadline=None)
@given(
    experts=st.sampled_from((None, 0, 1, 3)),
    rows=st.sampled_from((0, 16, 48)),
    cols=st.sampled_from((0, 16, 80)),
    dtype=st.sampled_from((torch.bfloat16, torch.float16, torch.float32)),
)
def test_the_transpose_of_squares_has_the_transposed_values(experts, rows, cols, dtype):
    x = random_normal(*(() if experts is None else (experts,)), rows, cols, dtype=dtype)
    got, scale = values(x, block="16x16")
    for axis in (-1, -2):
        turned, other = values(x.mT, block="16x16", axis=axis)
        assert turned.equal(got.mT)
        assert other.equal(scale)


@settings(max_examples=25, deadline=None)
@given(axis=st.sampled_from((-1, -2)), block=st.sampled_from(("1x16", "16x16")), shift=st.integers(-30, 30))
def test_a_value_is_within_half_a_step_of_its_element(axis, block, shift):
    """A block's largest code is 6, give or take the rounding of its scale. A step near 6 is 2, near 0 it is 0.5."""
    x = random_normal(2, 32, 48, dtype=torch.float32) * 2.0**shift
    got, scale = values(x, axis=axis, block=block)
    read = got.float() * scale[:, None, None]
    largest = x.abs().amax((-2, -1), keepdim=True)
    assert ((read - x).abs() <= largest / 6 * (1 + 2**-4)).all()
    assert ((read - x).abs() <= x.abs() / 4 + largest / 24 * (1 + 2**-4)).all()


def test_a_matmul_of_values_is_that_of_the_codes():
    a, b = random_normal(40, 64), random_normal(32, 64, seed=1)
    of_a, a_scale, a_t = mxspec.nvfp4_quantize(a)
    of_b, b_scale, b_t = mxspec.nvfp4_quantize(b, block="16x16")
    (u, u_t), (v, v_t) = values(a), values(b, block="16x16")
    by_codes = mxspec.nvfp4_gemm(of_a, a_scale, a_t, of_b, b_scale, b_t, out_dtype=torch.float32)
    assert by_codes.equal(mxspec.nvfp4_gemm(u, None, u_t, v, None, v_t, out_dtype=torch.float32))


@pytest.mark.parametrize(("sizes", "names"), [((64, 32), ["64x32, 16x16", "64x32"]), ((60, 32), ["60x32"])])
def test_bench_cases_are_the_matrices_and_the_experts(sizes, names):
    op = dispatch.reference("nvfp4_fake_quantize")
    found = list(op.spec.bench_cases(Shapes(matrices=(sizes,), experts=((2, *sizes),))))
    assert [case.name for case in found] == [*names, *(f"2x{name}" for name in names if "16x16" in name)]
    for case in found:
        assert op(*case.args(), **case.kwargs)[0].dtype == BF16


@runs_kernels
@pytest.mark.parametrize("columns", [512, 528, 1008, 1024, 1040, 2064])
@pytest.mark.parametrize("options", [{"block": "16x16"}, {}, {"axis": -2}], ids=str)
def test_a_program_has_two_tiles_side_by_side(columns, options):
    """The largest magnitude is in the first tile, in the second, or in the next program's."""
    x = random_normal(5, 32, columns).bfloat16().clamp(-4, 4)
    for matrix, column in enumerate((0, 511, min(512, columns - 1), columns - 1)):
        x[matrix, 17, column] = -50.0 - matrix
    expected = values(x, **options)
    got = mxspec.nvfp4_fake_quantize(x.to(DEVICE), backend="triton", **options)
    assert all(mine.cpu().equal(theirs) for mine, theirs in zip(got, expected, strict=True))
