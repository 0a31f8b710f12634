"""to_blocked_m_groups: bytes by hand, peers' bytes, and each group on its own."""

import pytest
import torch

from mxspec import to_blocked, to_blocked_m_groups
from tests.helpers import published

VECTORS = published("groups")

# (row, column) of a scale in 200 x 5 with groups [0, 130), [130, 130), [130, 200) -> its byte in rows of 8. Group 0
# takes 256 rows, that is 2048 bytes. Group 2 begins there.
OFFSETS = [
    ((0, 0), 0),
    ((33, 0), 20),  # the second row of the second 32
    ((0, 4), 512),
    ((128, 0), 1024),
    ((129, 1), 1024 + 16 + 1),
    ((130, 0), 2048),  # the first row of group 2
    ((162, 4), 2048 + 512 + 4),
]


@pytest.mark.parametrize(("place", "byte"), OFFSETS)
def test_golden_byte(place, byte):
    scale = torch.zeros(200, 5, dtype=torch.uint8)
    scale[place] = 7
    blocked, start = to_blocked_m_groups(scale, torch.tensor([130, 130, 200], dtype=torch.int32), backend="reference")
    assert blocked.shape == (200 + 3 * 128, 8)
    assert blocked.flatten().nonzero().tolist() == [[byte]]
    assert (start.tolist(), start.dtype) == ([0, 256, 256, 384], torch.int64)


def test_golden_rows_past_the_last_group_are_dropped():
    blocked, start = to_blocked_m_groups(torch.ones(9, 4, dtype=torch.uint8), torch.tensor([2], dtype=torch.int32))
    assert blocked.flatten().nonzero().flatten().tolist() == [0, 1, 2, 3, 16, 17, 18, 19]
    assert start.tolist() == [0, 128]


def test_golden_no_group():
    blocked, start = to_blocked_m_groups(torch.ones(3, 4, dtype=torch.uint8), torch.zeros(0, dtype=torch.int32))
    assert blocked.tolist() == [[0] * 4] * 3
    assert start.tolist() == [0]


@pytest.mark.parametrize("case", ["M0", "M1", "M2", "M3"])
def test_vectors_of_torchao_main(case):
    scale, offs, *expected = (torch.from_numpy(VECTORS[f"{case}.{part}"]) for part in ("in", "offs", "out", "start"))
    got = to_blocked_m_groups(scale, offs, backend="reference")
    assert all(g.equal(e) for g, e in zip(got, expected, strict=True))


def test_a_group_is_to_blocked_of_its_rows():
    scale, ends = torch.randint(0, 256, (500, 9), dtype=torch.uint8), [0, 3, 131, 131, 400]
    blocked, start = to_blocked_m_groups(scale, torch.tensor(ends[1:], dtype=torch.int32))
    for g in range(4):
        group = blocked[int(start[g]) : int(start[g + 1])]
        assert group.flatten().equal(to_blocked(scale[ends[g] : ends[g + 1]]))
    assert not blocked[int(start[-1]) :].any()
