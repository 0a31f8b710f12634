"""Goldens for unpad_token_groups, by hand. test_pad_token_groups.py tests what it shares with its inverse."""

import pytest
import torch

import mxspec

# padded, offs, start, num_tokens -> tokens
GOLDENS = [
    ([1, 2, 3, 0], [2, 3], [0, 2], 3, [1, 2, 3]),
    ([1, 0, 0, 2, 3, 0], [1, 1, 3], [0, 3, 3], 5, [1, 2, 3, 0, 0]),  # two tokens belong to no group
    ([9, 9, 1, 2], [2], [2], 2, [1, 2]),  # a gap before the group
    ([1, 2, 3], [2, 4], [0, 2], 4, [1, 2, 3, 0]),  # the last token's place lies outside
    ([3, 0, 1, 2], [2, 3], [2, 0], 3, [1, 2, 3]),  # the groups exchanged
    ([1, 2, 3], [2, 4], [0, 1], 4, [1, 2, 2, 3]),  # two groups share a row
    ([5], [], [], 2, [0, 0]),
]


@pytest.mark.parametrize(("padded", "offs", "start", "num_tokens", "tokens"), GOLDENS)
def test_golden(padded, offs, start, num_tokens, tokens):
    offs, start = (torch.tensor(t, dtype=torch.int32) for t in (offs, start))
    padded = torch.tensor(padded, dtype=torch.float32)[:, None]
    got = mxspec.unpad_token_groups(padded, offs, start, num_tokens, backend="reference")
    assert got.shape == (num_tokens, 1)
    assert got.flatten().tolist() == tokens
