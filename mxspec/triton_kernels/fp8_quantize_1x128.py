"""fp8_quantize_1x128 in Triton: one kernel for blocks that lie along memory, one kernel for blocks that lie across it.

The strides alone decide which kernel runs: blocks along the columns of x are blocks along the rows of its transpose,
and both results are transposed in the same way. In both kernels a warp has whole blocks, so that shuffles compute amax.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxspec.formats import FP8_BLOCK_SIZE, fp32_bits
from mxspec.triton_kernels.common import launch
from mxspec.triton_kernels.common.fp8_numerics import factors
from mxspec.triton_kernels.common.numerics import magnitude_bits, saturating_cast, widened
from mxspec.triton_kernels.tiles.fp8_columns import turn, turned_index

RANK = {(9, 0): 1, (10, 0): 1}  # Blackwell: compiled, not run
# "flat": ROWS blocks a program, if everything is contiguous. "along": ROWS rows of one block. "across": BLOCKS by COLS
# blocks of 128x1; the word after the comma is `scale_major`. The race of these configurations:
# benchmarks/results/decisions.md.
_HOPPER = {
    "flat": {"ROWS": 16, "num_warps": 4},
    "along": {"ROWS": 32, "num_warps": 8},
    "across, k": {"BLOCKS": 1, "COLS": 128, "num_warps": 4},
    "across, mn": {"BLOCKS": 1, "COLS": 128, "num_warps": 4},
}
CONFIGS = {(9, 0): _HOPPER, (10, 0): _HOPPER}  # Blackwell: compiled, not run
PTX = (r"ld\.global\.v4\.b32", r"st\.global\.v4\.b32", r"cvt\.rn\.satfinite\.e4m3x2\.f32")


@triton.jit(do_not_specialize=["eps_bits"])
def _along(
    x, qdata, scale,
    R, K, stride_r, stride_k, scale_stride_r, scale_stride_c, eps_bits,
    POW2: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    # A program has ROWS rows of one block, so that it stores column-major scales as a run. Programs run along the row
    # first.
    r0 = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * ROWS
    c, r, k = tl.program_id(0).to(tl.int64), tl.arange(0, ROWS), tl.arange(0, 128)
    inside = (r0 + r < R) | EVEN
    there = inside[:, None]
    if TAIL:  # the last block of a row is shorter
        there = there & (k < K - tl.program_id(0) * 128)[None, :]
    if WIDE:  # the products with strides are above 2^31
        r, k = r.to(tl.int64), k.to(tl.int64)
    x += r0 * stride_r + c * 128 * stride_k
    values = widened(tl.load(x + (r[:, None] * stride_r + k[None, :] * stride_k), mask=there, other=0))
    s, back = factors(tl.max(magnitude_bits(values), axis=1), eps_bits, POW2)
    q = saturating_cast(values * s[:, None], qdata.dtype.element_ty)
    tl.store(qdata + r0 * K + c * 128 + (r[:, None] * K + k[None, :]), q, mask=there)
    tl.store(scale + r0 * scale_stride_r + c * scale_stride_c + r * scale_stride_r, back, mask=inside)


@triton.jit(do_not_specialize=["eps_bits"])
def _across(
    x, qdata, scale,
    R, K, stride_r, stride_k, scale_stride_r, scale_stride_c, eps_bits,
    POW2: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr, TAIL: tl.constexpr, BLOCKS: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    # A program has BLOCKS blocks of each of COLS rows. These rows are columns of memory. Programs run along a row
    # first, so that neighbouring programs write neighbouring codes of the row.
    r0 = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * COLS
    k0 = tl.program_id(0).to(tl.int64) * (BLOCKS * 128)
    r, k, run = turned_index(WIDE, BLOCKS, COLS)
    inside = ((r0 + r < R) & (k0 + k < K)) | EVEN  # (4, COLS // 32, BLOCKS, 8)
    # A run has 16 elements, and K is a multiple of 16. So a run lies in the row as a whole, or not at all.
    runs = k0 + k + run < K if TAIL else None
    back = turn(
        x + r0 * stride_r + k0 * stride_k, qdata + r0 * K + k0, r, k, run, stride_r, stride_k, K,
        inside, inside, None, eps_bits, POW2, BLOCKS, COLS, runs,
    )  # fmt: skip
    scale += r0 * scale_stride_r + tl.program_id(0).to(tl.int64) * BLOCKS * scale_stride_c
    tl.store(scale + (r * scale_stride_r + k // 128 * scale_stride_c), back, mask=inside)


def fp8_quantize_1x128(
    x: Tensor, *, axis: int = -1, scale_format: str = "fp32", scale_major: str = "k", eps: float = 1e-12
) -> tuple[Tensor, Tensor]:
    rows = x if axis == -1 else x.mT  # from here on the blocks lie along the last dimension
    R, K = rows.shape
    C, tail = -(-K // FP8_BLOCK_SIZE), K % FP8_BLOCK_SIZE != 0
    qdata = x.new_empty((R, K), dtype=torch.float8_e4m3fn)
    scale = x.new_empty((R, C) if scale_major == "k" else (C, R), dtype=torch.float32)
    result = qdata if axis == -1 else qdata.mT, scale if scale_major == "k" else scale.mT
    if not x.numel():
        return result
    scale_strides = (C, 1) if scale_major == "k" else (1, R)
    if rows.stride(1) != 1 and rows.stride(0) == 1:
        kernel, which = _across, f"across, {scale_major}"
    elif rows.is_contiguous() and (scale_major == "k" or C == 1) and not tail:
        kernel, which = _along, "flat"
        rows, R, K, scale_strides = rows.view(-1, FP8_BLOCK_SIZE), R * C, FP8_BLOCK_SIZE, (1, 1)
    else:
        kernel, which = _along, "along"
    config = launch.for_device(CONFIGS, x.device)[which]
    height = config["COLS"] if kernel is _across else config["ROWS"]
    width = FP8_BLOCK_SIZE * config.get("BLOCKS", 1)
    grid = launch.grid(-(-K // width), -(-R // height))
    even = K % width == 0 and height * grid[1] * grid[2] == R
    wide = max(height * max(rows.stride(0), K, scale_strides[0]), width * rows.stride(1)) >= 2**31
    kernel[grid](
        rows, qdata, scale, R, K, *rows.stride(), *scale_strides, fp32_bits(eps), scale_format == "pow2", even, wide,
        tail, **config, **launch.UNFUSED,
    )  # fmt: skip
    return result
