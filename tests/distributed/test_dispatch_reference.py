"""The order of the tokens of several ranks, written out by hand, and the way back."""

import pytest
import torch

from mxspec.distributed import combine_reference, dispatch_reference
from tests.helpers import ends


def column(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)[:, None]


@pytest.mark.parametrize(
    ("tokens", "offs", "sorted_tokens", "sorted_offs"),
    [
        # three experts on two ranks: expert 0 gets 1, 2 of rank 0 and 4 of rank 1; expert 1 gets 5; expert 2 gets 3, 6
        ([(1, 2, 3), (4, 5, 6)], [(2, 2, 3), (1, 2, 3)], (1, 2, 4, 5, 3, 6), (3, 4, 6)),
        # rank 0 has no tokens
        ([(), (4, 5, 6)], [(0, 0, 0), (0, 3, 3)], (4, 5, 6), (0, 3, 3)),
        # 2 and 3 of rank 0 have no expert: they come last, and combine brings them back too
        ([(1, 2, 3), (4,)], [(0, 1, 1), (1, 1, 1)], (4, 1, 2, 3), (1, 2, 2)),
        # four ranks, everything to expert 1
        ([(1,), (2,), (3,), (4,)], [(0, 1)] * 4, (1, 2, 3, 4), (0, 4)),
    ],
)
def test_tokens_are_sorted_by_expert_source_rank_and_position(tokens, offs, sorted_tokens, sorted_offs):
    given = [column(*each) for each in tokens]
    there = dispatch_reference(given, [ends(*each) for each in offs])
    assert there.tokens.flatten().tolist() == list(sorted_tokens)
    assert there.offs.tolist() == list(sorted_offs)
    assert there.offs.dtype == torch.int32
    back = combine_reference(there.tokens, there)
    assert all(torch.equal(a, b) for a, b in zip(back, given, strict=True))


def test_gradients_take_the_same_ways():
    given = [column(1, 2).requires_grad_(), column(3).requires_grad_()]
    there = dispatch_reference(given, [ends(1, 2), ends(1, 1)])
    there.tokens.backward(column(10, 20, 30))
    assert [x.grad.flatten().tolist() for x in given] == [[10, 30], [20]]
    out = column(1, 2, 3).requires_grad_()
    torch.autograd.backward(combine_reference(out, there), [column(10, 20), column(30)])
    assert out.grad.flatten().tolist() == [10, 30, 20]
