"""nvfp4_fake_quantize in Triton: one launch finds the largest magnitudes and writes the values.

A program has PARTS tiles of 16 rows and COLS columns of a matrix, side by side, and one of two tasks. The first kind of
program finds the largest magnitude of its tiles. The second kind loads its tiles, waits until all magnitudes of its
matrix are found, and writes the values. It follows the first kind at a distance that the L2 cache holds. So a stack of
small matrices comes from memory once.

GPUs start programs in the order of their numbers, and a program waits only for programs with smaller numbers. So all
programs for which it waits have started. CUDA does not promise this order. The scans of NVIDIA's CUB rely on it, too.

A thread holds 4 columns with all of their 16 rows, as in nvfp4_fake_quantize_rowcol_groups. A small launch before sets
the magnitudes and the counts of tiles to 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxspec.triton_kernels.common import launch
from mxspec.triton_kernels.common.numerics import magnitude_bits, widened
from mxspec.triton_kernels.common.nvfp4_numerics import of_matrix, store_tensor_scale
from mxspec.triton_kernels.common.nvfp4_values import matrix_values
from mxspec.triton_kernels.common.runs import load16, store16
from mxspec.triton_kernels.tiles.largest import zeros_beside

RANK = {(9, 0): 1, (10, 0): 1}
# "narrow": a row has few columns, or their number is no multiple of 16. "large element": fp32 takes more registers.
# So do elements of a row that lie apart: each has an address.
_HOPPER = {
    "wide": {"COLS": 512, "PARTS": 2, "num_warps": 4},
    "narrow": {"COLS": 512, "PARTS": 1, "num_warps": 4},
    "large element": {"COLS": 256, "PARTS": 1, "num_warps": 4},
}
CONFIGS = {(9, 0): _HOPPER, (10, 0): _HOPPER}
_AHEAD = 2**22  # elements between the two kinds of programs, besides those of one matrix: about as many as run at once
PTX = (r"(red|atom)\.global\..*max", r"st\.global\.(v2\.)?b32", r"cvt\.rn\.bf16x2\.f32")


def supports(x: Tensor, **_: object) -> str | None:
    if x.numel() >= 2**34:
        return f"counts tiles in 32 bits, so x must have fewer than 2^34 elements; it has {x.numel()}"
    return None


@triton.jit
def _acquired(at):
    """A number that other programs count up. What they wrote before is then visible.

    Triton's loads have no such order, and an atomic sum with 0 would make the programs wait for each other.
    """
    text: tl.constexpr = "ld.acquire.gpu.global.b32 $0, [$1];"
    return tl.inline_asm_elementwise(text, "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _task(tiles, lead):
    """`(tile, writes)` of a program: the number of its tile, among those of all matrices, and which kind it is.

    `lead` programs of the first kind come first. Then the two kinds take turns, and those of the second kind end.
    """
    n = tl.program_id(0) - lead
    both = 2 * (tiles - lead)
    writes = (n >= both) | ((n >= 0) & (n % 2 == 1))
    tile = tl.where(n < 0, n + lead, tl.where(n < both, n // 2 + tl.where(writes, 0, lead), n - (tiles - lead)))
    return tile, writes


@triton.jit
def _nvfp4_fake_quantize(
    x, found, values, tensor_scale, R, K, stride_e, stride_m, stride_k, of_row, per_matrix, tiles, lead, E,
    BLOCK: tl.constexpr, WIDE: tl.constexpr, WAITS: tl.constexpr, COLS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    tile, writes = _task(tiles, lead)
    e, place = tile // per_matrix, tile % per_matrix
    row, k = place // of_row * 16, place % of_row * (COLS * PARTS) + tl.arange(0, COLS)
    left = R - row
    stride = tl.cast(stride_m, tl.int64) if WIDE else stride_m
    at = x + e.to(tl.int64) * stride_e + row.to(tl.int64) * stride_m + k.to(tl.int64) * stride_k
    beside = at + tl.cast(stride_k, tl.int64) * COLS
    if writes:
        loaded = load16(at, stride, k < K, left, "evict_first").reshape(COLS, 16)
        if PARTS == 2:
            other = load16(beside, stride, k + COLS < K, left, "evict_first").reshape(COLS, 16)
        if WAITS:  # an interpreter runs one program after the other
            while _acquired(found + E + e) < per_matrix:
                pass
        amax = tl.load(found + e, cache_modifier=".cg").to(tl.float32, bitcast=True)
        to = values + (e.to(tl.int64) * R + row) * K + k
        _write(to, K, loaded, amax, k, left, BLOCK)
        if PARTS == 2:
            _write(to + COLS, K, other, amax, k + COLS, left, BLOCK)
        A, _, _, wrong = of_matrix(amax)
        store_tensor_scale(tensor_scale, A, wrong, e, place == per_matrix - 1)
    else:
        loaded = load16(at, stride, k < K, left, "evict_last").reshape(COLS, 16)
        bits = magnitude_bits(widened(loaded))
        if PARTS == 2:
            other = load16(beside, stride, k + COLS < K, left, "evict_last").reshape(COLS, 16)
            bits = tl.maximum(bits, magnitude_bits(widened(other)))
        largest = tl.max(tl.max(bits, axis=1), axis=0)
        if largest > tl.load(found + e, volatile=True):  # a later magnitude is seldom the largest one
            tl.atomic_max(found + e, largest, sem="relaxed")
        tl.atomic_add(found + E + e, 1, sem="release")


@triton.jit
def _write(to, K, loaded, amax, k, left, BLOCK: tl.constexpr):
    """The values of a tile."""
    out = matrix_values(widened(loaded), amax, loaded.dtype, BLOCK)
    store16(to, K, out.reshape([loaded.shape[0], 2, 2, 2, 2]), k < K, left, "evict_first")


def nvfp4_fake_quantize(x: Tensor, *, axis: int = -1, block: str = "1x16") -> tuple[Tensor, Tensor]:
    *lead, R, K = x.shape
    E = lead[0] if lead else 1
    values = x.new_empty(x.shape, dtype=torch.bfloat16)
    tensor_scale = x.new_empty(tuple(lead), dtype=torch.float32)
    if E:
        strides = x.stride()[-2:] if x.numel() else (16, 1)  # without elements, PyTorch makes strides 1
        is_large, is_wide = strides[1] != 1 or x.dtype == torch.float32, K > 512 and K % 16 == 0
        size = "large element" if is_large else "wide" if is_wide else "narrow"
        config = launch.for_device(CONFIGS, x.device)[size]
        width = config["COLS"] * config["PARTS"]
        of_row, rows = max(1, -(-K // width)), max(1, -(-R // 16))
        tiles = E * of_row * rows
        ahead = min(tiles, of_row * rows + _AHEAD // (16 * width))
        found = zeros_beside(x, 2 * E)  # the magnitudes, and how many tiles are read
        shape = "16x16" if block == "16x16" else "rows" if axis == -1 else "columns"
        _nvfp4_fake_quantize[(2 * tiles,)](
            x, found, values, tensor_scale, R, K, x.stride(0) if lead else 0, *strides, of_row, of_row * rows, tiles,
            ahead, E, shape, 16 * strides[0] >= 2**31, x.device.type != "cpu", **config, **launch.UNFUSED,
        )  # fmt: skip
    return values, tensor_scale
