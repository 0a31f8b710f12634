"""What expert parallelism computes, in one process: the order of the tokens of several ranks, and what codes change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import mxspec
from mxspec.distributed._wire import Wire, check_wire, wires
from mxspec.nn import Recipe
from mxspec.nn.recipe import recipe_of


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


def wire_reference(x: Tensor, recipe: Recipe | str, *, of_gradient: bool = False) -> Tensor:
    """Quantize rows and read the codes back, as `ExpertParallel(wire="codes")` does when it sends rows.

    The codes lie along the features: `mx_quantize` or `fp8_quantize_1x128`, with the rules of the recipe. Their values
    are rounded to x's dtype. The wire quantizes the tokens in the forward, and the gradient of the experts' results in
    the backward. So expert parallelism with a wire is, in one process::

        there = dispatch_reference([wire_reference(x, recipe) for x in tokens], offs)
        outs = combine_reference(experts(there.tokens, there.offs), there)
        outs = [wire_reference(out, recipe, of_gradient=True) for out in outs]

    `ExpertParallel` may multiply the codes themselves. These are the same numbers, unless a code stands for a number
    beyond the largest number of x's dtype. Its value is then Inf.

    Args:
        x: `(M, D)`, bfloat16 or float32.
        recipe: a `Recipe` or its name, not bf16.
        of_gradient: False changes the values, and leaves the gradient as it is. True leaves the values, and quantizes
            the gradient to codes of the recipe's `grad_dtype`. The gradient keeps x's dtype.

    Returns:
        `(M, D)` in x's dtype.

    Raises:
        ValueError: the recipe is bf16, which has no codes.

    Example:
        >>> x = torch.tensor([[1.0, 1.1]]).repeat(1, 16)
        >>> wire_reference(x, "mxfp8_rceil")[0, :2].tolist()
        [1.0, 1.125]
    """
    found = recipe_of(recipe, "wire_reference")
    check_wire("wire_reference", found)
    of_tokens, of_results = wires(found, mxspec.current_backend())
    return _Wired.apply(x, None if of_gradient else of_tokens, of_results if of_gradient else None)


class _Wired(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, there: Wire | None, back: Wire | None) -> Tensor:
        return x.view_as(x) if there is None else there.decode(there.encode(x), x.shape[1], x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.there, ctx.back = inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _Wired.apply(gradients[0], ctx.back, ctx.there), None, None
