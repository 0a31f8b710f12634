"""Runs of rows in the registers of one thread: each row is a load, or a store, of its own.

`hl.join`, unlike `torch.stack`, leaves what was loaded in the thread that loaded it.
"""

from __future__ import annotations

import helion.language as hl
from torch import Tensor

from mxspec.formats import element
from mxspec.helion_kernels.common.numerics import saturating_cast


def dimension(size: int, dim: int, dims: int) -> Tensor:
    """0, 1, ... along one of so many dimensions.

    All are there, since Helion aligns fewer by their sizes, not from the last; by `unsqueeze`, across which Triton
    still sees a run.
    """
    index = hl.arange(size)
    for _before in range(dim):
        index = index.unsqueeze(0)
    for _after in range(dims - dim - 1):
        index = index.unsqueeze(-1)
    return index


def load_run(
    x: Tensor, m: Tensor, stride: int, k: Tensor, mask: Tensor | None, run: int, step: int = 1,
    left: Tensor | None = None, i: int = 0,
) -> Tensor:  # fmt: skip
    """The rows m, m + step, ..., `run` of them, along new last dimensions of 2: the highest bit of a number first.

    With `left`, of the rows from each first one on only so many are there; m is i after it.
    """
    if run == 1:
        there = mask if left is None else left > i if mask is None else mask & (left > i)
        return hl.load(x, [m * stride + k], extra_mask=there)
    evens = load_run(x, m, stride, k, mask, run // 2, 2 * step, left, i)
    return hl.join(evens, load_run(x, m + step, stride, k, mask, run // 2, 2 * step, left, i + step))


def store_run(
    qdata: Tensor, place: Tensor, stride: int, values: Tensor, mask: Tensor | None, run: int,
    left: Tensor | None = None, step: int = 1, i: int = 0,
) -> None:  # fmt: skip
    """Cast and store the rows of each group, `run` of them, along last dimensions of 2.

    Cast last, or two rows and not two columns would be cast together. With a mask and `left`, of the rows only so many
    are there.
    """
    if run == 1:
        there = mask if mask is None or left is None else mask & (left > i)
        hl.store(qdata, [place], saturating_cast(values, element(qdata.dtype)), extra_mask=there)
        return
    even, odd = hl.split(values)
    store_run(qdata, place, 2 * stride, even, mask, run // 2, left, 2 * step, i)
    store_run(qdata, place + stride, 2 * stride, odd, mask, run // 2, left, 2 * step, i + step)
