"""Runs of rows in the registers of one thread. Each row is a load or a store of its own.

The thread that loads a value keeps it. If the rows were a dimension of one load, Triton would spread them over the
threads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mxspec.triton_kernels.common.numerics import saturating_cast

NORMALLY = tl.constexpr("")  # the cache evicts as it would without a hint: the default of Triton's loads and stores


@triton.jit
def load1(x, mask, left, ROW: tl.constexpr, EVICT: tl.constexpr = NORMALLY):
    if left is None:
        return tl.load(x, mask=mask, other=0, eviction_policy=EVICT)
    else:  # only `left` of the rows from each pointer on exist
        return tl.load(x, mask=mask & (left > ROW), other=0, eviction_policy=EVICT)


@triton.jit
def load2(x, stride, mask, left, ROW: tl.constexpr, STEP: tl.constexpr, EVICT: tl.constexpr = NORMALLY):
    return tl.join(load1(x, mask, left, ROW, EVICT), load1(x + stride, mask, left, ROW + STEP, EVICT))


@triton.jit
def load4(x, stride, mask, left, ROW: tl.constexpr, STEP: tl.constexpr, EVICT: tl.constexpr = NORMALLY):
    even = load2(x, 2 * stride, mask, left, ROW, 2 * STEP, EVICT)
    return tl.join(even, load2(x + stride, 2 * stride, mask, left, ROW + STEP, 2 * STEP, EVICT))


@triton.jit
def load8(x, stride, mask, left, ROW: tl.constexpr, STEP: tl.constexpr, EVICT: tl.constexpr = NORMALLY):
    even = load4(x, 2 * stride, mask, left, ROW, 2 * STEP, EVICT)
    return tl.join(even, load4(x + stride, 2 * stride, mask, left, ROW + STEP, 2 * STEP, EVICT))


@triton.jit
def load16(x, stride, mask, left, EVICT: tl.constexpr = NORMALLY):
    """Load 16 rows from each pointer on. The result has four more dimensions of 2 at its end, which number the rows.

    The thread of a pointer holds its 16 rows.
    """
    even = load8(x, 2 * stride, mask, left, 0, 2, EVICT)
    return tl.join(even, load8(x + stride, 2 * stride, mask, left, 1, 2, EVICT))


@triton.jit
def load_eight(x, stride, mask):
    """Load 8 numbers of a row from its first addresses, `(rows, 8)`, or `(rows, 4)` if a number has 4 bytes.

    One load instruction of a thread reads up to 16 bytes: a longer row lies in several threads. So it is loaded twice.
    """
    values = tl.load(x, mask=mask, other=0)
    if x.shape[1] == 4:
        more = tl.load(x + tl.cast(stride, tl.int64) * 4, mask=mask, other=0)
        values = tl.join(values, more).permute(0, 2, 1).reshape(values.shape[0], 8)
    return values


@triton.jit
def store1(q, values, mask, left, ROW: tl.constexpr, EVICT: tl.constexpr = NORMALLY):
    if left is not None:  # only `left` of the rows from each pointer on exist
        mask = mask & (left > ROW)
    tl.store(q, saturating_cast(values, q.dtype.element_ty), mask=mask, eviction_policy=EVICT)


@triton.jit
def store2(q, stride, values, mask, left, ROW: tl.constexpr, STEP: tl.constexpr, EVICT: tl.constexpr = NORMALLY):
    even, odd = tl.split(values)
    store1(q, even, mask, left, ROW, EVICT)
    store1(q + stride, odd, mask, left, ROW + STEP, EVICT)


@triton.jit
def store4(q, stride, values, mask, left, ROW: tl.constexpr, STEP: tl.constexpr, EVICT: tl.constexpr = NORMALLY):
    even, odd = tl.split(values)
    store2(q, 2 * stride, even, mask, left, ROW, 2 * STEP, EVICT)
    store2(q + stride, 2 * stride, odd, mask, left, ROW + STEP, 2 * STEP, EVICT)


@triton.jit
def store8(q, stride, values, mask, left, ROW: tl.constexpr, STEP: tl.constexpr, EVICT: tl.constexpr = NORMALLY):
    """Cast and store 8 rows from each pointer on.

    The cast comes last, because its instruction converts a pair of values. An earlier cast would pair two rows instead
    of two columns.
    """
    even, odd = tl.split(values)
    store4(q, 2 * stride, even, mask, left, ROW, 2 * STEP, EVICT)
    store4(q + stride, 2 * stride, odd, mask, left, ROW + STEP, 2 * STEP, EVICT)


@triton.jit
def store16(q, stride, values, mask, left, EVICT: tl.constexpr = NORMALLY):
    even, odd = tl.split(values)
    store8(q, 2 * stride, even, mask, left, 0, 2, EVICT)
    store8(q + stride, 2 * stride, odd, mask, left, 1, 2, EVICT)
