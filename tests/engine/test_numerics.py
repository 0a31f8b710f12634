"""The element cast of the references: one function for every format, against ml_dtypes and torch."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mxspec import formats
from mxspec.formats import E2M1, E2M3, E3M2, E4M3FN, E5M2, INT8
from mxspec.reference.common.numerics import decoded, encoded, packed, saturating_cast, unpacked, widened
from mxspec.rules._recorded import load

ML_DTYPES = {
    E4M3FN: ml_dtypes.float8_e4m3fn,
    E5M2: ml_dtypes.float8_e5m2,
    E2M3: ml_dtypes.float6_e2m3fn,
    E3M2: ml_dtypes.float6_e3m2fn,
    E2M1: ml_dtypes.float4_e2m1fn,
}
FINITE = (E2M1, E2M3, E3M2)  # floats with neither NaN nor Inf: every code is a number

each = pytest.mark.parametrize("fmt", formats.ELEMENTS.values(), ids=lambda fmt: fmt.name)
each_finite = pytest.mark.parametrize("fmt", FINITE, ids=lambda fmt: fmt.name)


def by_ml_dtypes(x, fmt):
    return torch.from_numpy(x.clamp(-fmt.max, fmt.max).numpy().astype(ML_DTYPES[fmt]).view(np.uint8))


each_float = pytest.mark.parametrize("fmt", ML_DTYPES, ids=lambda fmt: fmt.name)


@each_finite
def test_every_code_is_the_value_that_ml_dtypes_gives_and_comes_back(fmt):
    codes = torch.arange(2**fmt.bits).to(torch.uint8)
    got = decoded(codes, fmt)
    expected = torch.from_numpy(codes.numpy().view(ML_DTYPES[fmt]).astype(np.float32))
    assert torch.equal(got.view(torch.int32), expected.view(torch.int32))  # the sign of zero too
    assert torch.equal(encoded(got, fmt), codes)


@each_float
def test_every_bfloat16_gets_the_code_that_ml_dtypes_gives(fmt):
    """Among them are ties, subnormals, zeros, both ends and Inf, which saturates."""
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).float()
    x = x[~x.isnan()]
    assert torch.equal(encoded(x, fmt), by_ml_dtypes(x, fmt))


def test_int8_is_an_integer_of_64ths_that_numpy_rounds():
    """Every bfloat16: ties, zeros of both signs, both ends and Inf, which saturates. -128 does not occur."""
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).float()
    x = x[~x.isnan()]
    expected = np.rint(np.clip(x.double().numpy() * 64, -127, 127)).astype(np.int8)
    got = encoded(x, INT8).view(torch.int8)
    assert got.tolist() == expected.tolist()
    assert int(got.min()) == -127
    codes = torch.arange(-128, 128).to(torch.int8)
    assert decoded(codes.view(torch.uint8), INT8).tolist() == (codes.double() / 64).tolist()


@each_float
def test_every_tie_goes_to_the_even_code_and_its_neighbours_to_theirs(fmt):
    codes = torch.arange(fmt.largest_code)
    below, above = (torch.tensor([fmt.value(int(c) + d) for c in codes]) for d in (0, 1))
    tie = (below + above) / 2
    for sign, bit in ((1, 0), (-1, 1 << (fmt.bits - 1))):
        assert torch.equal(encoded(sign * tie, fmt), (codes + codes % 2 + bit).to(torch.uint8))
        assert torch.equal(encoded(sign * tie.nextafter(below), fmt), (codes + bit).to(torch.uint8))
        assert torch.equal(encoded(sign * tie.nextafter(above), fmt), (codes + 1 + bit).to(torch.uint8))


@settings(deadline=None, max_examples=100)
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=64), st.sampled_from(list(ML_DTYPES)))
def test_any_fp32_gets_the_code_that_ml_dtypes_gives(values, fmt):
    x = torch.tensor(values)
    assert torch.equal(encoded(x, fmt), by_ml_dtypes(x, fmt))


def test_e2m1_rounds_as_the_peers_that_round_to_nearest_even():
    """`fp4` of peers.json: a value, and its code by four peers. The third peer rounds ties towards zero."""
    rows = load()["fp4"]
    got = encoded(torch.tensor([value for value, *_ in rows]), E2M1).tolist()
    assert [[code] * 3 for code in got] == [[row[1], row[2], row[4]] for row in rows]
    ties = dict(zip([value for value, *_ in rows], got, strict=True))
    expected = {0.25: 0, 0.75: 2, 1.25: 2, 1.75: 4, 2.5: 4, 3.5: 6, 5.0: 6, 7.0: 7}
    assert {value: ties[value] for value in expected} == expected


@pytest.mark.parametrize("fmt", [*FINITE, INT8], ids=lambda fmt: fmt.name)
def test_a_nan_takes_the_largest_code_whatever_its_sign(fmt):
    nan = torch.tensor([0x7FC00000, -0x400000, 0x7F800001]).to(torch.int32).view(torch.float32)
    assert encoded(nan, fmt).tolist() == [fmt.largest_code] * 3


def test_the_first_of_two_e2m1_lies_in_the_low_nibble():
    codes = torch.tensor([[0x1, 0x2, 0xF, 0x0], [0x7, 0x8, 0x3, 0xC]], dtype=torch.uint8)
    stored = packed(codes, E2M1)
    assert (stored.dtype, stored.view(torch.uint8).tolist()) == (torch.float4_e2m1fn_x2, [[0x21, 0x0F], [0x87, 0xC3]])
    assert torch.equal(unpacked(stored, E2M1), codes)


@pytest.mark.parametrize("fmt", [E2M3, E3M2], ids=lambda fmt: fmt.name)
def test_four_of_fp6_make_a_little_endian_number_of_24_bits(fmt):
    """Bit i of the number of four codes is bit i % 6 of code i // 6."""
    for i in range(24):
        codes = torch.zeros(1, 4, dtype=torch.uint8)
        codes[0, i // 6] = 1 << i % 6
        stored = packed(codes, fmt)
        assert (stored.dtype, bytes(stored[0].tolist())) == (torch.uint8, (1 << i).to_bytes(3, "little"))
        assert torch.equal(unpacked(stored, fmt), codes)
    every = torch.arange(64).to(torch.uint8)
    assert torch.equal(unpacked(packed(every, fmt), fmt), every)


@each
def test_the_cast_stores_what_its_reading_gives_back(fmt):
    """FP6 is stored as uint8, because torch has no dtype for it."""
    values = torch.tensor([fmt.value(code) for code in range(fmt.largest_code + 1)])
    x = torch.cat([values, -values]) + 0.0 if fmt is INT8 else torch.cat([values, -values])  # int8 has no -0
    stored = saturating_cast(x, fmt)
    assert stored.dtype == (fmt.dtype or torch.uint8)
    assert stored.shape == (len(x) * fmt.bits // 8,)
    assert torch.equal(widened(stored, fmt).view(torch.int32), x.view(torch.int32))
