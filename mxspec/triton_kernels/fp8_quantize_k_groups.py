"""fp8_quantize_k_groups in Triton: the tile of fp8_quantize_1x128 that transposes codes, read from the rows of a group.

A program owns a block of 128 padded tokens of COLS features. All tokens of the block belong to one group. Its codes of
one feature are 128 bytes of the result, aligned to 128. The padding past the last group counts as one more group, which
holds zeros.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxspec.formats import FP8_BLOCK_SIZE, fp32_bits
from mxspec.triton_kernels.common import launch
from mxspec.triton_kernels.common.groups import chunk, group_of, padded_rows, tokens_left
from mxspec.triton_kernels.tiles.fp8_columns import turn, turned_index

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
):  # fmt: skip
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
    back = turn(
        x + token.to(tl.int64) * stride_m + d0 * stride_d,
        qdata + (first.to(tl.int64) * D + d0 * count + (block - first)) * 128,
        d, k, run, stride_d, stride_m, count * 128, inside, owned, tokens_left(token + run, stop, tokens),
        eps_bits, POW2, 1, COLS,
    )  # fmt: skip
    tl.store(scale + block.to(tl.int64) * D + d0 + d, tl.where(group < G, back, 0.0), mask=inside & (block < blocks))


def fp8_quantize_k_groups(
    x: Tensor, offs: Tensor, *, scale_format: str = "fp32", eps: float = 1e-12, check_offs: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (M, D), G = x.shape, offs.shape[0]
    R = padded_rows(M, G, FP8_BLOCK_SIZE)
    blocks = R // FP8_BLOCK_SIZE
    qdata = x.new_empty((D, R), dtype=torch.float8_e4m3fn)
    scale = x.new_empty((blocks, D), dtype=torch.float32)
    start, end = (offs.new_empty(G) for _ in range(2))
    config = launch.for_device(CONFIGS, x.device)
    wide = max(config["COLS"] * max(x.stride(1), R), FP8_BLOCK_SIZE * x.stride(0)) >= 2**31
    if blocks:
        # At least one program across: with no features, start and end are still written.
        grid = launch.grid(max(1, -(-D // config["COLS"])), blocks)
        even = config["COLS"] * grid[0] == D
        _fp8_quantize_k_groups[grid](
            x, qdata, scale, start, end, offs, M, D, blocks, *x.stride(), G, offs.stride(0),
            fp32_bits(eps), scale_format == "pow2", even, wide, chunk(G), **config,
            **launch.UNFUSED,
        )  # fmt: skip
    return qdata, scale.mT, start, end
