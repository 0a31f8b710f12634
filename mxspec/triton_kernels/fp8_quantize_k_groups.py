"""fp8_quantize_k_groups in Triton: the tile of fp8_quantize_1x128 that transposes codes, read from the rows of a group.

A program owns a block of 128 padded tokens of COLS features. All tokens of the block belong to one group. Its codes of
one feature are 128 bytes of the result, aligned to 128. The padding past the last group counts as one more group, which
holds zeros.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxspec.formats import FP8_BLOCK_SIZE, fp32_bits
from mxspec.triton_kernels.common import launch
from mxspec.triton_kernels.common.groups import chunk, group_of, padded_rows, tokens_left
from mxspec.triton_kernels.common.numerics import widened
from mxspec.triton_kernels.common.runs import load16
from mxspec.triton_kernels.tiles.fp8_columns import store_turned, turn, turned_index

_HOPPER = {"COLS": 128, "num_warps": 4}  # as fp8_quantize_1x128, "across, mn"
CONFIGS = {(9, 0): _HOPPER, (10, 0): _HOPPER}
# The race on an H200: benchmarks/results/decisions.md. Blackwell: compiled, not run.
RANK = {(9, 0): 1, (10, 0): 1}
PTX = (r"ld\.global\.v4\.b32", r"st\.global\.v4\.b32", r"cvt\.rn\.satfinite\.e4m3x2\.f32")


# `tokens` is not specialized: with tokens == 1 ptxas 12.8 generates wrong code (see mx_quantize_groups).
@triton.jit(do_not_specialize=["tokens", "eps_bits"])
def _fp8_quantize_k_groups(
    x, qdata, scale, start, end, offs,
    tokens, D, blocks, stride_m, stride_d, G, stride_offs, eps_bits,
    POW2: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr, CHUNK: tl.constexpr, COLS: tl.constexpr,
    row_scale=None, row_scale_stride_m=None, row_scale_stride_d=None, BF16: tl.constexpr = False,
):  # fmt: skip
    # With `row_scale`, x holds codes along the features. Their values are quantized, rounded to bfloat16 if BF16.
    # Grid order: features first, so that neighbouring programs read neighbouring bytes of the same tokens. With tokens
    # first, they would write neighbouring bytes of a feature's codes, which is slower
    # (benchmarks/results/decisions.md).
    column, block = tl.program_id(0), tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    writes = (block == 0) & (column == 0)
    group, token0, stop, begin = group_of(block * 128, offs, stride_offs, G, start, end, writes, 128, CHUNK)
    first = begin // 128  # the group's first block; the group has `count` blocks
    count = tl.where(group < G, (stop - token0 + 127) // 128, blocks - first)
    d0 = column.to(tl.int64) * COLS
    d, k, run = turned_index(WIDE, 1, COLS)
    # EVEN is a constant, so that ptxas needs fewer registers (benchmarks/results/decisions.md).
    inside = (d0 + d < D) | EVEN
    owned = inside & (count > block - first) & (count <= blocks - first)  # True for all blocks if offs is in order
    token = token0 + (block - first) * 128
    x += token.to(tl.int64) * stride_m + d0 * stride_d
    to = qdata + (first.to(tl.int64) * D + d0 * count + (block - first)) * 128
    left = tokens_left(token + run, stop, tokens)
    if row_scale is None:
        back = turn(x, to, d, k, run, stride_d, stride_m, count * 128, inside, owned, left, eps_bits, POW2, 1, COLS)
    else:
        tl.static_assert(COLS == 128)  # one block of the rows, so that a token has one scale
        if WIDE:  # also the products in load16
            stride_m, row_scale_stride_m = tl.cast(stride_m, tl.int64), tl.cast(row_scale_stride_m, tl.int64)
        codes = load16(x + (d * stride_d)[:, None, :, :, :] + run * stride_m, stride_m, inside[:, None, :, :, :], left)
        row_scale += token.to(tl.int64) * row_scale_stride_m + column.to(tl.int64) * row_scale_stride_d
        # Each thread loads the scales of its 16 tokens. If it loaded other scales, Triton would exchange the codes.
        scales = tl.broadcast_to(row_scale + run * row_scale_stride_m, (4, 8, COLS // 32, 1, 1))
        value = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32) * load16(scales, row_scale_stride_m, d0 < D, left)
        value = value.reshape(4, 8, COLS // 32, 1, 8, 16)
        if BF16:
            value = widened(value.to(tl.bfloat16))
        back = store_turned(value, to, d, k, run, count * 128, owned[:, None, :, :, :], eps_bits, POW2)
    tl.store(scale + block.to(tl.int64) * D + d0 + d, tl.where(group < G, back, 0.0), mask=inside & (block < blocks))


def fp8_quantize_k_groups(
    x: Tensor, offs: Tensor, *, scale_format: str = "fp32", eps: float = 1e-12, check_offs: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return k_groups(x, offs, scale_format, eps)


def k_groups(
    x: Tensor, offs: Tensor, scale_format: str, eps: float, row_scale: Tensor | None = None, bf16: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch. With `row_scale`, x holds codes along the features, as bytes; bf16 says how to round their values."""
    (M, D), G = x.shape, offs.shape[0]
    R = padded_rows(M, G, FP8_BLOCK_SIZE)
    blocks = R // FP8_BLOCK_SIZE
    qdata = x.new_empty((D, R), dtype=torch.float8_e4m3fn)
    scale = x.new_empty((blocks, D), dtype=torch.float32)
    start, end = (offs.new_empty(G) for _ in range(2))
    config = launch.for_device(CONFIGS, x.device)
    of_codes: dict[str, Any] = {}
    stride_m = x.stride(0)
    if row_scale is not None:
        of_codes = {"row_scale": row_scale, "BF16": bf16}
        of_codes["row_scale_stride_m"], of_codes["row_scale_stride_d"] = row_scale.stride()
        stride_m = max(stride_m, row_scale.stride(0))
    wide = max(config["COLS"] * max(x.stride(1), R), FP8_BLOCK_SIZE * stride_m) >= 2**31
    if blocks:
        # At least one program across: with no features, start and end are still written.
        grid = launch.grid(max(1, -(-D // config["COLS"])), blocks)
        even = config["COLS"] * grid[0] == D
        _fp8_quantize_k_groups[grid](
            x, qdata, scale, start, end, offs, M, D, blocks, *x.stride(), G, offs.stride(0),
            fp32_bits(eps), scale_format == "pow2", even, wide, chunk(G), **config,
            **of_codes, **launch.UNFUSED,
        )  # fmt: skip
    return qdata, scale.mT, start, end
