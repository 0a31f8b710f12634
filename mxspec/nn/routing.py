"""Sort tokens by expert and bring the results back: the steps around the experts of a mixture-of-experts layer."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from mxspec.nn._autograd import applied, signature_once


class Routing(NamedTuple):
    """The (token, expert) pairs, sorted by expert. Their number is `P = tokens * top_k`."""

    experts: Tensor  # (P,), the expert of each pair; it never decreases
    order: Tensor  # (P,), the pair at each place; a pair's number is its position in the router's flattened index
    places: Tensor  # (P,), the place of each pair: the inverse of `order`
    offs: Tensor  # (E,) int32, the exclusive end of each expert's pairs
    top_k: int  # the number of experts that each token goes to

    def gather(self, x: Tensor) -> Tensor:
        """The token of each pair, sorted by expert: `(tokens, K)` -> `(P, K)`."""
        return applied(_Gather, x, self.order, self.places, self.top_k)

    def sort(self, values: Tensor) -> Tensor:
        """One value of each pair, such as its routing weight, sorted by expert."""
        return permute(values, self.order, self.places)

    def combine(self, pairs: Tensor) -> Tensor:
        """The sum of each token's pairs, in the order of the router's index: `(P, N)` -> `(tokens, N)`."""
        return _sum_of_pairs(permute(pairs, self.places, self.order), self.top_k)


def routing(index: Tensor, num_experts: int) -> Routing:
    """Sort the (token, expert) pairs of `index` by expert. The host never waits for the device.

    Args:
        index: `(tokens, top_k)`, integers: the experts that the router chose. A number from num_experts on means an
            expert of another device: its pairs come last and belong to no group.
        num_experts: E, the number of experts here.
    """
    experts, order = index.reshape(-1).sort(stable=True)
    numbers = torch.arange(num_experts, device=index.device, dtype=experts.dtype)
    offs = torch.searchsorted(experts, numbers, right=True, out_int32=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return Routing(experts, order, places, offs, index.shape[-1])


def experts_of_rows(offs: Tensor, rows: int) -> Tensor:
    """The expert of each row, for rows sorted by expert. Rows from `offs[-1]` on get E, the number of experts."""
    return torch.searchsorted(offs, torch.arange(rows, device=offs.device, dtype=offs.dtype), right=True)


def add_bias(out: Tensor, bias: Tensor, experts: Tensor) -> Tensor:
    """Add each expert's bias, `(E, N)`, to the results of its rows. Rows of experts from E on stay as they are.

    The bias's gradient is one matmul, so it is the same on every run. A NaN in the results' gradient reaches the
    bias's gradient of all experts.

    Args:
        out: `(M, N)`, the results.
        bias: `(E, N)`.
        experts: `(M,)`, the expert of each row, as `experts_of_rows` gives it.
    """
    return applied(_AddBias, out, bias, experts)


def permute(x: Tensor, order: Tensor, places: Tensor) -> Tensor:
    """`x[order]` for a permutation `order` and its inverse `places`. The backward gathers too, and adds nothing."""
    return applied(_Permute, x, order, places)


def _sum_of_pairs(pairs: Tensor, top_k: int) -> Tensor:
    return pairs.view(pairs.shape[0] // top_k, top_k, pairs.shape[1]).sum(1)


@signature_once
class _Gather(torch.autograd.Function):
    """`x[order // top_k]`. Its backward gathers and sums. PyTorch's own backward adds rows to the same addresses."""

    @staticmethod
    def forward(x: Tensor, order: Tensor, places: Tensor, top_k: int) -> Tensor:
        return x.index_select(0, order // top_k)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, order, places, ctx.top_k = inputs
        ctx.save_for_backward(order, places)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (order, places) = gradients, ctx.saved_tensors
        return _sum_of_pairs(_Permute.apply(grad, places, order), ctx.top_k), None, None, None


@signature_once
class _Permute(torch.autograd.Function):
    """`x[order]` for a permutation. Its backward is `grad[places]`, the inverse permutation."""

    @staticmethod
    def forward(x: Tensor, order: Tensor, places: Tensor) -> Tensor:
        return x.index_select(0, order)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (order, places) = gradients, ctx.saved_tensors
        return _Permute.apply(grad, places, order), None, None


@signature_once
class _AddBias(torch.autograd.Function):
    @staticmethod
    def forward(out: Tensor, bias: Tensor, experts: Tensor) -> Tensor:
        with_zeros = pad(bias.to(out.dtype), (0, 0, 0, 1))  # one more row, for experts that are not here
        return out + with_zeros.index_select(0, experts.clamp(max=bias.shape[0]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, bias, experts = inputs
        ctx.save_for_backward(experts)
        ctx.shape, ctx.dtype = bias.shape, bias.dtype

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (experts,), grad_bias = gradients, ctx.saved_tensors, None
        if ctx.needs_input_grad[1]:
            numbers = torch.arange(ctx.shape[0], device=experts.device)
            grad_bias = ((numbers[:, None] == experts).to(grad.dtype) @ grad).to(ctx.dtype)
        return grad, grad_bias, None
