"""fp8_quantize_1x128: goldens computed by hand, and peers' bytes."""

import numpy as np
import pytest
import torch

from mxspec import check, dispatch, fp8_quantize_1x128
from tests.helpers import published

VECTORS = published("fp8_block")


def quantized(*values, **kwargs):
    x = torch.zeros(1, 128)
    x[0, : len(values)] = torch.tensor(values)
    qdata, scale = fp8_quantize_1x128(x, backend="reference", **kwargs)
    return qdata.view(torch.uint8)[0, : len(values)].tolist(), scale.item()


def test_golden():
    assert quantized(448.0, 1.0, -1.0) == ([0x7E, 0x38, 0xB8], 1.0)
    assert quantized(896.0, -2.0) == ([0x7E, 0xB8], 2.0)


def test_golden_pow2_rounds_the_factor_down():
    # 448 / 300 = 1.49 becomes 1; 300 = 1.171875 * 2^8 rounds to 288 + 32 * 0.375 -> 288 = 0.1111.001
    assert quantized(300.0, scale_format="pow2") == ([0x79], 1.0)
    assert quantized(1000.0, scale_format="pow2") == ([0x78], 4.0)  # 448 / 1000 -> 1/4; 250 -> 256


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_golden_zero_block(dtype):
    qdata, scale = fp8_quantize_1x128(torch.zeros(1, 128, dtype=dtype), backend="reference")
    assert qdata.view(torch.uint8).unique().tolist() == [0]
    assert scale.view(torch.int32).item() == 0x2720D7C5


def test_golden_a_shorter_last_block():
    """The last 16 elements are a block of their own. Their amax is 2, so the factor is 224, and -0.5 becomes -112."""
    x = torch.zeros(1, 144)
    x[0, 0], x[0, 128], x[0, 143] = 448.0, 2.0, -0.5
    for axis in (-1, -2):
        qdata, scale = fp8_quantize_1x128(x if axis == -1 else x.mT, axis=axis, backend="reference")
        codes = (qdata if axis == -1 else qdata.mT).view(torch.uint8)
        assert codes.shape == (1, 144)
        assert codes[0, [0, 128, 143]].tolist() == [0x7E, 0x7E, 0xEE]  # 448, 448, -112
        assert scale.view(torch.int32).tolist() == [[0x3F800000, 0x3B924925]]  # 1, and 1 / 224 = 0x1.24924A * 2^-8


@pytest.mark.parametrize("special", [torch.nan, torch.inf])
def test_golden_nan_and_inf(special):
    x = torch.ones(2, 256)
    x[0, 130] = special
    qdata, scale = fp8_quantize_1x128(x, backend="reference")
    assert scale.isnan().tolist() == [[False, True], [False, False]]
    assert qdata.float().isnan().sum(1).tolist() == [128, 0]


def test_the_division_is_rounded_once():
    """PyTorch computes 448.0 / tensor as a reciprocal times 448, which differs for 33 of 128 bfloat16 mantissas."""
    amax = (1 + torch.arange(128) / 128).unsqueeze(1)
    x = torch.zeros(128, 128)
    x[:, :1] = amax
    _, scale = fp8_quantize_1x128(x, backend="reference")
    exact = (1 / (448 / amax.double()).float().double()).float()
    assert torch.equal(scale, exact)
    assert ((448 * amax.reciprocal()) != (448 / amax.double()).float()).sum() == 33


@pytest.mark.parametrize("case", ["0", "1"])
def test_vectors_of_torchao_main(case):
    qdata, scale = fp8_quantize_1x128(torch.from_numpy(VECTORS[f"{case}.x"]), backend="reference")
    assert qdata.view(torch.uint8).tolist() == VECTORS[f"{case}.act1x128.q"].tolist()
    assert scale.view(torch.int32).tolist() == VECTORS[f"{case}.act1x128.s"].view(np.int32).tolist()


def test_scale_major_and_axis():
    x = torch.randn(256, 384)
    qdata, scale = fp8_quantize_1x128(x, scale_major="mn", backend="reference")
    assert (scale.shape, scale.stride(), qdata.stride()) == ((256, 3), (1, 256), (384, 1))
    column, column_scale = fp8_quantize_1x128(x, axis=-2, backend="reference")
    row, row_scale = fp8_quantize_1x128(x.mT, backend="reference")
    assert column.stride() == (1, 256)
    assert torch.equal(column.mT.view(torch.uint8), row.view(torch.uint8))
    assert torch.equal(column_scale, row_scale)


DEVICE = check.default_device()
each_backend = pytest.mark.parametrize("backend", ["reference", *(b for b in dispatch.backends() if b != "reference")])


def quantize(x, backend, **kwargs):
    if reason := dispatch.refusal("fp8_quantize_1x128", backend, (x,), kwargs):
        pytest.skip(reason)
    return fp8_quantize_1x128(x, backend=backend, **kwargs)


@each_backend
@pytest.mark.parametrize("scale_format", ["fp32", "pow2"])
def test_the_factor_of_every_bfloat16(backend, scale_format):
    """`fp32(448 / amax)`, then inverted, against float64: the float64 quotient of two fp32 rounds like the exact."""
    amax = torch.arange(2**15).to(torch.int16).view(torch.bfloat16)
    # An interpreter takes some exponents only; eps lies in the third.
    if DEVICE.type == "cpu" and backend != "reference":
        amax = amax.view(256, 128)[[0, 1, 87, 88, 126, 127, 128, 254, 255]].flatten()
    x = torch.zeros(len(amax), 128, dtype=torch.bfloat16)
    x[:, 5] = -amax
    _, scale = quantize(x.to(DEVICE), backend, scale_format=scale_format)
    s = (448 / amax.double().clamp(min=float(np.float32(1e-12)))).float()
    if scale_format == "pow2":
        s = torch.frexp(s)[1].sub(1).double().exp2().float()
    expected = torch.where(amax.isfinite(), (1 / s.double()).float(), torch.nan)
    assert torch.equal(scale[:, 0].cpu().nan_to_num(-1.0), expected.nan_to_num(-1.0))


@each_backend
@pytest.mark.parametrize("axis", [-1, -2])
def test_a_power_of_two_moves_a_pow2_scale_and_no_code(backend, axis):
    x = torch.randn(128, 128).clamp(min=2**-6)  # elements are at least amax / 448, so no code is subnormal
    qdata, scale = quantize(x.to(DEVICE), backend, axis=axis, scale_format="pow2")
    for k in (-30, -1, 1, 30, 100):
        moved, moved_scale = quantize((x * 2.0**k).to(DEVICE), backend, axis=axis, scale_format="pow2")
        assert torch.equal(moved.view(torch.uint8), qdata.view(torch.uint8))
        assert torch.equal(moved_scale, scale * 2.0**k)
