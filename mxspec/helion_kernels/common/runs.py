"""Runs of rows in the registers of one thread. Each row is a load or a store of its own.

`hl.join` keeps a loaded value in the thread that loaded it. `torch.stack` does not.
"""

from __future__ import annotations

import helion.language as hl
from torch import Tensor

from mxspec.helion_kernels.common.numerics import FP6_WORDS, fp6_thirds, packed_cast, stored


def dimension(size: int, dim: int, dims: int) -> Tensor:
    """0, 1, ... along dimension `dim` of `dims`.

    The index has all dimensions, because Helion aligns an index with fewer dimensions by their sizes, not from the last
    dimension. `unsqueeze` adds the dimensions, because Triton still sees a run of addresses across it.
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
    """Load `run` rows, m, m + step, ..., along new last dimensions of 2. The highest bit of a row's number comes first.

    With `left`, only that many rows exist from each first row on. m is `i` rows after the first row.
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
    """Cast and store `run` rows of each group, along last dimensions of 2.

    The cast comes last, because its instruction converts a pair of values. An earlier cast would pair two rows instead
    of two columns. FP6 casts 8 columns to three words. With `left`, only that many rows exist.
    """
    if run == 1:
        there = mask if left is None else left > i if mask is None else mask & (left > i)
        if qdata.dtype in FP6_WORDS:
            for i, third in enumerate(fp6_thirds(values, stored(qdata.dtype))):
                hl.store(qdata, [place + i], third, extra_mask=there)
        else:
            hl.store(qdata, [place], packed_cast(values, stored(qdata.dtype)), extra_mask=there)
        return
    even, odd = hl.split(values)
    store_run(qdata, place, 2 * stride, even, mask, run // 2, left, 2 * step, i)
    store_run(qdata, place + stride, 2 * stride, odd, mask, run // 2, left, 2 * step, i + step)
