"""NVFP4 blocks along the columns. A program owns a tile of whole blocks.

The tile is held as that of `mx_columns`: 16 rows of a column are loads of their own, in the registers of one thread. So
a thread finds the largest magnitude of a block alone, and packs its codes. They pass through shared memory, where the
tile is transposed. Narrow numbers stay in words of two, as `common/pairs.py` says, until their codes are computed. For
squares and for token groups, quotients are exact for every magnitude: a branch for short ones would take registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxspec.triton_kernels.common.blocked import blocked_shape, turned
from mxspec.triton_kernels.common.groups import chunk, group_of, grouped_tile, padded_rows, tokens_left
from mxspec.triton_kernels.common.launch import UNFUSED, for_device, span
from mxspec.triton_kernels.common.numerics import largest_of_eight
from mxspec.triton_kernels.common.nvfp4_numerics import (
    BYTES,
    NEAREST,
    SEED,
    block_scale,
    bytes_of_words,
    converts,
    factors,
    is_short,
    of_matrix,
    packed_codes,
    random_of,
    random_words,
    scale_byte,
    store_tensor_scale,
    store_tensor_scales,
)
from mxspec.triton_kernels.common.pairs import (
    columns_of_halves,
    compares_pairs,
    even_and_odd,
    halves,
    largest_of_pairs,
    paired,
    parted,
    unpaired,
)
from mxspec.triton_kernels.common.runs import load16
from mxspec.triton_kernels.hopper.releases import release

_HOPPER = {"RUNS": 4, "COLS": 128, "num_warps": 4}  # a tile has 16 * RUNS rows
CONFIGS = {(9, 0): _HOPPER, (10, 0): _HOPPER}
# Registers of a thread on Hopper that has narrow numbers of whole tiles, with plain scales and without random bytes.
# More programs then fit on a processor.
_REGISTERS = {"maxnreg": 80}
# Those of token groups with blocked scales. Elsewhere, and under Triton 3.9, a thread would keep some in local memory.
_OF_GROUPS = {"maxnreg": 96}
_LIMITED = ("3.6", "3.7", "3.8")
_SPAN = 8  # a program of token groups has up to so many tiles


def supports(x: Tensor) -> str | None:
    if x.shape[-1] > 65535 * 32:
        return f"takes K up to {65535 * 32}, the limit of its grid; it is {x.shape[-1]}"
    return None


@triton.jit
def _coded_one_way(
    tile, byte, h, up, wrong_matrix, short,
    DTYPE: tl.constexpr, SQUARE: tl.constexpr, BOUNDED: tl.constexpr, CONVERTS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """`_coded` in one of the two ways of `packed_codes`. tile: words of `paired`, or fp32."""
    NARROW: tl.constexpr = tl.float32 != DTYPE
    RUNS: tl.constexpr = tile.shape[0]
    COLS: tl.constexpr = 2 * tile.shape[1] if NARROW else tile.shape[1]
    if NARROW:
        first, second = halves(tile)
        b0, c0 = largest_of_pairs(first, DTYPE, ASM)
        b1, c1 = largest_of_pairs(second, DTYPE, ASM)
    else:
        even, odd = parted(tile)
        e0, e1 = halves(even)
        o0, o1 = halves(odd)
        b0, b1, c0, c1 = largest_of_eight(e0), largest_of_eight(e1), largest_of_eight(o0), largest_of_eight(o1)
    # The last step is a reduction: the compiler would repeat other operations for the layout of the scales.
    bits = tl.max(columns_of_halves(b0, b1, c0, c1), axis=2)  # (RUNS, COLS)
    if SQUARE:
        largest = tl.max(bits.reshape(RUNS, COLS // 16, 16), axis=2)
        bits = tl.broadcast_to(largest[:, :, None], (RUNS, COLS // 16, 16)).reshape(RUNS, COLS)
    s, wrong = block_scale(bits, h, up, wrong_matrix)
    minus_d, factor = factors(s, h, up, wrong, short)
    # If both branches begin with equal steps, the compiler moves these before the branch. The two ways differ in the
    # factors. So the numbers become fp32 after them: before the branch, all would take registers at once.
    if NARROW:
        e0, o0 = unpaired(first, DTYPE)
        e1, o1 = unpaired(second, DTYPE)
    even_d, odd_d = even_and_odd(minus_d)
    even_f, odd_f = even_and_odd(factor)
    even_w, odd_w = even_and_odd(wrong)
    if byte is None:
        b0, b1, c0, c1 = None, None, None, None
    else:
        even, odd = parted(byte)
        b0, b1 = halves(even)
        c0, c1 = halves(odd)
    e0 = packed_codes(e0, even_d, even_f, up, even_w, short, b0, NARROW, BOUNDED, CONVERTS)
    e1 = packed_codes(e1, even_d, even_f, up, even_w, short, b1, NARROW, BOUNDED, CONVERTS)
    o0 = packed_codes(o0, odd_d, odd_f, up, odd_w, short, c0, NARROW, BOUNDED, CONVERTS)
    o1 = packed_codes(o1, odd_d, odd_f, up, odd_w, short, c1, NARROW, BOUNDED, CONVERTS)
    return columns_of_halves(e0, e1, o0, o1).permute(1, 0, 2).reshape(COLS, 2 * RUNS), scale_byte(s, wrong)


@triton.jit
def _coded(
    loaded, A, h, up, wrong_matrix, byte,
    SHORT: tl.constexpr, SQUARE: tl.constexpr, BOUNDED: tl.constexpr, CONVERTS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """The words of eight codes of each column, `(COLS, 2 * RUNS)`, and the scale bytes, `(RUNS, COLS)`, of a tile.

    loaded: `load16` of the tile. SHORT: a branch for short magnitudes is worth its registers.
    """
    DTYPE: tl.constexpr = loaded.dtype
    tile = loaded if tl.float32 == DTYPE else paired(loaded)
    if is_short(A, SHORT and tl.float32 != DTYPE and byte is None):
        words, scales = _coded_one_way(
            tile, byte, h, up, wrong_matrix, True, DTYPE, SQUARE, BOUNDED, CONVERTS, ASM
        )  # fmt: skip
    else:
        words, scales = _coded_one_way(
            tile, byte, h, up, wrong_matrix, False, DTYPE, SQUARE, BOUNDED, CONVERTS, ASM
        )  # fmt: skip
    return words, scales


@triton.jit
def _nvfp4_tile(
    x, amax, qdata, scale, tensor_scale,
    M, K, M16, stride_e, stride_m, stride_k, amax_stride,
    SQUARE: tl.constexpr, BLOCKED: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr, BOUNDED: tl.constexpr,
    CONVERTS: tl.constexpr, ASM: tl.constexpr, RUNS: tl.constexpr, COLS: tl.constexpr,
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
    A, h, up, wrong_matrix = of_matrix(tl.load(amax + e * amax_stride))
    word, stored = _coded(values, A, h, up, wrong_matrix, byte, not SQUARE, SQUARE, BOUNDED, CONVERTS, ASM)
    m, M8 = m0 // 8 + tl.arange(0, ROWS // 8), M16 * 2
    to = (e * K + k0) * M8 + m0 // 8
    offset = tl.arange(0, ROWS // 8)[None, :] + (k.to(tl.int64) * M8 if WIDE else k * M8)[:, None]
    tl.store(qdata + to + offset, word, mask=((k0 + k < K)[:, None] & (m < M8)[None, :]) | EVEN)
    there = ((k0 + k < K)[:, None] & (m0 // 16 + run < M16)[None, :]) | EVEN
    scales = stored.permute(1, 0)  # (COLS, RUNS)
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
        few = even and not (blocked or wide or converts(x.device)) and random is None and x.dtype != torch.float32
        registers = _REGISTERS if few else {}
        _nvfp4_tile[max(1, -(-M // rows)), max(1, -(-K // cols)), E](
            x, amax, qdata, scale, tensor_scale, M, K, M // 16, x.stride(0) if lead else 0, *x.stride()[-2:],
            amax.stride(0) if lead else 0, square, blocked, even, wide, bounded, converts(x.device),
            compares_pairs(x.device), **config, **random_of(random), **registers, **UNFUSED,
        )  # fmt: skip
    return qdata.view(torch.float4_e2m1fn_x2), scale.view(torch.float8_e4m3fn), tensor_scale


# `tokens` is not specialized: with tokens == 1 ptxas 12.8 generates wrong code (see mx_quantize_groups).
@triton.jit(do_not_specialize=["tokens", "span"])
def _nvfp4_tile_of_groups(
    x, amax, qdata, scale, tensor_scale, start, end, offs,
    R, K, R16, tokens, span, stride_m, stride_k, amax_stride, G, stride_offs,
    BLOCKED: tl.constexpr, WIDE: tl.constexpr, BOUNDED: tl.constexpr, CONVERTS: tl.constexpr,
    ASM: tl.constexpr, ALIGN: tl.constexpr, CHUNK: tl.constexpr, RUNS: tl.constexpr, COLS: tl.constexpr,
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
        A, h, up, wrong_group = of_matrix(tl.load(amax + group * amax_stride))
        token = token0 + m0 - begin
        left = tokens_left((token + run * 16)[:, None], stop, tokens)
        x_rows = x + token.to(tl.int64) * stride_m
        offset = ((run * 16) * stride_m)[:, None] + (b * stride_k)[None, :]
        for i in range(tiles):
            k_tile = first_tile + i
            inside = tl.broadcast_to((k_tile * COLS + b < K)[None, :], (RUNS, COLS))
            values = load16(x_rows + k_tile.to(tl.int64) * COLS * stride_k + offset, stride_m, inside, left)
            word, stored = _coded(values, A, h, up, wrong_group, None, False, False, BOUNDED, CONVERTS, ASM)
            byte = stored.permute(1, 0)  # (COLS, RUNS)
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
        few = blocked and x.dtype != torch.float32 and not (wide or converts(x.device)) and release() in _LIMITED
        # At least one program across: with no columns, start, end and the tensor scales are still written.
        _nvfp4_tile_of_groups[row_tiles, max(1, -(-k_tiles // of_program))](
            x, amax, qdata, scale, tensor_scale, start, end, offs, R, K, R // 16, M, of_program, *x.stride(),
            amax.stride(0), G, offs.stride(0), blocked, wide, bounded, converts(x.device),
            compares_pairs(x.device), pad_to, chunk(G), **config,
            **(_OF_GROUPS if few else {}), **UNFUSED,
        )  # fmt: skip
    return qdata.view(torch.float4_e2m1fn_x2), scale.view(torch.float8_e4m3fn), tensor_scale
