"""NVFP4 blocks along the tokens of token groups, in tiles of `nvfp4_columns.py`. A program reads one group."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxspec.triton_kernels.common.blocked import turned
from mxspec.triton_kernels.common.groups import chunk, group_of, grouped_tile, padded_rows, tokens_left
from mxspec.triton_kernels.common.launch import UNFUSED, for_device, span
from mxspec.triton_kernels.common.nvfp4_numerics import converts, is_short, of_matrix, store_tensor_scales
from mxspec.triton_kernels.common.pairs import in_words, instructions
from mxspec.triton_kernels.common.runs import load16
from mxspec.triton_kernels.hopper.releases import release
from mxspec.triton_kernels.tiles.nvfp4_columns import CONFIGS, PROGRAMS, coded

# On Blackwell, the registers of a thread if K is no whole number of tiles. Without a limit, the assembler chooses 128,
# and keeps 8 bytes in local memory.
_ON_BLACKWELL = {"maxnreg": 144}
_SPAN = 8  # a program has up to so many tiles


def _limited(blocked: bool, even: bool) -> tuple[dict[str, int], int]:
    """As `_limited` of `nvfp4_columns.py`. `even` says that K is a whole number of tiles."""
    if not blocked and release() in ("3.6", "3.7", "3.8"):
        return {"maxnreg": 96}, 2
    return {"maxnreg": 96 if blocked and even and release() in ("3.6", "3.7", "3.9") else 128}, 1


@triton.jit
def _tiles_of_group(
    x_rows, qdata, scale, h, up, wrong_group, short, left, first_tile, tiles, m0, b, group, begin,
    size, G, K, R16, stride_m, stride_k,
    BLOCKED: tl.constexpr, EVEN: tl.constexpr, BOUNDED: tl.constexpr, CONVERTS: tl.constexpr, ASM: tl.constexpr,
    RUNS: tl.constexpr, COLS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """All tiles of a program of `_nvfp4_tile_of_groups`, in one of the two ways of `packed_codes`.

    It takes a tile in PARTS parts, one below the other. RUNS is the number of runs of a part.
    left: the number of tokens from the first row of each run on. None: all rows of a tile have tokens.
    """
    run = tl.arange(0, RUNS)
    offset = ((run * 16) * stride_m)[:, None] + (b * stride_k)[None, :]
    for i in range(tiles * PARTS):
        k_tile = first_tile + i // PARTS
        row = i % PARTS * (16 * RUNS)
        inside = tl.broadcast_to((k_tile * COLS + b < K)[None, :], (RUNS, COLS)) | EVEN
        of_tile = x_rows + row * stride_m + k_tile.to(tl.int64) * COLS * stride_k
        of_run = None if left is None else left - row
        values = load16(of_tile + offset, stride_m, inside, of_run)
        word, stored = coded(
            values, None, h, up, wrong_group, short, x_rows.dtype.element_ty, False, BOUNDED, CONVERTS, ASM
        )
        byte = stored.permute(1, 0)  # (COLS, RUNS)
        _store_of_groups(
            qdata, scale, word, byte, m0 + row, k_tile, b, group, begin, size, G, K, R16, BLOCKED, EVEN, RUNS, COLS
        )  # fmt: skip


# `tokens` is not specialized: with tokens == 1 ptxas 12.8 generates wrong code (see mx_quantize_groups).
@triton.jit(do_not_specialize=["tokens", "span", "padded_tiles"])
def _nvfp4_tile_of_groups(
    x, amax, qdata, scale, tensor_scale, start, end, offs,
    padded_tiles, K, tokens, span, stride_m, stride_k, amax_stride, G, stride_offs,
    BLOCKED: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr, BOUNDED: tl.constexpr, CONVERTS: tl.constexpr,
    ASM: tl.constexpr, PARTS: tl.constexpr, ALIGN: tl.constexpr, CHUNK: tl.constexpr,
    RUNS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    # padded_tiles counts the padded rows in tiles of 128. So Triton knows that the distances between rows of scales are
    # multiples of 8 bytes, and those between rows of codes multiples of 64. The rows of a program belong to one group.
    ROWS: tl.constexpr = 16 * RUNS
    R16 = padded_tiles * 8
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
        left_long = tokens_left((token + tl.arange(0, RUNS // PARTS) * 16)[:, None], stop, tokens)
        left_long = tl.maximum(left_long, 0)  # for any `offs`, the rows of a part can be subtracted
        # A loop for each way, as in `_nvfp4_tile`. Most tiles are short and whole: their loads need no masks for rows.
        # With a part of a tile at the end of K, one more loop is no faster.
        if is_short(A, tl.float32 != x.dtype.element_ty):
            if EVEN & (tokens_left(token, stop, tokens) >= ROWS):
                _tiles_of_group(
                    x_rows, qdata, scale, h, up, wrong_group, True, None, first_tile, tiles, m0, b, group,
                    begin, size, G, K, R16, stride_m, stride_k, BLOCKED, EVEN, BOUNDED, CONVERTS, ASM, RUNS, COLS, 1,
                )  # fmt: skip
            else:
                _tiles_of_group(
                    x_rows, qdata, scale, h, up, wrong_group, True, left, first_tile, tiles, m0, b, group,
                    begin, size, G, K, R16, stride_m, stride_k, BLOCKED, EVEN, BOUNDED, CONVERTS, ASM, RUNS, COLS, 1,
                )  # fmt: skip
        else:
            _tiles_of_group(
                x_rows, qdata, scale, h, up, wrong_group, False, left_long, first_tile, tiles, m0, b, group,
                begin, size, G, K, R16, stride_m, stride_k, BLOCKED, EVEN, BOUNDED, CONVERTS, ASM,
                RUNS // PARTS, COLS, PARTS,
            )  # fmt: skip
    else:  # rows after the last group
        word, byte = tl.zeros((COLS, ROWS // 8), tl.uint32), tl.zeros((COLS, RUNS), tl.uint8)
        for i in range(tiles):
            k_tile = first_tile + i
            _store_of_groups(
                qdata, scale, word, byte, m0, k_tile, b, group, begin, size, G, K, R16, BLOCKED, EVEN, RUNS, COLS
            )  # fmt: skip
    if writes:
        store_tensor_scales(tensor_scale, amax, amax_stride, G, CHUNK)


@triton.jit
def _store_of_groups(
    qdata, scale, word, byte, m0, k_tile, b, group, begin, size, G, K, R16,
    BLOCKED: tl.constexpr, EVEN: tl.constexpr, RUNS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Store the words of codes `(COLS, 2 * RUNS)` and the scale bytes `(COLS, RUNS)` of a tile of one group.

    `size` is the number of tiles of 64 padded rows of the group, and `begin` is its first padded row.
    """
    k0, there = k_tile * COLS, (k_tile * COLS + b < K)[:, None] | EVEN
    n, R8 = tl.arange(0, 2 * RUNS), R16 * 2
    to, there_too = qdata + k0.to(tl.int64) * R8 + m0 // 8, there & (m0 // 16 < R16)
    tl.store(to + (b * R8)[:, None] + n, word, mask=there_too)
    if BLOCKED:
        tl.static_assert(COLS == 128 and RUNS == 4)
        byte = turned(tl.where(there, byte, 0).to(tl.uint8), 1)
        place, exists = grouped_tile(m0 // 64, k_tile, group, begin // 64, size, G, tl.cdiv(K, 128), R16 // 4 + G)
        tl.store(scale + place * 512 + tl.arange(0, 512), byte, mask=exists)
    else:
        run = tl.arange(0, RUNS)
        at = scale + k0.to(tl.int64) * R16 + m0 // 16
        tl.store(at + ((b * R16)[:, None] + run[None, :]), byte, mask=there_too)


def nvfp4_tile_of_groups(
    x: Tensor, offs: Tensor, amax: Tensor, start: Tensor, end: Tensor, pad_to: int, bounded: bool, blocked: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`(qdata, scale, tensor_scale)` of token groups; also writes start and end.

    The codes are stored as those of the transpose, `(K, R / 2)`.
    """
    (M, K), G, config = x.shape, offs.shape[0], for_device(CONFIGS, x.device)["blocked" if blocked else "plain"]
    R, rows, cols = padded_rows(M, G, pad_to), 16 * config["RUNS"], config["COLS"]
    qdata = x.new_empty((K, R // 8), dtype=torch.int32)  # words of eight codes
    scale = x.new_empty((-(-K // 128) * 128, R // 16 + 4 * G) if blocked else (K, R // 16), dtype=torch.uint8)
    tensor_scale = x.new_empty(G, dtype=torch.float32)
    scaled = R + 64 * G if blocked else R  # the number of rows with scales
    if scaled:
        wide = max(rows * x.stride(0), cols * max(x.stride(1), R)) >= 2**31
        row_tiles, k_tiles = -(-scaled // rows), -(-K // cols)
        of_program = span(k_tiles, row_tiles, x.device, _SPAN, PROGRAMS)
        even = K % cols == 0
        registers, parts = dict[str, int](), 1
        if in_words(x) and K % 16 == 0 and not wide:
            if converts(x.device):
                registers = {} if even else _ON_BLACKWELL
            else:
                registers, parts = _limited(blocked, even)
        # At least one program across: with no columns, start, end and the tensor scales are still written.
        _nvfp4_tile_of_groups[row_tiles, max(1, -(-k_tiles // of_program))](
            x, amax, qdata, scale, tensor_scale, start, end, offs, R // 128, K, M, of_program, *x.stride(),
            amax.stride(0), G, offs.stride(0), blocked, even, wide, bounded, converts(x.device),
            instructions(x.device), parts, pad_to, chunk(G), **config, **registers, **UNFUSED,
        )  # fmt: skip
    return qdata.view(torch.float4_e2m1fn_x2), scale.view(torch.float8_e4m3fn), tensor_scale
