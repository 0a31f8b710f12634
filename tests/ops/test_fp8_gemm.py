"""fp8_gemm: literal sums, and the elements that each scale reaches."""

import torch

import mxspec
from mxspec import dispatch
from mxspec.shapes import Shapes

E4M3FN = torch.float8_e4m3fn


def zeros(M, N, K, rows=128):
    return (
        torch.zeros(M, K).to(E4M3FN),
        torch.ones(M, K // 128),
        torch.zeros(N, K).to(E4M3FN),
        torch.ones(-(-N // rows), K // 128),
    )


def fp8_gemm(*args, **options):
    return mxspec.fp8_gemm(*args, backend="reference", **options)


def test_golden_1x128_by_128x128():
    a, a_scale, b, b_scale = zeros(2, 130, 256)
    a[0, 0], a[0, 128], a[1, 255] = 1.5, 4.0, -448.0
    b[0, 0], b[0, 128], b[129, 0], b[129, 255] = -2.0, 8.0, 1.0, 0.5
    a_scale[0] = torch.tensor([2.0, 0.25])
    b_scale[:] = torch.tensor([[0.5, 3.0], [10.0, 1.0]])  # rows 0..127 of b, rows 128 and 129
    out = fp8_gemm(a, a_scale, b, b_scale)
    assert (out.dtype, out.shape) == (torch.bfloat16, (2, 130))
    # [0, 0]: 3 * -1 + 1 * 24; [0, 129]: 3 * 10; [1, 129]: -448 * 0.5
    assert out[:, [0, 129]].tolist() == [[21.0, 30.0], [0.0, -224.0]]
    assert out[:, 1:129].count_nonzero() == 0


def test_golden_a_shorter_last_block():
    """Columns 128 to 143 are a block of their own, with the second scale of each row."""
    a, b = torch.zeros(1, 144).to(E4M3FN), torch.zeros(1, 144).to(E4M3FN)
    a[0, [0, 143]], b[0, [0, 143]] = torch.tensor([2.0, -4.0]).to(E4M3FN), torch.tensor([1.5, 8.0]).to(E4M3FN)
    out = fp8_gemm(a, torch.tensor([[10.0, 0.5]]), b, torch.tensor([[1.0, 2.0]]))
    assert out.tolist() == [[2.0 * 10 * 1.5 - 4.0 * 0.5 * 8 * 2]]


def test_golden_1x128_by_1x128():
    a, a_scale, b, b_scale = zeros(1, 3, 256, rows=1)
    a[0, 127], a[0, 128], b[:, 127], b[:, 128] = 1.0, 1.0, 2.0, 1.0
    a_scale[0, 1] = 4.0
    b_scale[:] = torch.tensor([[1.0, 1.0], [0.5, 0.0], [0.0, -8.0]])
    assert fp8_gemm(a, a_scale, b, b_scale).tolist() == [[6.0, 1.0, -32.0]]


def test_golden_not_by_way_of_fp32():
    """1 + 2^-8 + 2^-39 rounds to 1 + 2^-7. Through fp32 it would be the tie 1 + 2^-8, which rounds to 1."""
    a, a_scale, b, b_scale = zeros(1, 1, 256)
    a[0, 0] = a[0, 128] = b[0, 0] = b[0, 128] = 1.0
    a_scale[0] = torch.tensor([1 + 2**-8, 2**-39])
    assert fp8_gemm(a, a_scale, b, b_scale).item() == 1 + 2**-7


def test_golden_sums_are_rounded_once_to_even():
    a, a_scale, b, b_scale = zeros(1, 2, 256)
    a[0, 0] = a[0, 128] = b[0, 0] = b[0, 128] = b[1, 0] = b[1, 128] = 1.0
    a_scale[0, 1] = 2**-8  # half a unit in the last place of bfloat16 at 1
    b[1, 1] = a[0, 1] = 2**-6
    assert fp8_gemm(a, a_scale, b, b_scale).tolist() == [[1.0, 1.0078125]]
    out = fp8_gemm(a, a_scale, b, b_scale, out_dtype=torch.float32)
    assert out.tolist() == [[1 + 2**-8, 1 + 2**-8 + 2**-12]]


def test_golden_a_nan_scale_reaches_its_128_columns():
    a, a_scale, b, b_scale = zeros(2, 200, 128)
    b_scale[1] = torch.nan
    assert fp8_gemm(a, a_scale, b, b_scale).isnan().tolist() == 2 * [128 * [False] + 72 * [True]]


def test_bench_cases_are_the_linear_shapes_and_those_of_wgrad():
    op = dispatch.reference("fp8_gemm")
    forward, wgrad = op.spec.bench_cases(Shapes(linear=((4, 200, 256),), wgrad=((128, 256, 384),)))
    args = forward.args()
    assert (forward.name, op(*args).shape, args[3].shape) == ("4x200x256", (4, 200), (2, 2))
    assert op.spec.flops(args, ()) == 2 * 4 * 200 * 256
    args = wgrad.args()
    assert (args[1].stride(), args[3].shape, args[3].stride()) == ((1, 128), (256, 3), (1, 256))
    assert op(*args, **wgrad.kwargs).dtype == torch.float32
