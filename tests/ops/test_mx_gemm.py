"""mx_gemm: literal sums, the elements that each scale byte reaches, and the byte's place in the tiles."""

import pytest
import torch

import mxspec
from mxspec import dispatch
from mxspec.reference.common.numerics import round_once
from mxspec.shapes import Shapes

E4M3FN, E5M2, E8M0FNU = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
NAN, INF = float("nan"), float("inf")


def operands(M, N, K, a_dtype=E4M3FN, b_dtype=E4M3FN):
    """Codes of zero, and scales of 1 as uint8."""
    ones = (torch.full((rows, K // 32), 127, dtype=torch.uint8) for rows in (M, N))
    return torch.zeros(M, K).to(a_dtype), next(ones), torch.zeros(N, K).to(b_dtype), next(ones)


def mx_gemm(a, a_scale, b, b_scale, **options):
    a_scale, b_scale = a_scale.view(E8M0FNU), b_scale.view(E8M0FNU)
    return mxspec.mx_gemm(a, a_scale, b, b_scale, backend="reference", **options)


def test_golden_each_block_has_its_scale():
    a, a_scale, b, b_scale = operands(2, 3, 64, b_dtype=E5M2)
    a[0, 31], a[0, 32], a[1, 0] = 1.5, 4.0, -448.0
    b[0, 31], b[0, 32], b[1, 0], b[2, 32] = -2.0, 8.0, 57344.0, 0.25
    a_scale[0] = torch.tensor([128, 125])  # 2, 1/4
    b_scale[:] = torch.tensor([[127, 126], [117, 127], [127, 130]])  # 1, 1/2; 2^-10; 1, 8
    out = mx_gemm(a, a_scale, b, b_scale)
    assert (out.dtype, out.shape) == (torch.bfloat16, (2, 3))
    # [0, 0]: 3 * -2 + 1 * 4; [0, 2]: 1 * 2; [1, 1]: -448 * 56
    assert out.tolist() == [[-2.0, 0.0, 2.0], [0.0, -25088.0, 0.0]]


def test_golden_blocked_scales_are_read_from_their_tiles():
    a, _, b, _ = operands(130, 33, 160)
    a[129, 32], b[32, 32] = 1.0, 1.0  # block 1 of both
    a[129, 128], b[32, 128] = 1.0, 1.0  # block 4: the second tile of columns
    a_scale, b_scale = (torch.full((n,), 255, dtype=torch.uint8) for n in (256 * 8, 128 * 8))
    for row in range(130):  # scales of 1, wherever to_blocked puts them
        for c in range(5):
            a_scale[row // 128 * 1024 + c // 4 * 512 + row % 32 * 16 + row % 128 // 32 * 4 + c % 4] = 127
            b_scale[c // 4 * 512 + row % 32 * 16 + row % 128 // 32 * 4 + c % 4] = 127
    a_scale[1024 + 16 + 1], a_scale[1024 + 512 + 16] = 129, 130  # row 129 is row 1 of the second tile: 4, 8
    b_scale[4 + 1], b_scale[512 + 4] = 127, 126  # row 32 is the second word: 1, 1/2
    out = mx_gemm(a, a_scale, b, b_scale, scale_layout="blocked")
    assert (out[129, 32].item(), out.count_nonzero().item()) == (8.0, 1)


def test_golden_bfloat16_by_e2m1_takes_the_first_element_from_the_low_nibble():
    bits = torch.zeros(2, 32, dtype=torch.uint8)
    bits[0, 0], bits[0, 16], bits[1, 31] = 0x52, 0x0F, 0x90  # 1 and 3; -6 and 0; 0 and -0.5
    scale = torch.tensor([[127, 128], [127, 0]], dtype=torch.uint8).view(E8M0FNU)
    a = torch.zeros(2, 64, dtype=torch.bfloat16)
    a[0, 0], a[0, 1], a[0, 32], a[1, 63] = 10.0, 100.0, 0.5, 2.0**100
    w = bits.view(torch.float4_e2m1fn_x2)
    out = mxspec.mx_gemm(a, None, w, scale, out_dtype=torch.float32, backend="reference")
    assert out.tolist() == [[10 + 300 - 6, 0.0], [0.0, -(2.0**-28)]]  # -6 * 2 * 0.5; -0.5 * 2^-127 * 2^100
    scale.view(torch.uint8)[1, 0] = 255
    assert mxspec.mx_gemm(a, None, w, scale, backend="reference").isnan().tolist() == [[False, True], [False, True]]


def test_golden_e4m3_by_e2m1_has_both_scales():
    a = torch.zeros(1, 32).to(E4M3FN)
    a[0, 5] = 1.5
    bits = torch.zeros(1, 16, dtype=torch.uint8)
    bits[0, 2] = 0xC0  # element 5 is the high nibble of byte 2: -2
    of_a, of_b = (torch.tensor([[byte]], dtype=torch.uint8).view(E8M0FNU) for byte in (129, 126))
    out = mxspec.mx_gemm(a, of_a, bits.view(torch.float4_e2m1fn_x2), of_b, backend="reference")
    assert out.tolist() == [[-6.0]]  # 1.5 * 4 * -2 / 2


def test_golden_products_beyond_either_range_are_finite():
    a, a_scale, b, b_scale = operands(1, 2, 64)
    a[0, 0], a[0, 32], b[0, 0], b[0, 32], b[1, 32] = 448.0, 2**-9, 1.0, 2.0, -448.0
    a_scale[0] = torch.tensor([254, 0])  # 2^127, 2^-127
    b_scale[:] = torch.tensor([0, 254])
    assert mx_gemm(a, a_scale, b, b_scale, out_dtype=torch.float32).tolist() == [[448 + 2**-8, -0.875]]
    b_scale[:] = 254
    assert mx_gemm(a, a_scale, b, b_scale).tolist() == [[INF, -0.875]]  # 448 * 2^254


def test_golden_sums_are_rounded_once_to_even():
    a, a_scale, b, b_scale = operands(1, 3, 96)
    a[0, [0, 32, 64]] = 1.0
    a_scale[0] = torch.tensor([127, 119, 87])  # 1, 2^-8, 2^-40
    b[:, 0], b[:, 32], b[1, 64], b[2, 64] = 1.0, 1.0, 1.0, -1.0
    # A tie between 1 and 1 + 2^-7, and numbers above and below it by less than fp32 can represent.
    assert mx_gemm(a, a_scale, b, b_scale).tolist() == [[1.0, 1.0078125, 1.0]]
    assert mx_gemm(a, a_scale, b, b_scale, out_dtype=torch.float32).tolist() == [3 * [1 + 2**-8]]


def test_golden_nan_reaches_its_row_and_column():
    a, a_scale, b, b_scale = operands(3, 3, 64)
    a[1, 40], b_scale[2, 0] = NAN, 255
    expected = [[False, False, True], [True, True, True], [False, False, True]]
    assert mx_gemm(a, a_scale, b, b_scale).isnan().tolist() == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1 + 2**-8 + 2**-40, 1 + 2**-7),
        (-1 - 2**-8 - 2**-40, -1 - 2**-7),
        (1 + 3 * 2**-8 - 2**-40, 1 + 2**-7),
        (1 + 3 * 2**-8, 1 + 2**-6),
        (2 - 2**-40, 2.0),
        (-(2.0**-1000), -0.0),
        (2.0**128 - 2.0**119, INF),  # half a unit past the largest bfloat16
        (2.0**128 - 2.0**119 - 2.0**80, 2.0**128 - 2.0**120),
        (-(2.0**1000), -INF),
        (INF, INF),
    ],
)
def test_fp64_is_rounded_once_to_bfloat16(value, expected):
    out = round_once(torch.tensor([value], dtype=torch.float64), torch.bfloat16)
    assert (out.dtype, str(out.item())) == (torch.bfloat16, str(expected))


def test_bench_cases_are_the_linear_shapes():
    op = dispatch.reference("mx_gemm")
    case, few = op.spec.bench_cases(Shapes(linear=((4, 200, 256),)))
    args = case.args()
    assert (case.name, op(*args, **case.kwargs).shape) == ("4x200x256", (4, 200))
    assert op.spec.flops(args, ()) == 2 * 4 * 200 * 256
    assert (few.name, op(*few.args()).shape) == ("16x200x256, bfloat16 by e2m1", (16, 200))
    assert op.spec.flops(few.args(), ()) == 2 * 16 * 200 * 256
