"""One kernel computes SwiGLU, or its gradient, of matrices with any strides.

A program owns a tile of ROWS rows. Programs run along the rows first, as memory does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxspec.triton_kernels.common import swiglu
from mxspec.triton_kernels.common.launch import UNFUSED, capability, for_device
from mxspec.triton_kernels.hopper import swiglu as hopper

# The elements of a tile. A thread has 16 of them, in two accesses of 16 bytes for each tensor. The kernel runs at the
# rate of a copy (benchmarks/results/decisions.md).
_HOPPER = {"ELEMENTS": 2048, "num_warps": 4}
CONFIGS = {(9, 0): _HOPPER, (10, 0): _HOPPER}
_WIDTHS = (2048, 1024, 512, 256)


def _columns(width: int) -> int:
    """The columns of a tile: as few as possible lie past the end of a row; then, as many as possible."""
    if width <= 256:
        return triton.next_power_of_2(width)
    return min(_WIDTHS, key=lambda columns: -(-width // columns) * columns)


# M is not specialized: for M == 1, Triton would generate another kernel.
@triton.jit(do_not_specialize=["M", "across"])
def _swiglu(
    gate, up, dh, out, M, width, across,
    gate_stride_m, gate_stride_i, up_stride_m, up_stride_i, dh_stride_m, dh_stride_i,
    GRADIENT: tl.constexpr, HOPPER: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    i = (tl.program_id(0) % across).to(tl.int64) * COLS + tl.arange(0, COLS)
    there = (row < M)[:, None] & (i < width)[None, :]
    g = tl.load(gate + (row * gate_stride_m)[:, None] + (i * gate_stride_i)[None, :], mask=there)
    u = tl.load(up + (row * up_stride_m)[:, None] + (i * up_stride_i)[None, :], mask=there)
    if GRADIENT:
        d = tl.load(dh + (row * dh_stride_m)[:, None] + (i * dh_stride_i)[None, :], mask=there)
        if HOPPER:
            d_gate, d_up = hopper.gradients(g, u, d)
        else:
            d_gate, d_up = swiglu.gradients(g, u, d)
        to = out + (row * (2 * tl.cast(width, tl.int64)))[:, None] + i[None, :]
        tl.store(to, d_gate, mask=there)
        tl.store(to + width, d_up, mask=there)
    else:
        h = hopper.swiglu(g, u) if HOPPER else swiglu.swiglu(g, u)
        tl.store(out + (row * width)[:, None] + i[None, :], h, mask=there)


def _on_hopper(device: torch.device) -> bool:
    """Whether the PTX of `hopper/swiglu.py` can run: the GPU is a Hopper, and the kernel is compiled."""
    compiled = isinstance(_swiglu, triton.JITFunction) and device.type != "cpu" and torch.version.hip is None
    return compiled and capability(device) == (9, 0)


def elementwise(gate: Tensor, up: Tensor, dh: Tensor | None) -> Tensor:
    """SwiGLU, or its gradient if there is a dh."""
    M, width = gate.shape
    out = gate.new_empty((M, width if dh is None else 2 * width))
    if not out.numel():
        return out
    chosen = for_device(CONFIGS, gate.device)
    cols = _columns(width)
    rows = chosen["ELEMENTS"] // cols
    across = -(-width // cols)
    _swiglu[(across * -(-M // rows),)](
        gate, up, dh, out, M, width, across, *gate.stride(), *up.stride(), *((0, 0) if dh is None else dh.stride()),
        dh is not None, _on_hopper(gate.device), rows, cols, num_warps=chosen["num_warps"], **UNFUSED,
    )  # fmt: skip
    return out
