"""The switch: which backend runs an op, and why.

A backend is a folder `mxspec/<name>_kernels`; it implements an op where it holds a file of the op's name. That is
all this module knows: it names no op and no backend but `reference` and `auto`.

Each op is a `torch.library` operator whose implementation reads the switch when it runs. The switch is never read
in code that torch.compile traces, so a compiled function follows a later choice without recompiling.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import pkgutil
import sys
import threading
import warnings
from collections.abc import Callable, Iterable
from contextvars import ContextVar, Token
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from mxspec.formats import ELEMENTS
from mxspec.reference.common import checks
from mxspec.spec import P, R, Reference, outputs_of

__all__ = ["Explanation", "backends", "current_backend", "explain", "op", "ops", "set_backend", "use_backend"]

_PACKAGE = Path(__file__).parent
_LIBRARY = torch.library.Library("mxspec", "DEF")


@functools.cache
def ops() -> tuple[str, ...]:
    """The names of all ops: the files of `mxspec/reference`."""
    files = pkgutil.iter_modules([str(_PACKAGE / "reference")])
    return tuple(sorted(m.name for m in files if not (m.ispkg or m.name.startswith("_"))))


@functools.cache
def backends() -> tuple[str, ...]:
    """The names of all backends: `reference` and the `mxspec/*_kernels` folders."""
    return ("reference", *sorted(path.name.removesuffix("_kernels") for path in _PACKAGE.glob("*_kernels")))


# --- what the user asked for ------------------------------------------------------------------------------------


def _known(backend: str, said_by: str) -> str:
    if backend != "auto" and backend not in backends():
        raise ValueError(f"{said_by}: unknown backend {backend!r}; needs one of {', '.join(('auto', *backends()))}")
    return backend


# The backend of a with-block, and the backward that it was entered in: -1 outside of any.
_in_context: ContextVar[tuple[str, int] | None] = ContextVar("mxspec_backend", default=None)
_environment = _known(os.environ.get("MXSPEC_BACKEND") or "auto", "MXSPEC_BACKEND")
_in_process: str | None = None
# Each `use_backend` that no with-block has entered yet, by id: its thread and its choice, the newest last.
_not_entered: dict[int, tuple[int, str]] = {}


def set_backend(backend: str | None) -> None:
    """Choose the backend for the whole process, all of its threads, from now on.

    A `backend=` on a call outranks a surrounding `with use_backend(...)`, which outranks this choice, which outranks
    the environment variable MXSPEC_BACKEND, read when mxspec is imported; without any of them the choice is `auto`.

    Args:
        backend: `auto`, `reference` or another name in `mxspec.dispatch.backends()`. None takes the choice back: the
            environment's holds again.

    Raises:
        ValueError: an unknown backend.
    """
    global _in_process
    _in_process = None if backend is None else _known(backend, "set_backend")
    _not_entered.clear()  # an older choice without `with` is outdone


class use_backend:
    """Choose the backend for a with-block: `with use_backend("triton"):`.

    The block holds for its own thread and its own asyncio task; `set_backend` chooses for the process, and says which
    choice outranks which. On CUDA, backward runs on another thread: an `autograd.Function` reads `current_backend()`
    in forward and passes it as `backend=` in backward.

    Deprecated, and to go in 0.3: `use_backend("triton")` without `with` does what `set_backend("triton")` does. It
    is known by the fact that no block has entered it. So it acts when the object is dropped, which is at once if
    nothing holds it, or when its own thread next reads the switch; other threads do not see it before. An object that
    is made early and entered late is taken for such a call if an op runs in between.

    Raises:
        ValueError: an unknown backend.
    """

    def __init__(self, backend: str) -> None:
        self._backend = _known(backend, "use_backend")
        self._tokens: list[Token[tuple[str, int] | None]] = []
        _not_entered[id(self)] = threading.get_ident(), self._backend

    def __enter__(self) -> use_backend:
        _not_entered.pop(id(self), None)
        self._tokens.append(_in_context.set((self._backend, torch._C._current_graph_task_id())))
        return self

    def __exit__(self, *exc_info: object) -> None:
        _in_context.reset(self._tokens.pop())

    def __del__(self) -> None:
        if dropped := _not_entered.pop(id(self), None):
            _choose_without_with(dropped[1])


def _choose_without_with(backend: str) -> None:
    set_backend(backend)
    frame, level = sys._getframe(), 1
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == "mxspec":
        frame, level = frame.f_back, level + 1  # to the user's own line
    warnings.warn(
        f"use_backend({backend!r}) is entered by no with-block, so it holds for the whole process; that is deprecated "
        f"and goes in 0.3; call mxspec.set_backend({backend!r})",
        DeprecationWarning,
        stacklevel=level,
    )


def current_backend() -> str:
    """What a call without `backend=` would use here and now: a backend's name or `auto`."""
    if in_context := _in_context.get():
        return in_context[0]
    if _not_entered:
        mine = [chosen for thread, chosen in _not_entered.copy().values() if thread == threading.get_ident()]
        if mine:
            _choose_without_with(mine[-1])
    return _in_process or _environment


def is_outer_block_unseen() -> bool:
    """Whether this runs in a backward, and in no with-block that was entered there.

    A with-block around the forward, which checkpointing runs again here, is then not seen; one around the backward may
    be seen, or not.
    """
    backward, in_context = torch._C._current_graph_task_id(), _in_context.get()
    return backward != -1 and (in_context is None or in_context[1] != backward)


# --- what can run -----------------------------------------------------------------------------------------------


@functools.cache
def reference(name: str) -> Reference[..., Any]:
    """The reference function of an op."""
    if name not in ops():
        raise ValueError(f"unknown op {name!r}; needs one of {', '.join(ops())}")
    return cast(Reference[..., Any], getattr(importlib.import_module(f"mxspec.reference.{name}"), name))


def public(name: str) -> Callable[..., Any]:
    """The public op of a name: `mxspec.<name>`."""
    return cast(Callable[..., Any], getattr(importlib.import_module("mxspec"), name))


def has_kernel(name: str, backend: str) -> bool:
    """Whether a backend has a file for an op."""
    return (_PACKAGE / f"{backend}_kernels" / f"{name}.py").exists()


@functools.cache
def kernel_module(name: str, backend: str) -> ModuleType | str:
    """The module of a backend's kernel for an op, or the reason why there is none."""
    if not has_kernel(name, backend):
        return f"has no kernel for {name}"
    try:
        return importlib.import_module(f"mxspec.{backend}_kernels.{name}")
    except ImportError as error:  # the framework is missing or does not fit; its own words say which
        return f"cannot be imported: {error}"


def interpreters() -> tuple[str, ...]:
    """The variables of the environment, <BACKEND>_INTERPRET=1, that make this process run kernels on the CPU."""
    return tuple(v for v in (f"{b.upper()}_INTERPRET" for b in backends()) if os.environ.get(v) == "1")


@functools.cache
def _cpu_refusal(name: str, backend: str) -> str | None:
    """Why a kernel does not run on CPU tensors; None where an interpreter runs it there."""
    if no := getattr(kernel_module(name, backend), "INTERPRETABLE", None):
        return f"runs on CUDA tensors only: {no}"
    variables = getattr(sys.modules[f"mxspec.{backend}_kernels"], "INTERPRETERS", ())
    if set(variables) & set(interpreters()):
        return None
    how = f", on a CPU only with {' or '.join(f'{v}=1' for v in variables)} set before it is imported"
    return "runs on CUDA tensors" + (how if variables else "")


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@functools.cache
def _kernel(name: str, backend: str) -> Callable[..., Any]:
    return cast(Callable[..., Any], getattr(kernel_module(name, backend), name))


@functools.cache
def _supports(name: str, backend: str) -> Callable[..., str | None] | None:
    return getattr(kernel_module(name, backend), "supports", None)


@functools.cache
def _static_refusal(name: str, backend: str, device_type: str) -> str | None:
    """Why a backend cannot run an op on a kind of device, whatever the arguments; None where it can."""
    module = kernel_module(name, backend)
    if isinstance(module, str):
        return module
    if device_type == "cpu":
        return _cpu_refusal(name, backend)
    return None if device_type == "cuda" else f"runs on CUDA tensors; these are on {device_type}"


def refusal(name: str, backend: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why a backend, asked for by name, cannot run this call; None where it can."""
    if backend == "reference":
        return None
    if reason := _static_refusal(name, backend, "cuda" if args[0].is_cuda else args[0].device.type):
        return reason
    supports = _supports(name, backend)
    return None if supports is None else supports(*args, **kwargs)


def _unranked(module: ModuleType, device: torch.device) -> str | None:
    """Why `auto` never takes a kernel on a device; None where it may."""
    if device.type != "cuda":
        return f"is only taken by name on {device.type} tensors"
    if waits := getattr(module, "HOST_SYNC", None):
        return f"waits for the device ({waits}), so it is taken by name"
    if _capability(device) not in getattr(module, "RANK", {}):
        return f"has no rank on compute capability {'.'.join(map(str, _capability(device)))}, so it is taken by name"
    return None


@functools.cache
def _ranked(name: str, device: torch.device) -> tuple[tuple[str, Callable[..., str | None] | None], ...]:
    """The backends that `auto` may take for an op on a GPU, best first, each with its `supports`."""
    modules = [(b, kernel_module(name, b)) for b in backends() if b != "reference"]
    ranked = [(b, m) for b, m in modules if isinstance(m, ModuleType) and _unranked(m, device) is None]
    ranked.sort(key=lambda found: found[1].RANK[_capability(device)])
    return tuple((backend, _supports(name, backend)) for backend, _ in ranked)


def _auto(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The backend that `auto` takes for a call."""
    if not args[0].is_cuda:
        return "reference"
    for backend, supports in _ranked(name, args[0].device):
        if supports is None or supports(*args, **kwargs) is None:
            return backend
    return "reference"


@functools.cache
def _warn_of_reference(name: str) -> None:
    """Once an op: `auto` has no kernel for a tensor that is on a GPU."""
    warnings.warn(
        f"{name}: no kernel supports this call on the GPU, so `auto` runs the reference; "
        f"mxspec.explain({name!r}, ...) says why",
        stacklevel=4,
    )


def _run(fn: Reference[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], backend: str | None) -> Any:
    """Run one call: check its arguments, choose, launch."""
    name = fn.__name__
    asked = _known(backend, name) if backend else current_backend()
    if asked == "reference":
        return fn(*args, **kwargs)  # it checks its arguments itself
    fn.spec.check_args(*args, **kwargs)
    on_gpu = args[0].is_cuda
    if asked == "auto":
        asked = _auto(name, args, kwargs)
        if asked == "reference":
            if on_gpu:
                _warn_of_reference(name)
            return fn(*args, **kwargs)
    elif reason := refusal(name, asked, args, kwargs):
        raise ValueError(f"{name}: backend {asked!r} {reason}")
    kernel = _kernel(name, asked)
    if on_gpu and args[0].get_device() != torch.cuda.current_device():
        with torch.cuda.device(args[0].device):  # a launch goes to the current device, wherever its tensors are
            return kernel(*args, **kwargs)
    return kernel(*args, **kwargs)


# --- torch.library ----------------------------------------------------------------------------------------------

# A dtype or a name is more than a schema can say: it crosses the operator as text.
_SCHEMA_TYPES = {
    "Tensor": "Tensor",
    "int": "SymInt",  # a number of rows may be a symbol while a graph is traced; a kernel always gets a plain int
    "float": "float",
    "bool": "bool",
    "str": "str",
    "torch.dtype": "ScalarType",
    "torch.dtype | str": "str",
    "None": "()",
    "tuple[Tensor, Tensor]": "(Tensor, Tensor)",
    "tuple[Tensor, Tensor, Tensor]": "(Tensor, Tensor, Tensor)",
    "tuple[Tensor, Tensor, Tensor, Tensor]": "(Tensor, Tensor, Tensor, Tensor)",
    "tuple[Tensor, ...]": "Tensor[]",  # as many as the options ask for
}


# The types in Python of what is annotated so.
_PYTHON_TYPES: dict[str, type | tuple[type, ...]] = {
    "Tensor": Tensor,
    "int": int,
    "float": (int, float),
    "bool": bool,
    "str": str,
    "torch.dtype": torch.dtype,
    "torch.dtype | str": (torch.dtype, str),
}


def _dtype_of(text: str) -> torch.dtype | str:
    """The dtype that `str(dtype)` or an element format's name stands for; other text as it is, to be refused."""
    if text.startswith("torch."):
        return cast(torch.dtype, getattr(torch, text.removeprefix("torch."), text))
    fmt = ELEMENTS.get(text)
    return (fmt and fmt.dtype) or text


def _schema(name: str, signature: inspect.Signature, in_place: bool) -> str:
    parameters, star = [], False
    for p in signature.parameters.values():
        if p.kind is p.KEYWORD_ONLY and not star:
            parameters.append("*")
            star = True
        default = str(p.default) if "str" in p.annotation else p.default
        shown = f'"{default}"' if isinstance(default, str) else str(default).removeprefix("torch.")
        parameters.append(f"{_SCHEMA_TYPES[p.annotation]} {p.name}" + ("" if default is p.empty else f"={shown}"))
    if in_place:
        parameters[0] = parameters[0].replace("Tensor", "Tensor(a!)", 1)
    parameters += [] if star else ["*"]
    return f"{name}({', '.join(parameters)}, str backend='') -> {_SCHEMA_TYPES[signature.return_annotation]}"


def _is_plain_eager(values: Iterable[Any]) -> bool:
    """Whether a call has nothing that only the operator can serve, and may so save the dispatcher's time.

    That is: no tracing or dispatch mode, no functorch transform, no tensor that is a subclass, on the meta device,
    in need of a gradient, or a view whose sign is yet to be flipped.
    """
    if torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    for value in values:
        if type(value) is Tensor:
            if value.is_meta or value.requires_grad or value.is_neg():
                return False
        elif isinstance(value, Tensor):
            return False
    return True


def _differentiated_by_functorch(values: Iterable[Any]) -> bool:
    """Whether a call lies within `torch.func.grad`, `jvp` or their like, and is to be differentiated."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return False
    tensors = [value for value in values if isinstance(value, Tensor)]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return True
    return forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def _annotated(signature: inspect.Signature, kind: str) -> tuple[str, ...]:
    """The parameters of an op that are of a kind."""
    return tuple(p.name for p in signature.parameters.values() if p.annotation == kind)


def op(fn: Reference[P, R]) -> Reference[P, R]:
    """The public op of a reference function: the same call, behind the switch, with `backend=` added."""
    name = fn.__name__
    signature, gradient, in_place = inspect.signature(fn), fn.spec.gradient, fn.spec.in_place
    by_text, flags = _annotated(signature, "torch.dtype | str"), _annotated(signature, "bool")
    types = {p.name: _PYTHON_TYPES[p.annotation] for p in signature.parameters.values()}
    as_list = _SCHEMA_TYPES[signature.return_annotation] == "Tensor[]"  # what crosses the operator as one

    def with_dtypes(kwargs: dict[str, Any]) -> dict[str, Any]:
        for key in by_text:
            if isinstance(kwargs.get(key), str):
                kwargs[key] = _dtype_of(kwargs[key])
        return kwargs

    def run(args: tuple[Any, ...], kwargs: dict[str, Any], backend: str | None) -> Any:
        result = _run(fn, args, with_dtypes(kwargs), backend)
        if in_place:  # a kernel writes unseen: autograd has to know that what it may have saved is another now
            torch.autograd.graph.increment_version(args[0])
        return result

    def misfit(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether an argument has another type than its annotation says; True is no number here."""
        given = {**dict(zip(types, args, strict=False)), **kwargs}
        return any(
            isinstance(value, bool) or not isinstance(value, types[key])
            for key, value in given.items()
            if key in types and key not in flags
        )

    def refuse(args: tuple[Any, ...], kwargs: dict[str, Any], backend: str | None) -> None:
        """Refuse, before the operator does it in torch's words, or takes True for the number 1."""
        if backend:
            _known(backend, name)
        options = {key: value for key, value in kwargs.items() if key not in flags}  # `check_offs` would wait twice
        fn.spec.check_args(*args, **with_dtypes(options))
        if _differentiated_by_functorch((*args, *kwargs.values())):
            raise RuntimeError(no_gradient if gradient is None else no_transform)

    def implementation(*args: Any, backend: str = "", **kwargs: Any) -> Any:
        result = run(args, kwargs, backend)
        return list(result) if as_list else result

    def fake(*args: Any, backend: str = "", **kwargs: Any) -> Any:
        result: Any = fn(*args, **with_dtypes(kwargs))
        return list(result) if as_list else result

    no_gradient = (
        f"{name} has no gradient; call it inside an autograd.Function that defines one, or on a detached tensor"
    )
    no_transform = f"{name} has a gradient for backward() and torch.autograd.grad; torch.func's transforms have none"

    def without_gradient(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        """Refuse at the call: no backward will ever come by here, and torch takes no formula for an op in place."""
        tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            raise RuntimeError(no_gradient)
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keyset & torch._C._after_autograd_keyset, *args, **kwargs)

    def backward(ctx: Any, *gradients: Any) -> Any:
        if gradient is None:
            raise RuntimeError(no_gradient)
        tensors = iter(ctx.saved_tensors)
        saved = tuple(next(tensors) if value is None else value for value in ctx.sizes)
        return gradient.backward(saved, gradients, ctx.backend)

    def setup_context(ctx: Any, inputs: Any, keyword_only_inputs: dict[str, Any], output: Any) -> None:
        if gradient is None:
            return
        saved = gradient.save(inputs, outputs_of(output))
        ctx.save_for_backward(*(value for value in saved if isinstance(value, Tensor)))
        ctx.sizes = [None if isinstance(value, Tensor) else value for value in saved]
        # Backward runs on a thread that sees no with-block. While a graph is traced, the choice is left to its runs.
        traced = torch._C._len_torch_dispatch_stack() > 0
        ctx.backend = keyword_only_inputs["backend"] or ("" if traced else current_backend())

    # Kernels are written for the strides that the caller's tensor has; without the tag inductor may change them.
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
    _LIBRARY.define(_schema(name, signature, in_place), tags=tags)
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"mxspec::{name}", fake, lib=_LIBRARY)
    if in_place:
        _LIBRARY.impl(name, without_gradient, "Autograd", with_keyset=True)
    else:
        torch.library.register_autograd(f"mxspec::{name}", backward, setup_context=setup_context, lib=_LIBRARY)
    operator = getattr(torch.ops.mxspec, name).default

    @functools.wraps(fn)
    def public(*args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        for flag in flags:  # as an `if` reads it, "no" is true
            checks.boolean(name, flag, kwargs.get(flag, False))
        if not torch.compiler.is_compiling():
            if args and _is_plain_eager((*args, *kwargs.values())):
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
    public.__signature__ = signature.replace(parameters=[*signature.parameters.values(), own])  # type: ignore[attr-defined]
    public.reference = fn  # type: ignore[attr-defined]
    public.__module__ = "mxspec"  # where pickle finds it
    return cast(Reference[P, R], public)


# --- explain ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Explanation:
    """Which backend a call would use, and for each other one why not."""

    op: str
    asked: str
    backend: str | None  # None: the call would raise
    reasons: dict[str, str]
    note: str | None = None  # how that backend runs the call, where it is not as its rank was measured

    def __str__(self) -> str:
        head = f"{self.op}: {self.asked!r} " + (f"runs {self.backend!r}" if self.backend else "raises")
        head += f", {self.note}" if self.note else ""
        return "\n".join([head, *(f"  {backend:<10} {reason}" for backend, reason in self.reasons.items())])


def explain(name: str, *args: Any, backend: str | None = None, **kwargs: Any) -> Explanation:
    """Say which backend `mxspec.<name>(*args, backend=backend, **kwargs)` would run, without running it.

    >>> print(explain("to_blocked", torch.zeros(128, 4, dtype=torch.uint8)))  # doctest: +ELLIPSIS
    to_blocked: 'auto' runs 'reference'
      cublas     has no kernel for to_blocked
      deepgemm   has no kernel for to_blocked
      helion     is only taken by name on cpu tensors
      triton     is only taken by name on cpu tensors
    """
    asked = _known(backend, "explain") if backend else current_backend()
    signature = inspect.signature(reference(name))
    bound = signature.bind(*args, **kwargs)
    args, kwargs = bound.args, bound.kwargs
    for flag in _annotated(signature, "bool"):
        checks.boolean(name, flag, kwargs.get(flag, False))
    reference(name).spec.check_args(*args, **kwargs)
    chosen: str | None
    reasons: dict[str, str] = {}
    if asked == "auto":
        chosen = _auto(name, args, kwargs)
        for other in backends():
            if other not in (chosen, "reference"):
                module = kernel_module(name, other)
                unranked = module if isinstance(module, str) else _unranked(module, args[0].device)
                reasons[other] = unranked or refusal(name, other, args, kwargs) or f"ranks behind {chosen!r}"
        if chosen != "reference":
            reasons["reference"] = "is taken by name, or where no kernel supports the call"
    else:
        why_not = refusal(name, asked, args, kwargs)
        chosen = None if why_not else asked
        for other in backends():
            if other != asked:
                reasons[other] = refusal(name, other, args, kwargs) or f"could run it, but {asked!r} was asked for"
        if why_not:
            reasons = {asked: why_not, **reasons}
    note = getattr(kernel_module(name, chosen), "note", None) if chosen not in (None, "reference") else None
    return Explanation(name, asked, chosen, reasons, note and note(*args, **kwargs))
