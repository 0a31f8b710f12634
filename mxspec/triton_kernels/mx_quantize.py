"""mx_quantize in Triton: a program owns a run of scale bytes, in the order in which they lie in memory.

From a byte's place follow the row and block that it scales: a division for the plain layout, the inverse of the tile
formula for the blocked one. So one kernel serves both layouts, its scale stores are always consecutive bytes, and the
padding of the blocked layout is written as the scale of a block of zeros, which is 0.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxspec.formats import element
from mxspec.triton_kernels._blocked import blocked_shape, blocked_to_row_col
from mxspec.triton_kernels._numerics import magnitude_bits, reciprocal_scale, saturating_cast, shared_exponent

RANK = {(9, 0): 1, (10, 0): 1}
CONFIGS: dict[str, dict[str, int]] = {
    "plain": {"BLOCKS": 64, "num_warps": 2},
    "blocked": {"BLOCKS": 64, "num_warps": 2},
}
_TL_DTYPE = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


def supports(x: Tensor, *, axis: int = -1, **_: Any) -> str | None:
    if axis != -1:
        return "has only axis -1"
    if x.numel() // 32 >= 2**31 - 2**20:  # room for padding and for the last program's overhang
        return "counts scale bytes in 32 bits: x has more than 2^36 elements"
    return None


@triton.jit
def _mx_quantize(
    x, qdata, scale,
    R, C, stride_e, stride_r, stride_k, bytes_per_matrix, programs,
    MAX: tl.constexpr, EMAX: tl.constexpr, MANTISSA: tl.constexpr,
    SCALING: tl.constexpr, BLOCKED: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    e = (tl.program_id(0) // programs).to(tl.int64)
    o = tl.program_id(0) % programs * BLOCKS + tl.arange(0, BLOCKS)
    if BLOCKED:
        r, c = blocked_to_row_col(o, C)
        valid = (r < R) & (c < C)
    else:
        r, c = o // C, o % C
        valid = r < R
    k = c[:, None] * 32 + tl.arange(0, 32)[None, :]  # K < 2^31: int32 inside a row, int64 between rows

    values = tl.load(x + e * stride_e + r.to(tl.int64)[:, None] * stride_r + k * stride_k, mask=valid[:, None], other=0)
    byte = shared_exponent(tl.max(magnitude_bits(values), axis=1), MAX, EMAX, MANTISSA, SCALING)
    q = saturating_cast(values.to(tl.float32) * reciprocal_scale(byte)[:, None], qdata.dtype.element_ty)

    row = e * R + r
    tl.store(qdata + (row * C)[:, None] * 32 + k, q, mask=valid[:, None])
    tl.store(scale + e * bytes_per_matrix + o, byte.to(tl.uint8), mask=o < bytes_per_matrix)


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
    C = K // 32
    row_tiles, col_tiles = blocked_shape(R, C)
    shape = (R, C) if scale_layout == "plain" else (512 * row_tiles * col_tiles,)
    qdata = torch.empty(x.shape, dtype=fmt.dtype, device=x.device)
    scale = torch.empty(*lead, *shape, dtype=torch.uint8, device=x.device)
    if scale.numel():
        E = lead[0] if lead else 1
        bytes_per_matrix = scale.numel() // E
        config = CONFIGS[scale_layout]
        programs = triton.cdiv(bytes_per_matrix, config["BLOCKS"])
        _mx_quantize[(programs * E,)](
            x, qdata, scale,
            R, C, x.stride(0) if lead else 0, x.stride(-2), x.stride(-1), bytes_per_matrix, programs,
            MAX=fmt.max, EMAX=fmt.emax, MANTISSA=fmt.mantissa_bits,
            SCALING=scaling, BLOCKED=scale_layout == "blocked", **config,
        )  # fmt: skip
    return qdata, scale.view(torch.float8_e8m0fnu)
