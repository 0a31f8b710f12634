"""Checks of an answer apart from its values: its type, the number of outputs, and memory of its own."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

from torch import Tensor

from mxspec.formats import INT_OF_BYTES
from mxspec.spec import Reference


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Inside the block, the prints of a candidate go to stderr, so that they do not mix with a report on stdout."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def returned_problem(reference: Reference[..., Any], result: Any) -> str | None:
    """What is wrong with the type of a call's result. `form_difference` compares the number, shapes and dtypes."""
    promised = inspect.signature(reference).return_annotation
    if promised in (None, "None"):
        return (
            None
            if result is None
            else f"returned a {type(result).__name__}; needs None, because the op changes its first argument"
        )
    if promised == "Tensor":
        outputs = (result,)
    elif isinstance(result, tuple):
        outputs = result
    else:
        return f"returned a {type(result).__name__}; needs a tuple"
    for i, t in enumerate(outputs):
        if type(t) is not Tensor:
            return f"output {i}: {type(t).__name__}; needs a tensor" + (
                ", and no subclass" if isinstance(t, Tensor) else ""
            )
        if t.requires_grad:
            return f"output {i}: requires a gradient, though no input does"
    return None


def extent(t: Tensor) -> range:
    """The addresses from a tensor's first byte to its last."""
    if not t.numel() or t.is_meta:
        return range(0)
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return range(t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size())


def overlap(one: Tensor, other: Tensor) -> bool:
    a, b = extent(one), extent(other)
    return one.device == other.device and bool(a) and bool(b) and a.start < b.stop and b.start < a.stop


def shared(outputs: tuple[Tensor, ...], inputs: dict[str, Tensor]) -> str | None:
    """The memory that the outputs of one call share with each other or with the inputs, in words."""
    for i, t in enumerate(outputs):
        for name, given in inputs.items():
            if overlap(t, given):
                return f"output {i} shares memory with the input {name}"
    for (i, one), (j, other) in combinations(enumerate(outputs), 2):
        if overlap(one, other):
            return f"outputs {i} and {j} share memory"
    return None


def equal_bits(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    """Whether all bits are the same, also the bits of a NaN."""
    return len(one) == len(other) and all(
        a.shape == b.shape and a.dtype == b.dtype and bool((_bits(a) == _bits(b)).all())
        for a, b in zip(one, other, strict=True)
    )


def _bits(t: Tensor) -> Tensor:
    return t.resolve_neg().view(INT_OF_BYTES[t.element_size()])


def copies(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Copies of the tensors, bit for bit. Works for every dtype."""
    return tuple(_bits(t).clone().view(t.dtype) for t in tensors)


Call = Callable[..., Any]
