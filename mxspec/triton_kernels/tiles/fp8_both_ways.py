"""FP8 codes of token groups along the features and along the tokens, from one read of the tokens, in plain Triton.

A program holds 128 padded tokens of one group by 128 features. A row of the tile is one block of 128 features, and a
column of the tile is one block of 128 tokens. So the maximum of every block lies inside the tile. The last block of
features may be shorter. Rows without a group follow the last group: a program writes their row codes, and zeros as
column codes.

The values of a tile are those of x, or SwiGLU's, or the gradient of SwiGLU's. On Hopper, `hopper/fp8/both_ways.py`
computes the same bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxspec.formats import FP8_BLOCK_SIZE, fp32_bits
from mxspec.triton_kernels.common import launch
from mxspec.triton_kernels.common.fp8_numerics import factors
from mxspec.triton_kernels.common.groups import chunk, group_of, padded_rows
from mxspec.triton_kernels.common.numerics import magnitude_bits, saturating_cast, widened
from mxspec.triton_kernels.common.swiglu import gradient_of_gate, gradient_of_up, swiglu

Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
EPS = 1e-12
TOKENS, SWIGLU, GRADIENT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # the values that a tile quantizes
CONFIGS = {(9, 0): {"num_warps": 8}, (10, 0): {"num_warps": 8}}
TAIL = {(9, 0): {"num_warps": 16}, (10, 0): {"num_warps": 16}}  # the masks along the features take registers, too


@triton.jit
def place_of(block, offs, stride_offs, G, start, end, writes, tokens, blocks, CHUNK: tl.constexpr):
    """Where a block of 128 padded tokens lies.

    Returns its group and whether it has one, the first block and the number of blocks of the group, the block's first
    token, and the end of the group's tokens. The rows after the last group count as one more group.
    """
    group, token0, stop, begin = group_of(block * 128, offs, stride_offs, G, start, end, writes, 128, CHUNK)
    first = begin // 128
    grouped = group < G
    count = tl.where(grouped, (stop - token0 + 127) // 128, blocks - first)
    last = tl.load(offs + (G - 1) * stride_offs, mask=G > 0, other=0)
    token0, stop = tl.where(grouped, token0, last), tl.where(grouped, tl.minimum(stop, tokens), tokens)
    return group, grouped, first, count, token0 + (block - first) * 128, stop


@triton.jit
def quantized(
    v, inside, there, q_row, s_row, q_col, s_col, token, row, d0, D, tokens, block, blocks, first, count, grouped,
    feature, eps_bits, POW2: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Store the codes and scales of a tile of values in both directions."""
    r, d = tl.arange(0, 128), tl.arange(0, 128)
    place = block - first
    wide = widened(v)
    bits = magnitude_bits(wide)
    s, back = factors(tl.max(bits, 1), eps_bits, POW2)
    tl.store(s_row + (d0 // 128) * tokens + token + r, back, mask=there)
    q = saturating_cast(wide * s[:, None], q_row.dtype.element_ty)
    tl.store(q_row + row * D + (d0 + d)[None, :], q, mask=inside)

    s, back = factors(tl.max(bits, 0), eps_bits, POW2)
    # True for all blocks if offs is in order.
    owned = (d < D) & (place >= 0) & (count > place) & (count <= blocks - first) & (first >= 0)
    if TAIL:
        owned = owned & (feature < D)
    tl.store(s_col + block.to(tl.int64) * D + d0 + d, tl.where(grouped, back, 0.0), mask=owned)
    q = saturating_cast(tl.where(grouped, wide * s[None, :], 0.0), q_col.dtype.element_ty)
    to = q_col + (first.to(tl.int64) * D + d0 * count + place) * 128
    tl.store(to + d.to(tl.int64)[:, None] * count * 128 + r[None, :], tl.trans(q), mask=owned[:, None])


# `tokens` is not specialized: with tokens == 1 ptxas 12.8 generates wrong code (see mx_quantize_groups).
@triton.jit(do_not_specialize=["tokens", "eps_bits"])
def _both_ways(
    x, dh, q_row, s_row, q_col, s_col, start, end, offs,
    tokens, D, blocks, stride_m, stride_d, dh_stride_m, dh_stride_d, G, stride_offs, eps_bits,
    VALUES: tl.constexpr, POW2: tl.constexpr, TAIL: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    column, block = tl.program_id(0), tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    _, grouped, first, count, token, stop = place_of(
        block, offs, stride_offs, G, start, end, (block == 0) & (column == 0), tokens, blocks, CHUNK
    )
    r, d = tl.arange(0, 128), tl.arange(0, 128)
    half = D // 2 if VALUES == GRADIENT else D
    if VALUES == GRADIENT and not TAIL:  # two neighbouring programs read the same values: one writes d_gate, one d_up
        of_up, d0 = column % 2 == 1, (column // 2).to(tl.int64) * 128
        width = half
    else:
        d0 = column.to(tl.int64) * 128
        width = D
    # False for all rows if there are no features. An offs out of order may read a row twice, but no row outside of x.
    there = (token + r >= 0) & (token + r < stop) & (block < blocks) & (d0 < width)
    inside, row = there[:, None], (token + r).to(tl.int64)[:, None]
    source = d0 + d
    if TAIL:
        feature = column * 128 + d
        inside = inside & (feature < D)[None, :]
        if VALUES == GRADIENT:  # a block may begin in d_gate and end in d_up
            in_gate = feature < half
            source = tl.where(in_gate, source, source - half)
    x += row * stride_m + source[None, :] * stride_d
    v = tl.load(x, mask=inside, other=0)
    if VALUES != TOKENS:
        up = x + tl.cast(half, tl.int64) * stride_d
        if VALUES == SWIGLU:
            v = swiglu(v, tl.load(up, mask=inside, other=0))
        else:
            dh += row * dh_stride_m + source[None, :] * dh_stride_d
            if TAIL:
                of_h = tl.load(dh, mask=inside, other=0)
                of_gate = gradient_of_gate(v, tl.load(up, mask=inside, other=0), of_h)
                v = tl.where(in_gate[None, :], of_gate, gradient_of_up(v, of_h))
            # One branch, so that the registers of the other gradient are not needed.
            elif of_up:
                v = gradient_of_up(v, tl.load(dh, mask=inside, other=0))
            else:
                v = gradient_of_gate(v, tl.load(up, mask=inside, other=0), tl.load(dh, mask=inside, other=0))
            if not TAIL:
                d0 += tl.where(of_up, half, 0)

    quantized(
        v, inside, there, q_row, s_row, q_col, s_col, token, row, d0, D, tokens, block, blocks, first, count, grouped,
        feature if TAIL else d0 + d, eps_bits, POW2, TAIL,
    )  # fmt: skip


def both_ways(values: int, x: Tensor, dh: Tensor | None, offs: Tensor, scale_format: str, eps: float = EPS) -> Results:
    """Launch. `values` is 0 for x, 1 for SwiGLU of x, 2 for the gradient of SwiGLU from x and dh."""
    M, G = x.shape[0], offs.shape[0]
    D = x.shape[1] // 2 if values == SWIGLU.value else x.shape[1]
    results = allocated(x, offs, M, D)
    q_row, s_row, q_col, s_col, start, end = results
    blocks = s_col.shape[1]
    if blocks:
        # At least one program across: with no features, start and end are still written, and no value is computed.
        grid = launch.grid(max(1, -(-D // FP8_BLOCK_SIZE)), blocks)
        tail = (D // 2 if values == GRADIENT.value else D) % FP8_BLOCK_SIZE != 0
        _both_ways[grid](
            x, dh, q_row, s_row, q_col, s_col, start, end, offs, M, D, blocks, *x.stride(),
            *((0, 0) if dh is None else dh.stride()), G, offs.stride(0), fp32_bits(eps),
            values if D else TOKENS.value, scale_format == "pow2", tail, chunk(G),
            **launch.for_device(TAIL if tail else CONFIGS, x.device), **launch.UNFUSED,
        )  # fmt: skip
    return results


def allocated(x: Tensor, offs: Tensor, M: int, D: int) -> Results:
    """The tensors of the results for M tokens of D features."""
    G = offs.shape[0]
    R = padded_rows(M, G, FP8_BLOCK_SIZE)
    q_row, q_col = (x.new_empty(shape, dtype=torch.float8_e4m3fn) for shape in ((M, D), (D, R)))
    s_row, s_col = (
        x.new_empty(shape, dtype=torch.float32).mT for shape in ((-(-D // FP8_BLOCK_SIZE), M), (R // FP8_BLOCK_SIZE, D))
    )
    start, end = (offs.new_empty(G) for _ in range(2))
    return q_row, s_row, q_col, s_col, start, end
