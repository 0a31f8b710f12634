"""The tokens that the kernel of few tokens reads with its weights in pairs of bytes: even columns first."""

import pytest
import torch

from mxspec import check
from mxspec.cases.common.token_groups import offs_of
from mxspec.triton_kernels.hopper.plan import plan_of
from mxspec.triton_kernels.hopper.weights.tokens import even_first
from tests.helpers import DEVICE, runs_kernels


def any_tokens(rows, K, stride):
    """Any bits, so also NaN: rows of K numbers, `stride` apart."""
    bits = torch.randint(-(2**15), 2**15, (rows, stride), dtype=torch.int16)
    return bits.to(DEVICE).view(torch.bfloat16)[:, :K]


def sorted_by_16(x):
    """In each 16 columns, 0, 2, 4 to 14, then 1, 3, 5 to 15."""
    order = torch.cat([torch.arange(0, 16, 2), torch.arange(1, 16, 2)])
    return x.view(torch.int16).reshape(len(x), -1, 16)[..., order.to(x.device)].reshape(x.shape)


@runs_kernels
@pytest.mark.parametrize(("rows", "K", "stride"), [(1, 16, 16), (13, 48, 64), (8, 512, 512), (9, 2880, 2888)])
def test_tokens_have_their_even_columns_first(rows, K, stride):
    x = any_tokens(rows, K, stride)
    with check.poisoned(0xFF):
        found, plan = even_first(x)
    assert found.shape == x.shape
    assert found.is_contiguous()
    assert found.view(torch.int16).equal(sorted_by_16(x))
    assert plan is None


@runs_kernels
@pytest.mark.parametrize("sizes", [[5, 0, 20, 1], [0, 0], [3] * 40], ids=["few", "none", "many"])
def test_one_launch_sorts_tokens_of_experts_and_writes_their_plan(sizes):
    x, offs = any_tokens(sum(sizes) + 7, 64, 64), offs_of(sizes).to(DEVICE)
    for tile in (16, 128):
        with check.poisoned(0xFF):
            found, plan = even_first(x, offs, tile)
        assert found.view(torch.int16).equal(sorted_by_16(x))
        assert plan.equal(plan_of(offs, len(x), tile))
