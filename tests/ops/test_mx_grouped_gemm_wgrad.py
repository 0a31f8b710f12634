"""mx_grouped_gemm_wgrad: literal sums over each group's tokens, and tokens of no group."""

import torch

import mxspec
from mxspec import dispatch
from mxspec.shapes import Shapes
from tests.helpers import ends, full

E4M3FN, E8M0FNU = torch.float8_e4m3fn, torch.float8_e8m0fnu


def mx_grouped_gemm_wgrad(dy, dy_scale, x, x_scale, offs, **options):
    """The op, with dy and x given as rows of features."""
    scales = dy_scale.view(E8M0FNU), x_scale.view(E8M0FNU)
    dy, x = (t.to(E4M3FN).mT for t in (dy, x))
    return mxspec.mx_grouped_gemm_wgrad(dy, scales[0], x, scales[1], offs, backend="reference", **options)


def operands():
    """One feature of dy: 1 at tokens 0, 33, 64 and 96. Two features of x: 2 everywhere, and the token's number / 32."""
    dy, x = torch.zeros(1, 128), torch.full((2, 128), 2.0)
    dy[0, [0, 33, 64, 96]] = 1.0
    x[1] = torch.arange(128) // 32
    return dy, x


def test_golden_sums_over_the_tokens_of_a_group():
    dy, x = operands()
    dy_scale, x_scale = full(127, 1, 4), full(127, 2, 4)
    dy_scale[0, 1], x_scale[1, 2] = 129, 126  # 4 at tokens 32..63; 1/2 at 64..95
    out = mx_grouped_gemm_wgrad(dy, dy_scale, x, x_scale, ends(64, 64, 128), scale_layout="plain")
    assert (out.dtype, out.stride()) == (torch.float32, (2, 2, 1))
    # 2 + 4 * 2 and 0 + 4 * 1; no token; 2 + 2 and 2 / 2 + 3
    assert out.tolist() == [[[10.0, 4.0]], [[0.0, 0.0]], [[4.0, 4.0]]]


def test_golden_tokens_of_no_group_never_count():
    dy, x = operands()
    dy[:, 96:], x[:, 96:] = torch.nan, torch.nan
    dy_scale, x_scale = full(127, 1, 4), full(127, 2, 4)
    dy_scale[:, 3], x_scale[:, 3] = 255, 255
    args = dy, dy_scale, x, x_scale, ends(32, 96)
    out = mx_grouped_gemm_wgrad(*args, out_dtype=torch.bfloat16, scale_layout="plain", check_offs=True)
    assert out.dtype == torch.bfloat16
    assert out.tolist() == [[[2.0, 0.0]], [[4.0, 3.0]]]


def test_golden_a_groups_blocked_scales_begin_at_a_multiple_of_four_columns():
    dy, x = operands()
    dy_scale, x_scale = full(255, 128, 4 + 2 * 4), full(255, 128, 4 + 2 * 4)
    # Group 0 has the first tile: blocks 0, 1 and 2 in columns 0, 1 and 2. Group 1 has the next: block 3 in column 0.
    dy_scale.view(-1)[0:3], dy_scale.view(-1)[512] = torch.tensor([127, 128, 129]), 130
    x_scale.view(-1)[0:3], x_scale.view(-1)[512] = 127, 127  # row 0
    x_scale.view(-1)[16:19], x_scale.view(-1)[512 + 16] = 127, 126  # row 1
    out = mx_grouped_gemm_wgrad(dy, dy_scale, x, x_scale, ends(96, 128))
    # 2 + 2 * 2 + 4 * 2 and 0 + 2 * 1 + 4 * 2; 8 * 2 and 8 * 3 / 2
    assert out.tolist() == [[[14.0, 10.0]], [[16.0, 12.0]]]


def test_golden_of_several_row_tiles_a_group_has_one_after_the_other():
    dy, x = torch.zeros(130, 64), torch.ones(1, 64)
    dy[129] = 1.0
    dy_scale, x_scale = full(255, 256, 2 + 2 * 4), full(255, 128, 2 + 2 * 4)
    for group in (0, 1):  # group 1 begins after both row tiles of group 0; the byte of a row is the first of its word
        for row in range(130):
            place = group * 1024 + row // 128 * 512 + row % 32 * 16 + row % 128 // 32 * 4
            dy_scale.view(-1)[place] = 127 + group * (row == 129)
        x_scale.view(-1)[group * 512] = 127
    out = mx_grouped_gemm_wgrad(dy, dy_scale, x, x_scale, ends(32, 64))
    assert out[:, 129, 0].tolist() == [32.0, 64.0]
    assert out[:, :129].count_nonzero() == 0


def test_golden_a_nan_stays_with_its_expert():
    dy, x = operands()
    x[1, 70] = torch.nan
    out = mx_grouped_gemm_wgrad(dy, full(127, 1, 4), x, full(127, 2, 4), ends(64, 96, 128), scale_layout="plain")
    assert out.isnan().tolist() == [[[False, False]], [[False, True]], [[False, False]]]


def test_it_is_the_gradient_of_a_grouped_linear():
    dy, x, offs = torch.randn(90, 40), torch.randn(90, 72), ends(50, 50, 83)
    for layout in ("blocked", "plain"):
        of_dy = mxspec.mx_quantize_groups(dy, offs, axis=-2, scale_layout=layout)
        of_x = mxspec.mx_quantize_groups(x, offs, axis=-2, scale_layout=layout)
        out = mxspec.mx_grouped_gemm_wgrad(*of_dy[:2], *of_x[:2], of_x[3], scale_layout=layout)
        for e, (first, last) in enumerate(((0, 50), (50, 50), (50, 83))):
            exact = dy[first:last].T @ x[first:last]
            assert (out[e] - exact).norm() <= 0.06 * exact.norm()  # two roundings to 3 bits of mantissa


def test_bench_cases_are_the_grouped_shapes():
    op = dispatch.reference("mx_grouped_gemm_wgrad")
    even, even_fp32, ragged = op.spec.bench_cases(Shapes(grouped=((256, 40, 96, 2),)))
    args = even.args()
    assert (even.name, args[4].tolist()) == ("256x40x96, E 2, even, padded, bfloat16", [128, 256])
    assert op.spec.flops(args, ()) == 2 * 256 * 40 * 96
    for case in (even, even_fp32, ragged):
        args = case.args()
        assert args[0].stride() == (1, args[4][-1])
        assert op(*args, check_offs=True).shape == (2, 40, 96)
