"""fp8_transpose_128x128 in Helion: a program owns one block. It moves the block's codes and its scale.

The two ways to move a block are those of the kernel in Triton.
"""

from __future__ import annotations

import helion.language as hl
import torch
from torch import Tensor

from mxspec.formats import FP8_BLOCK_SIZE
from mxspec.helion_kernels.common.launch import flat, for_device, launch, on_grid
from mxspec.helion_kernels.common.runs import dimension, load_run

# No GPU has run it. Layers call it for weights that FSDP2 gathered as codes, and the reference is slower.
RANK = {(9, 0): 2, (10, 0): 2}
_HOPPER = {"words": 2, "tile": 8}
NUM_WARPS = {(9, 0): _HOPPER, (10, 0): _HOPPER}  # as in Triton
PTX = (r"ld\.global\.v4\.b32", r"st\.global\.v4\.b32")


def _words(
    qdata: Tensor, stride_e: int, stride_n: int, stride_k: int, N: int, K: int, qdata_t: Tensor,
    even: bool, e: int, b: int, c: int,
) -> None:  # fmt: skip
    """A thread has 16 rows by 16 columns. It loads 16 bytes of each row, and turns them in its registers."""
    n, k = b * 128 + dimension(8, 0, 2) * 16, c * 128 + dimension(128, 1, 2)
    # A thread has all of its 16 rows or none, and all of its 16 columns or none: N and K are multiples of 16.
    inside = None if even else ((n < N) & (k < K)).expand(8, 128)
    q = load_run(qdata, n, stride_n, e * stride_e + k * stride_k, inside, 16)
    q = q.reshape(8, 128, 16).permute(1, 0, 2).reshape(128, 128)
    k, n = c * 128 + dimension(128, 0, 2), b * 128 + dimension(128, 1, 2)
    owned = None if even else ((k < K) & (n < N)).expand(128, 128)
    hl.store(qdata_t, [(e * K + k) * N + n], q, extra_mask=owned)


def _tile(
    qdata: Tensor, stride_e: int, stride_n: int, stride_k: int, N: int, K: int, qdata_t: Tensor,
    even: bool, e: int, b: int, c: int,
) -> None:  # fmt: skip
    n, k = b * 128 + dimension(128, 0, 2), c * 128 + dimension(128, 1, 2)
    inside = None if even else ((n < N) & (k < K)).expand(128, 128)
    q = hl.load(qdata, [e * stride_e + n * stride_n + k * stride_k], extra_mask=inside)
    hl.store(qdata_t, [(e * K + k) * N + n], q, extra_mask=inside)


def _blocks(
    qdata: Tensor, stride_e: int, stride_n: int, stride_k: int, E: int, N: int, K: int,
    scale: Tensor, scale_stride_e: int, scale_stride_b: int, scale_stride_c: int, qdata_t: Tensor, scale_t: Tensor,
    words: hl.constexpr, even: hl.constexpr,
) -> None:  # fmt: skip
    for e, b, c in hl.grid([E, (N + 127) // 128, (K + 127) // 128]):
        if words:
            _words(qdata, stride_e, stride_n, stride_k, N, K, qdata_t, even, e, b, c)
        else:
            _tile(qdata, stride_e, stride_n, stride_k, N, K, qdata_t, even, e, b, c)
        place = e * scale_stride_e + b * scale_stride_b + c * scale_stride_c
        factor = hl.load(scale, [place + hl.arange(1)])
        hl.store(scale_t, [(e * ((K + 127) // 128) + c) * ((N + 127) // 128) + b + hl.arange(1)], factor)


def fp8_transpose_128x128(qdata: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    *lead, N, K = qdata.shape
    row_blocks, col_blocks = scale.shape[-2:]
    qdata_t, scale_t = qdata.new_empty((*lead, K, N)), scale.new_empty((*lead, col_blocks, row_blocks))
    if qdata.numel():
        E, stride_e, scale_stride_e = (lead[0], qdata.stride(0), scale.stride(0)) if lead else (1, 0, 0)
        strides = qdata.stride()[-2:]
        words = strides[1] == 1 and (strides[0] | stride_e | N | qdata.data_ptr()) % 16 == 0
        num_warps = for_device(NUM_WARPS, qdata.device)["words" if words else "tile"]
        # A grid of three dimensions needs no divisions to find a program's place, but two of its dimensions hold at
        # most 65535.
        pid_type = "xyz" if max(E, row_blocks) < 65536 else "flat"
        even = N % FP8_BLOCK_SIZE == 0 == K % FP8_BLOCK_SIZE
        codes, codes_t = flat(qdata.view(torch.uint8)), qdata_t.view(torch.uint8).view(-1)
        launch(
            _blocks, {(9, 0): on_grid(3, num_warps, pid_type)}, codes, stride_e, *strides, E, N, K,
            flat(scale), scale_stride_e, *scale.stride()[-2:], codes_t, scale_t.view(-1), words, even,
        )  # fmt: skip
    return qdata_t, scale_t
