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
from mxspec.triton_kernels.common import numerics
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
# The multiplication has no .ftz, which would lose the subnormals. Both formats are converted by way of fp16, which
# holds the values of all their codes.
PTX = (
    r"ld\.global\.(v[24]\.)?b32|ld\.global\.b16",
    r"st\.global\.v4\.b32",
    r"cvt\.rn\.f16x2\.e[45]m[32]x2|cvt\.f32\.f16",
    r"mul\.(rn\.)?f32",
)


def supports(
    qdata: Tensor, scale: Tensor, *, axis: int = -1, elem_dtype: torch.dtype | str | None = None, **_: Any
) -> str | None:
    if reason := numerics.supports(qdata.dtype if elem_dtype is None else elem_dtype, packed=True):
        return reason
    if qdata.numel() > 2**35:
        return f"counts blocks in 32 bits, so qdata may have up to 2^35 elements; it has {qdata.numel()}"
    if qdata.shape[axis] >= 2**29:
        name = "K" if axis == -1 else "M"
        return f"counts the bytes of a row of tiles in 32 bits, so {name} must be below 2^29; it is {qdata.shape[axis]}"
    if qdata.ndim == 3 and qdata.shape[0] > 65535:
        return f"takes up to 65535 experts, the limit of its grid; qdata has {qdata.shape[0]}"
    return None


@triton.jit
def code_values(q):
    """The values of codes in fp32. A byte of e2m1 gives two values."""
    return values_of_pairs(q, 1.0, 1.0, tl.float32) if q.dtype == tl.uint8 else q.to(tl.float32)


@triton.jit
def _mx_dequantize(
    qdata, scale, out,
    R, C, stride_e, stride_r, stride_k, scale_stride_e, scale_stride_r, scale_stride_c, row_groups,
    LAYOUT: tl.constexpr, EVEN: tl.constexpr, BLOCKS: tl.constexpr, ROW_TILES: tl.constexpr,
):  # fmt: skip
    # A thread reads as many codes at once as make 16 bytes of output. By default, Triton would read 16 codes at once
    # and then exchange them through shared memory, because a thread stores 16 bytes.
    at_once: tl.constexpr = 128 // out.dtype.element_ty.primitive_bitwidth
    i = tl.arange(0, BLOCKS)
    j = tl.max_contiguous(tl.arange(0, 32), at_once)
    BYTES: tl.constexpr = 16 if qdata.dtype.element_ty == tl.uint8 else 32  # e2m1 has two codes in a byte
    of_block = tl.max_contiguous(tl.arange(0, BYTES), at_once * BYTES // 32)
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

    q = tl.load(qdata + q_offset, mask=in_matrix[:, None])
    byte = tl.load(scale + scale_offset, mask=in_matrix).to(tl.int32)
    value = code_values(q) * scale_value(byte)[:, None]
    tl.store(out + out_offset, value.to(out.dtype.element_ty), mask=in_matrix[:, None])


@triton.jit
def _values(codes, scale, in_rows, in_cols, in_blocks):
    """The values of blocks in fp32.

    `codes` are pointers `(rows, bytes)`, and `scale` are pointers `(rows, blocks)`.
    """
    value = scale_value(tl.load(scale, mask=in_rows[:, None] & in_blocks[None, :]).to(tl.int32))
    value = tl.broadcast_to(value[:, :, None], (scale.shape[0], scale.shape[1], 32))
    value = value.reshape(scale.shape[0], scale.shape[1] * 32)
    return code_values(tl.load(codes, mask=in_rows[:, None] & in_cols[None, :])) * value


@triton.jit
def _mx_dequantize_turned(
    qdata, scale, out,
    R, C, stride_e, stride_r, stride_k, scale_stride_e, scale_stride_r, scale_stride_c, row_programs, col_programs,
    BLOCKED: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    # Rows and blocks are rows and blocks of the transpose. Programs run along a row of it first, then down, then to the
    # next expert, so that neighbouring programs share sectors of plain scales.
    first_c = tl.program_id(0) % col_programs * BLOCKS
    first_r = tl.program_id(0) // col_programs % row_programs * ROWS
    e = (tl.program_id(0) // col_programs // row_programs).to(tl.int64)
    r, c, k = tl.arange(0, ROWS // 4) * 4, tl.arange(0, BLOCKS), tl.arange(0, BLOCKS * 32)
    BYTES: tl.constexpr = 16 if qdata.dtype.element_ty == tl.uint8 else 32  # e2m1 has two codes in a byte
    of_row = tl.arange(0, BLOCKS * BYTES)
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
    x0 = _values(codes, scales, r < rows, in_bytes, in_blocks)
    x1 = _values(codes + step, scales + scale_step, r + 1 < rows, in_bytes, in_blocks)
    x2 = _values(codes + 2 * step, scales + 2 * scale_step, r + 2 < rows, in_bytes, in_blocks)
    x3 = _values(codes + 3 * step, scales + 3 * scale_step, r + 3 < rows, in_bytes, in_blocks)
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
    per_byte = element(qdata.dtype).per_byte
    shape = list(qdata.shape)
    shape[axis] *= per_byte
    out = torch.empty(shape, dtype=out_dtype, device=qdata.device)
    if not out.numel():
        return out
    blocked = scale_layout == "blocked"
    q = qdata if axis == -1 else qdata.mT
    if per_byte > 1:
        q = q.view(torch.uint8)
    *lead, R, K = q.shape
    K *= per_byte
    C, E = K // MX_BLOCK_SIZE, lead[0] if lead else 1
    stride_e, scale_stride_e = (q.stride(0), scale.stride(0)) if lead else (0, 0)
    scale_stride_r = 0 if blocked else scale.stride(-2)
    strides = (stride_e, *q.stride()[-2:], scale_stride_e, scale_stride_r, scale.stride(-1))
    args = q, scale.view(torch.uint8), out
    if axis == -2:
        config = for_device(CONFIGS, q.device)["turned" if out_dtype == torch.bfloat16 else "turned_fp32"]
        row_programs, col_programs = -(-R // config["ROWS"]), -(-C // config["BLOCKS"])
        grid = (row_programs * col_programs * E, 1, 1)
        _mx_dequantize_turned[grid](*args, R, C, *strides, row_programs, col_programs, blocked, **config, **UNFUSED)
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
    _mx_dequantize[grid](*args, R, C, *strides, row_groups, layout, even, ROW_TILES=_ROW_TILES, **config, **UNFUSED)
    return out
