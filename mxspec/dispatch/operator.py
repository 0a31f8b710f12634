"""An op as an operator of torch.library, and the public function that calls the operator."""

from __future__ import annotations

import functools
import inspect
from typing import Any, cast

import torch
from torch import Tensor

from mxspec.dispatch import planned, traced
from mxspec.dispatch.choice import current_backend, known
from mxspec.dispatch.modes import is_differentiated_by_a_transform, is_forward_mode, is_plain_eager
from mxspec.dispatch.schema import PYTHON_TYPES, SCHEMA_TYPES, annotated, dtype_of, schema
from mxspec.plans import Description
from mxspec.reference.common import checks
from mxspec.spec import P, R, Reference, outputs_of

_LIBRARY = torch.library.Library("mxspec", "DEF")
# Kernels expect the strides of the caller's tensors. Without `needs_exact_strides` inductor may change the strides.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)


class Operator:
    """The functions that torch.library calls for one op."""

    def __init__(self, fn: Reference[..., Any]) -> None:
        self.fn, self.name = fn, fn.__name__
        self.signature, self.gradient, self.in_place = inspect.signature(fn), fn.spec.gradient, fn.spec.in_place
        self.by_text = annotated(self.signature, "torch.dtype | str", "torch.dtype | str | None")
        self.flags = annotated(self.signature, "bool")
        self.types = {p.name: PYTHON_TYPES[p.annotation] for p in self.signature.parameters.values()}
        self.as_list = SCHEMA_TYPES[self.signature.return_annotation] == "Tensor[]"  # a tuple leaves the op as a list
        no_gradient = "call it inside an autograd.Function that defines a gradient, or on a detached tensor"
        self.no_gradient = f"{self.name} has no gradient; {no_gradient}"
        no_transform = "has a gradient for backward() and torch.autograd.grad, but none for torch.func or forward mode"
        self.no_transform = f"{self.name} {no_transform}" if self.gradient else self.no_gradient

    def define(self) -> Any:
        """Register the op with torch. Returns the operator to call."""
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

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], backend: str | None, call: Description | None) -> Any:
        result = planned.run(self.fn, args, self.with_dtypes(kwargs), backend, call)
        if self.in_place:  # autograd does not see a kernel's write: tell it that a tensor it saved may have changed
            torch.autograd.graph.increment_version(args[0])
        return result

    def misfit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether an argument's type differs from its annotation. A bool does not count as a number here."""
        given = {**dict(zip(self.types, args, strict=False)), **kwargs}
        return any(
            isinstance(value, bool) or not isinstance(value, self.types[key])
            for key, value in given.items()
            if key in self.types and key not in self.flags
        )

    def refuse(self, args: tuple[Any, ...], kwargs: dict[str, Any], backend: str | None) -> None:
        """Raise our error for a bad call, before torch raises a less clear one or accepts True as the number 1."""
        if backend:
            known(backend, self.name)
        # Leave out the flags: with `check_offs=True` the host would wait for the device twice.
        options = {key: value for key, value in kwargs.items() if key not in self.flags}
        self.fn.spec.check_args(*args, **self.with_dtypes(options))
        if is_differentiated_by_a_transform((*args, *kwargs.values())):
            raise RuntimeError(self.no_transform)

    def implementation(self, *args: Any, backend: str = "", **kwargs: Any) -> Any:
        result = self.run(args, kwargs, backend, planned.describe(self.name, args, kwargs, backend))
        return list(result) if self.as_list else result

    def fake(self, *args: Any, backend: str = "", **kwargs: Any) -> Any:
        result = traced.outputs(self.name, self.fn, args, self.with_dtypes(kwargs))
        return list(result) if self.as_list else result

    def without_gradient(self, keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        """Raise at the call, not in the backward: torch registers no backward formula for an op in place."""
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
        # Save the choice: the backward runs on a thread that sees no with-block. A traced graph chooses when it runs.
        in_graph = torch._C._len_torch_dispatch_stack() > 0
        ctx.backend = keyword_only_inputs["backend"] or ("" if in_graph else current_backend())


def op(fn: Reference[P, R]) -> Reference[P, R]:
    """The public op of a reference function: the same signature plus `backend=`. The switch chooses what runs."""
    one = Operator(fn)
    name, flags, by_text, as_list, operator = one.name, one.flags, one.by_text, one.as_list, one.define()
    run, misfit, refuse = one.run, one.misfit, one.refuse

    @functools.wraps(fn)
    def public(*args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        for flag in flags:  # must be a real bool: to an `if`, the string "no" is true
            if flag in kwargs:
                checks.boolean(name, flag, kwargs[flag])
        if not torch.compiler.is_compiling():
            call = None if is_forward_mode() else planned.describe(name, args, kwargs, backend)
            if call is not None or (args and is_plain_eager((*args, *kwargs.values()))):
                return run(args, kwargs, backend, call)
            refuse(args, kwargs, backend)
        elif misfit(args, kwargs):
            refuse(args, kwargs, backend)
        for key in by_text:
            if kwargs.get(key) is not None:
                kwargs[key] = str(kwargs[key])
        result = operator(*args, backend=backend or "", **kwargs)
        return tuple(result) if as_list else result

    own = inspect.Parameter("backend", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="str | None")
    parameters = [*one.signature.parameters.values(), own]
    public.__signature__ = one.signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    public.reference = fn  # type: ignore[attr-defined]
    public.__module__ = "mxspec"  # pickle looks for the op there
    return cast(Reference[P, R], public)
