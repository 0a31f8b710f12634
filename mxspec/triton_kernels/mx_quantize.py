"""mx_quantize in Triton: a program owns a run of scale bytes, in the order in which they lie in memory.

From a byte's place follow the row and the 32 elements that it scales. So one kernel serves every scale layout, its
scale stores are consecutive bytes, and the padding of the blocked layout is written in passing, as the scale of a
block of zeros, which is 0.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxspec.formats import element
from mxspec.triton_kernels._blocked import blocked_shape, row_col_in_tile
from mxspec.triton_kernels._numerics import block_amax, reciprocal_scale, saturating_cast, shared_exponent

RANK = {(9, 0): 1, (10, 0): 1}
# BLOCKS scale bytes, so 32 * BLOCKS elements, a program. A thread holds 16 or 32 elements: two or four 16-byte loads.
CONFIGS: dict[str, dict[str, int]] = {
    "flat": {"BLOCKS": 64, "num_warps": 2},
    "strided": {"BLOCKS": 64, "num_warps": 2},
    "blocked": {"BLOCKS": 64, "num_warps": 4},
}
_ROW_TILES = 32768  # in a grid's second dimension, which holds at most 65535


def supports(x: Tensor, *, axis: int = -1, **_: Any) -> str | None:
    if axis != -1:
        return "has only axis -1"
    if x.numel() > 2**35:
        return f"counts blocks in 32 bits, so x may have up to 2^35 elements; it has {x.numel()}"
    return None


@triton.jit
def _mx_quantize(
    x, qdata, scale,
    R, C, stride_e, stride_r, stride_k, row_groups,
    MAX: tl.constexpr, EMAX: tl.constexpr, MANTISSA: tl.constexpr, SCALING: tl.constexpr,
    LAYOUT: tl.constexpr, EVEN: tl.constexpr, BLOCKS: tl.constexpr, ROW_TILES: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, BLOCKS)
    j = tl.arange(0, 32)
    if LAYOUT == "flat":  # x is contiguous: byte o scales the 32 elements at 32 * o, and no division is needed
        o = tl.program_id(0).to(tl.int64) * BLOCKS + i
        q_offset = o[:, None] * 32 + j[None, :]
        x_offset = q_offset
        in_matrix = (o < R * C) | EVEN
        owned = in_matrix
    else:
        e = (tl.program_id(2) // row_groups).to(tl.int64)  # row_groups is 1, and folds away, below 2^22 rows
        if LAYOUT == "strided":
            n = tl.program_id(0) * BLOCKS + i
            r, c = (n // C).to(tl.int64), n % C
            o = e * R * C + n
            in_matrix = n < R * C
            owned = in_matrix
        else:
            parts: tl.constexpr = 512 // BLOCKS  # programs a tile
            row_tile = tl.program_id(2) % row_groups * ROW_TILES + tl.program_id(1)
            row, col = row_col_in_tile(tl.program_id(0) % parts * BLOCKS + i)
            r, c = row_tile.to(tl.int64) * 128 + row, tl.program_id(0) // parts * 4 + col
            col_tiles = tl.cdiv(C, 4)
            o = ((e * tl.cdiv(R, 128) + row_tile) * col_tiles * 512) + tl.program_id(0) * BLOCKS + i
            in_matrix = (r < R) & (c < C)
            owned = row_tile < tl.cdiv(R, 128)
        k = c[:, None] * 32 + j[None, :]
        x_offset = e * stride_e + r[:, None] * stride_r + k.to(tl.int64) * stride_k
        q_offset = (e * R + r)[:, None] * (C * 32) + k

    values = tl.load(x + x_offset, mask=in_matrix[:, None], other=0)
    byte = shared_exponent(block_amax(values), MAX, EMAX, MANTISSA, SCALING)
    q = saturating_cast(values.to(tl.float32) * reciprocal_scale(byte)[:, None], qdata.dtype.element_ty)
    tl.store(qdata + q_offset, q, mask=in_matrix[:, None])
    tl.store(scale + o, byte.to(tl.uint8), mask=owned)


def mx_quantize(
    x: Tensor,
    *,
    axis: int = -1,
    elem_dtype: torch.dtype | str = torch.float8_e4m3fn,
    scaling: str = "rceil",
    scale_layout: str = "plain",
) -> tuple[Tensor, Tensor]:
    fmt = element(elem_dtype)
    *lead, R, K = x.shape
    C, E = K // 32, lead[0] if lead else 1
    qdata = torch.empty(x.shape, dtype=fmt.dtype, device=x.device)
    if scale_layout == "plain":
        scale = torch.empty((*lead, R, C), dtype=torch.uint8, device=x.device)
        layout = "flat" if x.is_contiguous() else "strided"
    else:
        row_tiles, col_tiles = blocked_shape(R, C)
        scale = torch.empty((*lead, 512 * row_tiles * col_tiles), dtype=torch.uint8, device=x.device)
        layout = "blocked"
    if scale.numel():
        config, row_groups, even = CONFIGS[layout], 1, False
        blocks = config["BLOCKS"]
        if layout == "flat":
            R, even = E * R, scale.numel() % blocks == 0
            grid = (-(-scale.numel() // blocks), 1, 1)
        elif layout == "strided":
            grid = (-(-R * C // blocks), 1, E)
        else:
            row_groups = -(-row_tiles // _ROW_TILES)
            grid = (col_tiles * 512 // blocks, min(row_tiles, _ROW_TILES), E * row_groups)
        _mx_quantize[grid](
            x, qdata, scale, R, C, x.stride(0) if lead else 0, x.stride(-2), x.stride(-1), row_groups,
            MAX=fmt.max, EMAX=fmt.emax, MANTISSA=fmt.mantissa_bits, SCALING=scaling,
            LAYOUT=layout, EVEN=even, ROW_TILES=_ROW_TILES, **config,
        )  # fmt: skip
    return qdata, scale.view(torch.float8_e8m0fnu)
