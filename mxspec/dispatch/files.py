"""The files decide which ops and backends exist, and whether a backend has a kernel for an op."""

from __future__ import annotations

import functools
import importlib
import os
import pkgutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from mxspec.spec import Reference

_PACKAGE = Path(__file__).parents[1]


@functools.cache
def ops() -> tuple[str, ...]:
    """The names of all ops: the files of `mxspec/reference`."""
    files = pkgutil.iter_modules([str(_PACKAGE / "reference")])
    return tuple(sorted(m.name for m in files if not (m.ispkg or m.name.startswith("_"))))


@functools.cache
def backends() -> tuple[str, ...]:
    """The names of all backends: `reference` and the `mxspec/*_kernels` folders."""
    return ("reference", *sorted(path.name.removesuffix("_kernels") for path in _PACKAGE.glob("*_kernels")))


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
    """The module of a backend's kernel for an op, or the reason why there is no such module."""
    if not has_kernel(name, backend):
        return f"has no kernel for {name}"
    try:
        return importlib.import_module(f"mxspec.{backend}_kernels.{name}")
    except ImportError as error:  # the framework is missing, or its version does not fit: the error says which
        return f"cannot be imported: {error}"


def interpreters() -> tuple[str, ...]:
    """The environment variables <BACKEND>_INTERPRET that are 1, so that this process runs kernels on the CPU."""
    return tuple(v for v in (f"{b.upper()}_INTERPRET" for b in backends()) if os.environ.get(v) == "1")
