"""mx_fake_quantize_rowcol_groups in Triton: a program reads a tile of one group once and writes both values of it.

A tile has ROWS tokens by COLS features, both multiples of 32, and begins at a block of its group. So every block of
both directions lies inside one tile. Both results are row-major as x is, so nothing is transposed. Rows without a group
count as one more group, whose column values are 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxspec.formats import element, exponent_rule
from mxspec.triton_kernels.common.groups import chunk, group_of, padded_rows
from mxspec.triton_kernels.common.launch import UNFUSED, for_device, grid
from mxspec.triton_kernels.common.numerics import (
    magnitude_bits,
    reciprocal_scale,
    saturating_cast,
    scale_value,
    shared_exponent,
    widened,
)

RANK = {(9, 0): 1, (10, 0): 1}  # compiled and interpreted; neither Hopper nor Blackwell has run it
PTX = (r"ld\.global\.v4\.b32", r"st\.global\.v4\.b32", r"cvt\.rn\.satfinite\.e[45]m[32]x2\.f32")

# Not timed yet. Larger tiles take twice the registers and one instruction an element less.
_HOPPER = {"ROWS": 32, "COLS": 128, "num_warps": 4}
CONFIGS = {(9, 0): _HOPPER, (10, 0): _HOPPER}


@triton.jit
def _read_back(x, byte, DTYPE: tl.constexpr):
    """The bfloat16 values of the codes of blocks, whose scale bytes are `byte`."""
    code = saturating_cast(x * reciprocal_scale(byte), DTYPE)
    return (code.to(tl.float32) * scale_value(byte)).to(tl.bfloat16)


# `tokens` is not specialized: with tokens == 1 ptxas 12.8 generates wrong code (see mx_quantize_groups).
@triton.jit(do_not_specialize=["tokens"])
def _fake_quantize(
    x, rows, columns, offs,
    tokens, K, tiles, stride_m, stride_k, G, stride_offs,
    DTYPE: tl.constexpr, EMAX: tl.constexpr, ROUND: tl.constexpr, EXCEPT: tl.constexpr, CHUNK: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    group, token0, stop, begin = group_of(tile * ROWS, offs, stride_offs, G, None, None, False, ROWS, CHUNK)
    last = tl.load(offs + (G - 1) * stride_offs, mask=G > 0, other=0)
    grouped = group < G
    token0, stop = tl.where(grouped, token0, last), tl.where(grouped, tl.minimum(stop, tokens), tokens)
    r, d = tl.arange(0, ROWS), tl.arange(0, COLS)
    token = token0 + tile * ROWS - begin + r
    k = tl.program_id(0) * COLS + d
    # An offs out of order may read a row twice, but no row outside of x.
    there = ((token >= 0) & (token < stop) & (tile < tiles))[:, None] & (k < K)[None, :]
    row = token.to(tl.int64)[:, None]
    v = widened(tl.load(x + row * stride_m + k.to(tl.int64)[None, :] * stride_k, mask=there, other=0))
    v = v.reshape(ROWS // 32, 32, COLS // 32, 32)
    bits = magnitude_bits(v)
    of_row = shared_exponent(tl.max(bits, 3), EMAX, ROUND, EXCEPT)[:, :, :, None]
    of_column = shared_exponent(tl.max(bits, 1), EMAX, ROUND, EXCEPT)[:, None, :, :]
    to = row * K + k[None, :]
    tl.store(rows + to, _read_back(v, of_row, DTYPE).reshape(ROWS, COLS), mask=there)
    if grouped:
        tl.store(columns + to, _read_back(v, of_column, DTYPE).reshape(ROWS, COLS), mask=there)
    else:
        tl.store(columns + to, tl.zeros((ROWS, COLS), tl.bfloat16), mask=there)


def mx_fake_quantize_rowcol_groups(
    x: Tensor,
    offs: Tensor,
    *,
    elem_dtype: torch.dtype | str = torch.float8_e4m3fn,
    scaling: str = "rceil",
    check_offs: bool = False,
) -> tuple[Tensor, Tensor]:
    (M, K), G, fmt = x.shape, offs.shape[0], element(elem_dtype)
    rows, columns = (x.new_empty((M, K), dtype=torch.bfloat16) for _ in range(2))
    if not x.numel():
        return rows, columns
    chosen = for_device(CONFIGS, x.device)
    tiles = padded_rows(M, G, chosen["ROWS"]) // chosen["ROWS"]
    dtype = tl.float8e4nv if fmt.dtype == torch.float8_e4m3fn else tl.float8e5
    _fake_quantize[grid(-(-K // chosen["COLS"]), tiles)](
        x, rows, columns, offs, M, K, tiles, *x.stride(), G, offs.stride(0),
        dtype, *exponent_rule(fmt, scaling, x.dtype), chunk(G), **chosen, **UNFUSED,
    )  # fmt: skip
    return rows, columns
