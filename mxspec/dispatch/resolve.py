"""Which backends can run a call, which backend `auto` takes, and the run itself."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any, cast

import torch

from mxspec.dispatch.choice import current_backend, known
from mxspec.dispatch.files import backends, interpreters, kernel_module
from mxspec.spec import Reference


@functools.cache
def _cpu_refusal(name: str, backend: str) -> str | None:
    """Why a kernel does not run on CPU tensors. None if an interpreter runs it there."""
    if no := getattr(kernel_module(name, backend), "INTERPRETABLE", None):
        return f"runs on CUDA tensors only: {no.removeprefix('no: ')}"
    variables = getattr(sys.modules[f"mxspec.{backend}_kernels"], "INTERPRETERS", ())
    if set(variables) & set(interpreters()):
        return None
    how = f"; to run it on CPU tensors, set {' or '.join(f'{v}=1' for v in variables)} before Python starts"
    return "runs on CUDA tensors" + (how if variables else "")


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@functools.cache
def kernel_function(name: str, backend: str) -> Callable[..., Any]:
    return cast(Callable[..., Any], getattr(kernel_module(name, backend), name))


@functools.cache
def _supports(name: str, backend: str) -> Callable[..., str | None] | None:
    return getattr(kernel_module(name, backend), "supports", None)


@functools.cache
def static_refusal(name: str, backend: str, device_type: str) -> str | None:
    """Why a backend cannot run an op on a type of device, whatever the arguments. None if it can."""
    module = kernel_module(name, backend)
    if isinstance(module, str):
        return module
    if device_type == "cpu":
        return _cpu_refusal(name, backend)
    return None if device_type == "cuda" else f"runs on CUDA tensors, and these are on {device_type}"


def refusal(name: str, backend: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why a backend cannot run this call even if it is chosen by name. None if it can."""
    if backend == "reference":
        return None
    if reason := static_refusal(name, backend, "cuda" if args[0].is_cuda else args[0].device.type):
        return reason
    supports = _supports(name, backend)
    return None if supports is None else supports(*args, **kwargs)


def is_batch_invariant(name: str, backend: str) -> bool:
    """Whether a backend promises that the bits of a row do not depend on the other rows of a call."""
    return backend != "reference" and getattr(kernel_module(name, backend), "BATCH_INVARIANT", False)


def unranked(module: ModuleType, device: torch.device) -> str | None:
    """Why `auto` never takes a kernel on a device. None if it may take it."""
    if device.type != "cuda":
        return f"is used on {device.type} tensors only if chosen by name"
    if waits := getattr(module, "HOST_SYNC", None):
        return f"waits for the device ({waits}), so it is used only if chosen by name"
    if _capability(device) not in getattr(module, "RANK", {}):
        return (
            f"has no rank on compute capability {'.'.join(map(str, _capability(device)))}, "
            "so it is used only if chosen by name"
        )
    return None


@functools.cache
def _ranked(name: str, device: torch.device) -> tuple[tuple[str, Callable[..., str | None] | None], ...]:
    """The backends that `auto` may take for an op on a GPU, with their `supports` functions. The best is the first."""
    modules = [(b, kernel_module(name, b)) for b in backends() if b != "reference"]
    ranked = [(b, m) for b, m in modules if isinstance(m, ModuleType) and unranked(m, device) is None]
    ranked.sort(key=lambda found: found[1].RANK[_capability(device)])
    return tuple((backend, _supports(name, backend)) for backend, _ in ranked)


def taken_by_auto(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The backend that `auto` takes for a call."""
    if not args[0].is_cuda:
        return "reference"
    for backend, supports in _ranked(name, args[0].device):
        if supports is None or supports(*args, **kwargs) is None:
            return backend
    return "reference"


@functools.cache
def _warn_of_reference(name: str) -> None:
    """Warn, once per op, that `auto` has no kernel for a call with tensors on a GPU."""
    warnings.warn(
        f"{name}: `auto` has no kernel for this call on the GPU, so it runs the reference. "
        f"To see why, call mxspec.explain({name!r}, ...).",
        stacklevel=4,
    )


def run(fn: Reference[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], backend: str | None) -> Any:
    """Run one call: check its arguments, choose, launch."""
    name = fn.__name__
    asked = known(backend, name) if backend else current_backend()
    if asked == "reference":
        return fn(*args, **kwargs)  # it checks its arguments itself
    fn.spec.check_args(*args, **kwargs)
    on_gpu = args[0].is_cuda
    if asked == "auto":
        asked = taken_by_auto(name, args, kwargs)
        if asked == "reference":
            if on_gpu:
                _warn_of_reference(name)
            return fn(*args, **kwargs)
    elif reason := refusal(name, asked, args, kwargs):
        raise ValueError(f"{name}: backend {asked!r} {reason}")
    kernel = kernel_function(name, asked)
    if on_gpu and args[0].get_device() != torch.cuda.current_device():
        with torch.cuda.device(args[0].device):  # a kernel launches on the current device, so make it the tensors'
            return kernel(*args, **kwargs)
    return kernel(*args, **kwargs)
