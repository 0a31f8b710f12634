"""nvfp4_dequantize in Triton: the kernels of mx_dequantize, for codes that share a byte and two levels of scales.

Along axis -1, a program owns a run of scale bytes, in the order in which they lie in memory. Along axis -2, codes and
scales are stored transposed, and the output is not: a program transposes a tile of values.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxspec.formats import NVFP4_BLOCK_SIZE
from mxspec.triton_kernels.common.blocked import blocked_shape, row_col_in_tile
from mxspec.triton_kernels.common.launch import UNFUSED, for_device
from mxspec.triton_kernels.common.nvfp4_numerics import values_of_pairs

# At 0.97 of a bare cast's rate on an H100. Blackwell: compiled, not run.
RANK = {(9, 0): 1, (10, 0): 1}
# A program has BLOCKS scale bytes, that is, 16 * BLOCKS codes. "turned": ROWS rows of the transpose by BLOCKS of their
# blocks. No other tile was measured.
_HOPPER = {
    "flat": {"BLOCKS": 128, "num_warps": 4},
    "strided": {"BLOCKS": 128, "num_warps": 4},
    "blocked": {"BLOCKS": 128, "num_warps": 4},
    "turned": {"ROWS": 128, "BLOCKS": 4, "num_warps": 4},
    "turned_fp32": {"ROWS": 64, "BLOCKS": 4, "num_warps": 4},
}
CONFIGS = {(9, 0): _HOPPER, (10, 0): _HOPPER}
_ROW_TILES = 32768  # in a grid's second dimension, which holds at most 65535
# The multiplications have no .ftz, which would lose the subnormals.
PTX = (r"ld\.global\.(v[24]\.)?b(8|16|32)", r"st\.global\.v4\.b32", r"cvt\.rn\.f16x2\.e4m3x2", r"mul\.(rn\.)?f32")


def supports(qdata: Tensor, scale: Tensor, tensor_scale: Tensor, *, axis: int = -1, **_: Any) -> str | None:
    if qdata.numel() > 2**33:
        return f"counts blocks in 32 bits, so there may be up to 2^34 codes; there are {2 * qdata.numel()}"
    if qdata.shape[axis] >= 2**27:
        name, size = "K" if axis == -1 else "M", 2 * qdata.shape[axis]
        return f"counts the bytes of a row of tiles in 32 bits, so {name} must be below 2^28; it is {size}"
    if qdata.ndim == 3 and qdata.shape[0] > 65535:
        return f"takes up to 65535 experts, the limit of its grid; qdata has {qdata.shape[0]}"
    return None


@triton.jit
def _nvfp4_dequantize(
    qdata, scale, tensor_scale, out,
    R, C, stride_e, stride_r, stride_k, scale_stride_e, scale_stride_r, scale_stride_c, tensor_scale_stride, row_groups,
    LAYOUT: tl.constexpr, EVEN: tl.constexpr, BLOCKS: tl.constexpr, ROW_TILES: tl.constexpr,
):  # fmt: skip
    # A thread reads as many bytes at once as make 16 bytes of output, so that no thread exchanges values.
    at_once: tl.constexpr = 128 // out.dtype.element_ty.primitive_bitwidth
    i = tl.arange(0, BLOCKS)
    j, pair = tl.max_contiguous(tl.arange(0, 16), at_once), tl.max_contiguous(tl.arange(0, 8), at_once // 2)
    e = (tl.program_id(2) // row_groups).to(tl.int64)  # row_groups is 1 below 2^22 rows, and folds away
    # The pointers move to the start of the program's part. Most offsets from there fit in 32 bits.
    if LAYOUT == "flat":
        # Codes and scales of a matrix are contiguous: byte n scales the 16 codes at 8 * n. No division is needed.
        start = tl.program_id(0).to(tl.int64) * BLOCKS
        in_matrix = (tl.program_id(0) * BLOCKS + i < R * C) | EVEN
        q_offset = i[:, None] * 8 + pair[None, :]
        out_offset = i[:, None] * 16 + j[None, :]
        scale_offset = i
        qdata += e * stride_e + start * 8
        out += (e * R * C + start) * 16
        scale += e * scale_stride_e + start
    elif LAYOUT == "strided":
        n = tl.program_id(0) * BLOCKS + i
        in_matrix = n < R * C
        row, c = (n // C).to(tl.int64), n % C
        k = c[:, None] * 8 + pair[None, :]
        q_offset = row[:, None] * stride_r + k.to(tl.int64) * stride_k
        out_offset = n.to(tl.int64)[:, None] * 16 + j[None, :]
        scale_offset = row * scale_stride_r + c.to(tl.int64) * scale_stride_c
        qdata += e * stride_e
        out += e * R * C * 16
        scale += e * scale_stride_e
    else:
        parts: tl.constexpr = 512 // BLOCKS  # programs a tile
        row_tile = (tl.program_id(2) % row_groups * ROW_TILES + tl.program_id(1)).to(tl.int64)
        row, col = row_col_in_tile(tl.program_id(0) % parts * BLOCKS + i)
        c = tl.program_id(0) // parts * 4 + col
        in_matrix = (row_tile * 128 + row < R) & (c < C)
        k = c[:, None] * 8 + pair[None, :]
        q_offset = row.to(tl.int64)[:, None] * stride_r + k.to(tl.int64) * stride_k
        out_offset = row.to(tl.int64)[:, None] * (C * 16) + (c[:, None] * 16 + j[None, :])
        scale_offset = i.to(tl.int64) * scale_stride_c
        qdata += e * stride_e + row_tile * 128 * stride_r
        out += (e * R + row_tile * 128) * C * 16
        scale += e * scale_stride_e
        scale += (row_tile * tl.cdiv(C, 4) * 512 + tl.program_id(0) * BLOCKS) * scale_stride_c

    T = tl.load(tensor_scale + e * tensor_scale_stride)
    q = tl.load(qdata + q_offset, mask=in_matrix[:, None], other=0)
    s = tl.load(scale + scale_offset, mask=in_matrix).to(tl.float32)
    value = values_of_pairs(q, s[:, None], T, out.dtype.element_ty)
    tl.store(out + out_offset, value, mask=in_matrix[:, None])


@triton.jit
def _values(codes, scale, T, in_rows, in_pairs, in_blocks, DTYPE: tl.constexpr):
    """The values of blocks, `(rows, 16 * blocks)`.

    `codes` are pointers `(rows, 8 * blocks)`, and `scale` are pointers `(rows, blocks)`.
    """
    s = tl.load(scale, mask=in_rows[:, None] & in_blocks[None, :]).to(tl.float32)
    s = tl.broadcast_to(s[:, :, None], (scale.shape[0], scale.shape[1], 8)).reshape(codes.shape)
    return values_of_pairs(tl.load(codes, mask=in_rows[:, None] & in_pairs[None, :], other=0), s, T, DTYPE)


@triton.jit
def _nvfp4_dequantize_turned(
    qdata, scale, tensor_scale, out,
    R, C, stride_e, stride_r, stride_k, scale_stride_e, scale_stride_r, scale_stride_c, tensor_scale_stride,
    row_programs, col_programs,
    BLOCKED: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    # Rows and blocks are rows and blocks of the transpose. Programs run along a row of it first, then down, then to the
    # next expert, so that neighbouring programs share sectors of plain scales.
    first_c = tl.program_id(0) % col_programs * BLOCKS
    first_r = tl.program_id(0) // col_programs % row_programs * ROWS
    e = (tl.program_id(0) // col_programs // row_programs).to(tl.int64)
    r, c, pair = tl.arange(0, ROWS // 4) * 4, tl.arange(0, BLOCKS), tl.arange(0, BLOCKS * 8)
    qdata += e * stride_e + first_r.to(tl.int64) * stride_r + first_c.to(tl.int64) * 8 * stride_k
    codes = qdata + (r.to(tl.int64)[:, None] * stride_r + pair.to(tl.int64)[None, :] * stride_k)
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
    rows, in_pairs, in_blocks = R - first_r, first_c * 8 + pair < C * 8, first_c + c < C
    T = tl.load(tensor_scale + e * tensor_scale_stride)
    x0 = _values(codes, scales, T, r < rows, in_pairs, in_blocks, out.dtype.element_ty)
    x1 = _values(codes + step, scales + scale_step, T, r + 1 < rows, in_pairs, in_blocks, out.dtype.element_ty)
    x2 = _values(codes + 2 * step, scales + 2 * scale_step, T, r + 2 < rows, in_pairs, in_blocks, out.dtype.element_ty)
    x3 = _values(codes + 3 * step, scales + 3 * scale_step, T, r + 3 < rows, in_pairs, in_blocks, out.dtype.element_ty)
    x = tl.join(tl.join(x0, x2), tl.join(x1, x3))  # (r // 4, k, r % 4 // 2, r % 2)
    x = x.permute(1, 0, 2, 3).reshape(BLOCKS * 16, ROWS)
    n, k = tl.arange(0, ROWS), tl.arange(0, BLOCKS * 16)
    out += (e * C * 16 + first_c.to(tl.int64) * 16) * R + first_r
    mask = (first_c * 16 + k < C * 16)[:, None] & (n < rows)[None, :]
    tl.store(out + (k.to(tl.int64)[:, None] * R + n[None, :]), x, mask=mask)


def nvfp4_dequantize(
    qdata: Tensor,
    scale: Tensor,
    tensor_scale: Tensor,
    *,
    axis: int = -1,
    out_dtype: torch.dtype = torch.bfloat16,
    scale_layout: str = "plain",
) -> Tensor:
    sizes = [2 * n if d - qdata.ndim == axis else n for d, n in enumerate(qdata.shape)]
    out = qdata.new_empty(sizes, dtype=out_dtype)
    if not out.numel():
        return out
    blocked, q = scale_layout == "blocked", qdata.view(torch.uint8)
    if axis == -2:
        q = q.mT
    *lead, R, stored = q.shape
    C, E = 2 * stored // NVFP4_BLOCK_SIZE, lead[0] if lead else 1
    of_experts = (q.stride(0), scale.stride(0), tensor_scale.stride(0)) if lead else (0, 0, 0)
    scale_stride_r = 0 if blocked else scale.stride(-2)
    strides = (of_experts[0], *q.stride()[-2:], of_experts[1], scale_stride_r, scale.stride(-1), of_experts[2])
    if axis == -2:
        config = for_device(CONFIGS, q.device)["turned" if out_dtype == torch.bfloat16 else "turned_fp32"]
        row_programs, col_programs = -(-R // config["ROWS"]), -(-C // config["BLOCKS"])
        _nvfp4_dequantize_turned[row_programs * col_programs * E, 1, 1](
            q, scale, tensor_scale, out, R, C, *strides, row_programs, col_programs, blocked, **config, **UNFUSED
        )
        return out
    contiguous = q.is_contiguous() and scale.is_contiguous()
    layout = "blocked" if blocked else "flat" if contiguous else "strided"
    config = for_device(CONFIGS, q.device)[layout]
    blocks, row_groups = config["BLOCKS"], 1
    even = R * C % blocks == 0
    if blocked:
        row_tiles, col_tiles = blocked_shape(R, C)
        row_groups = -(-row_tiles // _ROW_TILES)
        grid = (col_tiles * 512 // blocks, min(row_tiles, _ROW_TILES), E * row_groups)
    else:
        grid = (-(-R * C // blocks), 1, E)
    _nvfp4_dequantize[grid](
        q, scale, tensor_scale, out, R, C, *strides, row_groups, layout, even, ROW_TILES=_ROW_TILES, **config, **UNFUSED
    )
    return out
