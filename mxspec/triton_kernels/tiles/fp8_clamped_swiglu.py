"""The clamped SwiGLU of token groups, or its gradient, quantized in both directions from one read, in plain Triton.

A program owns a tile of 128 padded tokens of one group by 128 columns of the result, as in `fp8_both_ways.py`. All
tokens of a tile have the same bias, so a program reads one row of it. Gate and up alternate in memory: a thread loads
both with one access, and stores their gradients with one access.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mxspec.formats import FP8_BLOCK_SIZE, fp32_bits
from mxspec.triton_kernels.common import launch
from mxspec.triton_kernels.common.clamped_swiglu import clamped_swiglu, gradients, with_bias
from mxspec.triton_kernels.common.groups import chunk
from mxspec.triton_kernels.common.numerics import widened
from mxspec.triton_kernels.tiles.fp8_both_ways import EPS, Results, allocated, place_of, quantized

# With fewer warps, ptxas spills. No other configuration was timed. A call without columns takes the gradient's.
CONFIGS = {(9, 0): {"num_warps": 16}, (10, 0): {"num_warps": 32}}
GRADIENT = {(9, 0): {"num_warps": 16}, (10, 0): {"num_warps": 16}}


@triton.jit
def _or_none(bias, grouped):
    bits = widened(bias).to(tl.int32, bitcast=True)
    return tl.where(grouped, bits, -0x80000000).to(tl.float32, bitcast=True)[None, :]


@triton.jit
def _biases(bias, group, grouped, stride_g, stride_d, first, half, COLS: tl.constexpr):
    """The biases of COLS gates and of their ups, as two rows of fp32. Without a group -0, which changes no number."""
    i = first + tl.arange(0, COLS)
    at = bias + group.to(tl.int64) * stride_g + i * (2 * stride_d)
    of_gate = tl.load(at, mask=grouped & (i < half), other=0)
    of_up = tl.load(at + stride_d, mask=grouped & (i < half), other=0)
    return _or_none(of_gate, grouped), _or_none(of_up, grouped)


@triton.jit
def _gate_and_up(gate_up, row, stride_m, stride_d, first, half, rows, COLS: tl.constexpr):
    """COLS gates and COLS ups of 128 rows. Both are 0 where there is none."""
    c = tl.arange(0, 2 * COLS)
    column = 2 * first + c
    inside = rows[:, None] & (column < 2 * tl.cast(half, tl.int64))[None, :]
    v = tl.load(gate_up + row * stride_m + (column * stride_d)[None, :], mask=inside, other=0)
    return tl.split(tl.reshape(v, (128, COLS, 2)))


# `tokens` is not specialized: see fp8_both_ways.
@triton.jit(do_not_specialize=["tokens", "eps_bits"])
def _clamped(
    gate_up, bias, dh, q_row, s_row, q_col, s_col, start, end, offs,
    tokens, D, half, blocks, stride_m, stride_d, bias_stride_g, bias_stride_d, dh_stride_m, dh_stride_d, G, stride_offs,
    eps_bits, BACKWARD: tl.constexpr, POW2: tl.constexpr, TAIL: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    column, block = tl.program_id(0), tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    group, grouped, first, count, token, stop = place_of(
        block, offs, stride_offs, G, start, end, (block == 0) & (column == 0), tokens, blocks, CHUNK
    )
    d0 = column.to(tl.int64) * 128
    r = tl.arange(0, 128)
    there = (token + r >= 0) & (token + r < stop) & (block < blocks) & (d0 < D)
    row = (token + r).to(tl.int64)[:, None]
    feature = d0 + r
    inside = there[:, None]
    if TAIL:
        inside = inside & (feature < D)[None, :]
    if BACKWARD:
        g, u = _gate_and_up(gate_up, row, stride_m, stride_d, d0 // 2, half, there, 64)
        of_gate, of_up = _biases(bias, group, grouped, bias_stride_g, bias_stride_d, d0 // 2, half, 64)
        i = d0 // 2 + tl.arange(0, 64)
        d = tl.load(
            dh + row * dh_stride_m + (i * dh_stride_d)[None, :], mask=there[:, None] & (i < half)[None, :], other=0
        )
        d_gate, d_up = gradients(with_bias(g, of_gate), with_bias(u, of_up), d)
        v = tl.reshape(tl.join(d_gate, d_up), (128, 128))
    else:
        g, u = _gate_and_up(gate_up, row, stride_m, stride_d, d0, half, there, 128)
        of_gate, of_up = _biases(bias, group, grouped, bias_stride_g, bias_stride_d, d0, half, 128)
        v = clamped_swiglu(with_bias(g, of_gate), with_bias(u, of_up))
    # Rows and columns that do not exist have a bias, too. Their values must not enter a maximum.
    v = tl.where(inside, v, 0.0)
    quantized(
        v, inside, there, q_row, s_row, q_col, s_col, token, row, d0, D, tokens, block, blocks, first, count, grouped,
        feature, eps_bits, POW2, TAIL,
    )  # fmt: skip


def both_ways(gate_up: Tensor, bias: Tensor, dh: Tensor | None, offs: Tensor, scale_format: str) -> Results:
    """Launch. The values are those of the activation, or of its gradient if there is a dh."""
    (M, wide), G = gate_up.shape, offs.shape[0]
    D = wide // 2 if dh is None else wide
    results = allocated(gate_up, offs, M, D)
    q_row, s_row, q_col, s_col, start, end = results
    blocks = s_col.shape[1]
    if blocks:
        # At least one program across: with no columns, start and end are still written.
        grid = launch.grid(max(1, -(-D // FP8_BLOCK_SIZE)), blocks)
        _clamped[grid](
            gate_up, bias, dh, q_row, s_row, q_col, s_col, start, end, offs, M, D, wide // 2, blocks,
            *gate_up.stride(), *bias.stride(), *((0, 0) if dh is None else dh.stride()), G, offs.stride(0),
            fp32_bits(EPS), dh is not None, scale_format == "pow2", D % FP8_BLOCK_SIZE != 0, chunk(G),
            **launch.for_device(CONFIGS if dh is None and D else GRADIENT, gate_up.device), **launch.UNFUSED,
        )  # fmt: skip
    return results
