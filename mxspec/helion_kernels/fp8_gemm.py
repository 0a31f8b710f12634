"""fp8_gemm in Helion: tiles of 128 columns, one scale block wide, whose sums move to fp32 every 128 of K."""

from __future__ import annotations

import os
from typing import Any

import helion.language as hl
import torch
from torch import Tensor

from mxspec.helion_kernels._launch import config, launch

# H200, TFLOP/s at 4096x4096x7168: 838 (descriptors made by each program 765; without TMA 722); Triton 1150.
RANK = {(9, 0): 2, (10, 0): 2}  # Blackwell: compiled, not run
PTX = {"sm90": (r"wgmma\.mma_async.*\.f32\.e4m3\.e4m3",), "sm100": (r"tcgen05\.mma",)}
# Operands and output by TMA where it can read them, scales by plain loads, of which any strides are good.
INDEXING = ["tensor_descriptor", "tensor_descriptor", "pointer", "pointer", "tensor_descriptor"]
# Programs run down eight tiles of M, then along N, so that those which run at a time share rows of a and b.
_COMMON: dict[str, Any] = {"l2_groupings": [8], "indexing": INDEXING}
if os.environ.get("TRITON_INTERPRET") != "1":  # Helion refuses the key where it sees no TMA, as interpreted
    _COMMON["host_tensor_descriptors"] = True
_LARGE, _LOW = config([128], 8, num_stages=4, **_COMMON), config([64], 4, num_stages=4, **_COMMON)
CONFIGS = {
    "1x128 by 128x128": {(9, 0): _LARGE, (10, 0): _LARGE},
    # On Blackwell a tile of 128 rows has no registers left for a scale of each column.
    "1x128 by 1x128": {(9, 0): _LARGE, (10, 0): _LOW},
    "at most 64 rows": {(9, 0): _LOW, (10, 0): _LOW},
}


def tiles(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, by_row: hl.constexpr) -> None:
    for m, n in hl.tile(out.size(), block_size=[None, 128]):
        acc = hl.zeros([m, n], dtype=torch.float32)
        for k in hl.tile(a.size(1), block_size=128):
            # Tensor cores keep about 14 bits of a sum, so it is moved to fp32 every 128 of K.
            partial = hl.dot(a[m, k], b[n, k].t(), out_dtype=torch.float32)
            of_row = a_scale[m, k.id]
            if by_row:
                acc = acc + partial * (of_row[:, None] * b_scale[n, k.id][None, :])
            else:
                acc = acc + partial * (of_row * b_scale[n.id, k.id])[:, None]
        out[m, n] = acc.to(out.dtype)


def fp8_gemm(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    M, N = a.shape[0], b.shape[0]
    out = torch.empty((M, N), dtype=out_dtype, device=a.device)
    if not out.numel():
        return out
    if not a.shape[1]:
        return out.zero_()
    by_row = b_scale.shape[0] == N != 1
    table = CONFIGS["at most 64 rows" if M <= 64 else "1x128 by 1x128" if by_row else "1x128 by 128x128"]
    launch(tiles, table, a, a_scale, b, b_scale, out, by_row)
    return out
