"""The memory of a call. Inputs keep their strides or lie in poisoned buffers; outputs are poisoned and guarded."""

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
from mxspec.plans import PLANS, Device
from mxspec.spec import Reference


def on_device(device: torch.device, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The tensors on the device, with their strides. A meta tensor stays: in a case it means "another device"."""
    return tuple(_moved(a, device) if isinstance(a, Tensor) else a for a in args)


def _moved(t: Tensor, device: torch.device) -> Tensor:
    """A tensor on the device, with its strides. Dimensions of stride 0 take no memory; gaps between rows are copied.

    A negated view stays one. Torch's `to` would compute its values.
    """
    if t.is_neg():
        return torch._neg_view(_moved(torch._neg_view(t), device))
    if t.device.type == "meta" or t.layout != torch.strided or not t.numel():
        return t if t.device.type == "meta" else t.to(device)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return t.as_strided((extent,), (1,)).to(device).as_strided(t.shape, t.stride())


def embedded(args: tuple[Any, ...], reference: Reference[..., Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The same values as views into larger buffers of 0xFF bytes (NaN for floats), with other strides and odd offsets.

    The dimensions of a tensor keep their order in memory. If the contract refuses gaps between rows, there are none.
    """

    def embed(t: Tensor, gap: int) -> Tensor:
        order = sorted(range(t.ndim), key=lambda d: t.stride(d) or math.inf, reverse=True)
        sizes = [t.shape[d] + gap for d in order]
        buffer = torch.empty(math.prod(sizes) + 2, dtype=t.dtype, device=t.device)
        buffer.view(torch.uint8).fill_(0xFF)
        inner = buffer[1:-1].view(sizes)[tuple(slice(gap // 2, gap // 2 + t.shape[d]) for d in order)]
        view = inner.permute([order.index(d) for d in range(t.ndim)])
        bits = INT_OF_BYTES[t.element_size()]
        view.view(bits).copy_(t.resolve_neg().view(bits))  # as integers: torch cannot copy a strided float4 tensor
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
    """Fill the whole storage of a tensor with a byte, for every dtype."""
    _bytes(t).fill_(byte)


_ALLOCATORS = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (Tensor, "new_empty"),
    (Tensor, "new_empty_strided"),
    (Device, "empty"),  # the memory of a call with a launch plan
)
_GUARD_BYTES = 1024  # a multiple of every alignment that a kernel needs, so that a guarded tensor stays as aligned


@contextlib.contextmanager
def poisoned(byte: int) -> Iterator[Callable[[], str | None]]:
    """Inside the block, uninitialized memory from torch is filled with `byte` and has guards of `byte` around it.

    Yields a function that says whether the guards were written. Inside, calls use launch plans and record none.
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
        wrong = sum(int((torch.cat(parts) != byte).sum()) for parts in around.values())  # one wait per device
        return f"it wrote {wrong} bytes outside the memory that it allocated" if wrong else None

    with contextlib.ExitStack() as patches:
        for place, name in _ALLOCATORS:
            patches.enter_context(mock.patch.object(place, name, filling(getattr(place, name))))
        patches.enter_context(mock.patch.object(PLANS, "is_due", return_value=False))  # or it records the filling
        yield overrun


def tensors_of(reference: Reference[..., Any], args: tuple[Any, ...]) -> dict[str, Tensor]:
    """The tensors that a call must not change, by the parameter's name."""
    names = list(inspect.signature(reference).parameters)[: len(args)]
    kept = list(zip(names, args, strict=True))[1 if reference.spec.in_place else 0 :]
    return {name: t for name, t in kept if isinstance(t, Tensor)}


def memory_of_inputs(reference: Reference[..., Any], args: tuple[Any, ...]) -> dict[str, Tensor]:
    """The memory of each tensor of `tensors_of`, by the parameter's name."""
    return {name: _touched(t) for name, t in tensors_of(reference, args).items()}


def _touched(t: Tensor) -> Tensor:
    """The memory that a tensor is a view of. If its rows lie gigabytes apart, only the pages that hold an element.

    A page has 4096 bytes. To read all pages between the rows would take seconds, and a copy of them would take
    gigabytes. So a write to a page that holds no element goes unnoticed.
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
    """Which inputs a call changed. The arguments are `memory_of_inputs` before and after the call."""
    found = [name for name, memory in before.items() if not memory.equal(after[name])]
    return f"it changed its input {', '.join(found)}" if found else None


def _bytes(t: Tensor) -> Tensor:
    """The whole storage that a tensor is a view of, as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())


def strayed(after: Tensor, before: Tensor) -> str | None:
    """Whether a call in place wrote outside the tensor that it changes.

    After the tensor's old values are put back, all of its storage must be as it was.
    """
    after.copy_(before)
    now, then = _bytes(after), _bytes(before)
    wrong = int((now != then).sum())
    return f"it wrote {wrong} bytes outside the tensor that it changes" if wrong else None
