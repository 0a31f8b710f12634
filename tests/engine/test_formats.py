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


FLOATS = [fmt for fmt in formats.ELEMENTS.values() if fmt is not formats.INT8]


@pytest.mark.parametrize("fmt", FLOATS, ids=lambda fmt: fmt.name)
def test_every_code_has_the_value_that_ml_dtypes_gives(fmt):
    codes = np.arange(2**fmt.bits, dtype=np.uint8)
    expected = codes.view(ML_DTYPES[fmt.name]).astype(np.float64)
    got = np.array([fmt.value(int(code)) for code in codes])
    np.testing.assert_array_equal(got, expected)
    assert [math.copysign(1, v) for v in got[expected == 0]] == [1, -1]


def test_a_code_of_int8_is_a_64th():
    codes = torch.arange(256).to(torch.uint8)
    assert [formats.INT8.value(int(code)) for code in codes] == (codes.view(torch.int8).double() / 64).tolist()


@pytest.mark.parametrize("fmt", [formats.E4M3FN, formats.E5M2], ids=lambda fmt: fmt.name)
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
        "int8": (0, 1 + 63 / 64, 1.0, 1 / 64),
    }


def test_sizes_in_bytes():
    sizes = {f.name: (f.stored(32), f.held(24)) for f in formats.ELEMENTS.values()}
    assert sizes == {**dict.fromkeys(sizes, (32, 24)), "e2m1": (16, 48), "e2m3": (24, 32), "e3m2": (24, 32)}
    assert (formats.E5M2.per_byte, formats.E2M1.per_byte) == (1, 2)
    with pytest.raises(TypeError, match="e2m3 elements cross bytes: 4 share 3"):
        _ = formats.E2M3.per_byte


def test_e8m0_is_torchs():
    codes = torch.arange(256).to(torch.uint8).view(torch.float8_e8m0fnu).double()
    got = torch.tensor([formats.E8M0FNU.value(code) for code in range(256)], dtype=torch.float64)
    assert torch.equal(got[:255], codes[:255])
    assert got[255].isnan()
    assert codes[255].isnan()
    assert got[0] == 2.0**-127


def test_element_refuses_what_is_no_format():
    with pytest.raises(TypeError, match=r"torch\.uint8 is no element format; known: .*'e2m1'"):
        formats.element(torch.uint8)
