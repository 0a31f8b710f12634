"""What the user asked for: on a call, in a with-block, for the process, in the environment."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from contextvars import ContextVar, Token

import torch

from mxspec.dispatch.files import backends


def known(backend: str, said_by: str) -> str:
    """The name of a backend, or `auto`; anything else is refused."""
    if backend != "auto" and backend not in backends():
        raise ValueError(f"{said_by}: unknown backend {backend!r}; needs one of {', '.join(('auto', *backends()))}")
    return backend


# The backend of a with-block, and the backward that it was entered in: -1 outside of any.
_in_context: ContextVar[tuple[str, int] | None] = ContextVar("mxspec_backend", default=None)
_environment = known(os.environ.get("MXSPEC_BACKEND") or "auto", "MXSPEC_BACKEND")
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
    _in_process = None if backend is None else known(backend, "set_backend")
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
        self._backend = known(backend, "use_backend")
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
