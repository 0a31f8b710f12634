"""fp8_transpose_128x128 in Triton: a program owns one block. It moves the block's codes and its scale.

`_words`: a thread has 16 rows by 16 columns. It loads 16 bytes of each row, turns them in its registers, and stores 16
bytes at a time along N. This needs rows of codes without gaps between their columns, and rows of both matrices that
begin at multiples of 16 bytes. `_tile` runs all other calls: Triton chooses its threads. If qdata itself is the
transpose of a row-major matrix, `_tile` copies rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxspec.formats import FP8_BLOCK_SIZE
from mxspec.triton_kernels.common import launch
from mxspec.triton_kernels.common.runs import load16

RANK = {(9, 0): 1, (10, 0): 1}  # 0.95 of a copy's rate on an H100. Blackwell: compiled, not run
# "words": a block is 64 threads. 128 and 256 threads take as long: benchmarks/results/decisions.md.
_HOPPER = {"words": {"num_warps": 2}, "tile": {"num_warps": 8}}
CONFIGS = {(9, 0): _HOPPER, (10, 0): _HOPPER}
PTX = (r"ld\.global\.v4\.b32", r"st\.global\.v4\.b32")


def supports(qdata: Tensor, scale: Tensor) -> str | None:
    if qdata.ndim == 3 and qdata.shape[0] > launch.MOST:
        return f"takes up to {launch.MOST} experts, the limit of its grid; qdata has {qdata.shape[0]}"
    if qdata.shape[-2] > launch.MOST * FP8_BLOCK_SIZE:
        return f"takes N up to {launch.MOST * FP8_BLOCK_SIZE}, the limit of its grid; qdata is {tuple(qdata.shape)}"
    return None


@triton.jit
def _move_scale(scale, scale_t, b, c, e, stride_e, stride_b, stride_c):
    factor = tl.load(scale + e * stride_e + b.to(tl.int64) * stride_b + c.to(tl.int64) * stride_c)
    tl.store(scale_t + (e * tl.num_programs(0) + c) * tl.num_programs(1) + b, factor)


@triton.jit
def _words(
    qdata, scale, qdata_t, scale_t,
    N, K, stride_e, stride_n, stride_k, scale_stride_e, scale_stride_b, scale_stride_c,
    EVEN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    c, b, e = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    n0, k0 = b.to(tl.int64) * 128, c.to(tl.int64) * 128
    n, k = tl.arange(0, 8)[:, None] * 16, tl.arange(0, 128)[None, :]
    if WIDE:  # the products with strides are above 2^31, also those in load16
        n, k, stride_n = n.to(tl.int64), k.to(tl.int64), tl.cast(stride_n, tl.int64)
    # A thread has all of its 16 rows or none, and all of its 16 columns or none: N and K are multiples of 16.
    inside = ((n0 + n < N) & (k0 + k < K)) | EVEN
    qdata += e * stride_e + n0 * stride_n + k0 * stride_k
    q = load16(qdata + (n * stride_n + k * stride_k), stride_n, inside, None)
    # The thread now has runs of 16 bytes along N. Triton exchanges them through shared memory for the store.
    q = q.reshape(8, 128, 16).permute(1, 0, 2).reshape(128, 128)
    k, n = tl.arange(0, 128)[:, None], tl.arange(0, 128)[None, :]
    if WIDE:
        k, n = k.to(tl.int64), n.to(tl.int64)
    inside = ((k0 + k < K) & (n0 + n < N)) | EVEN
    tl.store(qdata_t + (e * K + k0) * N + n0 + (k * N + n), q, mask=inside)
    _move_scale(scale, scale_t, b, c, e, scale_stride_e, scale_stride_b, scale_stride_c)


@triton.jit
def _tile(
    qdata, scale, qdata_t, scale_t,
    N, K, stride_e, stride_n, stride_k, scale_stride_e, scale_stride_b, scale_stride_c,
    EVEN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    c, b, e = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    n0, k0 = b.to(tl.int64) * 128, c.to(tl.int64) * 128
    n, k = tl.arange(0, 128)[:, None], tl.arange(0, 128)[None, :]
    if WIDE:  # the products with strides are above 2^31
        n, k = n.to(tl.int64), k.to(tl.int64)
    inside = ((n0 + n < N) & (k0 + k < K)) | EVEN
    qdata += e * stride_e + n0 * stride_n + k0 * stride_k
    q = tl.load(qdata + (n * stride_n + k * stride_k), mask=inside, other=0)
    tl.store(qdata_t + (e * K + k0) * N + n0 + (k * N + n), q, mask=inside)
    _move_scale(scale, scale_t, b, c, e, scale_stride_e, scale_stride_b, scale_stride_c)


def fp8_transpose_128x128(qdata: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    *lead, N, K = qdata.shape
    row_blocks, col_blocks = scale.shape[-2:]
    qdata_t, scale_t = qdata.new_empty((*lead, K, N)), scale.new_empty((*lead, col_blocks, row_blocks))
    if qdata.numel():
        E, stride_e, scale_stride_e = (lead[0], qdata.stride(0), scale.stride(0)) if lead else (1, 0, 0)
        strides, scale_strides = qdata.stride()[-2:], scale.stride()[-2:]
        even = N % FP8_BLOCK_SIZE == 0 == K % FP8_BLOCK_SIZE
        wide = FP8_BLOCK_SIZE * max(*strides, N) >= 2**31
        words = strides[1] == 1 and (strides[0] | stride_e | N | qdata.data_ptr()) % 16 == 0
        kernel, config = (_words, "words") if words else (_tile, "tile")
        # Codes as integers, so that a masked load can give 0.
        codes, codes_t = qdata.view(torch.uint8), qdata_t.view(torch.uint8)
        kernel[col_blocks, row_blocks, E](
            codes, scale, codes_t, scale_t, N, K, stride_e, *strides, scale_stride_e, *scale_strides, even, wide,
            **launch.for_device(CONFIGS, qdata.device)[config], **launch.UNFUSED,
        )  # fmt: skip
    return qdata_t, scale_t
