"""A compiled layer or op serves any number of tokens with one or two graphs, and gives the numbers of eager mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import mxspec
from mxspec import nn
from tests.helpers import ends

F = 128  # features
TOKENS = (*range(50, 60), 128, 256, 300)  # more numbers than the 8 graphs after which torch stops compiling
Arguments = tuple[Any, ...]


def groups(M: int) -> tuple[Tensor, Tensor]:
    """The ends of two token groups among M tokens, and their first rows among M + 64 rows."""
    return ends(M // 3, M - 2), ends(0, M // 3 + 5)


def tokens(M: int, rows: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(M)
    return torch.randn(rows or M, F, generator=generator).requires_grad_()


def layer(make: Callable[..., torch.nn.Module], *sizes: int, **options: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    return make(*sizes, **options)


def linear_input(M: int) -> Arguments:
    return (tokens(M),)


def grouped_input(M: int) -> Arguments:
    return tokens(M), groups(M)[0]


def weights() -> Tensor:
    return torch.randn(2, F, F, generator=torch.Generator().manual_seed(0)).requires_grad_()


def fp8_grouped_mm() -> Callable[..., Tensor]:
    w = weights()
    return lambda x, offs: nn.fp8_grouped_mm(x, w, offs)


# For each name: the layer, its arguments, and how many graphs serve any number of tokens. A layer that treats a single
# block differently has two graphs: one for up to 128 tokens, and one for more.
LAYERS = {
    "GroupedExperts": (lambda: layer(nn.GroupedExperts, 2, F, F), grouped_input, 1),
    "fp8_grouped_mm": (fp8_grouped_mm, grouped_input, 1),
    "MXLinear": (lambda: layer(nn.MXLinear, F, F), linear_input, 1),
    "Float8BlockwiseLinear": (lambda: layer(nn.Float8BlockwiseLinear, F, F), linear_input, 2),
}

OPS = {
    "pad_token_groups": lambda M: (tokens(M), groups(M)[0], 32),
    "unpad_token_groups": lambda M: (tokens(M, M + 64), *groups(M), M),
    "place_token_groups": lambda M: (tokens(M), *groups(M), M + 64),
    "from_blocked": lambda M: (torch.arange(-(-M // 128) * 1024).to(torch.uint8), M, 8),
    "mx_quantize_groups": lambda M: (tokens(M).detach(), groups(M)[0]),
    "fp8_quantize_k_groups": lambda M: (tokens(M).detach(), groups(M)[0]),
    "to_blocked_m_groups": lambda M: (tokens(M).detach().to(torch.uint8), groups(M)[0]),
}


def outputs_of(fn: Callable[..., Any], args: Arguments) -> list[Tensor]:
    """The outputs of a call, and the gradient of its first argument."""
    result = fn(*args)
    outputs = list(result) if isinstance(result, (tuple, list)) else [result]
    if outputs[0].requires_grad:
        x = args[0]
        weight = torch.arange(outputs[0].numel()).reshape(outputs[0].shape) % 7 - 3.0
        outputs += torch.autograd.grad((outputs[0] * weight).sum(), x)
    return [out.detach() for out in outputs]


def serve(
    fn: Callable[..., Any], make: Callable[[int], Arguments], sizes: tuple[int, ...], marked: bool = False,
    backend: str = "aot_eager", **options: Any,
) -> int:  # fmt: skip
    """Compile fn, call it with every number of tokens, and compare with eager mode. Returns the number of graphs."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(fn, backend=counter, fullgraph=True, **options)
    for M in sizes:
        args = make(M)
        if marked:
            torch._dynamo.mark_dynamic(args[0], 0)
        for got, expected in zip(outputs_of(compiled, args), outputs_of(fn, make(M)), strict=True):
            assert (got.dtype, got.shape, got.stride()) == (expected.dtype, expected.shape, expected.stride())
            assert torch.equal(got.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)), M
    return counter.frame_count


@pytest.mark.turns(4)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_compiled_once_for_any_number_of_tokens(name):
    """Without `mark_dynamic`, the first graph is for the first number of tokens only."""
    make, args, graphs = LAYERS[name]
    assert serve(make(), args, TOKENS) == 1 + graphs


@pytest.mark.turns(4)
@pytest.mark.parametrize("name", LAYERS)
def test_tokens_may_be_marked_as_dynamic(name):
    """The first number of tokens is 128, a multiple of every block size."""
    make, args, graphs = LAYERS[name]
    assert serve(make(), args, (128, 50, 61, 256, 300), marked=True) == graphs


@pytest.mark.turns(3)
@pytest.mark.parametrize("op", OPS)
def test_an_op_is_compiled_once_for_any_number_of_tokens(op):
    assert serve(getattr(mxspec, op), OPS[op], TOKENS, dynamic=True) <= 2


@pytest.mark.turns(4)
def test_inductor_compiles_once_for_any_number_of_tokens():
    def moved(x: Tensor, offs: Tensor, start: Tensor, num_tokens: int) -> Tensor:
        return mxspec.unpad_token_groups(x + 1, offs, start, num_tokens) * 2

    args = OPS["unpad_token_groups"]
    assert serve(moved, args, (50, 51, 52, 128), backend="inductor", dynamic=True) == 1


def test_kernels_get_plain_numbers(monkeypatch):
    """A size is a symbol only in the graph. A kernel gets an int."""
    seen = []
    kernel = mxspec.dispatch.reference("unpad_token_groups")
    monkeypatch.setattr(mxspec.dispatch.resolve, "taken_by_auto", lambda *_: "triton")
    monkeypatch.setattr(
        mxspec.dispatch.resolve,
        "kernel_function",
        lambda *_: lambda *args, **kw: (seen.append(type(args[3])), kernel(*args, **kw))[1],
    )
    serve(mxspec.unpad_token_groups, OPS["unpad_token_groups"], (50, 51, 52), dynamic=True)
    assert set(seen) == {int}
