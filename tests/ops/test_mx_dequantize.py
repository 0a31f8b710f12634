"""mx_dequantize: literal products."""

import math

import pytest
import torch

from mxspec import mx_dequantize


def read(code, byte, elem_dtype=torch.float8_e4m3fn, out_dtype=torch.float32):
    qdata = torch.full((1, 32), code, dtype=torch.uint8).view(elem_dtype)
    scale = torch.full((1, 1), byte, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    return mx_dequantize(qdata, scale, out_dtype=out_dtype, backend="reference")[0, 31].item()


@pytest.mark.parametrize(
    ("code", "byte", "value"),
    [
        (0x38, 127, 1.0),
        (0x7E, 128, 896.0),
        (0xB8, 120, -(2.0**-7)),
        (0x01, 0, 2.0**-136),  # smallest subnormal times 2^-127: a subnormal fp32, and exact
        (0x7E, 254, math.inf),  # 448 * 2^127 is past fp32
    ],
)
def test_golden(code, byte, value):
    assert read(code, byte) == value


def test_golden_e5m2():
    assert read(0x7B, 127, torch.float8_e5m2) == 57344.0
    assert read(0x01, 0, torch.float8_e5m2) == 2.0**-143


def test_golden_e2m1():
    """The low nibble comes first: 5 is 3.0, F is -6.0. At 2^-127 a value that is subnormal in fp32 is exact."""
    qdata = torch.full((2, 16), 0xF5, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    scale = torch.tensor([[0], [128]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    out = mx_dequantize(qdata, scale, out_dtype=torch.float32, backend="reference")
    assert out.shape == (2, 32)
    assert out[:, :3].tolist() == [[3 * 2.0**-127, -6 * 2.0**-127, 3 * 2.0**-127], [6.0, -12.0, 6.0]]
    columns = qdata[:, :1].expand(2, 16).mT  # (16, 2): 32 rows, two of which share a byte
    out = mx_dequantize(columns, scale, axis=-2, out_dtype=torch.float32, backend="reference")
    assert (out.shape, out.stride()) == ((32, 2), (2, 1))
    assert out[:2].tolist() == [[3 * 2.0**-127, 6.0], [-6 * 2.0**-127, -12.0]]
    nan = torch.tensor([[255], [127]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    assert mx_dequantize(qdata, nan, backend="reference").isnan().sum(-1).tolist() == [32, 0]


def test_golden_fp6():
    """The bytes 1F 82 06 are 0x6821F, the codes 1F, 08, 28 and 01. In e3m2 28 is -0.5 and 08 is 0.5."""
    qdata = torch.tensor([[0x1F, 0x82, 0x06] * 8], dtype=torch.uint8)
    scale = torch.tensor([[128]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    options = {"out_dtype": torch.float32, "backend": "reference"}
    out = mx_dequantize(qdata, scale, elem_dtype="e2m3", **options)
    assert (out.shape, out[0, 28:].tolist()) == ((1, 32), [15.0, 2.0, -2.0, 0.25])
    out = mx_dequantize(qdata, scale, elem_dtype="e3m2", **options)
    assert out[0, :4].tolist() == [56.0, 1.0, -1.0, 0.125]
    columns = qdata.expand(2, 24).mT  # (24, 2): 32 rows
    out = mx_dequantize(columns, scale.expand(2, 1), axis=-2, elem_dtype="e2m3", **options)
    assert (out.shape, out.stride()) == ((32, 2), (2, 1))
    assert out[:4].tolist() == [[15.0] * 2, [2.0] * 2, [-2.0] * 2, [0.25] * 2]


def test_golden_int8():
    """A code is an integer of 64ths, and -128, which no quantizer writes, is -2."""
    assert [read(code, 128, torch.int8) for code in (0x7F, 0x01, 0xFF, 0x80)] == [127 / 32, 1 / 32, -1 / 32, -4.0]
    assert read(0x01, 0, torch.int8) == 2.0**-133
    assert math.isnan(read(0x00, 255, torch.int8))


@pytest.mark.parametrize("elem_dtype", [torch.float8_e5m2, "e5m2", None])
def test_the_format_may_be_said_twice(elem_dtype):
    qdata = torch.full((1, 32), 0x3C, dtype=torch.uint8).view(torch.float8_e5m2)
    scale = torch.tensor([[127]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    assert mx_dequantize(qdata, scale, elem_dtype=elem_dtype).unique().tolist() == [1.0]


def test_golden_nan_and_minus_zero():
    assert math.isnan(read(0x38, 255))
    assert math.isnan(read(0x7F, 127))
    assert math.copysign(1, read(0x80, 127)) == -1


def test_golden_column_blocks_read_the_scale_of_the_transpose():
    qdata = torch.full((64, 2), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.tensor([[127, 128], [129, 130]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    out = mx_dequantize(qdata, scale, axis=-2, backend="reference")
    assert out[[0, 63]].tolist() == [[1.0, 4.0], [2.0, 8.0]]
    assert out.is_contiguous()


def test_a_packed_byte_counts_as_two_multiplies():
    flops = mx_dequantize.reference.spec.flops
    args = torch.zeros(4, 16, dtype=torch.uint8), torch.zeros(4, 1)
    assert flops((args[0].view(torch.float4_e2m1fn_x2), args[1]), ()) == 4 * 32
    assert flops((args[0].view(torch.float8_e4m3fn), args[1]), ()) == 4 * 16
