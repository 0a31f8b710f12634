"""The random data of the cases: the same bits on every machine and with every release of torch."""

import hashlib

import torch

from mxspec.spec import normal, power_of_two, random_bits, random_normal


def digest(t):
    return hashlib.sha256(t.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def test_golden_normal_is_a_sum_of_three_integers():
    # The first word of the Mersenne twister with seed 0, as torch.randint gives it below 2^63 - 1.
    word = torch.randint(0, 2**63 - 1, (1,), generator=torch.Generator().manual_seed(0)).item()
    total = (word & 0x1FFFFF) + (word >> 21 & 0x1FFFFF) + (word >> 42)
    assert normal(1).item() == (total - 3 * 2**20) / 2**20


def test_normal_is_nearly_so():
    x = normal(1000, 1000).double()
    assert abs(x.mean()) < 0.005
    assert abs(x.var() - 1) < 0.01
    # Exactly 2/3 lie within one sigma; for a normal distribution it would be 0.683.
    assert abs((x.abs() < 1).double().mean() - 2 / 3) < 0.01
    assert x.abs().max() <= 3


def test_powers_of_two_are_exact():
    exponent = torch.arange(-126, 128)
    assert power_of_two(exponent).tolist() == [2.0**e for e in range(-126, 128)]


def test_golden_digests():
    """The same on every machine. A change here changes the published vectors and their version."""
    assert digest(normal(64, 64)) == "b337c8f9bfb5cff1"
    assert digest(random_normal(64, 96)) == "5ebeee8845e75fa5"
    assert digest(random_normal(64, 96, dtype=torch.float16, seed=7)) == "0d8f29cb4357f82f"
    assert digest(random_bits(64, 64, dtype=torch.float32)) == "d0c52d38582e1da1"
    assert digest(random_bits(64, 64, dtype=torch.float8_e4m3fn, seed=3)) == "08259d494f4239dc"
