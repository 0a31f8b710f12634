"""hadamard_16: values by hand, exact sums over fractions, and what the transform keeps."""

import math
from fractions import Fraction

import pytest
import torch

from mxspec import hadamard_16
from mxspec.formats import same_bits
from mxspec.reference.hadamard_16 import SIGNS
from mxspec.spec import random_normal

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# TransformerEngine, transformer_engine/pytorch/tensor/nvfp4_tensor.py, get_wgrad_sign_vector
VECTOR = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]


def transformed(x, **options):
    return hadamard_16(x, backend="reference", **options)


def test_golden_the_signs_are_transformer_engines():
    assert [-1 if SIGNS >> j & 1 else 1 for j in range(16)] == VECTOR


def test_golden_sylvesters_matrix():
    """Row 5 of H, and rows 1, 2, 4 and 8, by hand."""
    rows = transformed(torch.eye(16), signs=0) * 4
    assert rows[1].tolist() == 8 * [1, -1]
    assert rows[2].tolist() == 4 * [1, 1, -1, -1]
    assert rows[4].tolist() == 2 * [1, 1, 1, 1, -1, -1, -1, -1]
    assert rows[8].tolist() == 8 * [1] + 8 * [-1]
    assert rows[5].tolist() == 2 * [1, -1, 1, -1, -1, 1, -1, 1]
    assert rows[0].tolist() == 16 * [1]
    assert torch.equal(rows, rows.mT)
    assert torch.equal(rows @ rows.mT, 16 * torch.eye(16))


def test_golden_signs_come_first():
    rows = transformed(torch.eye(16)) * 4  # row j is the image of the unit vector j: s[j] times row j of H
    assert rows[:, 0].tolist() == VECTOR
    assert rows[3].tolist() == 4 * [-1, 1, 1, -1]
    assert transformed(torch.eye(16), signs=1)[0].tolist() == 16 * [-0.25]
    assert transformed(torch.eye(16), signs=0x8000)[15, :2].tolist() == [-0.25, 0.25]


def test_golden_down_the_columns():
    x = torch.zeros(32, 3)
    x[1, 0], x[16, 2] = 8.0, 1.0
    y = transformed(x, axis=-2, signs=0)
    assert y.is_contiguous()
    assert y[:16, 0].tolist() == 8 * [2.0, -2.0]
    assert y[16:, 2].tolist() == 16 * [0.25]
    assert y[:, 1].count_nonzero() + y[16:, 0].count_nonzero() + y[:16, 2].count_nonzero() == 0


def test_golden_the_order_of_the_sums():
    """2^24 + 1 - 2^24 is 0 if 1 is added to 2^24 first. Neighbours are added first, so here it depends on the place."""
    x = torch.zeros(2, 16)
    x[0, 0], x[0, 1], x[0, 2] = 2.0**24, 1.0, -(2.0**24)  # (2^24 + 1) - 2^24: the 1 is lost
    x[1, 0], x[1, 1], x[1, 2] = 2.0**24, -(2.0**24), 1.0  # (2^24 - 2^24) + 1
    assert transformed(x, signs=0)[:, 0].tolist() == [0.0, 0.25]


def test_golden_rounded_once_at_the_end():
    x = torch.zeros(1, 16, dtype=BF16)
    x[0, 0], x[0, 1] = 256.0, 1.0  # the sum 257 is not in bfloat16; 257 / 4 = 64.25 is a tie of 64 and 64.5
    assert transformed(x, signs=0)[0, :2].tolist() == [64.0, 63.75]
    x[0, 2] = 0.0078125
    assert transformed(x, signs=0)[0, 0].item() == 64.5


def test_golden_special_values():
    x = torch.ones(4, 16, dtype=F16)
    x[0, 3], x[1, 3], x[2, 3:5] = math.nan, math.inf, torch.tensor([math.inf, -math.inf])
    x[3] = 65504.0
    y = transformed(x, signs=0)
    assert y[0].isnan().all()
    assert y[1].isinf().all()
    assert y[2].isnan().sum() == 8
    assert y[3].tolist() == [math.inf] + 15 * [0.0]
    zeros = transformed(torch.full((1, 16), -0.0), signs=0)
    assert zeros.signbit().tolist() == [[True] + 15 * [False]]  # -0 + -0 is -0, and -0 - -0 is +0


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("axis", [-1, -2])
def test_small_integers_are_transformed_exactly(dtype, axis):
    """The sums of integers below 2^20 are exact, so the result is the exact number, rounded once."""
    x = torch.randint(-128, 129, (64, 48), generator=torch.Generator().manual_seed(1)).to(dtype)
    x = x if axis == -1 else x.mT
    lines = (x if axis == -1 else x.mT).tolist()
    y = transformed(x, axis=axis)
    got = y if axis == -1 else y.mT
    for line, of_line in zip(lines, got.tolist(), strict=True):
        for at in range(0, 48, 16):
            v = [s * Fraction(e) for s, e in zip(VECTOR, line[at : at + 16], strict=True)]
            for i in range(16):
                exact = sum((-1) ** (i & j).bit_count() * v[j] for j in range(16)) / 4
                assert of_line[at + i] == torch.tensor(float(exact)).to(dtype).item()


@pytest.mark.parametrize("signs", [0, SIGNS, 0xFFFF, 0x1234])
def test_a_second_transform_undoes_the_first(signs):
    x = random_normal(32, 64, dtype=F32)
    s = torch.tensor([-1.0 if signs >> j & 1 else 1.0 for j in range(16)]).repeat(4)
    back = transformed(transformed(x, signs=signs), signs=0) * s
    assert (back - x).abs().max() < 2e-6 * x.abs().max()


def test_the_product_of_transformed_operands_is_the_product():
    a, b = random_normal(32, 64, dtype=F32), random_normal(24, 64, dtype=F32, seed=1)
    got, exact = transformed(a).double() @ transformed(b).double().mT, a.double() @ b.double().mT
    assert (got - exact).norm() < 1e-6 * exact.norm()


def test_one_axis_is_the_other_of_the_transpose():
    x = random_normal(2, 48, 96)
    assert same_bits(transformed(x, axis=-2), transformed(x.mT.contiguous()).mT).all()
