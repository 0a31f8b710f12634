"""The memory of a call: inputs with their strides, or embedded in poison; outputs poisoned, with guards around them."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from mxspec.formats import INT_OF_BYTES
from mxspec.spec import Reference


def on_device(device: torch.device, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Tensors on the device, with their strides; a meta tensor stays: it is how a case says 'another device'."""
    return tuple(_moved(a, device) if isinstance(a, Tensor) else a for a in args)


def _moved(t: Tensor, device: torch.device) -> Tensor:
    """A tensor on the device: its dimensions of stride 0 get no memory, what lies between its rows comes along."""
    if t.device.type == "meta" or t.layout != torch.strided or not t.numel():
        return t if t.device.type == "meta" else t.to(device)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return t.as_strided((extent,), (1,)).to(device).as_strided(t.shape, t.stride())


def embedded(args: tuple[Any, ...], reference: Reference[..., Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The same values as views into larger buffers of 0xFF bytes (NaN, for a float): other strides, odd offsets.

    A tensor's dimensions keep their order in memory, and, where the contract refuses the other strides, lie as dense.
    """

    def embed(t: Tensor, gap: int) -> Tensor:
        order = sorted(range(t.ndim), key=lambda d: t.stride(d) or math.inf, reverse=True)
        sizes = [t.shape[d] + gap for d in order]
        buffer = torch.empty(math.prod(sizes) + 2, dtype=t.dtype, device=t.device)
        buffer.view(torch.uint8).fill_(0xFF)
        inner = buffer[1:-1].view(sizes)[tuple(slice(gap // 2, gap // 2 + t.shape[d]) for d in order)]
        view = inner.permute([order.index(d) for d in range(t.ndim)])
        bits = INT_OF_BYTES[t.element_size()]
        view.view(bits).copy_(t.resolve_neg().view(bits))  # as bytes: torch copies no strided float4
        return view

    for gap in (3, 0):
        views = tuple(embed(a, gap) if isinstance(a, Tensor) and a.ndim else a for a in args)
        try:
            reference.spec.check_args(*views, **kwargs)
        except ValueError:
            continue
        break
    return views


def fill_bytes(t: Tensor, byte: int) -> None:
    """Fill all the memory of a tensor's storage, whatever its dtype."""
    _bytes(t).fill_(byte)


_ALLOCATORS = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (Tensor, "new_empty"),
    (Tensor, "new_empty_strided"),
)
_GUARD_BYTES = 1024  # a multiple of what any kernel asks for: a tensor begins behind them as aligned as it was


@contextlib.contextmanager
def poisoned(byte: int) -> Iterator[Callable[[], str | None]]:
    """Inside, memory that torch hands out uninitialised holds `byte` in every byte, and so does what lies around it.

    Gives a function that says whether that is still what lies around.
    """
    empty, guarded = torch.empty, list[tuple[Tensor, int]]()

    def filling(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(allocate)
        def filled(*args: Any, **kwargs: Any) -> Tensor:
            out = allocate(*args, **kwargs)
            if type(out) is not Tensor or out.is_meta or not out.numel():  # a FakeTensor has no bytes
                return out
            size = out.untyped_storage().nbytes()
            memory = empty(size + 2 * _GUARD_BYTES, dtype=torch.uint8, device=out.device)
            fill_bytes(memory, byte)
            guarded.append((memory, size))
            where = memory.untyped_storage(), _GUARD_BYTES // out.element_size(), out.shape, out.stride()
            return empty(0, dtype=out.dtype, device=out.device).set_(*where)

        return filled

    def overrun() -> str | None:
        around: dict[torch.device, list[Tensor]] = {}
        for memory, size in guarded:
            around.setdefault(memory.device, []).extend((memory[:_GUARD_BYTES], memory[_GUARD_BYTES + size :]))
        wrong = sum(int((torch.cat(parts) != byte).sum()) for parts in around.values())  # one wait a device
        return f"{wrong} bytes around memory that it allocated were written" if wrong else None

    with contextlib.ExitStack() as patches:
        for place, name in _ALLOCATORS:
            patches.enter_context(mock.patch.object(place, name, filling(getattr(place, name))))
        yield overrun


def tensors_of(reference: Reference[..., Any], args: tuple[Any, ...]) -> dict[str, Tensor]:
    """Each tensor that a call has to leave as it is, by the parameter's name."""
    names = list(inspect.signature(reference).parameters)[: len(args)]
    kept = list(zip(names, args, strict=True))[1 if reference.spec.in_place else 0 :]
    return {name: t for name, t in kept if isinstance(t, Tensor)}


def memory_of_inputs(reference: Reference[..., Any], args: tuple[Any, ...]) -> dict[str, Tensor]:
    """The memory of each of them."""
    return {name: _touched(t) for name, t in tensors_of(reference, args).items()}


def _touched(t: Tensor) -> Tensor:
    """All the memory that a tensor is a view of; of rows gigabytes apart the pages of 4096 bytes that hold an element.

    Nothing has touched the pages between: to read them all takes seconds, and to keep what they hold as much memory.
    A write to one of them is not seen.
    """
    memory = _bytes(t)
    if memory.numel() - t.numel() * t.element_size() < 2**28:
        return memory
    places = torch.tensor(t.storage_offset(), device=t.device)
    for size, stride in zip(t.shape, t.stride(), strict=True):
        places = places[..., None] + torch.arange(size, device=t.device) * stride
    pages = (places * t.element_size() // 4096).unique()
    return memory[(pages[:, None] * 4096 + torch.arange(4096, device=t.device)).clamp(max=memory.numel() - 1)]


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> str | None:
    """Which inputs a call changed, of `memory_of_inputs` before and after it."""
    found = [name for name, memory in before.items() if not memory.equal(after[name])]
    return f"it changed its input {', '.join(found)}" if found else None


def _bytes(t: Tensor) -> Tensor:
    """All the memory that a tensor is a view of."""
    return torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())


def strayed(after: Tensor, before: Tensor) -> str | None:
    """Whether a call wrote around what it is to change: with that put back, all of the memory is what it was."""
    after.copy_(before)
    now, then = _bytes(after), _bytes(before)
    wrong = int((now != then).sum())
    return f"{wrong} bytes around what it is to change were written" if wrong else None
