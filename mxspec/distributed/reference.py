"""What expert parallelism computes, in one process: the order in which an expert gets the tokens of several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Dispatched(NamedTuple):
    """The tokens of all ranks in the order of the experts."""

    tokens: Tensor  # (M, D), sorted by (expert, source rank, position); rows without an expert come last
    offs: Tensor  # (E,) int32, the exclusive end of each expert's tokens
    order: Tensor  # (M,), the row of `torch.cat(tokens)` at each place
    sizes: list[int]  # the number of tokens of each rank


def dispatch_reference(tokens: Sequence[Tensor], offs: Sequence[Tensor]) -> Dispatched:
    """Sort the tokens of all ranks by expert, stably, in one process: the meaning of `ExpertParallel`'s dispatch.

    The order is (expert, source rank, position at the source rank). With E experts on R ranks, rank d gets the rows of
    the experts `d * E / R` to `(d + 1) * E / R - 1` of this order. It is differentiable.

    Args:
        tokens: for each rank, its tokens `(M_r, D)`, sorted by expert.
        offs: for each rank, `(E,)` int32, the exclusive end of each expert's tokens among its own, as for
            `GroupedExperts`. Rows from `offs[-1]` on have no expert.

    Returns:
        A `Dispatched`.

    Example:
        >>> tokens = [torch.tensor([[0.], [1.]]), torch.tensor([[2.], [3.]])]
        >>> offs = [torch.tensor([1, 2]), torch.tensor([2, 2])]  # rank 1 has two tokens for expert 0
        >>> dispatch_reference(tokens, offs).tokens.flatten().tolist()
        [0.0, 2.0, 3.0, 1.0]
    """
    pairs = list(zip(tokens, offs, strict=True))
    expert = torch.cat([torch.searchsorted(end, torch.arange(len(x), device=x.device), right=True) for x, end in pairs])
    expert, order = expert.sort(stable=True)
    numbers = torch.arange(len(offs[0]), device=expert.device)
    ends = torch.searchsorted(expert, numbers, right=True, out_int32=True)
    return Dispatched(torch.cat(list(tokens))[order], ends, order, [len(x) for x in tokens])


def combine_reference(out: Tensor, dispatched: Dispatched) -> list[Tensor]:
    """Bring the experts' results back to the ranks, each to the place of its token. It is differentiable.

    Args:
        out: `(M, N)`, a row for each row of `dispatched.tokens`.
        dispatched: the result of `dispatch_reference`.

    Returns:
        For each rank, `(M_r, N)`.

    Example:
        >>> there = dispatch_reference([torch.tensor([[7.], [8.]]), torch.tensor([[9.]])], [torch.tensor([1, 2])] * 2)
        >>> [x.flatten().tolist() for x in combine_reference(there.tokens * 10, there)]
        [[70.0, 80.0], [90.0]]
    """
    return list(torch.empty_like(out).index_copy(0, dispatched.order, out).split(dispatched.sizes))
