"""Gradients of SwiGLU for runs of rows, as `common/runs.py` loads rows.

A row is computed before it is joined with other rows. So few intermediate values are in registers at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mxspec.triton_kernels.common.runs import load1
from mxspec.triton_kernels.common.swiglu import gradient_of_gate, gradient_of_up, gradients

BOTH, OF_GATE, OF_UP = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # the gradients that a tile needs


@triton.jit
def _gradient1(gate, up, dh, mask, left, of_up, WHICH: tl.constexpr, ROW: tl.constexpr):
    gate, of_h = load1(gate, mask, left, ROW), load1(dh, mask, left, ROW)
    if WHICH == OF_UP:
        return gradient_of_up(gate, of_h)
    elif WHICH == OF_GATE:  # no early return: Triton also compiles the code after a static `if` that returns
        return gradient_of_gate(gate, load1(up, mask, left, ROW), of_h)
    else:
        d_gate, d_up = gradients(gate, load1(up, mask, left, ROW), of_h)
        return tl.where(of_up, d_up, d_gate)


@triton.jit
def _gradient2(
    gate, up, dh, stride, dh_stride, mask, left, of_up, WHICH: tl.constexpr, ROW: tl.constexpr, STEP: tl.constexpr
):
    even = _gradient1(gate, up, dh, mask, left, of_up, WHICH, ROW)
    odd = _gradient1(gate + stride, up + stride, dh + dh_stride, mask, left, of_up, WHICH, ROW + STEP)
    return tl.join(even, odd)


@triton.jit
def _gradient4(
    gate, up, dh, stride, dh_stride, mask, left, of_up, WHICH: tl.constexpr, ROW: tl.constexpr, STEP: tl.constexpr
):
    even = _gradient2(gate, up, dh, 2 * stride, 2 * dh_stride, mask, left, of_up, WHICH, ROW, 2 * STEP)
    gate, up, dh = gate + stride, up + stride, dh + dh_stride
    odd = _gradient2(gate, up, dh, 2 * stride, 2 * dh_stride, mask, left, of_up, WHICH, ROW + STEP, 2 * STEP)
    return tl.join(even, odd)


@triton.jit
def gradient8(gate, up, dh, stride, dh_stride, mask, left, of_up, WHICH: tl.constexpr):
    """The gradients of 8 rows from each pointer on. `of_up` says which of both a value is, if WHICH is BOTH."""
    even = _gradient4(gate, up, dh, 2 * stride, 2 * dh_stride, mask, left, of_up, WHICH, 0, 2)
    gate, up, dh = gate + stride, up + stride, dh + dh_stride
    return tl.join(even, _gradient4(gate, up, dh, 2 * stride, 2 * dh_stride, mask, left, of_up, WHICH, 1, 2))
