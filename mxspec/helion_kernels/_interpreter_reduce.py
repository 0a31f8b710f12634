"""Reductions for Triton's CPU interpreter that combine whole slices.

Helion reduces with a combine function of its own, which the interpreter calls once an element: minutes for a tile of
a few thousand. Here the same function folds one slice along the axis after the other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from triton.runtime import interpreter

_triton_generic_reduce = interpreter.ReduceOps.generic_reduce


def _generic_reduce(self: Any, input: tuple[Any, ...]) -> Any:
    if self.axis is None or len(input) != 1:
        return _triton_generic_reduce(self, input)
    values, dtype = input[0].handle.data, input[0].dtype
    slices = [self.to_tensor(values.take(i, self.axis), dtype) for i in range(values.shape[self.axis])]
    total = slices[0]
    for part in slices[1:]:
        total = self.combine_fn.fn(total, part)
    out = total.handle.data
    return [self.to_tensor(np.expand_dims(out, self.axis) if self.keep_dims else out, dtype)]


def install() -> None:
    """Replace the interpreter's fallback; for every Triton kernel of the process."""
    interpreter.ReduceOps.generic_reduce = _generic_reduce
