"""nvfp4_dequantize: literal products."""

import math

import pytest
import torch

from mxspec import nvfp4_dequantize, nvfp4_quantize

PACKED, E4M3 = torch.float4_e2m1fn_x2, torch.float8_e4m3fn


def read(byte, scale, tensor_scale, out_dtype=torch.float32):
    """The first two elements of a block whose bytes are all the same."""
    qdata = torch.full((1, 8), byte, dtype=torch.uint8).view(PACKED)
    scale = torch.full((1, 1), scale, dtype=torch.uint8).view(E4M3)
    out = nvfp4_dequantize(qdata, scale, torch.tensor(tensor_scale), out_dtype=out_dtype, backend="reference")
    assert out.shape == (1, 16)
    return out[0, :2].tolist()


@pytest.mark.parametrize(
    ("byte", "scale", "tensor_scale", "values"),
    [
        (0xF5, 0x38, 1.0, [3.0, -6.0]),  # scale 1; the low nibble comes first
        (0x27, 0x7E, 1.0, [2688.0, 448.0]),
        (0x17, 0x01, 1.0, [6 * 2.0**-9, 2.0**-10]),
        (0x80, 0x38, 1.0, [0.0, -0.0]),
        (0x72, 0x3C, 0.1, [0.15000000596046448, 0.9000000357627869]),  # 1.5 and 9 times fp32(0.1), rounded to fp32
        (0x07, 0xB8, 1.0, [-6.0, -0.0]),  # a negative scale counts
        (0x77, 0x7E, 3e38, [math.inf, math.inf]),
        (0x77, 0x01, 2.0**-149, [0.0, 0.0]),  # 6 * 2^-9 * 2^-149 is below half of the smallest number
        (0x72, 0x38, 2.0**-149, [2.0**-149, 6 * 2.0**-149]),  # subnormal
        (0x77, 0x7E, 0.0, [0.0, 0.0]),
    ],
)
def test_golden(byte, scale, tensor_scale, values):
    got = read(byte, scale, tensor_scale)
    assert got == values
    assert [math.copysign(1, v) for v in got] == [math.copysign(1, v) for v in values]


def test_golden_nan():
    assert all(map(math.isnan, read(0x70, 0x7F, 1.0)))
    assert all(map(math.isnan, read(0x70, 0xFF, 1.0)))
    assert all(map(math.isnan, read(0x70, 0x38, math.nan)))


def test_golden_bfloat16_is_rounded_from_fp32():
    # 3 * 1.125 = 3.375 times 1 + 2^-8: 3.38818359375 lies between the bfloat16 numbers 3.375 and 3.390625
    assert read(0x55, 0x39, 1 + 2.0**-8, torch.bfloat16) == [3.390625, 3.390625]


def test_golden_stacks_and_columns():
    qdata = torch.full((2, 8, 3), 0x52, dtype=torch.uint8).view(PACKED)  # 16 rows, 3 columns: 1 above 3
    scale = torch.tensor([0x38, 0x40, 0x48], dtype=torch.uint8).view(E4M3)[None, :, None].expand(2, 3, 1)
    out = nvfp4_dequantize(qdata, scale, torch.tensor([1.0, -0.5]), axis=-2, backend="reference")
    assert (out.shape, out.is_contiguous(), out.dtype) == ((2, 16, 3), True, torch.bfloat16)
    assert out[:, :2].tolist() == [[[1.0, 2.0, 4.0], [3.0, 6.0, 12.0]], [[-0.5, -1.0, -2.0], [-1.5, -3.0, -6.0]]]


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("block", ["1x16", "16x16"])
@pytest.mark.parametrize("scale_layout", ["plain", "blocked"])
def test_what_a_quantizer_wrote_comes_back(axis, block, scale_layout):
    """The error is at most half of the largest step, 2 of 6, and the element that set the scale is nearly exact."""
    x = torch.randn(2, 64, 96, generator=torch.Generator().manual_seed(0))
    options = {"axis": axis, "scale_layout": scale_layout}
    out = nvfp4_dequantize(*nvfp4_quantize(x, block=block, **options), out_dtype=torch.float32, **options)
    blocks = {"1x16": (1, 16) if axis == -1 else (16, 1), "16x16": (16, 16)}[block]
    amax = x.abs().unflatten(-2, (-1, blocks[0])).unflatten(-1, (-1, blocks[1])).amax((-3, -1), keepdim=True)
    error = (x - out).abs().unflatten(-2, (-1, blocks[0])).unflatten(-1, (-1, blocks[1]))
    assert (error <= amax * (1 / 6 + 1 / 16)).all()
    sqnr_db = 10 * torch.log10(x.square().mean() / (x - out).square().mean())
    assert sqnr_db > (19 if block == "1x16" else 17)
