"""One kernel computes SwiGLU, or its gradient, of matrices with any strides."""

from __future__ import annotations

from typing import NamedTuple

import helion
import helion.language as hl
from torch import Tensor

from mxspec.helion_kernels.common.launch import flat, for_device, launch, on_grid
from mxspec.helion_kernels.common.swiglu import gradients, swiglu


class Tile(NamedTuple):
    elements: int
    num_warps: int


# The ops are not timed, so they have no rank.
_HOPPER = Tile(2048, 4)
TILES = {(9, 0): _HOPPER, (10, 0): _HOPPER}


def _swiglu(
    gate: Tensor, gate_stride_m: int, gate_stride_i: int, up: Tensor, up_stride_m: int, up_stride_i: int,
    dh: Tensor, dh_stride_m: int, dh_stride_i: int, out: Tensor, M: int, width: int, down: int, across: int,
    gradient: hl.constexpr, rows: hl.constexpr, cols: hl.constexpr,
) -> None:  # fmt: skip
    for row_tile, col_tile in hl.grid([down, across]):
        m = (row_tile * rows + hl.arange(rows)).unsqueeze(1)
        i = (col_tile * cols + hl.arange(cols)).unsqueeze(0)
        there = (m < M) & (i < width)
        g = hl.load(gate, [m * gate_stride_m + i * gate_stride_i], extra_mask=there)
        u = hl.load(up, [m * up_stride_m + i * up_stride_i], extra_mask=there)
        if gradient:
            d = hl.load(dh, [m * dh_stride_m + i * dh_stride_i], extra_mask=there)
            d_gate, d_up = gradients(g, u, d)
            hl.store(out, [m * (2 * width) + i], d_gate, extra_mask=there)
            hl.store(out, [m * (2 * width) + width + i], d_up, extra_mask=there)
        else:
            hl.store(out, [m * width + i], swiglu(g, u), extra_mask=there)


def elementwise(gate: Tensor, up: Tensor, dh: Tensor | None) -> Tensor:
    """SwiGLU, or its gradient if there is a dh."""
    M, width = gate.shape
    out = gate.new_empty((M, width if dh is None else 2 * width))
    if not out.numel():
        return out
    elements, num_warps = for_device(TILES, gate.device)
    cols = min(helion.next_power_of_2(width), 256)
    rows = elements // cols
    d = gate if dh is None else dh
    launch(
        _swiglu, {(9, 0): on_grid(2, num_warps)},
        flat(gate), *gate.stride(), flat(up), *up.stride(), flat(d), *d.stride(),
        flat(out), M, width, -(-M // rows), -(-width // cols), dh is not None, rows, cols,
    )  # fmt: skip
    return out
