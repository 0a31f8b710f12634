"""What the layers' autograd functions share: they have a first derivative only, and one backend for all their runs.

Checkpointing runs a forward again within the backward, on a thread that may see no with-block. `backend_now` gives that
run the backend of the layer's latest forward. That is a guess where a layer ran under several backends. So each
function saves the index of its backend as a tensor: checkpointing then keeps that of the second run, and the backward
compares it to that of the first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

import mxspec
from mxspec import dispatch

_CHOICES = ("auto", *dispatch.backends())
_latest: Any = WeakIdKeyDictionary()  # the backend of the latest forward, by its layer or its weights


def backend_now(owner: object) -> str | None:
    """The backend for a forward and its backward; `owner` is the layer, or the weights of a function."""
    if torch.compiler.is_compiling():  # while a graph is traced, the choice is left to its runs
        return None
    if not dispatch.is_outer_block_unseen():
        _latest[owner] = mxspec.current_backend()
    return str(_latest.get(owner) or mxspec.current_backend())


def checkpoint_context() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Make checkpointing run a forward again by the backend that it had: a `context_fn` for `use_reentrant=False`.

    A layer that is run again takes the backend of its latest forward; `mx_grouped_mm` and `fp8_grouped_mm` take that
    of the latest call with these weights. So this is needed only where these differ from what the checkpointed forward
    had. Without it, the backward then raises. With `use_reentrant=True` nobody can tell, and nothing raises.

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
    """`use_backend`, which is constructed where it is entered: constructed, it is a choice for the process."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._entered: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> None:
        self._entered.append(mxspec.use_backend(self._backend))
        self._entered[-1].__enter__()

    def __exit__(self, *exc_info: Any) -> None:
        self._entered.pop().__exit__(*exc_info)


def keep(ctx: Any, x: Tensor, w: Tensor, name: str, backend: str | None, *tensors: Tensor | None) -> None:
    """Save tensors for the backward of a function of x and w, called for the layer of that name."""
    ctx.name, ctx.backend = name, backend
    if not torch.compiler.is_compiling():
        ctx.varies_outside = _outside(x).requires_grad, _outside(w).requires_grad
    run_by = None if backend is None else torch.tensor(_CHOICES.index(backend), device="cpu")
    ctx.save_for_backward(*tensors, run_by)


def kept(ctx: Any) -> tuple[Any, ...]:
    """What `keep` saved, or what a second run of the forward did."""
    *tensors, run_by = ctx.saved_tensors
    if torch.compiler.is_compiling() or type(run_by) is not Tensor:  # a fake tensor has no value
        return tuple(tensors)
    if (again := _CHOICES[int(run_by)]) != ctx.backend:
        raise RuntimeError(
            f"{ctx.name}: checkpointing ran the forward again by the backend {again!r}, the first run had "
            f"{ctx.backend!r}; pass context_fn=mxspec.nn.checkpoint_context to checkpoint"
        )
    return tuple(tensors)


def first_derivative_only(backward: Callable[..., tuple[Tensor | None, ...]]) -> Callable[..., Any]:
    """A backward whose results raise when they are differentiated; the first two are the gradients of x and of w.

    torch's `once_differentiable` does not see that the gradient of x depends on w, nor that of w on x.
    """

    @functools.wraps(backward)
    def wrapper(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if torch.compiler.is_compiling():  # PyTorch itself refuses the second derivative of what it compiled
            return backward(ctx, *gradients)
        if (transforms := len(torch._C._functorch.get_interpreter_stack() or ())) > 1:
            raise RuntimeError(_refusal(ctx.name))  # one transform of torch.func within another
        with torch.no_grad():
            of_x, of_w, *rest = backward(ctx, *gradients)
        if not torch.is_grad_enabled():  # it is, where create_graph=True, and always within torch.func
            return of_x, of_w, *rest
        x_varies, w_varies = ctx.varies_outside if transforms else ctx.needs_input_grad[:2]
        varies = any(_outside(gradient).requires_grad for gradient in gradients)
        return (
            of_x if of_x is None or not (varies or w_varies) else _Underivable.apply(of_x, _NEEDS_GRADIENT, ctx.name),
            of_w if of_w is None or not (varies or x_varies) else _Underivable.apply(of_w, _NEEDS_GRADIENT, ctx.name),
            *rest,
        )

    return wrapper


def _outside(x: Tensor) -> Tensor:
    """The tensor as it is outside of a transform of torch.func, if it is within one."""
    wrapped = torch._C._functorch.is_gradtrackingtensor(x)
    return torch._C._functorch.get_unwrapped(x) if wrapped else x


with torch.inference_mode(False):
    _NEEDS_GRADIENT = torch.empty(0, device="cpu", requires_grad=True)


class _Underivable(torch.autograd.Function):
    """The same values, of which autograd knows that they depend on something, and not how."""

    @staticmethod
    def forward(gradient: Tensor, needs_gradient: Tensor, name: str) -> Tensor:
        return gradient.clone()  # a view might not be written in place, as clipping does

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *_, ctx.name = inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError(_refusal(ctx.name))


def _refusal(name: str) -> str:
    return (
        f"{name}: has no second derivative: autograd does not follow its backward; a loss that contains a gradient, as "
        "a gradient penalty does, needs nn.Linear in its place"
    )
