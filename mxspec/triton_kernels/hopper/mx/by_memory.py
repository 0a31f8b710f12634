"""MX matmuls on Hopper by way of memory: cuBLAS or PyTorch's grouped matmul multiplies bf16 values.

A kernel first writes the bf16 values of both operands to memory.

This way writes and reads more bytes than the Gluon kernel. It pays for a large output: the power limit slows the tensor
cores, and they multiply these values faster than other bf16 numbers, because the values have few mantissa bits. For
token groups it pays if each expert has many tokens, because the Gluon kernel writes no values of weights to memory.

A code times its scale is exactly a bf16 number, unless the scale is near either end of its range. A block with such a
scale, and with a code that is not 0, raises the flag of its row. Then `mx_tiles` computes again each sum whose row of a
or of b has a flag. So a flag does not change the bits of other rows. If no flag is raised, the programs of `mx_tiles`
read only the first flag, which stands for all. For token groups, they also set the rows of no group to 0. NaN and Inf
need no flag.

Three launches prepare the matmul: `_prepare` clears the flags and plans the tiles of token groups, and `_bf16_values`
runs once for each operand.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import grouped_mm

from mxspec.formats import MX_BLOCK_SIZE
from mxspec.triton_kernels.common.blocked import row_col_in_tile
from mxspec.triton_kernels.common.groups import chunk, group_of, store_in_order
from mxspec.triton_kernels.common.launch import UNFUSED, capability, grid, processors
from mxspec.triton_kernels.common.numerics import scale_value
from mxspec.triton_kernels.common.nvfp4_numerics import values_of_pairs
from mxspec.triton_kernels.hopper.nvfp4.launch import FEW as FEW_OF_GROUPS
from mxspec.triton_kernels.hopper.nvfp4.launch import nvfp4_sm90
from mxspec.triton_kernels.hopper.nvfp4.launch import reads as multiplies_values
from mxspec.triton_kernels.hopper.weights import launch as weights
from mxspec.triton_kernels.tiles.mx_matmul import mx_tiles
from mxspec.triton_kernels.tiles.mx_weights import UNSHIFT, mx_weights

E2M1 = torch.float4_e2m1fn_x2
# By code format: the first and the last scale byte under which every code becomes 0, a normal bf16 number, Inf or NaN.
# The smallest code is 2^-9 or 2^-16. The largest is just below 2^9 or 2^16. A quarter or a sixteenth of a value of e2m1
# is exact under every scale: it is a bf16 number also if it is subnormal.
EXACT = {torch.float8_e4m3fn: (10, 246), torch.float8_e5m2: (17, 239), E2M1: (0, 254)}
VALUES = {"BLOCKS": 64, "num_warps": 4}  # as in mx_dequantize
# From this many waves of tiles of 128 x 128 on, the output is large. For smaller outputs, and for few rows, cuBLAS may
# split K and round the partial sums to bf16. Then the bits of a row would depend on the number of rows.
WAVES = 2
FEW = 256
# Tokens per expert, from which it pays to write the values of the weights, too. With T tokens and E experts, this way
# takes the time of 3 * E * N * K bytes for the weights. The Gluon kernel takes a tenth longer than bf16 for
# 2 * T * N * K operations. So neither N nor K decides.
TOKENS = 2048
MAX_GROUPS = 1023  # the limit of PyTorch's grouped matmul


@triton.jit
def _prepare(flags, count, plan, tiles, offs, offs_stride, G, R, ends, CHUNK: tl.constexpr):
    """Set all flags to 0. For token groups, also put offs in order and write the plan.

    The plan holds the first row and the end of each tile of 128 rows. Every group begins a new tile. No row is outside
    of the operand, whatever offs holds.
    """
    tile, at = tl.program_id(0), tl.program_id(0) * 128 + tl.arange(0, 128)
    tl.store(flags + at, 0, mask=at < count)
    if plan is not None:
        if tile == 0:
            store_in_order(offs, offs_stride, G, R, ends, CHUNK)
        if tile < tiles:
            _, first, stop, begin = group_of(tile * 128, offs, offs_stride, G, None, None, False, 128, CHUNK)
            in_scale = tile * 128 <= R + 128 * G - 128
            tl.store(plan + 2 * tile, first + tile * 128 - begin)
            tl.store(plan + 2 * tile + 1, tl.where(in_scale, tl.minimum(stop, R), 0))


@triton.jit(do_not_specialize=["first_flag", "tiles", "all_tiles"])  # so that new values compile no new kernel
def _bf16_values(
    codes, stride_e, stride_r, scale, scale_stride_e, scale_stride_r, scale_stride_c, out, flags, first_flag,
    R, C, tiles, all_tiles, plan,
    BLOCKED: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, UP: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """UP times the values of BLOCKS blocks of a tile of 128 rows, in the order of their scale bytes.

    A value that may be inexact raises a flag.
    """
    place = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    # A thread reads as many codes at once as make 16 bytes of values (see mx_dequantize).
    i, j = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS), tl.max_contiguous(tl.arange(0, 32), 8)
    if BLOCKED:
        row, col = row_col_in_tile(i % 512)
        c = i // 512 * 4 + col
    else:
        row, c = i // C, i % C
    if plan is None:
        e, of_e, top, end = (place // tiles).to(tl.int64), place % tiles, place % tiles * 128, R
    else:  # every group begins a new tile
        e, of_e = tl.cast(0, tl.int64), place
        top = tl.load(plan + 2 * place, mask=place < all_tiles, other=0)
        end = tl.load(plan + 2 * place + 1, mask=place < all_tiles, other=0)
    r = (top + row).to(tl.int64)
    there = (r >= 0) & (r < end) & (row < 128) & (c < C) & (place < all_tiles)
    if BLOCKED:
        scale_at = scale + e * scale_stride_e + of_e.to(tl.int64) * (tl.cdiv(C, 4) * 512) + i
    else:
        scale_at = scale + e * scale_stride_e + r * scale_stride_r + c.to(tl.int64) * scale_stride_c
    byte = tl.load(scale_at, mask=there, other=127).to(tl.int32)
    k = c[:, None] * 32 + j[None, :]
    codes += (e * stride_e + r * stride_r)[:, None]
    if codes.dtype.element_ty == tl.uint8:  # e2m1, two codes in a byte
        pairs = tl.load(codes + c[:, None] * 16 + tl.arange(0, 16)[None, :], mask=there[:, None], other=0)
        code = values_of_pairs(pairs, 1.0, UP, tl.float32)
    else:
        code = tl.load(codes + k, mask=there[:, None], other=0.0).to(tl.float32) * UP
    value = code * scale_value(byte)[:, None]
    out += ((e * R + r) * (C * 32))[:, None] + k
    tl.store(out, value.to(tl.bfloat16), mask=there[:, None])
    beyond = ((byte < FIRST) | ((byte > LAST) & (byte < 255))) & (tl.max(tl.abs(value), 1) > 0)
    tl.store(flags + i * 0, 1, mask=beyond)
    tl.store(flags + first_flag + place * 128 + row, 1, mask=beyond)


def bf16_values(
    codes: Tensor, scale: Tensor, scale_layout: str, flags: Tensor, first_flag: int, plan: Tensor | None = None,
    up: float = 1.0,
) -> Tensor:  # fmt: skip
    """`up` times the bf16 values of codes `(R, K)` or `(E, R, K)`. Rows of e2m1 codes have half as many bytes.

    The kernel raises the flags from `first_flag` on. There is one flag for each row. The rows of each tile of 128 rows
    have 128 flags.

    `plan` holds the first row and the end of each tile of 128 rows, if the rows are in token groups.
    """
    *lead, R, K = codes.shape
    exact, blocked = EXACT[codes.dtype], scale_layout == "blocked"
    if codes.dtype == E2M1:
        K, codes = 2 * K, codes.view(torch.uint8)
    C = K // MX_BLOCK_SIZE
    out = torch.empty((*lead, R, K), dtype=torch.bfloat16, device=codes.device)
    tiles = -(-R // 128)
    all_tiles = tiles * (lead[0] if lead else 1) if plan is None else plan.shape[0]
    of_scale = (scale.stride(0) if lead else 0, *((0, 0) if blocked else scale.stride()[-2:]))
    across = -(-128 * (-(-C // 4) * 4 if blocked else C) // VALUES["BLOCKS"])
    _bf16_values[grid(across, all_tiles)](
        codes, codes.stride(0) if lead else 0, codes.stride(-2), scale.view(torch.uint8), *of_scale,
        out, flags, first_flag, R, C, tiles, all_tiles, plan, blocked, *exact, up, **VALUES,
        **UNFUSED,
    )  # fmt: skip
    return out


def pays(M: int, N: int, device: torch.device) -> bool:
    """Whether this way is faster than the Gluon kernel: on Hopper, for a large output of more than a few rows."""
    if device.type == "cpu" or capability(device) != (9, 0) or M <= FEW:
        return False
    return WAVES * processors(device) <= -(-M // 128) * -(-N // 128)


def pays_for_groups(M: int, N: int, E: int, out_dtype: torch.dtype, device: torch.device) -> bool:
    """As `pays`, for token groups, within the limits of PyTorch's grouped matmul.

    It returns bf16, and rows of the output must begin at multiples of 16 bytes.
    """
    takes = out_dtype == torch.bfloat16 and N % 8 == 0 and E <= MAX_GROUPS
    return takes and M >= TOKENS * E and pays(M, N, device)


def by_weights(
    a: Tensor, a_scale: Tensor | None, b: Tensor, b_scale: Tensor, out_dtype: torch.dtype, scale_layout: str,
    offs: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`mx_gemm`, or with `offs` `mx_grouped_gemm`, by e2m1 weights, on any GPU. Each operand has at least one element.

    If a holds codes, a kernel writes its bf16 values first. For a large output on Hopper, another kernel writes the
    values of the weights, and the Gluon matmul of bf16 values multiplies them. Its sums are those of `mx_weights`: of
    the same numbers, in the same order. cuBLAS may sum in another order.
    """
    M, N, on, up, flags, ends = a.shape[0], b.shape[-2], a.device, 1.0, None, offs
    E, grouped = (1, "") if offs is None else (b.shape[0], "M")
    out = torch.empty((M, N), dtype=out_dtype, device=on)
    if a.dtype == torch.bfloat16 or a_scale is None:
        x = a
    else:
        flags, plan, ends, _ = _flags_and_plan(a, b, offs)
        up = 4.0 if a.dtype == E2M1 else 1.0
        x = bf16_values(a, a_scale, scale_layout, flags, 1, plan, up=1 / up)
    reads_codes = weights.reads(x, b)
    of_groups = not weights.pays(M, b) if reads_codes else M > FEW_OF_GROUPS
    large = pays(M, N, on) if offs is None else of_groups
    # The kernel writes the values of the weights as bfloat16 rows that follow each other, which TMA reads.
    if large and multiplies_values(x, None, x, None, out, grouped):
        unused = b.new_empty(1 + 128 * E * -(-N // 128), dtype=torch.int32) if flags is None else flags
        w = bf16_values(b, b_scale, scale_layout, unused, 1, up=1 / UNSHIFT)  # it raises no flag
        nvfp4_sm90(x, None, w, None, out, offs=offs, grouped=grouped, up=up * UNSHIFT)
    elif reads_codes:
        weights.by_e2m1(x, b, b_scale, out, scale_layout, up, offs=offs)
    else:
        mx_weights(x, b, b_scale, out, scale_layout, up, offs=offs)
    if flags is not None and a_scale is not None and a.dtype != E2M1:
        only: Any = {"flags": flags, "programs": processors(on)}
        mx_tiles(a, a_scale, b, b_scale, out, scale_layout, offs=ends, grouped=grouped, **only)
    return out


def _flags_and_plan(a: Tensor, b: Tensor, offs: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None, int]:
    """Flags that are 0: one for all, then those of a, then those of b. For token groups, also the plan and the ends.

    The plan holds the first row and the end of each tile of 128 rows. The ends are `offs` in order. The last result is
    the place of the first flag of b.
    """
    E, stride, row_tiles = (1, 0, 0) if offs is None else (b.shape[0], offs.stride(0), b.shape[0])
    row_tiles += -(-a.shape[0] // 128)
    flags = b.new_empty(1 + 128 * (row_tiles + E * -(-b.shape[-2] // 128)), dtype=torch.int32)
    plan, ends = (None, None) if offs is None else (offs.new_empty(row_tiles, 2), offs.new_empty(E))
    programs = -(-flags.numel() // 128)  # more than the plan has tiles
    _prepare[(programs,)](flags, flags.numel(), plan, row_tiles, offs, stride, E, a.shape[0], ends, chunk(E), **UNFUSED)
    return flags, plan, ends, 1 + 128 * row_tiles


def mx_bf16(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out_dtype: torch.dtype, scale_layout: str,
    offs: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`mx_gemm`, or with `offs` `mx_grouped_gemm` in bf16. Each operand has at least one element."""
    flags, plan, ends, first_of_b = _flags_and_plan(a, b, offs)
    x = bf16_values(a, a_scale, scale_layout, flags, 1, plan)
    w = bf16_values(b, b_scale, scale_layout, flags, first_of_b)
    if ends is not None:
        out = grouped_mm(x, w.mT, offs=ends)
    else:  # A launch plan holds a matmul that writes to `out`, and autocast does not cast its operands.
        out = x.new_empty(x.shape[0], w.shape[0], dtype=out_dtype)
        options = {} if out_dtype == torch.bfloat16 else {"out_dtype": out_dtype}
        torch.mm(x, w.t(), out=out, **options)
    only: Any = {"flags": flags, "programs": processors(a.device)}
    mx_tiles(a, a_scale, b, b_scale, out, scale_layout, offs=ends, grouped="" if offs is None else "M", **only)
    return out
