"""The constants of every format, against torch's dtypes, or against ml_dtypes for formats that torch lacks."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from mxspec import formats

ML_DTYPES = {
    "e4m3fn": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
}


@pytest.mark.parametrize("fmt", formats.ELEMENTS.values(), ids=lambda fmt: fmt.name)
def test_every_code_has_the_value_that_ml_dtypes_gives(fmt):
    codes = np.arange(2**fmt.bits, dtype=np.uint8)
    expected = codes.view(ML_DTYPES[fmt.name]).astype(np.float64)
    got = np.array([fmt.value(int(code)) for code in codes])
    np.testing.assert_array_equal(got, expected)
    assert [math.copysign(1, v) for v in got[expected == 0]] == [1, -1]


@pytest.mark.parametrize("fmt", [f for f in formats.BY_DTYPE.values() if f.per_byte == 1], ids=lambda fmt: fmt.name)
def test_limits_are_torchs(fmt):
    info = torch.finfo(fmt.dtype)
    assert fmt.bits == info.bits
    assert fmt.max == info.max
    assert fmt.smallest_normal == info.smallest_normal
    assert 2.0**-fmt.mantissa_bits == info.eps
    codes = torch.arange(256).to(torch.uint8)
    expected = codes.view(fmt.dtype).double()
    got = torch.tensor([fmt.value(code) for code in range(256)], dtype=torch.float64)
    assert torch.equal(got.nan_to_num(0.5), expected.nan_to_num(0.5))


def test_literal_limits():
    """OCP OFP8 v1.0 table 1; OCP MX v1.0 tables 2 to 5."""
    table = {f.name: (f.emax, f.max, f.smallest_normal, f.smallest_subnormal) for f in formats.ELEMENTS.values()}
    assert table == {
        "e4m3fn": (8, 448.0, 2.0**-6, 2.0**-9),
        "e5m2": (15, 57344.0, 2.0**-14, 2.0**-16),
        "e2m3": (2, 7.5, 1.0, 0.125),
        "e3m2": (4, 28.0, 0.25, 0.0625),
        "e2m1": (2, 6.0, 1.0, 0.5),
    }


def test_e8m0_is_torchs():
    codes = torch.arange(256).to(torch.uint8).view(torch.float8_e8m0fnu).double()
    got = torch.tensor([formats.E8M0FNU.value(code) for code in range(256)], dtype=torch.float64)
    assert torch.equal(got[:255], codes[:255])
    assert got[255].isnan()
    assert codes[255].isnan()
    assert got[0] == 2.0**-127


def test_element_refuses_what_is_no_format():
    with pytest.raises(TypeError, match=r"torch\.int8 is no element format; known: .*'e2m1'"):
        formats.element(torch.int8)
