"""The outputs of an op on fake tensors, which `torch.compile` traces.

The reference defines their shapes, strides and dtypes. It takes 10 to 300 ms on fake tensors. torch asks 16 to 20 times
for each layer, and the layers of a model have the same shapes. So the answer is kept. It depends only on the shapes,
strides, dtypes and devices of the tensors, and on the other arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from mxspec.spec import outputs_of


class Form(NamedTuple):
    """What a fake tensor shows."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


_KNOWN: dict[Hashable, tuple[Form, ...]] = {}
_MOST = 4096  # calls; then all are forgotten
_PLAIN = (type(None), bool, int, float, str, torch.dtype)  # a symbolic number is of none of these types


def outputs(name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `fn(*args, **kwargs)` returns: a fake tensor or a tuple of them.

    The reference runs for the first call of its kind. It runs each time for symbolic sizes and numbers, for tensors
    that are no plain fake tensors or that begin inside their memory, and for ops that return no tensor. Its errors are
    those of the op.
    """
    call = _described(name, args, kwargs)
    if call is None:
        return fn(*args, **kwargs)
    forms = _KNOWN.get(call)
    if forms is None:
        result = fn(*args, **kwargs)
        found = [_form(out) for out in outputs_of(result)]
        if None not in found:
            if len(_KNOWN) >= _MOST:
                _KNOWN.clear()
            _KNOWN[call] = tuple(form for form in found if form is not None)
        return result
    made = tuple(torch.empty_strided(f.shape, f.strides, dtype=f.dtype, device=f.device) for f in forms)
    return made if len(made) > 1 else made[0]


def _described(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable | None:
    """All that an answer depends on. None: the reference has to run."""
    parts: list[Hashable] = [name]
    for key, value in (*enumerate(args), *sorted(kwargs.items())):
        described = (type(value), value) if type(value) in _PLAIN else _form(value)
        if described is None:
            return None
        parts.append((key, described))
    return tuple(parts)


def _form(tensor: Any) -> Form | None:
    """The form of a fake tensor without symbolic sizes that begins where its memory begins. None for all others."""
    if type(tensor) is not FakeTensor:
        return None
    numbers = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    if any(type(number) is not int for number in numbers) or numbers[-1]:
        return None
    return Form(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
