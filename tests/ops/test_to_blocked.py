"""to_blocked and from_blocked: literal offsets, peers' bytes, and the bijection."""

import pytest
import torch

from mxspec import from_blocked, to_blocked
from tests.helpers import published

VECTORS = published("blocked")


# (r, c) of a 256 x 8 matrix (2 x 2 tiles) -> the byte that it goes to, computed by hand.
OFFSETS = [
    ((0, 0), 0),
    ((0, 3), 3),
    ((1, 0), 16),
    ((31, 0), 496),
    ((32, 0), 4),  # the next group of 32 rows lies beside the first
    ((127, 3), 511),
    ((0, 4), 512),  # the tile to the right comes next
    ((128, 0), 1024),  # and then the tiles below
    ((255, 7), 2047),
]


@pytest.mark.parametrize(("place", "offset"), OFFSETS)
def test_golden_offset(place, offset):
    scale = torch.zeros(256, 8, dtype=torch.uint8)
    scale[place] = 7
    assert to_blocked(scale, backend="reference").nonzero().tolist() == [[offset]]


def test_golden_padding_is_zero():
    out = to_blocked(torch.full((1, 5), 9, dtype=torch.uint8), backend="reference")
    assert out.shape == (1024,)
    assert out.nonzero().flatten().tolist() == [0, 1, 2, 3, 512]


def test_golden_experts_lie_one_after_the_other():
    scale = torch.zeros(3, 1, 1, dtype=torch.uint8)
    scale[:, 0, 0] = torch.tensor([1, 2, 3])
    out = to_blocked(scale, backend="reference")
    assert out.shape == (3, 512)
    assert out[:, 0].tolist() == [1, 2, 3]


@pytest.mark.parametrize("shape", ["128x4", "130x6", "384x20"])
def test_vectors_of_torchao_main(shape):
    scale = torch.from_numpy(VECTORS[f"{shape}.in"])
    assert to_blocked(scale, backend="reference").tolist() == VECTORS[f"{shape}.out"].flatten().tolist()


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (130, 6), (300, 70), (3, 130, 6)])
def test_from_blocked_inverts(shape):
    scale = torch.randint(0, 256, shape, dtype=torch.uint8)
    assert torch.equal(from_blocked(to_blocked(scale), *shape[-2:]), scale)
