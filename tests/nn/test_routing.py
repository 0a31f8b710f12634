"""Tokens sorted by expert, and their results brought back."""

from __future__ import annotations

import pytest
import torch

from mxspec.check import default_device
from mxspec.nn.routing import add_bias, experts_of_rows, routing

DEVICE = default_device()
E, TOP = 5, 3


def chosen(tokens: int = 40, elsewhere: int = 0) -> torch.Tensor:
    """The experts of each token: never expert 2, and `elsewhere` experts of another device."""
    torch.manual_seed(0)
    scores = torch.randn(tokens, E + elsewhere, device=DEVICE)
    scores[:, 2] = -torch.inf
    return scores.topk(TOP).indices


@pytest.mark.parametrize("tokens", [0, 1, 40])
@pytest.mark.parametrize("elsewhere", [0, 2])
def test_pairs_lie_by_expert_and_in_order(tokens, elsewhere):
    index = chosen(tokens, elsewhere)
    pairs = routing(index, E)
    flat = index.flatten()
    assert torch.equal(pairs.order, flat.argsort(stable=True))
    assert torch.equal(pairs.experts, flat[pairs.order])
    assert torch.equal(pairs.order[pairs.places], torch.arange(len(flat), device=DEVICE))
    ends = torch.stack([(flat < e + 1).sum() for e in range(E)])
    assert pairs.offs.dtype == torch.int32
    assert torch.equal(pairs.offs, ends.int())


def test_gather_sort_and_combine_are_indexing_and_so_are_their_gradients():
    index = chosen().flip(0)
    pairs, order = routing(index, E), index.flatten().argsort(stable=True)
    x = torch.randn(40, 8, device=DEVICE, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(40, TOP, device=DEVICE, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(E, 8, device=DEVICE, dtype=torch.float64, requires_grad=True)
    out = pairs.combine(add_bias(pairs.gather(x) ** 3, bias, pairs.experts) * pairs.sort(weights.flatten())[:, None])
    tokens = x[order // TOP] ** 3 + bias[index.flatten()[order]]
    expected = (tokens * weights.flatten()[order][:, None])[order.argsort()].view(40, TOP, 8).sum(1)
    assert torch.equal(out, expected)
    grad = torch.randn_like(out)
    inputs = (x, weights, bias)
    for got, by_indexing in zip(
        torch.autograd.grad(out, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True
    ):
        torch.testing.assert_close(got, by_indexing, rtol=1e-12, atol=1e-12)


def test_pairs_of_another_device_get_no_bias_and_give_it_no_gradient():
    pairs = routing(chosen(elsewhere=2), E)
    bias = torch.ones(E, 8, device=DEVICE, requires_grad=True)
    experts = experts_of_rows(pairs.offs, len(pairs.order))
    assert torch.equal(experts, pairs.experts.clamp(max=E))
    out = add_bias(torch.zeros(len(pairs.order), 8, device=DEVICE), bias, experts)
    assert torch.equal(out[:, 0], (pairs.experts < E).float())
    out.sum().backward()
    ends = torch.cat([pairs.offs.new_zeros(1), pairs.offs])
    assert torch.equal(bias.grad[:, 0], ends.diff().float())
    assert not bias.grad[2].any()
