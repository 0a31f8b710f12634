"""from_blocked: literal places. test_to_blocked.py tests that it inverts to_blocked."""

import pytest
import torch

from mxspec import from_blocked


@pytest.mark.parametrize(
    ("offset", "place"), [(0, (0, 0)), (17, (1, 1)), (4, (32, 0)), (511, (127, 3)), (512, (0, 4)), (1024, (128, 0))]
)
def test_golden(offset, place):
    blocked = torch.zeros(2048, dtype=torch.uint8)
    blocked[offset] = 7
    assert from_blocked(blocked, 256, 8, backend="reference").nonzero().tolist() == [list(place)]


def test_golden_padding_is_dropped():
    assert from_blocked(torch.arange(512).to(torch.uint8), 2, 2, backend="reference").tolist() == [[0, 1], [16, 17]]
