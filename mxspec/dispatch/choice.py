"""The user's choice of a backend: on a call, in a with-block, for the process, or in the environment."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
import warnings
from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import ParamSpec, TypeVar

import torch

from mxspec.dispatch.files import backends

P = ParamSpec("P")
R = TypeVar("R")


def known(backend: str, said_by: str) -> str:
    """`backend` itself, if it is `auto` or the name of a backend. Anything else raises an error."""
    if backend != "auto" and backend not in backends():
        raise ValueError(f"{said_by}: unknown backend {backend!r}; needs one of {', '.join(('auto', *backends()))}")
    return backend


# The backend of a with-block, and the id of the backward in which the block was entered: -1 outside of a backward.
_in_context: ContextVar[tuple[str, int] | None] = ContextVar("mxspec_backend", default=None)
_environment = known(os.environ.get("MXSPEC_BACKEND") or "auto", "MXSPEC_BACKEND")
_in_process: str | None = None
# The thread and the choice of each `use_backend` object that no with-block has entered yet. The newest is the last.
_not_entered: dict[int, tuple[int, str]] = {}


def set_backend(backend: str | None) -> None:
    """Choose the backend for the whole process, with all of its threads, from now on.

    There are four ways to choose a backend. The first one in this list that is present decides:

    1. `backend=` on the call.
    2. A `with use_backend(...)` block around the call.
    3. This function.
    4. The environment variable MXSPEC_BACKEND. mxspec reads it once, when it is imported.

    If none is present, the choice is `auto`.

    Args:
        backend: `auto`, `reference` or another name in `mxspec.dispatch.backends()`. None removes this choice, so that
            MXSPEC_BACKEND decides again.

    Raises:
        ValueError: an unknown backend.
    """
    global _in_process
    _in_process = None if backend is None else known(backend, "set_backend")
    _not_entered.clear()  # this choice replaces an older choice by `use_backend` without `with`


class use_backend:
    """Choose the backend for a with-block: `with use_backend("triton"):`. As a decorator, for each call of a function.

    The block holds for its own thread and its own asyncio task. `set_backend` chooses for the whole process; its
    docstring says which choice comes first. On CUDA, a backward runs on another thread, which does not see the block.
    So an `autograd.Function` must read `current_backend()` in its forward and pass it as `backend=` in its backward.

    `torch.compile(fullgraph=True)` cannot compile a block, because a compiled op reads the choice when it runs. Put the
    block around the call of the compiled function, or pass `backend=` to the op.

    Deprecated, removed in 0.3: `use_backend("triton")` without `with` does what `set_backend("triton")` does. mxspec
    recognizes such a call because no block has entered the object. So the call takes effect late: when the object is
    deleted (at once, if nothing holds it), or when its thread next reads the switch. Other threads do not see the
    choice before then. If an op runs after an object is made and before a `with` enters it, the object counts as such a
    call.

    Raises:
        RuntimeError: the block is inside a function that is compiled as one graph.
        TypeError: the decorated object is no function, or is a generator or a coroutine.
        ValueError: an unknown backend.
    """

    def __init__(self, backend: str) -> None:
        if torch.compiler.is_compiling():
            raise RuntimeError(
                "use_backend: a block inside a compiled function has no effect on its ops; put the block around the "
                "call of the compiled function, or pass backend= to the op"
            )
        self._backend = known(backend, "use_backend")
        self._tokens: list[Token[tuple[str, int] | None]] = []
        _not_entered[id(self)] = threading.get_ident(), self._backend

    def __call__(self, fn: Callable[P, R]) -> Callable[P, R]:
        _not_entered.pop(id(self), None)
        if not callable(fn) or inspect.isgeneratorfunction(fn) or inspect.iscoroutinefunction(fn):
            raise TypeError(f"use_backend: decorates {fn!r}; needs a function that is no generator and no coroutine")

        @functools.wraps(fn)
        def in_block(*args: P.args, **kwargs: P.kwargs) -> R:
            with use_backend(self._backend):
                return fn(*args, **kwargs)

        return in_block

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
        frame, level = frame.f_back, level + 1  # up to the user's own line
    warnings.warn(
        f"use_backend({backend!r}) without a with-block chooses for the whole process. This is deprecated and will be "
        f"removed in 0.3. Call mxspec.set_backend({backend!r}) instead.",
        DeprecationWarning,
        stacklevel=level,
    )


def current_backend() -> str:
    """The choice for a call without `backend=`, here and now: a backend's name or `auto`."""
    if in_context := _in_context.get():
        return in_context[0]
    if _not_entered:
        mine = [chosen for thread, chosen in _not_entered.copy().values() if thread == threading.get_ident()]
        if mine:
            _choose_without_with(mine[-1])
    return _in_process or _environment


def is_outer_block_unseen() -> bool:
    """Whether this code runs inside a backward, and inside no with-block that was entered in that backward.

    If so, and checkpointing runs a forward again here, a with-block around the first forward is not visible. A
    with-block around the backward may or may not be visible.
    """
    backward, in_context = torch._C._current_graph_task_id(), _in_context.get()
    return backward != -1 and (in_context is None or in_context[1] != backward)
