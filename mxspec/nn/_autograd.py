"""Shared parts of the layers' autograd functions.

The functions have a first derivative only. A backward uses the backend of its forward.

Checkpointing runs a forward a second time, inside the backward, on a thread that may not see the user's with-block.
`backend_now` gives the second run the backend of the layer's latest forward. This is a guess if the layer ran on
several backends. The user may also have changed the recipe. So each function saves the number of its backend and its
recipe as a tensor. Checkpointing replaces this tensor with the tensor of the second run, and the backward compares.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakIdKeyDictionary

import mxspec
from mxspec import dispatch
from mxspec.nn._format import Format
from mxspec.nn.recipe import Recipe

Function = TypeVar("Function", bound=torch.autograd.Function)

_CHOICES = ("auto", *dispatch.backends())
_latest: Any = WeakIdKeyDictionary()  # a layer, or the weights of a function -> the backend of its latest forward


def signature_once(function: type[Function]) -> type[Function]:
    """A decorator of autograd functions. PyTorch's `apply` reads the forward's signature; at each call, this took the
    host 14 us.
    """
    function.forward.__signature__ = inspect.signature(function.forward)  # type: ignore[attr-defined]
    return function


def applied(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply(*args)`. Without gradients it is the forward alone, because `apply` costs the host 30 us."""
    return function.apply(*args) if torch.is_grad_enabled() else function.forward(*args)


def backend_now(owner: object) -> str | None:
    """The backend for a forward and its backward. `owner` is the layer, or the weights of a function."""
    if torch.compiler.is_compiling():  # each run of the compiled graph chooses its own backend
        return None
    if not dispatch.is_outer_block_unseen():
        _latest[owner] = mxspec.current_backend()
    return str(_latest.get(owner) or mxspec.current_backend())


def checkpoint_context() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Run a checkpointed forward again on its first backend: a `context_fn` for `checkpoint(use_reentrant=False)`.

    Without this context, the second run of a layer uses the backend of the layer's latest forward. `mx_grouped_mm` and
    `fp8_grouped_mm` use the backend of their latest call with the same weights. If the first run used another backend,
    the backward raises an error. With `use_reentrant=True` the layers cannot detect the difference, and no error is
    raised.

    Example:
        >>> from mxspec.nn import MXLinear
        >>> from torch.utils.checkpoint import checkpoint
        >>> layer, x = MXLinear(64, 32), torch.ones(2, 64, requires_grad=True)
        >>> with mxspec.use_backend("reference"):
        ...     y = checkpoint(layer, x, use_reentrant=False, context_fn=checkpoint_context)
        >>> _ = layer(x)
        >>> y.sum().backward()
    """
    chosen = mxspec.current_backend()
    return _Block(chosen), _Block(chosen)


class _Block:
    """`use_backend`, constructed only on entry, because its constructor already chooses for the whole process."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._entered: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> None:
        self._entered.append(mxspec.use_backend(self._backend))
        self._entered[-1].__enter__()

    def __exit__(self, *exc_info: Any) -> None:
        self._entered.pop().__exit__(*exc_info)


def keep(
    ctx: Any, x: Tensor, w: Tensor | tuple[Tensor, ...], name: str, by: Format | None, *tensors: Tensor | None
) -> None:
    """Save tensors for the backward of a function of x and w. `name` is the layer's name, for error texts.

    A function of one weight is a product `x @ w^T`: its gradient for x depends on w, and its gradient for w depends on
    x. In a function of several weights, the gradient for each argument depends on all arguments.
    """
    ctx.name, ctx.ran = name, None if by is None or by.backend is None else (by.backend, _number(by.recipe))
    inputs = (x, w) if isinstance(w, Tensor) else (x, *w)
    ctx.is_product = isinstance(w, Tensor)
    if not torch.compiler.is_compiling():
        ctx.varies_outside = tuple(_outside(tensor).requires_grad for tensor in inputs)
    ctx.inputs = len(inputs)
    ctx.save_for_backward(*tensors, None if ctx.ran is None else _RAN[ctx.ran])


def kept(ctx: Any) -> tuple[Any, ...]:
    """The tensors that `keep` saved in the forward, or in the forward's second run."""
    *tensors, ran = ctx.saved_tensors
    if torch.compiler.is_compiling() or type(ran) is not Tensor:  # a fake tensor has no value
        return tuple(tensors)
    if any(isinstance(tensor, FakeTensor) for tensor in tensors):  # inside a FakeTensorMode, no tensor may be read
        return tuple(tensors)
    (backend, recipe), (first, first_recipe) = _RUNS[int(ran)], ctx.ran
    if backend != first:
        raise RuntimeError(
            f"{ctx.name}: checkpointing ran the forward again on the backend {backend!r}, but the first run was on "
            f"{first!r}. Pass context_fn=mxspec.nn.checkpoint_context to checkpoint."
        )
    if recipe != first_recipe:
        raise RuntimeError(
            f"{ctx.name}: checkpointing ran the forward again by another recipe than the first run. Change the recipe "
            "between two steps, and not between a forward and its backward."
        )
    return tuple(tensors)


def first_derivative_only(backward: Callable[..., tuple[Tensor | None, ...]]) -> Callable[..., Any]:
    """Make the results of a backward raise when they are differentiated.

    The first results are the gradients for the tensors that `keep` was given: for x, and for each weight.

    torch's `once_differentiable` is not enough: it does not see that grad_x depends on w, and grad_w on x.
    """

    @functools.wraps(backward)
    def wrapper(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if torch.compiler.is_compiling():  # PyTorch itself raises at the second derivative of a compiled function
            return backward(ctx, *gradients)
        if (transforms := len(torch._C._functorch.get_interpreter_stack() or ())) > 1:
            raise RuntimeError(_refusal(ctx.name))  # torch.func transforms are nested: this is a second derivative
        with torch.no_grad():
            results = list(backward(ctx, *gradients))
        if not torch.is_grad_enabled():  # create_graph=True enables it, and torch.func always does
            return tuple(results)
        varies = ctx.varies_outside if transforms else ctx.needs_input_grad[: ctx.inputs]
        from_above = any(_outside(gradient).requires_grad for gradient in gradients if gradient is not None)
        for i in range(ctx.inputs):
            others = any(varies[:i] + varies[i + 1 :]) if ctx.is_product else any(varies)
            if results[i] is not None and (from_above or others):
                results[i] = _Underivable.apply(results[i], _NEEDS_GRADIENT, ctx.name)
        return tuple(results)

    return wrapper


def _outside(x: Tensor) -> Tensor:
    """The plain tensor below a wrapper of a torch.func transform, or x itself if it is not wrapped."""
    wrapped = torch._C._functorch.is_gradtrackingtensor(x)
    return torch._C._functorch.get_unwrapped(x) if wrapped else x


_DIFFERENT = 32  # recipes. Were there more, two of them would share a number, and a change between the two go unseen
_RUNS = [(backend, number) for backend in _CHOICES for number in range(_DIFFERENT)]


@functools.cache
def _number(recipe: Recipe) -> int:
    """A number for each recipe."""
    return next(_numbers) % _DIFFERENT


_numbers = itertools.count()
with torch.inference_mode(False):
    _RAN = {run: torch.tensor(index, device="cpu") for index, run in enumerate(_RUNS)}
    _NEEDS_GRADIENT = torch.empty(0, device="cpu", requires_grad=True)


class _Underivable(torch.autograd.Function):
    """Return the same values. Autograd sees that they depend on an input, but their derivative raises."""

    @staticmethod
    def forward(gradient: Tensor, needs_gradient: Tensor, name: str) -> Tensor:
        return gradient.clone()  # gradient clipping writes in place, and autograd may forbid that on a view

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *_, ctx.name = inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError(_refusal(ctx.name))


def _refusal(name: str) -> str:
    return (
        f"{name}: has no second derivative, because autograd cannot differentiate its backward. If the loss contains a "
        "gradient (a gradient penalty, for example), use PyTorch's own layer instead, such as nn.Linear."
    )
