"""fp8_dequantize in Triton: one kernel reads the codes in the order of the output, another kernel transposes them.

Along axis -1, a program of `_along` reads ROWS rows of one 128-block each and writes them in the same order.

Along axis -2, codes and scales are stored transposed, and the output is not. Each thread of `_turned` transposes its
own elements in registers, as in fp8_quantize_1x128.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxspec.formats import FP8_BLOCK_SIZE
from mxspec.triton_kernels.common import launch
from mxspec.triton_kernels.common.runs import load8

# Blackwell: compiled, not run. Measured on an H200: benchmarks/results/decisions.md.
RANK = {(9, 0): 1, (10, 0): 1}
# "flat": ROWS blocks a program, if everything is contiguous. "along": ROWS rows of one block. ROWS divides 128, so that
# the rows of a program share one scale if blocks are 128x128. "turned": 128 rows by COLS columns of the output.
_HOPPER = {
    "flat": {"ROWS": 32, "num_warps": 4},
    "along": {"ROWS": 32, "num_warps": 4},
    "turned": {"COLS": 128, "num_warps": 4},
    "turned, ragged": {"COLS": 128, "num_warps": 8},  # masked stores, or stores of single values: 4 warps spill
}
CONFIGS = {(9, 0): _HOPPER, (10, 0): _HOPPER}  # Blackwell: compiled, not run
# The multiplication has no .ftz, which would lose the subnormals.
PTX = (r"ld\.global\.(v[24]\.)?b32", r"st\.global\.v4\.b32", r"cvt\.rn\.f16x2\.e4m3x2", r"mul\.(rn\.)?f32")


@triton.jit
def _along(
    qdata, scale, out,
    E, R, K, tiles, stride_e, stride_r, stride_k, scale_stride_e, scale_stride_r, scale_stride_c,
    SQUARE: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    # A thread reads as many codes at once as make 16 bytes of output. By default, Triton would read 16 codes at once
    # and then exchange them through shared memory, because a thread stores 16 bytes.
    at_once: tl.constexpr = 128 // out.dtype.element_ty.primitive_bitwidth
    place, c = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1), tl.program_id(0).to(tl.int64)
    e, r0 = (place // tiles).to(tl.int64), (place % tiles).to(tl.int64) * ROWS
    r, k = tl.arange(0, ROWS), tl.max_contiguous(tl.arange(0, 128), at_once)
    inside = ((r0 + r < R) & (e < E)) | EVEN
    there = inside[:, None]
    if TAIL:  # the last block of a row is shorter
        there = there & (k < K - tl.program_id(0) * 128)[None, :]
    if WIDE:  # the products with strides are above 2^31
        r, k = r.to(tl.int64), k.to(tl.int64)
    qdata += e * stride_e + r0 * stride_r + c * 128 * stride_k
    q = tl.load(qdata + (r[:, None] * stride_r + k[None, :] * stride_k), mask=there)
    scale += e * scale_stride_e + c * scale_stride_c
    if SQUARE:
        value = q.to(tl.float32) * tl.load(scale + r0 // 128 * scale_stride_r, mask=(e < E) | EVEN)
    else:
        value = q.to(tl.float32) * tl.load(scale + r0 * scale_stride_r + r * scale_stride_r, mask=inside)[:, None]
    out += (e * R + r0) * K + c * 128
    tl.store(out + (r[:, None] * K + k[None, :]), value.to(out.dtype.element_ty), mask=there)


@triton.jit
def _turned(
    qdata, scale, out,
    E, R, K, tiles, stride_e, stride_r, stride_k, scale_stride_e, scale_stride_r, scale_stride_c,
    SQUARE: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr, TAIL: tl.constexpr, WHOLE: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    # R and K are the sizes of the transpose: the output has K rows and R columns. Programs run along a row of the
    # output first.
    # A thread has 16 elements along K of each of 8 neighbouring columns: 8 loads of 16 codes become 16 stores of 8
    # values.
    place, r0 = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1), tl.program_id(0).to(tl.int64) * COLS
    e, c = (place // tiles).to(tl.int64), (place % tiles).to(tl.int64)
    r = (tl.arange(0, 4) * 8)[:, None, None, None] + (tl.arange(0, COLS // 32) * 32)[None, None, :, None]
    k = (tl.arange(0, 8) * 16)[None, :, None, None] + tl.arange(0, 16)
    there = ((r0 + r < R) & (e < E)) | EVEN
    if TAIL:  # the last block is shorter; a thread has all of its 16 codes or none, because K is a multiple of 16
        rows = k < K - place % tiles * 128
        there = there & rows
    if WIDE:  # the products with strides are above 2^31, also those in load8
        r, k, stride_r = r.to(tl.int64), k.to(tl.int64), tl.cast(stride_r, tl.int64)
    qdata += e * stride_e + r0 * stride_r + c * 128 * stride_k
    # WHOLE: R is a multiple of 8, so that a thread has all of its 8 columns or none.
    left = None if WHOLE else R - r0 - r
    q = load8(qdata + (r * stride_r + k * stride_k), stride_r, there, left, 0, 1)
    # In parts of 16 bytes, because a thread stores 16 bytes. Triton would give the halves of a longer run to two
    # threads.
    PART: tl.constexpr = 128 // out.dtype.element_ty.primitive_bitwidth
    value = q.to(tl.float8e4nv, bitcast=True).to(tl.float32).reshape(4, 8, COLS // 32, 16, 8 // PART, PART)
    column = r[:, :, :, :, None, None] + (tl.arange(0, 8 // PART) * PART)[:, None] + tl.arange(0, PART)
    inside = ((r0 + column < R) & (e < E)) | EVEN
    scale += e * scale_stride_e + c * scale_stride_c
    if SQUARE:
        value *= tl.load(scale + (r0 + column) // 128 * scale_stride_r, mask=inside)
    else:
        value *= tl.load(scale + r0 * scale_stride_r + column * scale_stride_r, mask=inside)
    if TAIL:
        inside = inside & rows[:, :, :, :, None, None]
    out += (e * K + c * 128) * R + r0
    tl.store(out + (k[:, :, :, :, None, None] * R + column), value.to(out.dtype.element_ty), mask=inside)


def fp8_dequantize(qdata: Tensor, scale: Tensor, *, axis: int = -1, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    out = torch.empty_like(qdata, dtype=out_dtype, memory_format=torch.contiguous_format)
    if not out.numel():
        return out
    q = qdata if axis == -1 else qdata.mT  # from here on the blocks lie along the last dimension
    *lead, R, K = q.shape
    C, tail, square = -(-K // FP8_BLOCK_SIZE), K % FP8_BLOCK_SIZE != 0, scale.shape[-2] != R
    E, stride_e, scale_stride_e = (lead[0], q.stride(0), scale.stride(0)) if lead else (1, 0, 0)
    strides, scale_strides = q.stride()[-2:], scale.stride()[-2:]
    config = launch.for_device(CONFIGS, q.device)
    if axis == -2:
        q = q.view(torch.uint8)  # as integers, so that a masked load can give 0
        even = R % config["turned"]["COLS"] == 0 and not tail
        kernel, chosen = _turned, {**config["turned" if even else "turned, ragged"], "WHOLE": R % 8 == 0}
        across, tiles = -(-R // chosen["COLS"]), C
    else:
        which = "along"
        if not square and q.is_contiguous() and scale.is_contiguous() and not tail:
            which, R, K, E, C, strides, scale_strides = "flat", E * R * C, FP8_BLOCK_SIZE, 1, 1, (128, 1), (1, 1)
        kernel, chosen = _along, config[which]
        across, tiles, even = C, -(-R // chosen["ROWS"]), R % chosen["ROWS"] == 0
    grid = launch.grid(across, E * tiles)
    even = even and grid[1] * grid[2] == E * tiles
    wide = max(FP8_BLOCK_SIZE, chosen.get("COLS", 0)) * max(*strides, *scale_strides, R if axis == -2 else K) >= 2**31
    kernel[grid](
        q, scale, out, E, R, K, tiles, stride_e, *strides, scale_stride_e, *scale_strides, square, even, wide, tail,
        **chosen, **launch.UNFUSED,
    )  # fmt: skip
    return out
