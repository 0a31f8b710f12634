"""The launch of `weights.py`: bfloat16 by MXFP4 weights on Hopper."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mxspec.triton_kernels.common.launch import FUSED, capability, processors
from mxspec.triton_kernels.hopper import releases
from mxspec.triton_kernels.tiles.mx_weights import UNSHIFT

if releases.refusal() is None:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from mxspec.triton_kernels.hopper.mx.weights import mx_weights_sm90
    from mxspec.triton_kernels.hopper.names import shared_layout

# By the largest number of rows of a. The race on an H100: benchmarks/results/decisions.md.
TILES = {
    16: {"BLOCK_M": 16, "BLOCK_N": 64, "STEP": 256, "STAGES": 4},
    32: {"BLOCK_M": 32, "BLOCK_N": 64, "STEP": 256, "STAGES": 4},
    64: {"BLOCK_M": 64, "BLOCK_N": 64, "STEP": 128, "STAGES": 4},
    128: {"BLOCK_M": 128, "BLOCK_N": 64, "STEP": 128, "STAGES": 3},
}
# For 17 to 32 rows of a, if there are more than two tiles for each processor. A processor holds two programs of the
# tile of TILES, and four of this one.
MANY_TILES = {"BLOCK_M": 32, "BLOCK_N": 64, "STEP": 128, "STAGES": 4}


def reads(x: Tensor, b: Tensor, b_scale: Tensor, scale_layout: str) -> bool:
    """Whether the Gluon kernel can run: the GPU is a Hopper, TMA can read the operands, and scales are whole words."""
    if x.device.type == "cpu" or capability(x.device) != (9, 0) or releases.refusal() or x.shape[1] % 256:
        return False
    steps = (x.stride(0) * 2, b.stride(0), x.data_ptr(), b.data_ptr())
    if any(number % 16 for number in steps) or x.stride(0) < x.shape[1] or b.stride(0) < b.shape[1]:
        return False
    if scale_layout == "blocked":
        return b_scale.data_ptr() % 4 == 0
    return b_scale.stride(1) == 1 and (b_scale.stride(0) | b_scale.data_ptr()) % 4 == 0


def tile_for(M: int, N: int, processors: int) -> dict[str, int]:
    """The tile for M rows of a and N rows of b."""
    tile = TILES[min((rows for rows in TILES if rows >= M), default=max(TILES))]
    many = tile["BLOCK_M"] == MANY_TILES["BLOCK_M"] and -(-N // tile["BLOCK_N"]) > 2 * processors
    return MANY_TILES if many else tile


def mx_weights_on_hopper(
    x: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, scale_layout: str, up: float = 1.0, **options: Any
) -> Any:
    """`mx_weights` by the Gluon kernel. `options` override fields of the tile. Returns the compiled kernel."""
    (M, K), N, blocked = x.shape, b.shape[0], scale_layout == "blocked"
    config = {**tile_for(M, N, processors(x.device)), **options}
    BLOCK_M, BLOCK_N, STEP = (config.pop(name) for name in ("BLOCK_M", "BLOCK_N", "STEP"))
    stride_r, stride_w = (128 * -(-K // 128), 128) if blocked else (b_scale.stride(0) // 4, 1)
    descriptors = (
        TensorDescriptor.from_tensor(x, [BLOCK_M, STEP], shared_layout(128, 16)),
        TensorDescriptor.from_tensor(b.view(torch.uint8), [BLOCK_N, STEP // 2], shared_layout(STEP // 2, 8)),
    )
    return mx_weights_sm90[(-(-N // BLOCK_N) * -(-M // BLOCK_M),)](
        *descriptors, b_scale.view(torch.int32), stride_r, stride_w, out, N, M, N, K,
        UP=up * UNSHIFT, BLOCKED=blocked, **config, num_warps=BLOCK_N // 16, **FUSED,
    )  # fmt: skip
