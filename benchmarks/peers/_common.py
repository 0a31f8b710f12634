"""Shared parts of the adapters: how they register, how they refuse a call, and scales in the layout for TMA."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

ADAPTERS: dict[str, dict[str, Callable[..., Any]]] = {}  # op -> label (begins with the library's name) -> adapter


class Unsupported(Exception):
    """The library does not support this call, on this GPU or on any. The message is the reason."""


def adapter(
    op: str, label: str, prepare: Callable[..., tuple[Any, ...]] | None = None, waits: bool = False
) -> Callable[..., Any]:
    """Register an adapter.

    `prepare` takes the op's arguments and returns the adapter's arguments. `waits` says that the adapter reads values
    on the host, so that a CUDA graph cannot capture it.
    """

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        if prepare:
            fn.prepare = prepare  # type: ignore[attr-defined]
        fn.waits = waits  # type: ignore[attr-defined]
        ADAPTERS.setdefault(op, {})[label] = fn
        return fn

    return register


def need(condition: bool, what: str) -> None:
    if not condition:
        raise Unsupported(what)


@functools.cache
def major(device: torch.device) -> int:
    """The GPU's generation: 9 for Hopper, 10 for Blackwell. 0 if the device is no GPU."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


def version_of(module: str) -> str:
    try:
        importlib.import_module(module)
    except ImportError:
        raise
    except Exception as error:  # a missing .so, or no CUDA toolkit: each library raises its own type of error
        raise ImportError(f"{module} is installed, but cannot be imported: {type(error).__name__}: {error}") from error
    return str(importlib.import_module(module.partition(".")[0]).__version__)


def mn_major(scale: Tensor, multiple: int = 1) -> Tensor:
    """The same scales with strides `(1, rows)`, with `rows` rounded up to a multiple."""
    rows, cols = scale.shape
    padded = -(-rows // multiple) * multiple
    return torch.empty_strided((rows, cols), (1, padded), dtype=scale.dtype, device=scale.device).copy_(scale)


def is_1x128(b: Tensor, b_scale: Tensor) -> bool:
    return b_scale.shape[0] == b.shape[0]


def tma_scales(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, **options: Any) -> tuple[Tensor, ...]:
    of_b = mn_major(b_scale, multiple=4) if is_1x128(b, b_scale) else b_scale.contiguous()
    return a, mn_major(a_scale, multiple=4), b, of_b  # TMA needs rows in multiples of 16 bytes
