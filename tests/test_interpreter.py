"""Corrections to Triton's interpreter that no op's case would show by itself."""

from fractions import Fraction

import numpy as np

from mxspec.interpreter import fused_multiply_add


def rounded_once(x, y, z):
    """The fp32 nearest to `x * y + z`, ties to even, by exact arithmetic."""
    exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
    near = np.float32(float(exact))
    around = [np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf))]
    return min(around, key=lambda f: (abs(Fraction(float(f)) - exact), int(f.view(np.uint32)) & 1))


def test_a_fused_multiply_add_is_rounded_once():
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal(2000).astype(np.float32) for _ in range(2))
    z = np.concatenate([-(x * y)[:1000], rng.standard_normal(1000).astype(np.float32)])  # a residual; a plain sum
    expected = np.array([rounded_once(*v) for v in zip(x, y, z, strict=True)])
    assert (fused_multiply_add(x, y, z) == expected).all()
    assert (x * y + z != expected).any()


def test_a_sum_that_float64_would_round_onto_a_tie():
    """1 + 2^-24 + 2^-60 is above the tie between 1 and its neighbour, and float64 rounds it onto the tie."""
    x, y, z = np.float32([2.0**-24]), np.float32([1 + 2.0**-23]), np.float32([1.0])
    assert fused_multiply_add(x, y, z)[0] == np.float32(1 + 2.0**-23)
    y = np.float32([2.0**-24])
    assert fused_multiply_add(np.float32([2.0**-36]), y, np.float32([1 + 2.0**-23]))[0] == np.float32(1 + 2.0**-23)


def test_special_values():
    x = np.float32([np.inf, np.nan, 3e38, 0.0])
    got = fused_multiply_add(x, np.float32([1.0, 1.0, 10.0, 0.0]), np.float32([-np.inf, 0.0, 0.0, -0.0]))
    assert np.isnan(got[:2]).all()
    assert got[2:].tolist() == [np.inf, 0.0]
