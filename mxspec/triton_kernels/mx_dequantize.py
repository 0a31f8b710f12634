"""mx_dequantize in Triton: one kernel reads the codes in the order of the output, another kernel transposes them.

Along axis -1, a program owns a run of scale bytes, in the order in which they lie in memory, as in mx_quantize. Along
axis -2, codes and scales are stored transposed, and the output is not: a program transposes a tile of values.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxspec.formats import MX_BLOCK_SIZE, element
from mxspec.triton_kernels.common import fp6, numerics
from mxspec.triton_kernels.common.blocked import blocked_shape, row_col_in_tile
from mxspec.triton_kernels.common.launch import UNFUSED, for_device
from mxspec.triton_kernels.common.numerics import scale_value
from mxspec.triton_kernels.common.nvfp4_numerics import values_of_pairs

# Blackwell: compiled, not run. Measured on an H200: benchmarks/results/decisions.md.
RANK = {(9, 0): 1, (10, 0): 1}
# A program has BLOCKS scale bytes, that is, 32 * BLOCKS codes. "turned": ROWS rows of the transpose by BLOCKS of their
# blocks. Only these configurations were measured. With fewer scale bytes than threads, Triton lets each thread load its
# own byte, and the L1 cache serves it. With more, Triton exchanges the bytes through shared memory.
_HOPPER = {
    "flat": {"BLOCKS": 64, "num_warps": 4},
    "strided": {"BLOCKS": 64, "num_warps": 4},
    "blocked": {"BLOCKS": 64, "num_warps": 4},
    "turned": {"ROWS": 128, "BLOCKS": 4, "num_warps": 8},
    "turned_fp32": {"ROWS": 64, "BLOCKS": 4, "num_warps": 8},  # 128 rows spill
}
CONFIGS = {(9, 0): _HOPPER, (10, 0): _HOPPER}
_ROW_TILES = 32768  # in a grid's second dimension, which holds at most 65535
# The multiplication has no .ftz, which would lose the subnormals. The floats are converted by way of fp16, which holds
# the values of all their codes. FP6 is read in single bytes, because a tensor may begin at any byte.
PTX = (
    r"ld\.global\.(v[24]\.)?b32|ld\.global\.b(8|16)",
    r"st\.global\.v4\.b32",
    r"cvt\.rn\.f16x2\.e[45]m[32]x2|cvt\.f32\.f16|cvt\.rn\.f32\.s",
    r"mul\.(rn\.)?f32",
)


def supports(qdata: Tensor, scale: Tensor, *, axis: int = -1, **_: Any) -> str | None:
    if qdata.numel() > 2**35:
        return f"counts blocks in 32 bits, so qdata may have up to 2^35 elements; it has {qdata.numel()}"
    if qdata.shape[axis] >= 2**29:
        name = "K" if axis == -1 else "M"
        return f"counts the bytes of a row of tiles in 32 bits, so {name} must be below 2^29; it is {qdata.shape[axis]}"
    if qdata.ndim == 3 and qdata.shape[0] > 65535:
        return f"takes up to 65535 experts, the limit of its grid; qdata has {qdata.shape[0]}"
    return None


@triton.constexpr_function
def bytes_of_block(dtype, fp6):
    return 24 if fp6 else 16 if dtype == tl.uint8 else 32  # e2m1 has two codes in a byte


@triton.jit
def _codes(at, stride, mask, FP6: tl.constexpr):
    """The values of the codes at these pointers, in fp32. A byte of e2m1 gives two values, three of FP6 give four."""
    if FP6:
        return fp6.values(fp6.load_words(at, stride, mask), FP6)
    else:
        q = tl.load(at, mask=mask)
        return values_of_pairs(q, 1.0, 1.0, tl.float32) if q.dtype == tl.uint8 else numerics.code_values(q)


@triton.jit
def _mx_dequantize(
    qdata, scale, out,
    R, C, stride_e, stride_r, stride_k, scale_stride_e, scale_stride_r, scale_stride_c, row_groups,
    FP6: tl.constexpr, LAYOUT: tl.constexpr, EVEN: tl.constexpr, BLOCKS: tl.constexpr, ROW_TILES: tl.constexpr,
):  # fmt: skip
    # A thread reads as many codes at once as make 16 bytes of output. By default, Triton would read 16 codes at once
    # and then exchange them through shared memory, because a thread stores 16 bytes.
    at_once: tl.constexpr = 128 // out.dtype.element_ty.primitive_bitwidth
    i = tl.arange(0, BLOCKS)
    j = tl.max_contiguous(tl.arange(0, 32), at_once)
    BYTES: tl.constexpr = bytes_of_block(qdata.dtype.element_ty, FP6)
    # For FP6, a pointer is that of three bytes with four codes.
    of_block = tl.arange(0, 8) * 3 if FP6 else tl.max_contiguous(tl.arange(0, BYTES), at_once * BYTES // 32)
    # The pointers move to the start of the program's part. Most offsets from there fit in 32 bits.
    if LAYOUT == "flat":
        # Codes and scales are contiguous: byte n scales the 32 codes at 32 * n, and no division is needed.
        start = tl.program_id(0).to(tl.int64) * BLOCKS
        in_matrix = (start + i < R * C) | EVEN
        q_offset = i[:, None] * BYTES + of_block[None, :]
        out_offset = i[:, None] * 32 + j[None, :]
        scale_offset = i
        qdata += start * BYTES
        out += start * 32
        scale += start
    elif LAYOUT == "strided":
        e = tl.program_id(2).to(tl.int64)
        n = tl.program_id(0) * BLOCKS + i
        in_matrix = n < R * C
        row, c = (n // C).to(tl.int64), n % C
        k = c[:, None] * BYTES + of_block[None, :]
        q_offset = row[:, None] * stride_r + k.to(tl.int64) * stride_k
        out_offset = n.to(tl.int64)[:, None] * 32 + j[None, :]
        scale_offset = row * scale_stride_r + c.to(tl.int64) * scale_stride_c
        qdata += e * stride_e
        out += e * R * C * 32
        scale += e * scale_stride_e
    else:
        parts: tl.constexpr = 512 // BLOCKS  # programs a tile
        e = (tl.program_id(2) // row_groups).to(tl.int64)  # below 2^22 rows row_groups is 1, and folds away
        row_tile = (tl.program_id(2) % row_groups * ROW_TILES + tl.program_id(1)).to(tl.int64)
        row, col = row_col_in_tile(tl.program_id(0) % parts * BLOCKS + i)
        c = tl.program_id(0) // parts * 4 + col
        in_matrix = (row_tile * 128 + row < R) & (c < C)
        k = c[:, None] * BYTES + of_block[None, :]
        q_offset = row.to(tl.int64)[:, None] * stride_r + k.to(tl.int64) * stride_k
        out_offset = row.to(tl.int64)[:, None] * (C * 32) + (c[:, None] * 32 + j[None, :])
        scale_offset = i.to(tl.int64) * scale_stride_c
        qdata += e * stride_e + row_tile * 128 * stride_r
        out += (e * R + row_tile * 128) * C * 32
        scale += e * scale_stride_e
        scale += (row_tile * tl.cdiv(C, 4) * 512 + tl.program_id(0) * BLOCKS) * scale_stride_c

    q = _codes(qdata + q_offset, stride_k, in_matrix[:, None], FP6)
    byte = tl.load(scale + scale_offset, mask=in_matrix).to(tl.int32)
    value = q * scale_value(byte)[:, None]
    tl.store(out + out_offset, value.to(out.dtype.element_ty), mask=in_matrix[:, None])


@triton.jit
def _values(codes, stride, scale, in_rows, in_cols, in_blocks, FP6: tl.constexpr):
    """The values of blocks in fp32.

    `codes` are pointers `(rows, bytes)`, or for FP6 pointers to the first of three bytes. `scale` are pointers
    `(rows, blocks)`.
    """
    value = scale_value(tl.load(scale, mask=in_rows[:, None] & in_blocks[None, :]).to(tl.int32))
    value = tl.broadcast_to(value[:, :, None], (scale.shape[0], scale.shape[1], 32))
    value = value.reshape(scale.shape[0], scale.shape[1] * 32)
    return _codes(codes, stride, in_rows[:, None] & in_cols[None, :], FP6) * value


@triton.jit
def _mx_dequantize_turned(
    qdata, scale, out,
    R, C, stride_e, stride_r, stride_k, scale_stride_e, scale_stride_r, scale_stride_c, row_programs, col_programs,
    FP6: tl.constexpr, BLOCKED: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    # Rows and blocks are rows and blocks of the transpose. Programs run along a row of it first, then down, then to the
    # next expert, so that neighbouring programs share sectors of plain scales.
    first_c = tl.program_id(0) % col_programs * BLOCKS
    first_r = tl.program_id(0) // col_programs % row_programs * ROWS
    e = (tl.program_id(0) // col_programs // row_programs).to(tl.int64)
    r, c, k = tl.arange(0, ROWS // 4) * 4, tl.arange(0, BLOCKS), tl.arange(0, BLOCKS * 32)
    BYTES: tl.constexpr = bytes_of_block(qdata.dtype.element_ty, FP6)
    of_row = tl.arange(0, BLOCKS * 8) * 3 if FP6 else tl.arange(0, BLOCKS * BYTES)
    qdata += e * stride_e + first_r.to(tl.int64) * stride_r + first_c.to(tl.int64) * BYTES * stride_k
    codes = qdata + (r.to(tl.int64)[:, None] * stride_r + of_row.to(tl.int64)[None, :] * stride_k)
    scale += e * scale_stride_e
    if BLOCKED:  # the rows of a program are in one row of tiles, and its first block is a tile's first column
        scale += ((first_r // 128).to(tl.int64) * tl.cdiv(C, 4) + first_c // 4) * 512 * scale_stride_c
        row = first_r % 128 + r
        byte = (row % 32 * 16 + row // 32 * 4)[:, None] + (c // 4 * 512 + c % 4)[None, :]
        scales = scale + byte.to(tl.int64) * scale_stride_c
        scale_step = tl.cast(scale_stride_c, tl.int64) * 16
    else:
        scale += first_r.to(tl.int64) * scale_stride_r + first_c.to(tl.int64) * scale_stride_c
        scales = scale + (r.to(tl.int64)[:, None] * scale_stride_r + c.to(tl.int64)[None, :] * scale_stride_c)
        scale_step = tl.cast(scale_stride_r, tl.int64)
    # A thread reads codes from four neighbouring rows and joins them in its registers. The transposition exchanges
    # values through shared memory: the join makes it move 8 or 16 bytes at a time instead of single values.
    step = tl.cast(stride_r, tl.int64)
    rows, in_bytes, in_blocks = R - first_r, first_c * BYTES + of_row < C * BYTES, first_c + c < C
    in_cols = first_c * 32 + k < C * 32
    x0 = _values(codes, stride_k, scales, r < rows, in_bytes, in_blocks, FP6)
    x1 = _values(codes + step, stride_k, scales + scale_step, r + 1 < rows, in_bytes, in_blocks, FP6)
    x2 = _values(codes + 2 * step, stride_k, scales + 2 * scale_step, r + 2 < rows, in_bytes, in_blocks, FP6)
    x3 = _values(codes + 3 * step, stride_k, scales + 3 * scale_step, r + 3 < rows, in_bytes, in_blocks, FP6)
    x = tl.join(tl.join(x0, x2), tl.join(x1, x3)).to(out.dtype.element_ty)  # (r // 4, k, r % 4 // 2, r % 2)
    x = x.permute(1, 0, 2, 3).reshape(BLOCKS * 32, ROWS)
    n = tl.arange(0, ROWS)
    out += (e * C * 32 + first_c.to(tl.int64) * 32) * R + first_r
    tl.store(out + (k.to(tl.int64)[:, None] * R + n[None, :]), x, mask=in_cols[:, None] & (n < rows)[None, :])


def mx_dequantize(
    qdata: Tensor,
    scale: Tensor,
    *,
    axis: int = -1,
    out_dtype: torch.dtype = torch.bfloat16,
    scale_layout: str = "plain",
    elem_dtype: torch.dtype | str | None = None,
) -> Tensor:
    fmt = element(qdata.dtype if elem_dtype is None else elem_dtype)
    shape = list(qdata.shape)
    shape[axis] = fmt.held(shape[axis])
    out = torch.empty(shape, dtype=out_dtype, device=qdata.device)
    if not out.numel():
        return out
    blocked = scale_layout == "blocked"
    q = qdata if axis == -1 else qdata.mT
    if fmt.bits < 8:
        q = q.view(torch.uint8)
    *lead, R, stored = q.shape
    C, E = fmt.held(stored) // MX_BLOCK_SIZE, lead[0] if lead else 1
    stride_e, scale_stride_e = (q.stride(0), scale.stride(0)) if lead else (0, 0)
    scale_stride_r = 0 if blocked else scale.stride(-2)
    strides = (stride_e, *q.stride()[-2:], scale_stride_e, scale_stride_r, scale.stride(-1))
    args = q, scale.view(torch.uint8), out
    if axis == -2:
        config = for_device(CONFIGS, q.device)["turned" if out_dtype == torch.bfloat16 else "turned_fp32"]
        row_programs, col_programs = -(-R // config["ROWS"]), -(-C // config["BLOCKS"])
        grid = (row_programs * col_programs * E, 1, 1)
        _mx_dequantize_turned[grid](
            *args, R, C, *strides, row_programs, col_programs, fp6.mantissa_bits(fmt), blocked, **config, **UNFUSED
        )
        return out
    contiguous = q.is_contiguous() and scale.is_contiguous()
    layout = "blocked" if blocked else "flat" if contiguous else "strided"
    config = for_device(CONFIGS, q.device)[layout]
    blocks, row_groups, even = config["BLOCKS"], 1, False
    if layout == "flat":
        R, even = E * R, E * R * C % blocks == 0
        grid = (-(-R * C // blocks), 1, 1)
    elif layout == "strided":
        grid = (-(-R * C // blocks), 1, E)
    else:
        row_tiles, col_tiles = blocked_shape(R, C)
        row_groups = -(-row_tiles // _ROW_TILES)
        grid = (col_tiles * 512 // blocks, min(row_tiles, _ROW_TILES), E * row_groups)
    _mx_dequantize[grid](
        *args, R, C, *strides, row_groups, fp6.mantissa_bits(fmt), layout, even, ROW_TILES=_ROW_TILES, **config,
        **UNFUSED,
    )  # fmt: skip
    return out
