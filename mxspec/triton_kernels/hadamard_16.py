"""hadamard_16 in Triton: a thread holds whole blocks of 16 elements, and transforms them in its registers.

Along axis -1 a program owns a run of blocks, in the order in which the result lies in memory. Along axis -2 it owns a
tile, and 16 rows of a column are loads of their own in one thread.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxspec.triton_kernels.common.launch import UNFUSED, for_device
from mxspec.triton_kernels.common.numerics import widened
from mxspec.triton_kernels.common.runs import load16, store16

# An H100 gave the reference's bytes for every case, and timed it (benchmarks/results/decisions.md).
RANK = {(9, 0): 1, (10, 0): 1}
# A program has BLOCKS blocks along axis -1, and a tile of 16 * RUNS rows and COLS columns along axis -2. Not measured.
_HOPPER = {
    "rows": {"BLOCKS": 128, "num_warps": 2},
    "columns": {"RUNS": 2, "COLS": 128, "num_warps": 4},
}
CONFIGS = {(9, 0): _HOPPER, (10, 0): _HOPPER}
# Without .ftz, which would lose subnormals.
PTX = (r"st\.global\.(v[24]\.)?b(16|32)", r"add\.(rn\.)?f32", r"sub\.(rn\.)?f32", r"mul\.(rn\.)?f32")


def supports(x: Tensor, *, axis: int = -1, **_: Any) -> str | None:
    if x.ndim == 3 and x.shape[0] > 65535:
        return f"takes up to 65535 experts, the limit of its grid; x has {x.shape[0]}"
    if x.numel() > 2**34:
        return f"counts blocks in 32 bits, so x may have up to 2^34 elements; it has {x.numel()}"
    if axis == -2 and x.shape[-1] > 65535 * 32:
        return f"takes K up to {65535 * 32}, the limit of its grid; it is {x.shape[-1]}"
    return None


@triton.jit
def negated(v, signs, j):
    """The elements v, fp32, with the sign of those changed whose bit j of `signs` is set. j broadcasts with v."""
    return (v.to(tl.int32, bitcast=True) ^ ((signs >> j) << 31)).to(tl.float32, bitcast=True)


@triton.jit
def _stage(v):
    """The sums and the differences of the pairs in the last dimension. That dimension then becomes the second.

    After as many stages as there are dimensions of 2, the dimensions have their order again.
    """
    a, b = tl.split(v)
    v = tl.join(a + b, a - b)
    if len(v.shape) == 4:
        return v.permute(0, 3, 1, 2)
    else:
        return v.permute(0, 1, 5, 2, 3, 4)


@triton.jit
def _hadamard_of_rows(
    x, y, signs, R, C, stride_e, stride_r, stride_k, FLAT: tl.constexpr, EVEN: tl.constexpr, BLOCKS: tl.constexpr
):
    e = tl.program_id(2).to(tl.int64)
    i, j = tl.arange(0, BLOCKS), tl.arange(0, 8)
    n = tl.program_id(0) * BLOCKS + i
    inside = ((n < R * C) | EVEN)[:, None]
    start = e * R * C + tl.program_id(0).to(tl.int64) * BLOCKS
    if FLAT:  # a matrix is contiguous
        x += start * 16
        source = i[:, None] * 16 + j[None, :]
    else:
        x += e * stride_e
        k = (n % C)[:, None] * 16 + j[None, :]
        source = (n // C).to(tl.int64)[:, None] * stride_r + k.to(tl.int64) * stride_k
    # Two halves, so that a thread has a whole block.
    low = negated(widened(tl.load(x + source, mask=inside, other=0)), signs, j[None, :])
    high = tl.load(x + source + tl.cast(stride_k, tl.int64) * 8, mask=inside, other=0)
    high = negated(widened(high), signs, j[None, :] + 8)
    low, high = low.reshape(BLOCKS, 2, 2, 2), high.reshape(BLOCKS, 2, 2, 2)
    for _ in tl.static_range(3):  # the distances 1, 2 and 4
        low, high = _stage(low), _stage(high)
    low, high = low.reshape(BLOCKS, 8), high.reshape(BLOCKS, 8)
    place = y + start * 16 + (i[:, None] * 16 + j[None, :])
    tl.store(place, ((low + high) * 0.25).to(y.dtype.element_ty), mask=inside)
    tl.store(place + 8, ((low - high) * 0.25).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _hadamard_of_columns(
    x, y, signs, M, K, stride_e, stride_m, stride_k, EVEN: tl.constexpr, WIDE: tl.constexpr,
    RUNS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    # Programs run along the columns first, as memory does.
    m0, k0, e = tl.program_id(1) * (16 * RUNS), tl.program_id(0) * COLS, tl.program_id(2).to(tl.int64)
    run, k = tl.arange(0, RUNS), tl.arange(0, COLS)
    inside = ((m0 + run * 16 < M)[:, None] & (k0 + k < K)[None, :]) | EVEN  # M is a multiple of 16
    m, b = run * 16, k
    if WIDE:  # the products with strides are above 2^31, also those in load16
        m, b, stride_m = m.to(tl.int64), b.to(tl.int64), tl.cast(stride_m, tl.int64)
    x += e * stride_e + m0.to(tl.int64) * stride_m + k0.to(tl.int64) * stride_k
    values = load16(x + ((m * stride_m)[:, None] + (b * stride_k)[None, :]), stride_m, inside, None)
    j = tl.arange(0, 16)[None, None, :]
    v = negated(widened(values).reshape(RUNS, COLS, 16), signs, j).reshape(RUNS, COLS, 2, 2, 2, 2)
    for _ in tl.static_range(4):
        v = _stage(v)
    y += (e * M + m0) * K + k0
    store16(y + ((m * K)[:, None] + k[None, :]), K, v * 0.25, inside, None)


def hadamard_16(x: Tensor, *, axis: int = -1, signs: int = 0xD7E8) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return y
    *lead, M, K = x.shape
    E, stride_e = (lead[0], x.stride(0)) if lead else (1, 0)
    config = for_device(CONFIGS, x.device)["rows" if axis == -1 else "columns"]
    if axis == -1:
        C, blocks = K // 16, config["BLOCKS"]
        flat = x.stride(-1) == 1 and x.stride(-2) == K and (not lead or stride_e == M * K)
        even = M * C % blocks == 0
        _hadamard_of_rows[-(-M * C // blocks), 1, E](
            x, y, signs, M, C, stride_e, *x.stride()[-2:], flat, even, **config, **UNFUSED
        )
        return y
    rows, cols = 16 * config["RUNS"], config["COLS"]
    even = M % rows == 0 == K % cols
    wide = max(rows * max(x.stride(-2), K), cols * x.stride(-1)) >= 2**31
    _hadamard_of_columns[-(-K // cols), -(-M // rows), E](
        x, y, signs, M, K, stride_e, *x.stride()[-2:], even, wide, **config, **UNFUSED
    )
    return y
