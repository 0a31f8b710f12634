"""Calls that an op must refuse: every tensor with wrong dtypes and ranks, every option with wrong values.

The refusals are changes of one valid call. A change that the op's own `check_args` accepts is not a refusal and is left
out. `tests/engine/test_facts.py` checks that each tensor has refusals for a wrong dtype and rank, and each option for a
wrong value.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mxspec.formats import INT_OF_BYTES
from mxspec.spec import Case, Reference, these

DTYPES = (torch.uint8, torch.bool, torch.int32, torch.float64, torch.bfloat16, torch.float8_e5m2)
VALUES = (None, True, 1.5, -3, "unknown", torch.int8)


def refusals(reference: Reference[..., Any], valid: Case) -> Iterator[Case]:
    """The refusals of an op, made from a valid call of the op."""
    signature = inspect.signature(reference)
    bound = signature.bind(*valid.args(), **valid.kwargs)
    bound.apply_defaults()
    for name, parameter in signature.parameters.items():
        right = bound.arguments[name]
        for what, wrong in _wrong_tensors(right) if parameter.annotation == "Tensor" else _wrong_values():
            bound.arguments[name] = wrong
            given = {key: value for key, value in bound.kwargs.items() if key in valid.kwargs or key == name}
            if error := _refused(reference, bound.args, given):
                made = these(*bound.args)
                yield Case(
                    f"refused: {name} {what}", made, given, type(error), str(error).rpartition("; ")[2], {"generated"}
                )
        bound.arguments[name] = right


def _refused(reference: Reference[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception | None:
    """The error that the public op raises for such a call."""
    try:
        reference.spec.check_args(*args, **kwargs)
    except (TypeError, ValueError) as error:
        return error
    return None


def _wrong_tensors(t: Tensor) -> Iterator[tuple[str, Any]]:
    for dtype in DTYPES:
        if dtype != t.dtype:
            yield f"of {str(dtype)[6:]}", torch.zeros_like(t, dtype=torch.uint8).to(dtype)  # has the strides of t
    yield "with one dimension more", t[None]
    bits = t.view(INT_OF_BYTES[t.element_size()])
    if t.ndim:
        yield "with one dimension", bits.reshape(-1).view(t.dtype)
        yield "without a dimension", torch.zeros((), dtype=bits.dtype).view(t.dtype)
        yield "one column short", t[..., :-1]
        yield "one column long", torch.cat([bits, bits[..., :1]], -1).view(t.dtype)
        yield "one row short", t[:-1]
        yield "one row long", torch.cat([bits, bits[:1]]).view(t.dtype)
    yield "None", None
    yield "a list", [0.0]
    yield "on another device", t.to("meta")


def _wrong_values() -> Iterator[tuple[str, Any]]:
    return ((str(value).removeprefix("torch."), value) for value in VALUES)
