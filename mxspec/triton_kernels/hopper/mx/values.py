"""The kernel that turns the second operand of Hopper's MX matmuls into bf16, and a copy of weights.

If token groups divide the rows of this operand, the kernel also writes the plan. The plan says which rows each block of
the output has.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mxspec.triton_kernels.common.groups import group_of
from mxspec.triton_kernels.hopper.plan import write_plan

VALUES = {"ROWS": 32, "num_warps": 8}  # a program has ROWS rows of 128 codes each


@triton.jit
def copy_experts(codes, stride_e, stride_r, out, rows, N, K, ROWS: tl.constexpr):
    """Write the weights of experts, N rows each, one row directly after the other. There are `rows` rows."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(1) * 128 + tl.arange(0, 128)
    there = (r < rows)[:, None] & (k < K)[None, :]
    code = tl.load(codes + (r // N * stride_e + r % N * stride_r)[:, None] + k[None, :], mask=there)
    tl.store(out + (r * K)[:, None] + k[None, :], code, mask=there)


@triton.jit
def mx_values(
    codes, stride_r, scale, scale_stride_r, scale_stride_c, out, out_stride,
    R, K, offs, offs_stride, G, plan, plan_tiles, marks,
    GROUPED: tl.constexpr, BLOCKED: tl.constexpr, CHUNK: tl.constexpr, SHIFT: tl.constexpr, TILE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Write 2^SHIFT times the values of ROWS x 128 codes of one matrix of R rows.

    GROUPED says whether token groups divide the rows ("M") or the columns ("K").
    """
    if tl.program_id(1) == 0:
        tl.store(marks, 0, mask=tl.program_id(0) == 0)
        if GROUPED == "M":
            write_plan(plan, plan_tiles, offs, offs_stride, G, R, CHUNK, TILE)
    n, tile = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    r, last = n, R
    if GROUPED == "M" and BLOCKED:  # each group begins a new tile of scales, so a program has padded rows of one tile
        top = tl.program_id(0) * ROWS // 128 * 128
        group, of_group, stop, begin = group_of(top, offs, offs_stride, G, None, None, False, 128, CHUNK)
        last = tl.where((group < G) & (top + 128 <= R + 128 * G), tl.minimum(stop, R), 0)
        r += of_group - begin
        if tl.program_id(0) * ROWS + of_group - begin >= last:
            return
    first, end = tile * 128, K
    tiles_before, across = tile * 0, tl.cdiv(K, 128)
    if GROUPED == "K":  # the 128 tokens of a tile belong to one group
        _, first, end, begin = group_of(tile * 128, offs, offs_stride, G, None, None, False, 128, CHUNK)
        # If offs is out of order, the tile may lie outside of the group or of the scales. Then nothing is read.
        end = tl.minimum(tl.maximum(end, 0), K) // 32 * 32
        across = tl.where(first >= 0, tl.cdiv(tl.maximum(end - first, 0), 128), 0)
        tiles_before = begin // 128
        of_group = (tiles_before >= 0) & (tiles_before <= tile) & (tile < tiles_before + across)
        of_group &= tiles_before + across <= K // 128 + G
        # The same value, as a multiple of 32 for the compiler.
        first = tl.where(of_group, first + tile * 128 - begin, K) // 32 * 32
    c, k = tl.arange(0, 4), tl.arange(0, 128)
    in_r, in_c = (r >= 0) & (r < last), (first >= 0) & (first + 32 * c < end)
    in_k = (first >= 0) & (first + k < end)
    if BLOCKED:
        of_row = (n // 128 * across + tile - tiles_before) * 512 + n % 32 * 16 + n % 128 // 32 * 4
        if GROUPED == "K":
            of_row += tiles_before.to(tl.int64) * tl.cdiv(R, 128) * 512
        at = scale + of_row[:, None] + c[None, :]
    else:
        at = scale + (r * scale_stride_r)[:, None]
        at += ((first // 32 + c).to(tl.int64) * scale_stride_c)[None, :]
    byte = tl.load(at, mask=in_r[:, None] & in_c[None, :], other=0).to(tl.int32)
    factor = (tl.minimum(byte + SHIFT, 255) << 23).to(tl.float32, bitcast=True)  # infinite for the scale NaN
    x = tl.load(codes + (r * stride_r + first)[:, None] + k[None, :], mask=in_r[:, None] & in_k[None, :])
    value = (x.to(tl.float32).reshape(ROWS, 4, 32) * factor[:, :, None]).to(tl.bfloat16)
    # In each 16 columns, (thread of four, half, pair) becomes (half, thread, pair): the same permutation as that of
    # `values` in `conversion.py`.
    value = value.reshape(ROWS * 8, 4, 2, 2).permute(0, 2, 1, 3).reshape(ROWS, 128)
    in_out = in_k if GROUPED == "K" else first + k < out_stride
    tl.store(out + (r * out_stride + first)[:, None] + k[None, :], value, mask=in_r[:, None] & in_out[None, :])
