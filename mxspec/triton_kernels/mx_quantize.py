"""mx_quantize in Triton: a program owns a run of scale bytes, in the order in which they lie in memory.

The place of a byte determines the row and the 32 elements that it scales. So one kernel serves every scale layout, and
its scale stores are consecutive bytes. The same kernel also writes the padding of the blocked layout: it is the scale
of a block of zeros, which is 0.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxspec.formats import element, exponent_rule
from mxspec.triton_kernels.common import fp6
from mxspec.triton_kernels.common.blocked import blocked_shape, row_col_in_tile
from mxspec.triton_kernels.common.launch import UNFUSED, for_device, span
from mxspec.triton_kernels.common.numerics import (
    e2m1_pairs,
    magnitude_bits,
    reciprocal_scale,
    saturating_cast,
    shared_exponent,
    widened,
)
from mxspec.triton_kernels.common.pairs import e2m1_of_mx_blocks, instructions, load_mx_blocks
from mxspec.triton_kernels.tiles import mx_columns

# Triton and Helion have the same rate. Triton is first because a call takes less host time
# (benchmarks/results/decisions.md).
RANK = {(9, 0): 1, (10, 0): 1}  # Blackwell: compiled, not run
# By compute capability and layout. A program has BLOCKS scale bytes, that is, 32 * BLOCKS elements. The race by
# benchmarks/tune.py: benchmarks/results/decisions.md.
_HOPPER = {
    "flat": {"BLOCKS": 64, "num_warps": 2},
    "strided": {"BLOCKS": 64, "num_warps": 2},
    "blocked": {"BLOCKS": 64, "num_warps": 4},
    "flat, words": {"BLOCKS": 64, "num_warps": 1},
    "blocked, words": {"BLOCKS": 128, "num_warps": 4},
}
CONFIGS = {(9, 0): _HOPPER, (10, 0): _HOPPER}
PTX = mx_columns.PTX
_SPAN = 2  # with words and blocked scales, a program has the same part of up to so many tiles
_ROW_TILES = 32768  # in a grid's second dimension, which holds at most 65535


def supports(x: Tensor, *, axis: int = -1, **_: Any) -> str | None:
    if axis == -2:
        if not _is_transposed(x):
            return mx_columns.supports(x)
        x = x.mT
    if x.numel() > 2**35:
        return f"counts blocks in 32 bits, so x may have up to 2^35 elements; it has {x.numel()}"
    if x.shape[-1] >= 2**29:
        return f"counts the bytes of a row of tiles in 32 bits, so K must be below 2^29; it is {x.shape[-1]}"
    if x.ndim == 3 and x.shape[0] > 65535:
        return f"takes up to 65535 experts, the limit of its grid; x has {x.shape[0]}"
    return None


def _is_transposed(x: Tensor) -> bool:
    """Whether consecutive elements in memory are those of a column.

    Blocks along a column are then blocks along the rows of the transpose.
    """
    return x.stride(-2) == 1 and x.stride(-1) != 1


@triton.jit
def _mx_quantize(
    x, qdata, scale,
    R, C, stride_e, stride_r, stride_k, row_groups, span,
    EMAX: tl.constexpr, ROUND: tl.constexpr, EXCEPT: tl.constexpr,
    FP6: tl.constexpr, ASM: tl.constexpr,
    LAYOUT: tl.constexpr, EVEN: tl.constexpr, BLOCKS: tl.constexpr, ROW_TILES: tl.constexpr,
):  # fmt: skip
    # The elements of qdata in a block: codes of FP8 and int8, pairs or words of e2m1, or words of FP6.
    WORDS: tl.constexpr = qdata.dtype.element_ty == tl.int32
    E2M1: tl.constexpr = WORDS or qdata.dtype.element_ty == tl.uint8
    SIZE: tl.constexpr = fp6.SHORTS if FP6 else 4 if WORDS else 16 if E2M1 else 32
    i = tl.arange(0, BLOCKS)
    j = tl.arange(0, 8 if WORDS else 32)  # see load_mx_blocks
    of_block = tl.arange(0, 32 if FP6 else SIZE)
    # With blocked scales and words, a program has the same part of up to `span` tiles, one after the other. The
    # pointers move to the start of the first part. Most offsets from there fit in 32 bits.
    if LAYOUT == "flat":
        # x is contiguous: byte n scales the 32 elements at 32 * n, and no division is needed.
        steps = 1
        start = tl.program_id(0).to(tl.int64) * BLOCKS
        in_matrix = (start + i < R * C) | EVEN
        x_offset = i[:, None] * 32 + j[None, :]
        q_offset = i[:, None] * SIZE + of_block[None, :]
        place = i
        x += start * 32
        qdata += start * SIZE
        scale += start
    elif LAYOUT == "strided":
        e = tl.program_id(2).to(tl.int64)
        steps = 1
        n = tl.program_id(0) * BLOCKS + i
        in_matrix = n < R * C
        k = (n % C)[:, None] * 32 + j[None, :]
        x_offset = (n // C).to(tl.int64)[:, None] * stride_r + k.to(tl.int64) * stride_k
        q_offset = n.to(tl.int64)[:, None] * SIZE + of_block[None, :]
        place = n.to(tl.int64)
        x += e * stride_e
        qdata += e * R * C * SIZE
        scale += e * R * C + tl.program_id(0) * BLOCKS
    else:
        parts: tl.constexpr = 512 // BLOCKS  # programs a tile
        e = (tl.program_id(2) // row_groups).to(tl.int64)  # below 2^22 rows row_groups is 1, and folds away
        row_tile = (tl.program_id(2) % row_groups * ROW_TILES + tl.program_id(1)).to(tl.int64)
        row, col = row_col_in_tile(tl.program_id(0) % parts * BLOCKS + i)
        first = tl.program_id(0) // parts * span
        steps = tl.minimum(span, tl.cdiv(C, 4) - first) if WORDS else 1
        c = first * 4 + col
        k = c[:, None] * 32 + j[None, :]
        x_offset = row.to(tl.int64)[:, None] * stride_r + k.to(tl.int64) * stride_k
        q_offset = row.to(tl.int64)[:, None] * (C * SIZE) + (c[:, None] * SIZE + of_block[None, :])
        place = row.to(tl.int64) * C + c
        x += e * stride_e + row_tile * 128 * stride_r
        qdata += (e * R + row_tile * 128) * C * SIZE
        scale += (e * tl.cdiv(R, 128) + row_tile) * tl.cdiv(C, 4) * 512
        scale += first.to(tl.int64) * 512 + tl.program_id(0) % parts * BLOCKS

    for step in range(steps):
        if LAYOUT == "blocked":
            in_matrix = (row_tile * 128 + row < R) & ((first + step) * 4 + col < C)
        owned = row_tile < tl.cdiv(R, 128) if LAYOUT == "blocked" else in_matrix
        if WORDS:
            quarters = load_mx_blocks(x + x_offset, stride_k, in_matrix[:, None])
            words, byte = e2m1_of_mx_blocks(quarters, x.dtype.element_ty, EMAX, ROUND, EXCEPT, ASM)
            tl.store(qdata + q_offset, words, mask=in_matrix[:, None])
        else:
            values = widened(tl.load(x + x_offset, mask=in_matrix[:, None], other=0))
            byte = shared_exponent(tl.max(magnitude_bits(values), axis=1), EMAX, ROUND, EXCEPT)
            scaled = values * reciprocal_scale(byte, EMAX)[:, None]
            if E2M1:
                tl.store(qdata + q_offset, e2m1_pairs(scaled, ASM), mask=in_matrix[:, None])
            elif FP6:
                fp6.store_blocks(qdata, place, fp6.encoded(scaled, FP6), in_matrix)
            else:
                tl.store(qdata + q_offset, saturating_cast(scaled, qdata.dtype.element_ty), mask=in_matrix[:, None])
        tl.store(scale + i, byte.to(tl.uint8), mask=owned)
        if LAYOUT == "blocked":  # to the next tile
            x += tl.cast(stride_k, tl.int64) * 128
            qdata += SIZE * 4
            scale += 512


def mx_quantize(
    x: Tensor,
    *,
    axis: int = -1,
    elem_dtype: torch.dtype | str = torch.float8_e4m3fn,
    scaling: str = "rceil",
    scale_layout: str = "plain",
) -> tuple[Tensor, Tensor]:
    fmt = element(elem_dtype)
    if axis == -2:
        if _is_transposed(x):
            qdata, scale = mx_quantize(x.mT, elem_dtype=elem_dtype, scaling=scaling, scale_layout=scale_layout)
        else:
            qdata, scale = mx_columns.mx_tile(x, fmt, scaling, scale_layout)
        return qdata.mT, scale
    *lead, R, K = x.shape
    C, E = K // 32, lead[0] if lead else 1
    if fmt in fp6.FORMATS:
        qdata = fp6.empty(x, (*lead, R, K), torch.int16)
    else:
        qdata = mx_columns.empty_codes(x, (*lead, R, K), fmt, words=x.dtype != torch.float32)
    row_groups, even = 1, False
    if scale_layout == "blocked":
        layout, (row_tiles, col_tiles) = "blocked", blocked_shape(R, C)
        scale = x.new_empty((*lead, 512 * row_tiles * col_tiles), dtype=torch.uint8)
        row_groups = -(-row_tiles // _ROW_TILES)
    else:
        layout = "flat" if x.is_contiguous() else "strided"
        scale = x.new_empty((*lead, R, C), dtype=torch.uint8)
    words = layout != "strided" and qdata.dtype == torch.int32
    config = for_device(CONFIGS, x.device)[f"{layout}, words" if words else layout]
    blocks, of_program = config["BLOCKS"], 1
    if layout == "flat":
        R, even = E * R, R * E * C % blocks == 0
        grid = (-(-R * C // blocks), 1, 1)
    elif layout == "strided":
        grid = (-(-R * C // blocks), 1, E)
    else:
        of_tile = 512 // blocks
        of_program = span(of_tile * col_tiles, row_tiles * E, x.device, _SPAN) if words else 1
        grid = (of_tile * -(-col_tiles // of_program), min(row_tiles, _ROW_TILES), E * row_groups)
    if scale.numel():
        _mx_quantize[grid](
            x, qdata, scale, R, C, x.stride(0) if lead else 0, x.stride(-2), x.stride(-1), row_groups,
            of_program, *exponent_rule(fmt, scaling, x.dtype), fp6.mantissa_bits(fmt), instructions(x.device),
            layout, even, ROW_TILES=_ROW_TILES, **config, **UNFUSED,
        )  # fmt: skip
    return fmt.as_codes(qdata.view(fmt.storage_dtype)), scale.view(torch.float8_e8m0fnu)
