"""FP8 matmuls in plain Triton: a program computes one tile of the output.

Rows of the operands and scales may have any strides; the codes of a row are contiguous. Operands may be token groups.
The last block of K may be shorter than 128.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mxspec.formats import FP8_BLOCK_SIZE
from mxspec.triton_kernels.common.groups import chunk, group_of, tokens_of
from mxspec.triton_kernels.common.launch import FUSED, for_device
from mxspec.triton_kernels.common.tile_order import swizzle

_TILE = {"BLOCK_M": 128, "BLOCK_N": 128, "SWIZZLE": 8, "num_warps": 8, "num_stages": 3}
CONFIGS = {(9, 0): _TILE, (10, 0): _TILE}
# In K-groups, the distance between two rows is the number of tokens of the group, so the addresses take more registers.
# On Hopper the sums are in registers, so a scale for each row of b takes more registers there, too.
K_GROUPS = {(9, 0): _TILE | {"BLOCK_N": 64}, (10, 0): _TILE | {"BLOCK_N": 64}}
VECTOR = {(9, 0): _TILE | {"BLOCK_N": 64}, (10, 0): _TILE}


@triton.jit
def _tiles(
    a, a_stride, a_scale, a_scale_stride_m, a_scale_stride_k,
    b, b_stride_e, b_stride, b_scale, b_scale_stride_e, b_scale_stride_n, b_scale_stride_k,
    out, out_stride_e, out_stride, offs, offs_stride, E, M_tiles, M, N, K_blocks,
    GROUPED: tl.constexpr, VECTOR: tl.constexpr, ACCUMULATE: tl.constexpr, TAIL: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SWIZZLE: tl.constexpr,
):  # fmt: skip
    N_tiles = tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0)
    group = tile * 0
    if GROUPED == "K":
        group, tile = tile // (M_tiles * N_tiles), tile % (M_tiles * N_tiles)
    m_tile, n_tile = swizzle(tile, M_tiles, N_tiles, SWIZZLE)
    row_begin, row_end = m_tile * BLOCK_M, M
    if GROUPED == "M":  # rows of one group, or rows of no group, which become zeros
        group, begin, stop, padded = group_of(m_tile * BLOCK_M, offs, offs_stride, E, None, None, False, BLOCK_M, CHUNK)
        none = group >= E
        begin = tl.where(none, tl.load(offs + (E - 1) * offs_stride), begin)
        row_begin = tl.minimum(tl.maximum(begin + m_tile * BLOCK_M - padded, 0), M)  # within a, whatever offs holds
        row_end = tl.where(none, M, tl.minimum(stop, M))
        K_blocks = tl.where(none, 0, K_blocks)
        group = tl.minimum(group, E - 1)
    elif GROUPED == "K":  # a and b of a group are matrices of their own, and within the operands whatever offs holds
        begin, stop = tokens_of(group, offs, offs_stride, E)
        begin = tl.minimum(tl.maximum(begin // 128, 0), K_blocks)
        K_blocks = tl.maximum(tl.minimum(stop // 128, K_blocks) - begin, 0)
        a += begin.to(tl.int64) * 128 * M
        b += begin.to(tl.int64) * 128 * N
        a_stride, b_stride = K_blocks * 128, K_blocks * 128
        a_scale += begin.to(tl.int64) * a_scale_stride_k
        b_scale += begin.to(tl.int64) * b_scale_stride_k
        out += group.to(tl.int64) * out_stride_e
    if GROUPED == "M":
        b += group.to(tl.int64) * b_stride_e
        b_scale += group.to(tl.int64) * b_scale_stride_e
    row = (row_begin + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = (n_tile * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    k = tl.arange(0, 128)
    a_at, b_at = a + row[:, None] * a_stride + k[None, :], b + column[:, None] * b_stride + k[None, :]
    a_scale_at = a_scale + row * a_scale_stride_m
    if VECTOR:  # a scale for each row of b
        b_scale_at = b_scale + column * b_scale_stride_n
    else:  # one scale for 128 rows of b, so one scale for a tile
        b_scale_at = b_scale + (n_tile * BLOCK_N // 128).to(tl.int64) * b_scale_stride_n
    in_row, in_column = row < row_end, column < N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for i in range(K_blocks):
        if TAIL:  # the last block has TAIL columns; zeros fill it
            along = ((k < TAIL) | (i + 1 < K_blocks))[None, :]
            x = tl.load(a_at, mask=in_row[:, None] & along, other=0.0)
            w = tl.load(b_at, mask=in_column[:, None] & along, other=0.0)
        else:
            x, w = tl.load(a_at, mask=in_row[:, None], other=0.0), tl.load(b_at, mask=in_column[:, None], other=0.0)
        # Tensor cores keep only about 14 bits of a sum, so each 128 columns of K are added in fp32.
        partial = tl.dot(x, w.T)
        of_row = tl.load(a_scale_at, mask=in_row, other=0.0)
        if VECTOR:
            of_column = tl.load(b_scale_at, mask=in_column, other=0.0)
            acc += partial * (of_row[:, None] * of_column[None, :])
        else:
            acc += partial * (of_row * tl.load(b_scale_at))[:, None]
        a_at += 128
        b_at += 128
        a_scale_at += a_scale_stride_k
        b_scale_at += b_scale_stride_k
    at, there = out + row[:, None] * out_stride + column[None, :], in_row[:, None] & in_column[None, :]
    if ACCUMULATE:
        there &= K_blocks > 0  # do not add an empty sum: it would turn an output of -0 into +0
        acc += tl.load(at, mask=there)
    tl.store(at, acc.to(out.dtype.element_ty), mask=there)


def fp8_tiles(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor,
    *, offs: Tensor | None = None, grouped: str = "", accumulate: bool = False,
) -> None:  # fmt: skip
    """Multiply `(M, K)` by `(N, K)` into `out`, or add the product to `out`.

    - `grouped` "": one matmul.
    - "M": the rows of a are in groups, each with its own b.
    - "K": the columns are in groups, laid out as by `fp8_quantize_k_groups`, each with its own output.
    """
    (M, K), N, E = a.shape, b.shape[-2], 1 if offs is None else offs.shape[0]
    vector = grouped == "K" or (not grouped and b_scale.shape[0] == N != 1)
    config = for_device(K_GROUPS if grouped == "K" else VECTOR if vector else CONFIGS, a.device)
    if accumulate:  # the old tile of the output needs registers, too
        config = {**config, "BLOCK_M": 64}
    M_tiles, N_tiles = -(-M // config["BLOCK_M"]), -(-N // config["BLOCK_N"])
    if grouped == "M":  # each group, and the rows that belong to no group, may begin a tile
        M_tiles += E
    of_b, of_out = ((0, *t.stride()[-2:]) if t.ndim == 2 else t.stride() for t in (b, out))
    of_b_scale = (0, *b_scale.stride()) if b_scale.ndim == 2 else b_scale.stride()
    _tiles[(M_tiles * N_tiles * (E if grouped == "K" else 1),)](
        a, a.stride(0), a_scale, *a_scale.stride(), b, *of_b[:2], b_scale, *of_b_scale, out, *of_out[:2],
        offs, 0 if offs is None else offs.stride(0), E, M_tiles, M, N, -(-K // FP8_BLOCK_SIZE),
        GROUPED=grouped, VECTOR=vector, ACCUMULATE=accumulate, TAIL=K % FP8_BLOCK_SIZE, CHUNK=chunk(E),
        **config, **FUSED,
    )  # fmt: skip
