"""An op as an operator of torch.library, and the public function before it."""

from __future__ import annotations

import functools
import inspect
from typing import Any, cast

import torch
from torch import Tensor

from mxspec.dispatch import resolve
from mxspec.dispatch.choice import current_backend, known
from mxspec.dispatch.modes import is_differentiated_by_functorch, is_plain_eager
from mxspec.dispatch.schema import PYTHON_TYPES, SCHEMA_TYPES, annotated, dtype_of, schema
from mxspec.reference.common import checks
from mxspec.spec import P, R, Reference, outputs_of

_LIBRARY = torch.library.Library("mxspec", "DEF")
# Kernels are written for the strides that the caller's tensor has; without the tag inductor may change them.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)


class Operator:
    """What torch.library calls for one op."""

    def __init__(self, fn: Reference[..., Any]) -> None:
        self.fn, self.name = fn, fn.__name__
        self.signature, self.gradient, self.in_place = inspect.signature(fn), fn.spec.gradient, fn.spec.in_place
        self.by_text = annotated(self.signature, "torch.dtype | str")
        self.flags = annotated(self.signature, "bool")
        self.types = {p.name: PYTHON_TYPES[p.annotation] for p in self.signature.parameters.values()}
        self.as_list = SCHEMA_TYPES[self.signature.return_annotation] == "Tensor[]"  # what crosses the operator as one
        no_gradient = "call it inside an autograd.Function that defines one, or on a detached tensor"
        self.no_gradient = f"{self.name} has no gradient; {no_gradient}"
        no_transform = "has a gradient for backward() and torch.autograd.grad; torch.func's transforms have none"
        self.no_transform = f"{self.name} {no_transform}" if self.gradient else self.no_gradient

    def define(self) -> Any:
        """Tell torch of the op; what to call then."""
        name = f"mxspec::{self.name}"
        _LIBRARY.define(schema(self.name, self.signature, self.in_place), tags=_TAGS)
        _LIBRARY.impl(self.name, self.implementation, "CompositeExplicitAutograd")
        torch.library.register_fake(name, self.fake, lib=_LIBRARY)
        if self.in_place:
            _LIBRARY.impl(self.name, self.without_gradient, "Autograd", with_keyset=True)
        else:
            torch.library.register_autograd(name, self.backward, setup_context=self.setup_context, lib=_LIBRARY)
        self.call = getattr(torch.ops.mxspec, self.name).default
        return self.call

    def with_dtypes(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        for key in self.by_text:
            if isinstance(kwargs.get(key), str):
                kwargs[key] = dtype_of(kwargs[key])
        return kwargs

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], backend: str | None) -> Any:
        result = resolve.run(self.fn, args, self.with_dtypes(kwargs), backend)
        if self.in_place:  # a kernel writes unseen: autograd has to know that what it may have saved is another now
            torch.autograd.graph.increment_version(args[0])
        return result

    def misfit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether an argument has another type than its annotation says; True is no number here."""
        given = {**dict(zip(self.types, args, strict=False)), **kwargs}
        return any(
            isinstance(value, bool) or not isinstance(value, self.types[key])
            for key, value in given.items()
            if key in self.types and key not in self.flags
        )

    def refuse(self, args: tuple[Any, ...], kwargs: dict[str, Any], backend: str | None) -> None:
        """Refuse, before the operator does it in torch's words, or takes True for the number 1."""
        if backend:
            known(backend, self.name)
        # Without the flags: `check_offs` would wait twice.
        options = {key: value for key, value in kwargs.items() if key not in self.flags}
        self.fn.spec.check_args(*args, **self.with_dtypes(options))
        if is_differentiated_by_functorch((*args, *kwargs.values())):
            raise RuntimeError(self.no_transform)

    def implementation(self, *args: Any, backend: str = "", **kwargs: Any) -> Any:
        result = self.run(args, kwargs, backend)
        return list(result) if self.as_list else result

    def fake(self, *args: Any, backend: str = "", **kwargs: Any) -> Any:
        result: Any = self.fn(*args, **self.with_dtypes(kwargs))
        return list(result) if self.as_list else result

    def without_gradient(self, keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        """Refuse at the call: no backward will ever come by here, and torch takes no formula for an op in place."""
        tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            raise RuntimeError(self.no_gradient)
        with torch._C._AutoDispatchBelowAutograd():
            return self.call.redispatch(keyset & torch._C._after_autograd_keyset, *args, **kwargs)

    def backward(self, ctx: Any, *gradients: Any) -> Any:
        if self.gradient is None:
            raise RuntimeError(self.no_gradient)
        tensors = iter(ctx.saved_tensors)
        saved = tuple(next(tensors) if value is None else value for value in ctx.sizes)
        return self.gradient.backward(saved, gradients, ctx.backend)

    def setup_context(self, ctx: Any, inputs: Any, keyword_only_inputs: dict[str, Any], output: Any) -> None:
        if self.gradient is None:
            return
        saved = self.gradient.save(inputs, outputs_of(output))
        ctx.save_for_backward(*(value for value in saved if isinstance(value, Tensor)))
        ctx.sizes = [None if isinstance(value, Tensor) else value for value in saved]
        # Backward runs on a thread that sees no with-block. While a graph is traced, the choice is left to its runs.
        traced = torch._C._len_torch_dispatch_stack() > 0
        ctx.backend = keyword_only_inputs["backend"] or ("" if traced else current_backend())


def op(fn: Reference[P, R]) -> Reference[P, R]:
    """The public op of a reference function: the same call, behind the switch, with `backend=` added."""
    one = Operator(fn)
    name, flags, by_text, as_list, operator = one.name, one.flags, one.by_text, one.as_list, one.define()
    run, misfit, refuse = one.run, one.misfit, one.refuse

    @functools.wraps(fn)
    def public(*args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        for flag in flags:  # as an `if` reads it, "no" is true
            checks.boolean(name, flag, kwargs.get(flag, False))
        if not torch.compiler.is_compiling():
            if args and is_plain_eager((*args, *kwargs.values())):
                return run(args, kwargs, backend)
            refuse(args, kwargs, backend)
        elif misfit(args, kwargs):
            refuse(args, kwargs, backend)
        for key in by_text:
            if key in kwargs:
                kwargs[key] = str(kwargs[key])
        result = operator(*args, backend=backend or "", **kwargs)
        return tuple(result) if as_list else result

    own = inspect.Parameter("backend", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="str | None")
    parameters = [*one.signature.parameters.values(), own]
    public.__signature__ = one.signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    public.reference = fn  # type: ignore[attr-defined]
    public.__module__ = "mxspec"  # where pickle finds it
    return cast(Reference[P, R], public)
