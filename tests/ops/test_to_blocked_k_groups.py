"""to_blocked_k_groups: bytes by hand, peers' bytes, and each group on its own."""

import pytest
import torch

from mxspec import to_blocked, to_blocked_k_groups
from tests.helpers import published

VECTORS = published("groups")

# (row, column) of a scale in 200 x 12 with groups [0, 5), [5, 5), [5, 12) -> its byte. Group 0 takes 8 columns of 256
# rows, that is 2048 bytes. Group 2 begins there, also with 8 columns.
OFFSETS = [
    ((0, 0), 0),
    ((33, 0), 20),  # the second row of the second 32
    ((0, 4), 512),  # the group's second column of tiles
    ((128, 0), 1024),  # its second row of tiles
    ((0, 5), 2048),  # the first column of group 2
    ((199, 11), 2048 + 1024 + 512 + (199 - 192) * 16 + 2 * 4 + 2),
]


@pytest.mark.parametrize(("place", "byte"), OFFSETS)
def test_golden_byte(place, byte):
    scale = torch.zeros(200, 12, dtype=torch.uint8)
    scale[place] = 7
    blocked, start = to_blocked_k_groups(scale, torch.tensor([5, 5, 12], dtype=torch.int32), backend="reference")
    assert blocked.shape == (256, 12 + 3 * 4)
    assert blocked.flatten().nonzero().tolist() == [[byte]]
    assert (start.tolist(), start.dtype) == ([0, 8, 8, 16], torch.int64)


def test_golden_columns_past_the_last_group_are_dropped():
    blocked, start = to_blocked_k_groups(torch.ones(1, 9, dtype=torch.uint8), torch.tensor([2], dtype=torch.int32))
    assert blocked.flatten().nonzero().flatten().tolist() == [0, 1]
    assert start.tolist() == [0, 4]


def test_golden_no_group():
    blocked, start = to_blocked_k_groups(torch.ones(1, 3, dtype=torch.uint8), torch.zeros(0, dtype=torch.int32))
    assert blocked.shape == (128, 3)
    assert not blocked.any()
    assert start.tolist() == [0]


@pytest.mark.parametrize("case", ["K0", "K1", "K2"])
def test_vectors_of_torchao_main(case):
    scale, offs, *expected = (torch.from_numpy(VECTORS[f"{case}.{part}"]) for part in ("in", "offs", "out", "start"))
    got = to_blocked_k_groups(scale, offs, backend="reference")
    assert all(g.equal(e) for g, e in zip(got, expected, strict=True))


def test_a_group_is_to_blocked_of_its_columns():
    scale, ends = torch.randint(0, 256, (300, 50), dtype=torch.uint8), [0, 3, 31, 31, 45]
    blocked, start = to_blocked_k_groups(scale, torch.tensor(ends[1:], dtype=torch.int32))
    Rp = blocked.shape[0]
    for g in range(4):
        group = blocked.flatten()[int(start[g]) * Rp : int(start[g + 1]) * Rp]
        assert group.equal(to_blocked(scale[:, ends[g] : ends[g + 1]]))
    assert not blocked.flatten()[int(start[-1]) * Rp :].any()
