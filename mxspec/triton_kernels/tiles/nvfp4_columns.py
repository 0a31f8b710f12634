"""NVFP4 blocks along the columns. A program owns a tile of whole blocks.

The tile is held as that of `mx_columns`: 16 rows of a column are loads of their own, in the registers of one thread. So
a thread finds the largest magnitude of a block alone, and packs its codes. They pass through shared memory, where the
tile is transposed. Quotients are exact for every magnitude: a second way for short ones takes registers, and is slower.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxspec.triton_kernels.common.blocked import blocked_shape, turned
from mxspec.triton_kernels.common.groups import chunk, group_of, grouped_tile, padded_rows, tokens_left
from mxspec.triton_kernels.common.launch import UNFUSED, for_device, span
from mxspec.triton_kernels.common.numerics import largest_of_eight, widened
from mxspec.triton_kernels.common.nvfp4_numerics import (
    BYTES,
    NEAREST,
    SEED,
    block_scale,
    bytes_of_words,
    converts,
    divisor,
    of_matrix,
    packed_codes,
    random_of,
    random_words,
    scale_byte,
    store_tensor_scale,
    store_tensor_scales,
)
from mxspec.triton_kernels.common.runs import load16

_HOPPER = {"RUNS": 4, "COLS": 128, "num_warps": 4}  # a tile has 16 * RUNS rows
CONFIGS = {(9, 0): _HOPPER, (10, 0): _HOPPER}
# Registers of a thread, for plain scales. The compiler would take up to 128. With the limit, as many programs fit on a
# processor, and the order of instructions is faster.
_REGISTERS = {"1x16": {"maxnreg": 112}, "16x16": {"maxnreg": 120}}
_SPAN = 8  # a program of token groups has up to so many tiles


def supports(x: Tensor) -> str | None:
    if x.shape[-1] > 65535 * 32:
        return f"takes K up to {65535 * 32}, the limit of its grid; it is {x.shape[-1]}"
    return None


@triton.jit
def _words_of_columns(
    x, s, h, up, wrong, byte, NARROW: tl.constexpr, BOUNDED: tl.constexpr, CONVERTS: tl.constexpr
):  # fmt: skip
    """The words of eight codes of each column, `(COLS, 2 * RUNS)`, from x `(RUNS, COLS, 2, 8)`."""
    minus_d, factor = divisor(s, h, up, wrong)
    minus_d, factor, wrong = minus_d[:, :, None], factor[:, :, None], wrong[:, :, None]
    word = packed_codes(x, minus_d, factor, up, wrong, False, byte, NARROW, BOUNDED, CONVERTS)
    return word.permute(1, 0, 2).reshape(x.shape[1], 2 * x.shape[0])


@triton.jit
def _nvfp4_tile(
    x, amax, qdata, scale, tensor_scale,
    M, K, M16, stride_e, stride_m, stride_k, amax_stride,
    SQUARE: tl.constexpr, BLOCKED: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr, BOUNDED: tl.constexpr,
    CONVERTS: tl.constexpr, RUNS: tl.constexpr, COLS: tl.constexpr,
    random=None, random_e=None, random_r=None, random_k=None, RANDOM: tl.constexpr = NEAREST,
):  # fmt: skip
    # M16 is M / 16, computed on the host so that Triton keeps its divisible-by-16 specialization. Programs run along
    # the rows first, so that neighbouring programs write neighbouring bytes.
    ROWS: tl.constexpr = 16 * RUNS
    m0, k0, e = tl.program_id(0) * ROWS, tl.program_id(1) * COLS, tl.program_id(2).to(tl.int64)
    run, k = tl.arange(0, RUNS), tl.arange(0, COLS)
    inside = ((m0 + run * 16 < M)[:, None] & (k0 + k < K)[None, :]) | EVEN  # M is a multiple of 16
    m, b = run * 16, k
    if WIDE:  # the products with strides are above 2^31, also those in load16
        m, b, stride_m = m.to(tl.int64), b.to(tl.int64), tl.cast(stride_m, tl.int64)
        if RANDOM == BYTES:
            random_r = tl.cast(random_r, tl.int64)
    x += e * stride_e + m0.to(tl.int64) * stride_m + k0.to(tl.int64) * stride_k
    values = load16(x + ((m * stride_m)[:, None] + (b * stride_k)[None, :]), stride_m, inside, None)
    if RANDOM == BYTES:
        random += e * random_e + m0.to(tl.int64) * random_r + k0.to(tl.int64) * random_k
        byte = load16(random + ((m * random_r)[:, None] + (b * random_k)[None, :]), random_r, inside, None)
        byte = byte.to(tl.int32).reshape(RUNS, COLS, 2, 8)
    elif RANDOM == SEED:
        number = ((e * K + k0) * M16 + m0 // 16).to(tl.int32) + (k[None, :] * M16 + run[:, None])
        w0, w1, w2, w3 = random_words(random, random_k, number)
        byte = bytes_of_words(tl.join(tl.join(w0, w2), tl.join(w1, w3)))  # (RUNS, COLS, 2, 8)
    else:
        byte = None
    narrow: tl.constexpr = values.dtype != tl.float32
    values = widened(values).reshape(RUNS, COLS, 2, 8)
    A, h, up, wrong_matrix = of_matrix(tl.load(amax + e * amax_stride))
    # The last step is a reduction: the compiler would repeat other operations for the layout of the scales.
    bits = tl.max(largest_of_eight(values), axis=2)  # (RUNS, COLS)
    if SQUARE:
        largest = tl.max(bits.reshape(RUNS, COLS // 16, 16), axis=2)
        bits = tl.broadcast_to(largest[:, :, None], (RUNS, COLS // 16, 16)).reshape(RUNS, COLS)
    s, wrong = block_scale(bits, h, up, wrong_matrix)
    word = _words_of_columns(values, s, h, up, wrong, byte, narrow, BOUNDED, CONVERTS)
    m, M8 = m0 // 8 + tl.arange(0, ROWS // 8), M16 * 2
    to = (e * K + k0) * M8 + m0 // 8
    offset = tl.arange(0, ROWS // 8)[None, :] + (k.to(tl.int64) * M8 if WIDE else k * M8)[:, None]
    tl.store(qdata + to + offset, word, mask=((k0 + k < K)[:, None] & (m < M8)[None, :]) | EVEN)
    there = ((k0 + k < K)[:, None] & (m0 // 16 + run < M16)[None, :]) | EVEN
    scales = scale_byte(s, wrong).permute(1, 0)  # (COLS, RUNS)
    if BLOCKED:
        tl.static_assert(COLS == 128)
        scales = turned(tl.where(there, scales, 0).to(tl.uint8), RUNS // 4)
        place, col_tiles = tl.arange(0, 128 * RUNS), tl.cdiv(M16, 4)
        scale += ((e * tl.cdiv(K, 128) + tl.program_id(1)) * col_tiles + m0 // 64) * 512
        tl.store(scale + place, scales, mask=(m0 // 64 + place // 512 < col_tiles) & (k0 < K))
    else:
        scale += (e * K + k0) * M16 + m0 // 16
        tl.store(scale + (k[:, None] * M16 + run[None, :]), scales, mask=there)
    store_tensor_scale(tensor_scale, A, wrong_matrix, e, tl.program_id(0) + tl.program_id(1) == 0)


def nvfp4_tile(
    x: Tensor, amax: Tensor, bounded: bool, square: bool, blocked: bool, random: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`(qdata, scale, tensor_scale)` of x. The codes are stored as those of the transpose, `(..., K, M / 2)`."""
    *lead, M, K = x.shape
    E, config = lead[0] if lead else 1, for_device(CONFIGS, x.device)
    rows, cols = 16 * config["RUNS"], config["COLS"]
    row_tiles, col_tiles = blocked_shape(K, M // 16)
    shape = (512 * row_tiles * col_tiles,) if blocked else (K, M // 16)
    qdata = x.new_empty((*lead, K, M // 8), dtype=torch.int32)  # words of eight codes
    scale = x.new_empty((*lead, *shape), dtype=torch.uint8)
    tensor_scale = x.new_empty(tuple(lead), dtype=torch.float32)
    strides = [x.stride()[-2:]] + ([random.stride()[-2:]] if random is not None and random.ndim > 1 else [])
    if E:  # a matrix without elements has a tensor scale
        even = M * K > 0 and M % rows == 0 == K % cols
        wide = max(rows * max(m for m, _ in strides), cols * max(M, *(k for _, k in strides))) >= 2**31
        # Elsewhere, with so few registers, Triton 3.9 keeps some in local memory.
        few = even and not (blocked or wide or bounded or converts(x.device))
        few &= random is None and x.dtype != torch.float32
        registers = _REGISTERS["16x16" if square else "1x16"] if few else {}
        _nvfp4_tile[max(1, -(-M // rows)), max(1, -(-K // cols)), E](
            x, amax, qdata, scale, tensor_scale, M, K, M // 16, x.stride(0) if lead else 0, *x.stride()[-2:],
            amax.stride(0) if lead else 0, square, blocked, even, wide, bounded, converts(x.device), **config,
            **random_of(random), **registers, **UNFUSED,
        )  # fmt: skip
    return qdata.view(torch.float4_e2m1fn_x2), scale.view(torch.float8_e4m3fn), tensor_scale


# `tokens` is not specialized: with tokens == 1 ptxas 12.8 generates wrong code (see mx_quantize_groups).
@triton.jit(do_not_specialize=["tokens", "span"])
def _nvfp4_tile_of_groups(
    x, amax, qdata, scale, tensor_scale, start, end, offs,
    R, K, R16, tokens, span, stride_m, stride_k, amax_stride, G, stride_offs,
    BLOCKED: tl.constexpr, WIDE: tl.constexpr, BOUNDED: tl.constexpr, CONVERTS: tl.constexpr,
    ALIGN: tl.constexpr, CHUNK: tl.constexpr, RUNS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    # R counts the padded rows. The rows of a program belong to one group.
    ROWS: tl.constexpr = 16 * RUNS
    m0, first_tile = tl.program_id(0) * ROWS, tl.program_id(1) * span
    run, b = tl.arange(0, RUNS), tl.arange(0, COLS)
    writes = tl.program_id(0) + tl.program_id(1) == 0
    group, token0, stop, begin = group_of(m0, offs, stride_offs, G, start, end, writes, ALIGN, CHUNK)
    size = (stop - token0 + (ALIGN - 1)) // ALIGN * (ALIGN // 64)
    if WIDE:  # the products with strides are above 2^31, also those in load16
        b, stride_m = b.to(tl.int64), tl.cast(stride_m, tl.int64)
    tiles = tl.minimum(span, tl.cdiv(K, COLS) - first_tile)
    if group < G:
        _A, h, up, wrong_group = of_matrix(tl.load(amax + group * amax_stride))
        token = token0 + m0 - begin
        left = tokens_left((token + run * 16)[:, None], stop, tokens)
        x_rows = x + token.to(tl.int64) * stride_m
        offset = ((run * 16) * stride_m)[:, None] + (b * stride_k)[None, :]
        for i in range(tiles):
            k_tile = first_tile + i
            inside = tl.broadcast_to((k_tile * COLS + b < K)[None, :], (RUNS, COLS))
            values = load16(x_rows + k_tile.to(tl.int64) * COLS * stride_k + offset, stride_m, inside, left)
            narrow: tl.constexpr = values.dtype != tl.float32
            values = widened(values).reshape(RUNS, COLS, 2, 8)
            s, wrong = block_scale(tl.max(largest_of_eight(values), axis=2), h, up, wrong_group)
            word = _words_of_columns(values, s, h, up, wrong, None, narrow, BOUNDED, CONVERTS)
            byte = scale_byte(s, wrong).permute(1, 0)  # (COLS, RUNS)
            _store_of_groups(
                qdata, scale, word, byte, m0, k_tile, b, group, begin, size, G, K, R16, BLOCKED, RUNS, COLS
            )  # fmt: skip
    else:  # rows after the last group
        word, byte = tl.zeros((COLS, ROWS // 8), tl.uint32), tl.zeros((COLS, RUNS), tl.uint8)
        for i in range(tiles):
            k_tile = first_tile + i
            _store_of_groups(
                qdata, scale, word, byte, m0, k_tile, b, group, begin, size, G, K, R16, BLOCKED, RUNS, COLS
            )  # fmt: skip
    if writes:
        store_tensor_scales(tensor_scale, amax, amax_stride, G, CHUNK)


@triton.jit
def _store_of_groups(
    qdata, scale, word, byte, m0, k_tile, b, group, begin, size, G, K, R16,
    BLOCKED: tl.constexpr, RUNS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Store the words of codes `(COLS, 2 * RUNS)` and the scale bytes `(COLS, RUNS)` of a tile of one group.

    `size` is the number of tiles of 64 padded rows of the group, and `begin` is its first padded row.
    """
    k0, there = k_tile * COLS, (k_tile * COLS + b < K)[:, None]
    n, R8 = tl.arange(0, 2 * RUNS), R16 * 2
    to = qdata + k0.to(tl.int64) * R8 + m0 // 8
    tl.store(to + (b * R8)[:, None] + n, word, mask=there & (m0 // 8 + n < R8)[None, :])
    if BLOCKED:
        tl.static_assert(COLS == 128 and RUNS == 4)
        byte = turned(tl.where(there, byte, 0).to(tl.uint8), 1)
        place, exists = grouped_tile(m0 // 64, k_tile, group, begin // 64, size, G, tl.cdiv(K, 128), R16 // 4 + G)
        tl.store(scale + place * 512 + tl.arange(0, 512), byte, mask=exists)
    else:
        run = tl.arange(0, RUNS)
        at = scale + k0.to(tl.int64) * R16 + m0 // 16
        tl.store(at + ((b * R16)[:, None] + run[None, :]), byte, mask=there & (m0 // 16 + run < R16)[None, :])


def nvfp4_tile_of_groups(
    x: Tensor, offs: Tensor, amax: Tensor, start: Tensor, end: Tensor, pad_to: int, bounded: bool, blocked: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`(qdata, scale, tensor_scale)` of token groups; also writes start and end.

    The codes are stored as those of the transpose, `(K, R / 2)`.
    """
    (M, K), G, config = x.shape, offs.shape[0], for_device(CONFIGS, x.device)
    R, rows, cols = padded_rows(M, G, pad_to), 16 * config["RUNS"], config["COLS"]
    qdata = x.new_empty((K, R // 8), dtype=torch.int32)  # words of eight codes
    scale = x.new_empty((-(-K // 128) * 128, R // 16 + 4 * G) if blocked else (K, R // 16), dtype=torch.uint8)
    tensor_scale = x.new_empty(G, dtype=torch.float32)
    scaled = R + 64 * G if blocked else R  # the number of rows with scales
    if scaled:
        wide = max(rows * x.stride(0), cols * max(x.stride(1), R)) >= 2**31
        row_tiles, k_tiles = -(-scaled // rows), -(-K // cols)
        of_program = span(k_tiles, row_tiles, x.device, _SPAN)
        # At least one program across: with no columns, start, end and the tensor scales are still written.
        _nvfp4_tile_of_groups[row_tiles, max(1, -(-k_tiles // of_program))](
            x, amax, qdata, scale, tensor_scale, start, end, offs, R, K, R // 16, M, of_program, *x.stride(),
            amax.stride(0), G, offs.stride(0), blocked, wide, bounded, converts(x.device), pad_to, chunk(G),
            **config, **UNFUSED,
        )  # fmt: skip
    return qdata.view(torch.float4_e2m1fn_x2), scale.view(torch.float8_e4m3fn), tensor_scale
