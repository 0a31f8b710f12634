"""nvfp4_quantize: codes and scales by hand, the exactly rounded quotients, and properties."""

import math
from fractions import Fraction

import pytest
import torch

from mxspec import from_blocked, nvfp4_dequantize, nvfp4_quantize
from mxspec.formats import E2M1, E4M3FN, same_bits
from mxspec.reference.common.numerics import unpacked
from tests.helpers import generated

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def quantized(x, amax=None, **kwargs):
    """Codes, one in a number, the bytes of the scale, and the tensor scale."""
    qdata, scale, tensor_scale = nvfp4_quantize(x, amax, backend="reference", **kwargs)
    assert (qdata.dtype, scale.dtype, tensor_scale.dtype) == (E2M1.dtype, E4M3FN.dtype, F32)
    return unpacked(qdata.mT if kwargs.get("axis") == -2 else qdata, E2M1), scale.view(torch.uint8), tensor_scale


def block(*values, dtype=F32):
    x = torch.zeros(1, 16, dtype=dtype)
    x[0, : len(values)] = torch.tensor(values, dtype=dtype)
    return x


# By hand. The e2m1 codes 0 to 7 are 0, 0.5, 1, 1.5, 2, 3, 4 and 6; 8 is the sign. An e4m3fn byte has sign 1, exponent 4
# (bias 7), mantissa 3 bits. Under the tensor amax 2688 the scale is the block's amax / 6, and T is 1.
@pytest.mark.parametrize(
    ("values", "amax", "byte", "codes"),
    [
        # 448 * 6 / 2688 = 1 = 0.0111.000; the elements are the codes' values
        ((6.0, 1.0, -1.0, 0.5, -3.0), 2688.0, 0x38, [7, 2, 10, 1, 13]),
        # ties to even: 0.25 -> 0, 0.75 and 1.25 -> 1, 1.75 and 2.5 -> 2, 3.5 and 5 -> 4; -0.25 -> -0
        ((6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25), 2688.0, 0x38, [7, 0, 2, 2, 4, 4, 6, 6, 8]),
        # the scale is the largest, 448 = 0.1111.110
        ((2688.0, -1344.0), 2688.0, 0x7E, [7, 13]),
        # the tensor amax is too small: scale and code saturate, 5376 / 448 = 12 -> 6, 1344 / 448 = 3
        ((5376.0, 1344.0), 2688.0, 0x7E, [7, 5]),
        # 6 * 2^-9 gives the smallest scale, 2^-9 = 0.0000.001
        ((6 * 2.0**-9, 2.0**-9), 2688.0, 0x01, [7, 2]),
        # 6 * 2^-10 is halfway between 0 and 2^-9, and even is 0: all codes are zeros with their signs
        ((6 * 2.0**-10, -6 * 2.0**-10, 0.0, -0.0), 2688.0, 0x00, [0, 8, 0, 8]),
        # just above halfway: the scale 2^-9, and 3.05 and -0.5 of it
        ((6 * 2.0**-10 * 1.015625, -(2.0**-10)), 2688.0, 0x01, [5, 9]),
        # 6 * 1.0625 = 6.375: halfway between the scales 1 and 1.125, even is 1; 6.375 -> 6
        ((6.375, 5.0), 2688.0, 0x38, [7, 6]),
        # 6 * 1.1875 = 7.125: halfway between 1.125 and 1.25, even is 1.25 = 0.0111.010; 7.125 / 1.25 = 5.7 -> 6
        ((7.125, -2.5), 2688.0, 0x3A, [7, 12]),
        # A = 448: 448 * 75 / 448 = 75 -> 72 = 1.125 * 2^6 = 0.1101.001, and 2688 * 37.5 / (72 * 448) = 3.125 -> 3
        ((75.0, 37.5), 448.0, 0x69, [7, 5]),
        # a block of zeros
        ((0.0, -0.0), 448.0, 0x00, [0, 8]),
        # NaN and Inf show in the scale; every code is 7
        ((math.nan, 1.0), 448.0, 0x7F, [7] * 16),
        ((1.0, -math.inf), 448.0, 0x7F, [7] * 16),
        # TransformerEngine writes 0x23 here. 448 * b / A is the tie 0.1640625, and even is 0.15625 = 1.25 * 2^-3
        ((0.0003719329833984375,), 1.015625, 0x22, [7]),
    ],
)
def test_golden(values, amax, byte, codes):
    got, scale, tensor_scale = quantized(block(*values), torch.tensor(amax))
    assert (scale.tolist(), got[0, : len(codes)].tolist()) == ([[byte]], codes)
    assert tensor_scale.item() == torch.tensor(amax / 2688).item()


def test_golden_bytes_and_blocks_of_both_axes():
    x = torch.zeros(16, 32)
    x[:2, 0], x[0, 16] = torch.tensor([6.0, -3.0]), 2688.0
    qdata, scale, tensor_scale = nvfp4_quantize(x, backend="reference")
    assert (qdata.shape, qdata.stride(), tensor_scale.item()) == ((16, 16), (16, 1), 1.0)
    assert qdata.view(torch.uint8)[:2, [0, 8]].tolist() == [[0x07, 0x07], [0x0F, 0x00]]
    assert scale.view(torch.uint8)[:2].tolist() == [[0x38, 0x7E], [0x30, 0x00]]
    qdata, scale, _ = nvfp4_quantize(x, axis=-2, backend="reference")
    assert (qdata.shape, qdata.stride(), scale.shape) == ((8, 32), (1, 8), (32, 1))
    assert qdata.view(torch.uint8)[0, [0, 16]].tolist() == [0xD7, 0x07]  # 6 in the low nibble, -3 in the high
    assert scale.view(torch.uint8)[[0, 16], 0].tolist() == [0x38, 0x7E]


def test_golden_squares_hold_one_scale_16_times():
    x = torch.zeros(32, 32)
    x[3, 5], x[20, 0], x[31, 31] = 6.0, -12.0, 2688.0
    codes, scale, _ = quantized(x, block="16x16")
    assert scale.tolist() == 16 * [[0x38, 0x00]] + 16 * [[0x40, 0x7E]]
    assert (codes[3, 5], codes[20, 0], codes[31, 31]) == (7, 15, 7)
    turned, its_scale, _ = quantized(x, block="16x16", axis=-2)
    assert its_scale.tolist() == 16 * [[0x38, 0x40]] + 16 * [[0x00, 0x7E]]
    assert torch.equal(turned, codes.mT)


def test_golden_tensor_amax():
    assert quantized(block(7.0))[2].item() == torch.tensor(7.0 / 2688).item()
    assert quantized(torch.zeros(2, 16))[2].item() == 0.0
    stack = torch.stack([block(2688.0), block(1.0), block(0.0)])
    codes, scale, tensor_scale = quantized(stack)
    assert tensor_scale.tolist() == [1.0, torch.tensor(1 / 2688).item(), 0.0]
    assert scale.flatten().tolist() == [0x7E, 0x7E, 0x00]
    assert codes[:, 0, 0].tolist() == [7, 7, 0]
    scale, tensor_scale = quantized(stack, torch.tensor([2688.0, 2688.0, 5.0]))[1:]
    assert scale.flatten().tolist() == [0x7E, 0x23, 0x00]  # 448 / 2688 = 1/6 -> 0.171875 = 1.375 * 2^-3
    assert tensor_scale.tolist() == [1.0, 1.0, torch.tensor(5 / 2688).item()]


@pytest.mark.parametrize("amax", [math.nan, math.inf, -1.0])
def test_an_amax_that_is_no_magnitude_makes_its_matrix_nan(amax):
    x = torch.ones(2, 4, 32)
    codes, scale, tensor_scale = quantized(x, torch.tensor([amax, 1.0]))
    assert tensor_scale.isnan().tolist() == [True, False]
    assert (scale[0] == 0x7F).all()
    assert (codes[0] == 7).all()
    assert (scale[1] == 0x7E).all()
    x[1, 2, 3] = amax if amax != -1.0 else math.inf
    codes, scale, tensor_scale = quantized(x)
    assert tensor_scale.isnan().tolist() == [False, True]
    assert (scale[1] == 0x7F).all()


def nearest(value, fmt):
    """The code of a format nearest to a fraction that is not negative; a tie goes to the even code. It saturates."""
    grid = [Fraction(fmt.value(code)) for code in range(fmt.largest_code + 1)]
    return min(range(len(grid)), key=lambda code: (abs(grid[code] - value), code % 2))


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_scales_and_codes_are_the_quotients_rounded_once(dtype):
    """Over fractions, without any rounding between. Half of the blocks hold ties of codes or of scales."""
    generator = torch.Generator().manual_seed(3)
    ties = 0
    for turn in range(60):
        steps = torch.randint(1, 256, (4, 16), generator=generator).float()
        x = steps * 2.0 ** torch.randint(-6, 7, (4, 1), generator=generator)
        if turn % 2:
            x = x % 64
            x[0, 0], x[1:, 0] = 2688.0, 96.0  # A and b: the scale is 16
            x[1:, 1:8] = 16 * torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
        x = x.to(dtype)
        codes, scale, _ = quantized(x)
        A = Fraction(x.max().item())
        for row in range(4):
            b = Fraction(x[row].max().item())
            s = nearest(448 * b / A, E4M3FN)
            assert scale[row, 0] == s
            for element, code in zip(x[row].tolist(), codes[row].tolist(), strict=True):
                exact = 2688 * Fraction(element) / (Fraction(E4M3FN.value(s)) * A) if s else Fraction(0)
                assert code == nearest(exact, E2M1), (turn, row, element)
                ties += (4 * exact).denominator == 1 and exact not in map(Fraction, (0, 0.5, 1, 1.5, 2, 3, 4, 6))
    assert ties > 600


def test_every_pair_of_bfloat16_mantissas_gives_the_nearest_scale():
    """The quotient 448 * b / A for all mantissas of A and b, at the largest scales and among subnormal scales."""
    mantissas = torch.arange(128, 256, dtype=torch.float64) / 128
    grid = torch.tensor([E4M3FN.value(code) for code in range(E4M3FN.largest_code + 1)], dtype=torch.float64)
    for shift in (-1, -8, -14):
        for A in mantissas.tolist():
            x = torch.zeros(129, 16, dtype=BF16)
            x[:128, 0], x[128, 0] = (mantissas * 2.0**shift).to(BF16), A
            scale = quantized(x)[1][:128, 0].long()
            scaled = 448 * mantissas * 2.0**shift  # exact, and so are its products and differences with A * grid
            below, above = grid[(scale - 1).clamp(0)], grid[(scale + 1).clamp(max=E4M3FN.largest_code)]
            here = (scaled - A * grid[scale]).abs()
            for other, code in ((below, scale - 1), (above, scale + 1)):
                there = (scaled - A * other).abs()
                real = (code >= 0) & (code <= E4M3FN.largest_code)
                assert ((here < there) | ((here == there) & (scale % 2 == 0)) | ~real).all()


@pytest.mark.parametrize("block_shape", ["1x16", "16x16"])
def test_a_power_of_two_moves_the_tensor_scale_alone(block_shape):
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).to(BF16)
    codes, scale, tensor_scale = quantized(x, block=block_shape)
    for k in (-60, -3, 1, 40):
        others = quantized(x * 2.0**k, block=block_shape)
        assert torch.equal(others[0], codes)
        assert torch.equal(others[1], scale)
        assert others[2] == tensor_scale * 2.0**k


def test_one_axis_is_the_other_of_the_transpose_and_blocked_is_plain():
    x = torch.randn(2, 48, 96, generator=torch.Generator().manual_seed(1))
    codes, scale, tensor_scale = quantized(x, axis=-2)
    others = quantized(x.mT)
    assert torch.equal(codes, others[0])
    assert torch.equal(scale, others[1])
    assert torch.equal(tensor_scale, others[2])
    blocked = quantized(x, axis=-2, scale_layout="blocked")[1]
    assert torch.equal(from_blocked(blocked, 96, 3), scale)


def test_quantizing_the_values_read_back_changes_nothing():
    """In fp32 the values of one quantization are a fixed point if the amax of the tensor is given again."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(2)).to(BF16)
    amax = x.abs().amax().float()
    first = nvfp4_quantize(x, amax, backend="reference")
    values = nvfp4_dequantize(*first, out_dtype=F32, backend="reference")
    again = nvfp4_quantize(values, amax, backend="reference")
    full = first[0].view(torch.uint8).view(64, 4, 8)  # blocks whose largest code is 6 keep their scale
    holds_six = (((full & 7) == 7) | ((full >> 4 & 7) == 7)).any(-1)
    assert holds_six.float().mean() > 0.9
    same = first[1].view(torch.uint8) == again[1].view(torch.uint8)
    assert same[holds_six].all()
    codes = (first[0].view(torch.uint8) == again[0].view(torch.uint8)).view(64, 4, 8).all(-1)
    assert codes[holds_six].all()


def test_an_operator_takes_the_amax_by_name_or_not_at_all():
    x = torch.randn(32, 64)
    amax = x.abs().amax()
    named = torch.ops.mxspec.nvfp4_quantize(x, tensor_amax=amax)
    assert all(same_bits(*both).all() for both in zip(torch.ops.mxspec.nvfp4_quantize(x), named, strict=True))
    compiled = torch.compile(lambda x, a: nvfp4_quantize(x, tensor_amax=a), fullgraph=True, backend="aot_eager")
    for a in (None, amax):
        assert all(same_bits(*both).all() for both in zip(compiled(x, a), named, strict=True))


def test_the_generated_cases_give_and_leave_out_the_amax():
    given = [len(case.args()) for case in generated("nvfp4_quantize") if not case.raises]
    assert {1, 2} == set(given)
