"""NVFP4 blocks along the columns. A program owns a tile of whole blocks.

The tile is held as that of `mx_columns`: 16 rows of a column are loads of their own, in the registers of one thread. So
a thread finds the largest magnitude of a block alone, and packs its codes. They pass through shared memory, where the
tile is transposed. Narrow numbers stay in words of two, as `common/pairs.py` says, until their codes are computed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxspec.triton_kernels.common.blocked import blocked_shape, turned
from mxspec.triton_kernels.common.launch import UNFUSED, for_device, span
from mxspec.triton_kernels.common.numerics import largest_of_eight, signs_of
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
)
from mxspec.triton_kernels.common.pairs import (
    MAGNITUDES,
    columns_of_halves,
    even_and_odd,
    halves,
    in_words,
    instructions,
    largest_of_pairs,
    paired,
    parted,
    signs_of_columns,
    unpaired,
)
from mxspec.triton_kernels.common.runs import load16
from mxspec.triton_kernels.hopper.releases import release

# A tile has 16 * RUNS rows. A taller tile writes more plain scale bytes of a column at once. A tile of the blocked
# layout is 64 x 128.
_HOPPER = {
    "plain": {"RUNS": 8, "COLS": 64, "num_warps": 4},
    "blocked": {"RUNS": 4, "COLS": 128, "num_warps": 4},
}
CONFIGS = {(9, 0): _HOPPER, (10, 0): _HOPPER}
# A program has up to so many tiles, and there are at least so many programs for each processor.
_SPAN, PROGRAMS = 3, 24


def _limited(x: Tensor, square: bool, blocked: bool, even: bool) -> tuple[dict[str, int], int]:
    """The registers of a thread on Hopper, and the parts of a tile in the long way, to need fewer of them.

    This is for numbers of `in_words` that are rounded to nearest. `even` says that the tiles are whole. More programs
    then fit on a processor: four with 128 registers, five with 96, six with 80. With fewer registers than here, a
    thread would keep some in local memory. The releases are those of Triton whose code fits. Blocked tiles have no
    halves: a half writes less than a sector at once, which is slow.
    """
    if blocked:
        return {"maxnreg": 96 if even else 128}, 1
    fits = even and x.dtype == torch.bfloat16 and not square and release() in ("3.6", "3.7")
    return {"maxnreg": 80 if fits else 96}, 2


def supports(x: Tensor) -> str | None:
    if x.shape[-1] > 65535 * 32:
        return f"takes K up to {65535 * 32}, the limit of its grid; it is {x.shape[-1]}"
    return None


@triton.jit
def coded(
    loaded, byte, h, up, wrong_matrix, short,
    DTYPE: tl.constexpr, SQUARE: tl.constexpr, BOUNDED: tl.constexpr, CONVERTS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """The words of eight codes of each column, `(COLS, 2 * RUNS)`, and the scale bytes, `(RUNS, COLS)`, of a tile.

    loaded: `load16` of the tile. short: whether `packed_codes` goes the short way, known to the compiler.
    """
    tile = loaded if tl.float32 == DTYPE else paired(loaded)
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
    minus_d, factor = factors(s, h, up, wrong, short, ASM)
    # The numbers become fp32 only now. In fp32 they take twice the registers.
    if NARROW:
        e0, o0 = unpaired(first & MAGNITUDES, DTYPE)
        e1, o1 = unpaired(second & MAGNITUDES, DTYPE)
        e0_signs, o0_signs = signs_of_columns(first, ASM)
        e1_signs, o1_signs = signs_of_columns(second, ASM)
    else:
        e0_signs, e1_signs, o0_signs, o1_signs = signs_of(e0), signs_of(e1), signs_of(o0), signs_of(o1)
    even_d, odd_d = even_and_odd(minus_d)
    even_f, odd_f = even_and_odd(factor)
    even_w, odd_w = even_and_odd(wrong)
    if byte is None:
        b0, b1, c0, c1 = None, None, None, None
    else:
        even, odd = parted(byte)
        b0, b1 = halves(even)
        c0, c1 = halves(odd)
    e0 = packed_codes(e0, e0_signs, even_d, even_f, up, even_w, short, b0, NARROW, BOUNDED, CONVERTS, ASM)
    e1 = packed_codes(e1, e1_signs, even_d, even_f, up, even_w, short, b1, NARROW, BOUNDED, CONVERTS, ASM)
    o0 = packed_codes(o0, o0_signs, odd_d, odd_f, up, odd_w, short, c0, NARROW, BOUNDED, CONVERTS, ASM)
    o1 = packed_codes(o1, o1_signs, odd_d, odd_f, up, odd_w, short, c1, NARROW, BOUNDED, CONVERTS, ASM)
    return columns_of_halves(e0, e1, o0, o1).permute(1, 0, 2).reshape(COLS, 2 * RUNS), scale_byte(s, wrong)


@triton.jit
def _tiles(
    x, qdata, scale, h, up, wrong_matrix, short,
    M, K, M16, span, stride_e, stride_m, stride_k,
    SQUARE: tl.constexpr, BLOCKED: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr, BOUNDED: tl.constexpr,
    CONVERTS: tl.constexpr, ASM: tl.constexpr, RUNS: tl.constexpr, COLS: tl.constexpr, PARTS: tl.constexpr,
    random, random_e, random_r, random_k, RANDOM: tl.constexpr,
):  # fmt: skip
    """All tiles of a program of `_nvfp4_tile`, in one of the two ways of `packed_codes`.

    It takes a tile in PARTS parts, one below the other. RUNS is the number of runs of a part.
    """
    ROWS: tl.constexpr = 16 * RUNS
    first, k0, e = tl.program_id(0) * span, tl.program_id(1) * COLS, tl.program_id(2).to(tl.int64)
    last = tl.minimum(first + span, tl.cdiv(M, ROWS * PARTS))
    run, k = tl.arange(0, RUNS), tl.arange(0, COLS)
    m, b = run * 16, k
    if WIDE:  # the products with strides are above 2^31, also those in load16
        m, b, stride_m = m.to(tl.int64), b.to(tl.int64), tl.cast(stride_m, tl.int64)
        if RANDOM == BYTES:
            random_r = tl.cast(random_r, tl.int64)
    x += e * stride_e + k0.to(tl.int64) * stride_k
    x_offset = (m * stride_m)[:, None] + (b * stride_k)[None, :]
    M8 = M16 * 2
    qdata += (e * K + k0) * M8
    q_offset = tl.arange(0, ROWS // 8)[None, :] + (k.to(tl.int64) * M8 if WIDE else k * M8)[:, None]
    for part in range(first * PARTS, last * PARTS):
        m0 = part * ROWS
        inside = ((m0 + run * 16 < M)[:, None] & (k0 + k < K)[None, :]) | EVEN  # M is a multiple of 16
        values = load16(x + m0.to(tl.int64) * stride_m + x_offset, stride_m, inside, None)
        if RANDOM == BYTES:
            r = random + e * random_e + m0.to(tl.int64) * random_r + k0.to(tl.int64) * random_k
            byte = load16(r + ((m * random_r)[:, None] + (b * random_k)[None, :]), random_r, inside, None)
            byte = byte.to(tl.int32).reshape(RUNS, COLS, 2, 8)
        elif RANDOM == SEED:
            number = ((e * K + k0) * M16 + m0 // 16).to(tl.int32) + (k[None, :] * M16 + run[:, None])
            w0, w1, w2, w3 = random_words(random, random_k, number)
            byte = bytes_of_words(tl.join(tl.join(w0, w2), tl.join(w1, w3)))  # (RUNS, COLS, 2, 8)
        else:
            byte = None
        word, stored = coded(
            values, byte, h, up, wrong_matrix, short, x.dtype.element_ty, SQUARE, BOUNDED, CONVERTS, ASM
        )
        there = ((k0 + k < K)[:, None] & (m0 // 8 + tl.arange(0, ROWS // 8) < M8)[None, :]) | EVEN
        tl.store(qdata + m0 // 8 + q_offset, word, mask=there)
        there = ((k0 + k < K)[:, None] & (m0 // 16 + run < M16)[None, :]) | EVEN
        scales = stored.permute(1, 0)  # (COLS, RUNS)
        if BLOCKED:
            tl.static_assert(COLS == 128 and PARTS == 1)
            scales = turned(tl.where(there, scales, 0).to(tl.uint8), RUNS // 4)
            place, col_tiles = tl.arange(0, 128 * RUNS), tl.cdiv(M16, 4)
            at = scale + ((e * tl.cdiv(K, 128) + tl.program_id(1)) * col_tiles + m0 // 64) * 512
            tl.store(at + place, scales, mask=(m0 // 64 + place // 512 < col_tiles) & (k0 < K))
        else:
            at = scale + (e * K + k0) * M16 + m0 // 16
            tl.store(at + (k[:, None] * M16 + run[None, :]), scales, mask=there)


@triton.jit(do_not_specialize=["span"])
def _nvfp4_tile(
    x, amax, qdata, scale, tensor_scale,
    M, K, M16, span, stride_e, stride_m, stride_k, amax_stride,
    SQUARE: tl.constexpr, BLOCKED: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr, BOUNDED: tl.constexpr,
    CONVERTS: tl.constexpr, ASM: tl.constexpr, PARTS: tl.constexpr, RUNS: tl.constexpr, COLS: tl.constexpr,
    random=None, random_e=None, random_r=None, random_k=None, RANDOM: tl.constexpr = NEAREST,
):  # fmt: skip
    # M16 is M / 16, computed on the host so that Triton keeps its divisible-by-16 specialization. Programs run along
    # the rows first, so that neighbouring programs write neighbouring bytes. A program has up to `span` tiles, one
    # below the other.
    e = tl.program_id(2).to(tl.int64)
    A, h, up, wrong_matrix = of_matrix(tl.load(amax + e * amax_stride))
    # A loop for each way: with both ways in one loop, a thread would have registers for both. The long way needs more
    # registers for a number, and may take a tile in PARTS parts.
    if is_short(A, tl.float32 != x.dtype.element_ty and RANDOM == NEAREST):
        _tiles(
            x, qdata, scale, h, up, wrong_matrix, True, M, K, M16, span, stride_e, stride_m, stride_k,
            SQUARE, BLOCKED, EVEN, WIDE, BOUNDED, CONVERTS, ASM, RUNS, COLS, 1,
            random, random_e, random_r, random_k, RANDOM,
        )  # fmt: skip
    else:
        _tiles(
            x, qdata, scale, h, up, wrong_matrix, False, M, K, M16, span, stride_e, stride_m, stride_k,
            SQUARE, BLOCKED, EVEN, WIDE, BOUNDED, CONVERTS, ASM, RUNS // PARTS, COLS, PARTS,
            random, random_e, random_r, random_k, RANDOM,
        )  # fmt: skip
    store_tensor_scale(tensor_scale, A, wrong_matrix, e, tl.program_id(0) + tl.program_id(1) == 0)


def nvfp4_tile(
    x: Tensor, amax: Tensor, bounded: bool, square: bool, blocked: bool, random: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`(qdata, scale, tensor_scale)` of x. The codes are stored as those of the transpose, `(..., K, M / 2)`."""
    *lead, M, K = x.shape
    E, config = lead[0] if lead else 1, for_device(CONFIGS, x.device)["blocked" if blocked else "plain"]
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
        few = in_words(x) and random is None and K % 16 == 0 and not (wide or converts(x.device))
        registers, parts = _limited(x, square, blocked, even) if few else ({}, 1)
        row_parts, col_parts = -(-M // rows), max(1, -(-K // cols))
        of_program = span(row_parts, col_parts * E, x.device, _SPAN, PROGRAMS)
        _nvfp4_tile[max(1, -(-row_parts // of_program)), col_parts, E](
            x, amax, qdata, scale, tensor_scale, M, K, M // 16, of_program,
            x.stride(0) if lead else 0, *x.stride()[-2:], amax.stride(0) if lead else 0,
            square, blocked, even, wide, bounded, converts(x.device), instructions(x.device), parts,
            **config, **random_of(random), **registers, **UNFUSED,
        )  # fmt: skip
    return qdata.view(torch.float4_e2m1fn_x2), scale.view(torch.float8_e4m3fn), tensor_scale
