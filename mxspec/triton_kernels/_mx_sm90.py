"""MX matmuls on Hopper: one operand's codes become bf16 values, then the Gluon kernel, then what only exact tiles can.

`mx_sm90` takes what `mx_tiles` takes. The second operand is turned into bf16 by a kernel of its own, which for token
groups also writes down which rows each tile has. Tiles whose sums are not all finite, as for a NaN, an infinite code or
exponents that bf16 has not, are computed once more by `mx_tiles`; where there are none, its programs only look.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mxspec.formats import MX_BLOCK_SIZE
from mxspec.triton_kernels._groups import chunk, group_of, rows_before
from mxspec.triton_kernels._launch import capability, processors, shared_layout
from mxspec.triton_kernels._mx_gemm_sm90 import E4M3, E5M2, mx_gemm_sm90
from mxspec.triton_kernels._mx_gemm_tiles import mx_tiles

# By code format: its constants, and the exponent by which its values are shifted, so that the smallest of them,
# 2^-9 or 2^-16 times 2^-127, is a subnormal bf16 at least.
FORMATS = {torch.float8_e4m3fn: (E4M3, 4), torch.float8_e5m2: (E5M2, 10)}
# The cost is that of an element of the output: smaller tiles read more for it.
TILES = (
    (1.0, {"BLOCK_N": 256, "STAGES": 4, "AHEAD": 4, "REGISTERS": 224}),
    (1.2, {"BLOCK_N": 128, "STAGES": 6, "AHEAD": 4, "REGISTERS": 208}),
)
WIDEST_TILE = 256
VALUES = {"ROWS": 32, "num_warps": 8}  # a program's rows, of 128 codes each


@triton.jit
def _plan(plan, tiles, offs, offs_stride, G, M, TILE: tl.constexpr, CHUNK: tl.constexpr):
    """For each TILE padded rows of token groups: the group, the first row, the end of the group's, their tile of 128.

    Rows of no group have the group -1: their tiles are zeros. Whatever offs holds, no row is outside the operand.
    """
    rows_of_groups = tl.load(offs + (G - 1) * offs_stride)
    for m in range(tl.program_id(0), tiles, tl.num_programs(0)):
        group, first, stop, begin = group_of(m * TILE, offs, offs_stride, G, None, None, False, TILE, CHUNK)
        none = (group >= G) | (m * TILE + TILE > M + TILE * G)
        row = tl.where(none, rows_of_groups, first) + m * TILE - begin
        tl.store(plan + 4 * m, tl.where(none, -1, group))
        tl.store(plan + 4 * m + 1, tl.minimum(tl.maximum(row, 0), M))
        tl.store(plan + 4 * m + 2, tl.where(none, M, tl.minimum(stop, M)))
        of_128 = (rows_before(group, offs, offs_stride, 128, CHUNK) + m * TILE - begin) // 128
        tl.store(plan + 4 * m + 3, tl.maximum(of_128, 0))


@triton.jit
def _mx_values(
    codes, stride_e, stride_r, scale, scale_stride_e, scale_stride_r, scale_stride_c, out, out_stride,
    R, N, K, offs, offs_stride, G, plan, plan_tiles, plan_rows, marks,
    GROUPS: tl.constexpr, BLOCKED: tl.constexpr, CHUNK: tl.constexpr, SPAN: tl.constexpr, SHIFT: tl.constexpr,
    TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """2^SHIFT times the values of ROWS x 128 codes; R rows, of which N are a matrix, or in groups that count anew."""
    if tl.program_id(1) == 0:
        tl.store(marks, 0, mask=tl.program_id(0) == 0)
        if plan is not None:
            _plan(plan, plan_tiles, offs, offs_stride, G, plan_rows, TILE, CHUNK)
    r, tile = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    e, n, in_r = r // N, r % N, r < R
    if GROUPS == "N":  # padded to 128, so that a program's rows are of one group
        _, row, stop, begin = group_of(tl.program_id(0) * ROWS, offs, offs_stride, G, None, None, False, 128, CHUNK)
        e, n, r = e * 0, r, row + r - begin
        in_r = (r >= 0) & (r < tl.minimum(stop, R)) & (n // 128 * 128 + 128 <= R + 128 * G)
        if not BLOCKED:
            n = r
    first, end = tile * 128, K
    tiles_before, across = tile * 0, tl.cdiv(K, 128)
    if GROUPS == "K":  # a tile's 128 tokens are of one group
        _, first, end, begin = group_of(tile * 128, offs, offs_stride, G, None, None, False, 128, CHUNK)
        across = tl.cdiv(end - first, 128)
        end = tl.minimum(end, K) // 32 * 32
        tiles_before = begin // 128
        first = (first + tile * 128 - begin) // 32 * 32  # as it is, and the compiler knows
    c, k = tl.arange(0, 4), tl.arange(0, 128)
    in_c = (first >= 0) & (first + 32 * c < end)
    in_k = (first >= 0) & (first + k < end)
    if BLOCKED:
        of_row = (n // 128 * across + tile - tiles_before) * 512 + n % 32 * 16 + n % 128 // 32 * 4
        if GROUPS == "K":
            of_row += tiles_before.to(tl.int64) * tl.cdiv(N, 128) * 512
            in_c &= (tiles_before + across) * 4 <= K // 32 + 4 * G
        at = scale + (e * scale_stride_e + of_row)[:, None] + c[None, :]
    else:
        at = scale + (e * scale_stride_e + n * scale_stride_r)[:, None]
        at += ((first // 32 + c).to(tl.int64) * scale_stride_c)[None, :]
    byte = tl.load(at, mask=in_r[:, None] & in_c[None, :], other=0).to(tl.int32)
    factor = (tl.minimum(byte + SHIFT, 255) << 23).to(tl.float32, bitcast=True)  # infinite for NaN
    x = tl.load(codes + (e * stride_e + n * stride_r + first)[:, None] + k[None, :], mask=in_r[:, None] & in_k[None, :])
    value = (x.to(tl.float32).reshape(ROWS, 4, 32) * factor[:, :, None]).to(tl.bfloat16)
    # (thread of four, step of 16, half, pair) becomes (step, half, thread, pair), as `_values` does of the other's.
    value = value.reshape(ROWS * (128 // SPAN), 4, SPAN // 16, 2, 2).permute(0, 2, 3, 1, 4).reshape(ROWS, 128)
    in_out = in_k if GROUPS == "K" else first + k < out_stride
    tl.store(out + (r * out_stride + first)[:, None] + k[None, :], value, mask=in_r[:, None] & in_out[None, :])


def reads(a: Tensor, b: Tensor, out: Tensor) -> bool:
    """Whether the Gluon kernel can run: on Hopper, where TMA reads a and writes out, rows at multiples of 16 bytes."""
    if a.device.type == "cpu" or capability(a.device) != (9, 0) or not a.numel() or not b.numel():
        return False
    if a.ndim == 3 and a.stride(0) != a.shape[1] * a.stride(1):  # of experts, not one below the other
        return False
    rows_fit = a.stride(-2) % 16 == 0 and max(out.stride()[-2:]) * out.element_size() % 16 == 0
    return rows_fit and a.data_ptr() % 16 == 0 and out.data_ptr() % 16 == 0


def tile_for(row_tiles: int, N: int, processors: int, more: int, tiles: Any = TILES) -> dict[str, int]:
    """The tile with which the output takes the least time, in waves of as many tiles as there are processors.

    `more` columns of tiles there are than N needs.
    """

    def cost(choice: tuple[float, dict[str, int]]) -> float:
        of_element, tile = choice
        count = row_tiles * (-(-N // tile["BLOCK_N"]) + more)
        return -(-count // processors) * tile["BLOCK_N"] * of_element

    return min(tiles, key=cost)[1]


def mx_sm90(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, scale_layout: str,
    *, offs: Tensor | None = None, groups: str = "", **options: Any,
) -> Any:  # fmt: skip
    """`mx_tiles` by Hopper's bf16 tensor cores; `options` change the tile. Gives what was compiled.

    With groups "N" b has the tokens, in groups, each with an a of its own, and `out` is the transpose of their rows.
    """
    (M, K), N, E = a.shape[-2:], b.shape[-2], 1 if offs is None else offs.shape[0]
    C, blocked, row_tiles = K // MX_BLOCK_SIZE, scale_layout == "blocked", -(-M // 128)
    (a_format, a_shift), (_, b_shift) = FORMATS[a.dtype], FORMATS[b.dtype]
    a_scale, b_scale = a_scale.view(torch.uint8), b_scale.view(torch.uint8)
    # Each group, and the rows of none, may begin a tile.
    all_tiles = {"": row_tiles, "M": row_tiles + E, "N": row_tiles, "K": row_tiles * E}[groups]
    programs = processors(a.device)
    wasted = E // 2 if groups == "N" else 0  # on average half of each group's last tile
    choices = TILES[1:] if groups == "N" and out.dtype == torch.float32 else TILES  # the largest would spill
    config = {"GROUP": 8, **tile_for(all_tiles, N, programs, wasted, choices), **options}
    BLOCK_N = config.pop("BLOCK_N")
    col_tiles = -(-N // BLOCK_N) + (E if groups == "N" else 0)
    tiles = all_tiles * col_tiles
    plan, offs_stride = None, 0 if offs is None else offs.stride(0)
    plan_tiles, plan_rows, tile = {"M": (all_tiles, M, 128), "N": (col_tiles, N, BLOCK_N)}.get(groups, (0, 0, 0))
    if plan_tiles and offs is not None:
        plan = offs.new_empty(4 * plan_tiles)
    marks = out.new_empty(1 + 4 * tiles, dtype=torch.int32)  # either math warpgroup may mark a tile
    span = 32 if groups == "K" else 64  # groups of tokens begin at multiples of 32
    R = b.numel() // K
    values = b.new_empty(R, K if groups == "K" else -(-K // 64) * 64, dtype=torch.bfloat16)
    of_b = b_scale.stride(0) if b.ndim == 3 else 0, *((0, 0) if blocked else b_scale.stride()[-2:])
    tokens = offs if groups else None
    rows, columns = -(-R // 128) * 128 + 128 * E if groups == "N" else R, -(-K // 128) + (E if groups == "K" else 0)
    _mx_values[(-(-rows // VALUES["ROWS"]), columns)](
        b, b.stride(0) if b.ndim == 3 else 0, b.stride(-2), b_scale, *of_b, values, values.stride(0),
        R, N, K, tokens, offs_stride, E, plan, plan_tiles, plan_rows, marks,
        groups, blocked, chunk(E), span, b_shift, tile, **VALUES,
    )  # fmt: skip

    turned, size, chunk_size = out.stride(-2) == 1 and M > 1, out.element_size(), min(128, BLOCK_N)
    out_rows = out.mT.reshape(-1, M) if turned else out.view(-1, N)
    descriptors = (
        TensorDescriptor.from_tensor(a.view(-1, K).view(torch.int8), [128, 64], shared_layout(64, 8)),
        TensorDescriptor.from_tensor(values, [BLOCK_N, 64], shared_layout(128, 16)),
        TensorDescriptor.from_tensor(
            out_rows, [chunk_size, 64] if turned else [64, chunk_size], shared_layout(128, 8 * size)
        ),
    )
    of_a = a_scale.stride(0) if a.ndim == 3 else 0, *((0, 0) if blocked else a_scale.stride()[-2:])
    compiled = mx_gemm_sm90[(min(tiles, programs),)](
        *descriptors, out, a_scale, *of_a, marks, tokens if plan is None else plan, offs_stride,
        tiles, M, all_tiles if groups == "M" else row_tiles, N, col_tiles, K, C,
        GROUPS=groups, BLOCKED=blocked, CHUNK=chunk(E), SPAN=span, FORMAT=a_format, TURNED=turned, A_SHIFT=a_shift,
        UNSHIFT=2.0 ** -(a_shift + b_shift), **config, num_warps=4,
    )  # fmt: skip
    only: Any = {"offs": offs, "marks": marks, "programs": programs}
    if groups == "N":  # of a tile past its group's rows no harm is done: what is computed once more is the same
        mx_tiles(b, b_scale, a, a_scale, out.mT, scale_layout, groups="M", height=BLOCK_N, width=128, **only)
    else:
        mx_tiles(a, a_scale, b, b_scale, out, scale_layout, groups=groups, width=BLOCK_N, **only)
    return compiled
