"""fp8_dequantize: literal products, and which block a scale reaches."""

import torch

from mxspec import fp8_dequantize


def ones(*shape):
    return torch.full(shape, 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)


def test_golden_1x128():
    out = fp8_dequantize(ones(2, 256), torch.tensor([[2.0, 3.0], [0.5, -1.0]]), backend="reference")
    assert out[:, [0, 127, 128, 255]].tolist() == [[2.0, 2.0, 3.0, 3.0], [0.5, 0.5, -1.0, -1.0]]


def test_golden_128x128_with_a_partial_block():
    out = fp8_dequantize(ones(130, 128), torch.tensor([[2.0], [3.0]]), backend="reference")
    assert out[[0, 127, 128, 129], 0].tolist() == [2.0, 2.0, 3.0, 3.0]


def test_golden_columns():
    out = fp8_dequantize(ones(256, 2), torch.tensor([[2.0, 3.0], [4.0, 5.0]]), axis=-2, backend="reference")
    assert out[[0, 128]].tolist() == [[2.0, 4.0], [3.0, 5.0]]
    assert out.is_contiguous()


def test_golden_two_roundings():
    """1.5 * scale is 2^-24 above 1 + 2^-8, the tie between 1 and 1 + 2^-7: fp32 rounds onto the tie, bfloat16 to even.

    Rounded once, the product would be 1.0078125.
    """
    qdata = torch.full((1, 128), 0x3C, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.tensor([[0.6692708730697632]])
    assert 1.5 * scale.item() == 1 + 2.0**-8 + 2.0**-24
    assert fp8_dequantize(qdata, scale, backend="reference")[0, 0].item() == 1.0
    assert fp8_dequantize(qdata, scale, out_dtype=torch.float32, backend="reference")[0, 0].item() == 1 + 2.0**-8
