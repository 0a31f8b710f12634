"""nvfp4_gemm: literal sums of codes and of values, the tensor scales, and NaN."""

import math

import pytest
import torch

import mxspec

PACKED, E4M3 = torch.float4_e2m1fn_x2, torch.float8_e4m3fn
ONE = torch.tensor(1.0)


def codes(*rows):
    """Codes from bytes: the low nibble comes first."""
    return torch.tensor(rows, dtype=torch.uint8).view(PACKED)


def scales(*rows):
    return torch.tensor(rows, dtype=torch.uint8).view(E4M3)


def nvfp4_gemm(*args, **options):
    return mxspec.nvfp4_gemm(*args, backend="reference", **options)


def two_by_two():
    """a: 1 and -6 in elements 0 and 17 of row 0, 0.5 in element 1 of row 1. b: 2, 3 and 4 in elements 0, 1 and 17."""
    a = codes([0x02, *7 * [0], 0xF0, *7 * [0]], [0x10, *15 * [0]])
    b = codes([0x54, *7 * [0], 0x60, *7 * [0]])
    return a, b


def test_golden_each_block_of_16_has_its_scale():
    a, b = two_by_two()
    out = nvfp4_gemm(a, scales([0x38, 0x40], [0x48, 0x7E]), ONE, b, scales([0x3C, 0x30]), ONE)  # 1, 2; 4; 1.5, 0.5
    assert (out.dtype, out.stride()) == (torch.bfloat16, (1, 1))
    assert out.tolist() == [[1 * 2 * 1 * 1.5 - 6 * 4 * 2 * 0.5], [0.5 * 3 * 4 * 1.5]]


def test_golden_values_are_in_units_of_the_tensor_scale():
    a, _ = two_by_two()
    values = torch.zeros(1, 32)
    values[0, :2], values[0, 17] = torch.tensor([2.0, 3.0]), -4.0
    for t in (values.bfloat16(), values.bfloat16().t().contiguous().t()):
        out = nvfp4_gemm(
            a, scales([0x38, 0x40], [0x48, 0x7E]), torch.tensor(0.25), t, None, torch.tensor(-2.0),
            out_dtype=torch.float32,
        )  # fmt: skip
        assert out.tolist() == [[-0.5 * (2 + 48)], [-0.5 * 6]]


def test_golden_the_product_of_the_tensor_scales_is_rounded_to_fp32():
    ones = torch.ones(1, 1).bfloat16()
    third = torch.tensor(1 / 3)  # 11184811 * 2^-25; its square is 14913081.78 * 2^-27
    out = nvfp4_gemm(ones, None, third, ones, None, third, out_dtype=torch.float32)
    assert out.item() == 14913082 * 2.0**-27
    tiny = torch.tensor(2.0**-100)
    large = torch.full((1, 1), 2.0**100).bfloat16()
    assert nvfp4_gemm(large, None, tiny, ones, None, tiny).item() == 0.0  # 2^-200 is 0 in fp32


def test_golden_blocked_scales_lie_in_tiles():
    a, b = codes([0x02, *7 * [0], 0x02, *7 * [0]], [0x02, *15 * [0]]), codes([0x02, *7 * [0], 0x02, *7 * [0]])
    a_scale, b_scale = torch.full((512,), 0x7F, dtype=torch.uint8), torch.full((512,), 0x7F, dtype=torch.uint8)
    a_scale[:2] = torch.tensor([0x38, 0x40])  # row 0: 1 and 2
    a_scale[16:18] = torch.tensor([0x48, 0x38])  # row 1: 4 and 1
    b_scale[:2] = torch.tensor([0x38, 0x48])  # 1 and 4
    out = nvfp4_gemm(a, a_scale.view(E4M3), ONE, b, b_scale.view(E4M3), ONE, scale_layout="blocked")
    assert out.tolist() == [[1 + 2 * 4], [4]]


def test_golden_rounding_to_bfloat16_is_the_last_step():
    a = torch.tensor([[257.0 / 256, 0.0]]).bfloat16()  # rounds to 1
    assert nvfp4_gemm(a, None, ONE, torch.ones(1, 2).bfloat16(), None, ONE).item() == 1.0
    ones = torch.ones(1, 1).bfloat16()
    assert nvfp4_gemm(ones, None, torch.tensor(1 + 2.0**-8 + 2.0**-20), ones, None, ONE).item() == 1 + 2.0**-7


def test_golden_nan():
    a, b = two_by_two()
    out = nvfp4_gemm(a, scales([0x38, 0x7F], [0x38, 0x38]), ONE, b, scales([0x38, 0x38]), ONE)
    assert math.isnan(out[0, 0])
    assert out[1, 0] == 1.5
    of_nan = torch.tensor(math.nan)
    assert nvfp4_gemm(a[:, :0], scales([], []), ONE, b[:, :0], scales([]), of_nan).isnan().all()
    assert nvfp4_gemm(a, scales([0x38, 0x38], [0x38, 0x38]), 0 * ONE, b, scales([0x38, 0x38]), ONE).eq(0).all()


@pytest.mark.parametrize("which", ["a", "b"])
def test_codes_and_their_values_give_the_same_sums(which):
    x, w = (mxspec.nvfp4_quantize(torch.randn(n, 64).bfloat16(), backend="reference") for n in (5, 7))
    expected = nvfp4_gemm(*x, *w, out_dtype=torch.float32)
    (q, s, T) = x if which == "a" else w
    values = mxspec.nvfp4_dequantize(q, s, ONE, backend="reference"), None, T
    args = (*values, *w) if which == "a" else (*x, *values)
    assert nvfp4_gemm(*args, out_dtype=torch.float32).equal(expected)
