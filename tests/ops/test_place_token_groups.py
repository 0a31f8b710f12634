"""Goldens for place_token_groups, by hand. test_pad_token_groups.py tests what it shares with its inverse."""

import pytest
import torch

import mxspec

# tokens, offs, start, num_rows -> placed
GOLDENS = [
    ([1, 2, 3], [2, 3], [0, 3], 5, [1, 2, 0, 3, 0]),
    ([1, 2, 3], [2, 3], [1, 4], 4, [0, 1, 2, 0]),  # no room for the second group
    ([1, 2, 3], [2, 2, 3], [0, 2, 2], 4, [1, 2, 3, 0]),  # an empty group begins where the next does
    ([1, 2, 9], [2], [0], 3, [1, 2, 0]),  # 9 belongs to no group
    ([1, 2, 3], [2, 3], [2, 0], 5, [3, 0, 1, 2, 0]),  # the groups exchanged
    ([1, 2, 3], [2, 2, 3], [1, 2, 0], 4, [3, 1, 2, 0]),  # an empty group begins amid another
    ([1, 2, 3, 4], [3, 4], [0, 1], 4, [1, 4, 3, 0]),  # two groups share a row: the later token
    ([1, 2, 3, 4], [1, 4], [1, 0], 4, [2, 3, 4, 0]),
    ([1, 2, 3], [3], [-1], 3, [2, 3, 0]),  # no room for the first row
    ([5], [], [], 2, [0, 0]),
]


@pytest.mark.parametrize(("tokens", "offs", "start", "num_rows", "placed"), GOLDENS)
def test_golden(tokens, offs, start, num_rows, placed):
    offs, start = (torch.tensor(t, dtype=torch.int32) for t in (offs, start))
    tokens = torch.tensor(tokens, dtype=torch.float32)[:, None]
    got = mxspec.place_token_groups(tokens, offs, start, num_rows, backend="reference")
    assert got.shape == (num_rows, 1)
    assert got.flatten().tolist() == placed
