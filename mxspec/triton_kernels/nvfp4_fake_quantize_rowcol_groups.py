"""nvfp4_fake_quantize_rowcol_groups in Triton: one launch finds the magnitudes of the groups, one writes the values.

A program owns 16 rows of one padded group, and COLS columns. A thread holds 4 columns (2 under "large") with all of
their 16 rows: the transform, the blocks of columns and the random bytes of both directions need no other thread, and 4
threads (or 8) find the magnitude of a row's block by shuffles. Both results are row-major like x, so no value passes
through shared memory.

A first launch sets the magnitudes to 0, for the atomic maxima of the second.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxspec.triton_kernels.common import launch
from mxspec.triton_kernels.common.groups import chunk, group_of, padded_rows, tokens_left
from mxspec.triton_kernels.common.numerics import magnitude_bits, widened
from mxspec.triton_kernels.common.nvfp4_numerics import of_matrix
from mxspec.triton_kernels.common.nvfp4_values import (
    matrix_values,
    random_bytes,
    transformed,
    transformed_sums,
)
from mxspec.triton_kernels.common.runs import load16, store16
from mxspec.triton_kernels.tiles.largest import zeros_beside

# An H200 gave the reference's bytes. Times: benchmarks/results/decisions.md.
RANK = {(9, 0): 1, (10, 0): 1}
# "large": with random bytes, fp16 and fp32 take more registers. So do elements of a row that lie apart: each has an
# address.
_HOPPER = {"small": {"COLS": 256, "num_warps": 2}, "large": {"COLS": 256, "num_warps": 4}}
CONFIGS = {(9, 0): _HOPPER, (10, 0): _HOPPER}
_SPAN = 8  # the most tiles of a program that finds magnitudes
PTX = (r"(red|atom)\.global\..*max", r"st\.global\.(v2\.)?b32", r"cvt\.rn\.bf16x2\.f32")


@triton.jit
def _place(offs, tokens, G, stride_offs, start, end, of_program, COLS: tl.constexpr, CHUNK: tl.constexpr):
    """A program's tile of 16 padded rows, its group, its first token, the tokens that are left, and its first columns.

    A program owns `of_program` columns.
    The rows after the last group count as one more group, G. The last result says whether the program is the first.
    """
    tile = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    first = (tile == 0) & (tl.program_id(0) == 0)
    group, token, stop, begin = group_of(tile * 16, offs, stride_offs, G, start, end, first, 16, CHUNK)
    last = tl.load(offs + (G - 1) * stride_offs, mask=G > 0, other=0)
    grouped = group < G
    token = tl.where(grouped, token, last) + tile * 16 - begin
    left = tokens_left(token, tl.where(grouped, stop, tokens), tokens)
    return tile, group, token, left, tl.program_id(0) * of_program + tl.arange(0, COLS), first


@triton.jit
def _loaded(x, token, left, k, K, stride_m, stride_k, WIDE: tl.constexpr):
    """The elements of 16 tokens, `(COLS, 16)`: zeros where no token is left."""
    stride = tl.cast(stride_m, tl.int64) if WIDE else stride_m
    at = x + token.to(tl.int64) * stride_m + k.to(tl.int64) * stride_k
    return load16(at, stride, k < K, left).reshape(k.shape[0], 16)


# `span` is not specialized, so that no number compiles a kernel of its own. `tokens` is not specialized either: with
# tokens == 1 ptxas 12.8 generates wrong code (see mx_quantize_groups).
@triton.jit(do_not_specialize=["tokens", "span"])
def _largest(
    x, found, offs, start, end, tokens, span, K, stride_m, stride_k, G, stride_offs,
    SIGNS: tl.constexpr, WIDE: tl.constexpr, CHUNK: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """The magnitudes of a program's `span` tiles of the same rows."""
    _, group, token, left, k, _ = _place(offs, tokens, G, stride_offs, start, end, span * COLS, COLS, CHUNK)
    if group < G:
        most, most_turned = tl.zeros((COLS,), tl.int32), tl.zeros((COLS,), tl.int32)
        for _i in range(span):
            values = _loaded(x, token, left, k, K, stride_m, stride_k, WIDE)
            wide = widened(values)
            most = tl.maximum(most, tl.max(magnitude_bits(wide), axis=1))
            if SIGNS is not None:
                most_turned = tl.maximum(most_turned, tl.max(magnitude_bits(transformed_sums(wide, SIGNS)), axis=1))
            k += COLS
        tl.atomic_max(found + group, tl.max(most, axis=0), sem="relaxed")
        if SIGNS is not None:
            # The largest product is that of the largest sum. The largest rounded one is the largest one, rounded.
            bits = magnitude_bits(tl.max(most_turned, axis=0).to(tl.float32, bitcast=True) * 0.25)
            rounded = bits.to(tl.float32, bitcast=True).to(x.dtype.element_ty).to(tl.float32).to(tl.int32, bitcast=True)
            tl.atomic_max(found + G + group, tl.where(bits < 0x7F800000, rounded, bits), sem="relaxed")


@triton.jit(do_not_specialize=["tokens"])
def _nvfp4_fake_quantize_rowcol_groups(
    x, found, rows, columns, row_scale, column_scale, offs, random,
    tokens, tiles, K, stride_m, stride_k, G, stride_offs, stride_random,
    SIGNS: tl.constexpr, WIDE: tl.constexpr, CHUNK: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    tile, group, token, left, k, first = _place(offs, tokens, G, stride_offs, None, None, COLS, COLS, CHUNK)
    of_columns = 0 if SIGNS is None else G
    if first:
        for i in range(0, G, CHUNK):
            g = i + tl.arange(0, CHUNK)
            for_rows = tl.load(found + g, mask=g < G, other=0).to(tl.float32, bitcast=True)
            for_columns = tl.load(found + of_columns + g, mask=g < G, other=0).to(tl.float32, bitcast=True)
            _store_scales(row_scale, for_rows, g, G)
            _store_scales(column_scale, for_columns, g, G)
    inside = k < K
    rows += token.to(tl.int64) * K + k
    columns += tile.to(tl.int64) * 16 * K + k
    exists = inside & (tile < tiles)
    shape: tl.constexpr = [COLS, 2, 2, 2, 2]
    if group < G:
        loaded = _loaded(x, token, left, k, K, stride_m, stride_k, WIDE)
        values, byte = widened(loaded), None
        n = tile.to(tl.int64) * K + k
        if random is not None:
            byte = random_bytes(random, stride_random, n, 0)
        amax = tl.load(found + group).to(tl.float32, bitcast=True)
        out = matrix_values(values, amax, loaded.dtype, "rows", byte)
        store16(rows, K, out.reshape(shape), inside, left)
        # The caches hold the elements until here, and the registers do not.
        loaded = _loaded(x, token, left, k, K, stride_m, stride_k, WIDE)
        values = widened(loaded)
        if SIGNS is not None:
            values = widened(transformed(values, SIGNS).to(loaded.dtype))
        if random is not None:
            byte = random_bytes(random, stride_random, n, 1)
        amax = tl.load(found + of_columns + group).to(tl.float32, bitcast=True)
        out = matrix_values(values, amax, loaded.dtype, "columns", byte)
        store16(columns, K, out.reshape(shape), exists, None)
    else:  # rows that belong to no group
        zero = tl.zeros(shape, tl.float32)
        store16(rows, K, zero, inside, left)
        store16(columns, K, zero, exists, None)


@triton.jit
def _store_scales(to, amax, g, G):
    A, _, _, wrong = of_matrix(amax)
    T = tl.div_rn(A, 2688.0)
    tl.store(to + g, tl.where(wrong, float("nan"), T), mask=g < G)


def nvfp4_fake_quantize_rowcol_groups(
    x: Tensor,
    offs: Tensor,
    random: Tensor | None = None,
    *,
    signs: int | None = None,
    check_offs: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    (M, K), G, configs = x.shape, offs.shape[0], launch.for_device(CONFIGS, x.device)
    R = padded_rows(M, G, 16)
    rows, columns = (x.new_empty((n, K), dtype=torch.bfloat16) for n in (M, R))
    row_scale, column_scale = (x.new_empty((G,), dtype=torch.float32) for _ in range(2))
    start, end = (offs.new_empty((G,)) for _ in range(2))
    if R:
        found = zeros_beside(x, 2 * G)
        strides = x.stride() if K else (16, 1)  # without columns, PyTorch makes both strides 1, and registers spill
        is_apart = strides[1] != 1
        of_amax = configs["large" if is_apart else "small"]
        is_large = is_apart or (random is not None and x.dtype != torch.bfloat16)
        of_values = configs["large" if is_large else "small"]
        across = [max(1, -(-K // config["COLS"])) for config in (of_amax, of_values)]
        span = launch.span(across[0], R // 16, x.device, _SPAN)
        grids = [launch.grid(-(-across[0] // span), R // 16), launch.grid(across[1], R // 16)]
        given = signs, 16 * strides[0] >= 2**31, chunk(G)
        sizes = K, *strides, G, offs.stride(0)
        _largest[grids[0]](x, found, offs, start, end, M, span, *sizes, *given, **of_amax, **launch.UNFUSED)
        _nvfp4_fake_quantize_rowcol_groups[grids[1]](
            x, found, rows, columns, row_scale, column_scale, offs, random, M, R // 16, *sizes,
            0 if random is None else random.stride(0), *given, **of_values, **launch.UNFUSED,
        )  # fmt: skip
    return rows, row_scale, columns, column_scale, start, end
