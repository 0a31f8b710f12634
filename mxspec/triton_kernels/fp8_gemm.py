"""fp8_gemm in Triton: Hopper's Gluon kernel, `_fp8_gemm_sm90.py`; where TMA cannot read, and elsewhere, plain tiles."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mxspec.formats import FP8_BLOCK_SIZE
from mxspec.triton_kernels._fp8_gemm_sm90 import fp8_gemm_sm90
from mxspec.triton_kernels._launch import capability, for_device, processors, shared_layout

# H200, of DeepGEMM's and cuBLAS's rates in a race: 4096x4096x7168 0.95, 1.05; 7168x4096x4096 by 1x128 1.06, 0.95. It is
# first since it takes every call, and DeepGEMM compiles for seconds at a shape's first. Blackwell: compiled, not run.
RANK = {(9, 0): 1, (10, 0): 1}
PTX = {"sm90": (r"wgmma\.mma_async.*\.f32\.e4m3\.e4m3",), "sm100": (r"tcgen05\.mma",)}
# Tiles of the Gluon kernel. The cost is that of an element of the output: smaller tiles read more for it. Three stages
# leave room for a large tile's output; many keep enough loads in flight where M is small. There a tile takes less time
# than its scales are on their way, which are asked for several blocks ahead: N 7168 on an H200, us, with DeepGEMM's:
# K 7168, 16 rows 16.2 (17.2), 64 rows 17.0 (17.1), 128 rows 22.9 (23.8); K 2048, 7.8 (7.3), 7.9 (7.0), 9.1 (8.5).
TILES = (
    (1.0, {"BLOCK_M": 256, "BLOCK_N": 128, "WARPGROUPS": 2, "STAGES": 3}),
    (1.2, {"BLOCK_M": 128, "BLOCK_N": 128, "WARPGROUPS": 2, "STAGES": 4}),
    (1.7, {"BLOCK_M": 128, "BLOCK_N": 64, "WARPGROUPS": 2, "STAGES": 7, "AHEAD": 4}),
    (2.0, {"BLOCK_M": 64, "BLOCK_N": 64, "WARPGROUPS": 1, "STAGES": 11, "AHEAD": 8}),
)
# The kernel of plain tiles, which any strides suit.
CONFIGS = {
    (9, 0): {"BLOCK_M": 128, "BLOCK_N": 128, "GROUP": 8, "num_warps": 8, "num_stages": 3},
    (10, 0): {"BLOCK_M": 128, "BLOCK_N": 128, "GROUP": 8, "num_warps": 8, "num_stages": 3},
}


@triton.jit
def _tiles(
    a, a_stride, a_scale, a_scale_stride_m, a_scale_stride_k, b, b_stride, b_scale, b_scale_stride_n, b_scale_stride_k,
    out, out_stride, M, N, K_blocks,
    VECTOR: tl.constexpr, ACCUMULATE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    # Programs run down GROUP tiles of M, then along N, so that those which run at a time share rows of a and b.
    M_tiles, N_tiles = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    of_group = GROUP * N_tiles
    first = tl.program_id(0) // of_group * GROUP
    tall = tl.minimum(M_tiles - first, GROUP)
    inside = tl.program_id(0) % of_group
    row = ((first + inside % tall) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    n_tile = inside // tall
    column = (n_tile * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    k = tl.arange(0, 128)
    a_at, b_at = a + row[:, None] * a_stride + k[None, :], b + column[:, None] * b_stride + k[None, :]
    a_scale_at = a_scale + row * a_scale_stride_m
    if VECTOR:  # a scale for each row of b
        b_scale_at = b_scale + column * b_scale_stride_n
    else:  # one for 128 of them, and so one a tile
        b_scale_at = b_scale + (n_tile * BLOCK_N // 128).to(tl.int64) * b_scale_stride_n
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in range(K_blocks):
        x, w = tl.load(a_at, mask=(row < M)[:, None], other=0.0), tl.load(b_at, mask=(column < N)[:, None], other=0.0)
        partial = tl.dot(x, w.T)  # tensor cores keep about 14 bits of a sum, so it is moved to fp32 every 128 of K
        of_row = tl.load(a_scale_at, mask=row < M, other=0.0)
        if VECTOR:
            of_column = tl.load(b_scale_at, mask=column < N, other=0.0)
            acc += partial * (of_row[:, None] * of_column[None, :])
        else:
            acc += partial * (of_row * tl.load(b_scale_at))[:, None]
        a_at += 128
        b_at += 128
        a_scale_at += a_scale_stride_k
        b_scale_at += b_scale_stride_k
    at, there = out + row[:, None] * out_stride + column[None, :], (row < M)[:, None] & (column < N)[None, :]
    if ACCUMULATE:
        acc += tl.load(at, mask=there)
    tl.store(at, acc.to(out.dtype.element_ty), mask=there)


def _tma_reads(matrix: Tensor) -> bool:
    """Whether TMA reads, or writes, a row-major matrix: it starts, and its rows lie, at multiples of 16 bytes."""
    aligned = matrix.data_ptr() % 16 == 0 and matrix.stride(0) * matrix.element_size() % 16 == 0
    return aligned and matrix.stride(1) == 1


def tile_for(M: int, N: int, processors: int) -> dict[str, int]:
    """The tile with which the output takes the least time, in waves of as many tiles as there are processors."""

    def cost(choice: tuple[float, dict[str, int]]) -> float:
        of_element, tile = choice
        BLOCK_M, BLOCK_N = tile["BLOCK_M"], tile["BLOCK_N"]
        tiles = -(-M // BLOCK_M) * -(-N // BLOCK_N)
        return -(-tiles // processors) * BLOCK_M * BLOCK_N * of_element

    return min(TILES, key=cost)[1]


def launch_sm90(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, tile: dict[str, Any], **options: Any
) -> Any:
    """Run the Gluon kernel with a tile of TILES and what `options` change of it; gives what was compiled."""
    (M, K), N = a.shape, b.shape[0]
    vector = b_scale.shape[0] == N
    config = {
        "GROUP": 16 if vector else 8,
        "TURNS": 2,
        "chunk": tile["BLOCK_N"],
        "AHEAD": 1,
        "rows": tile["BLOCK_M"] if M > 32 else 32 if M > 16 else 16,
        "ACCUMULATE": False,  # add to the output
        **tile,
        **options,
    }
    if config["WARPGROUPS"] == 1:
        config["TURNS"] = 0  # there is no other to wait for
    M_tiles, N_tiles = -(-M // config["BLOCK_M"]), -(-N // config["BLOCK_N"])
    halves = config["BLOCK_M"] // (64 * config["WARPGROUPS"])
    # The scales of the columns, 32 a thread, are read once a block where registers are left for them: shared memory is
    # what bounds this kernel, and every thread's own 128 bytes of scales count as much there as operands.
    config.setdefault("ONCE", vector and (halves == 1 or out.element_size() == 4))
    config.setdefault("BUFFERS", halves if out.element_size() == 2 else 1)
    # Of 504 registers, for a thread of each warpgroup, the two that multiply take so many and the third the rest.
    config.setdefault("REGISTERS", 184 if halves == 1 else 232 if config["ONCE"] else 224)
    row_bytes = config["chunk"] * out.element_size()
    codes, rows = shared_layout(128, 8), shared_layout(min(row_bytes, 128), 8 * out.element_size())
    descriptors = (
        TensorDescriptor.from_tensor(a, [config.pop("rows"), FP8_BLOCK_SIZE], codes),
        TensorDescriptor.from_tensor(b, [config["BLOCK_N"], FP8_BLOCK_SIZE], codes),
        TensorDescriptor.from_tensor(out, [64, config.pop("chunk")], rows),
    )
    programs = min(M_tiles * N_tiles, processors(a.device))
    of_a, of_b = (a_scale, *a_scale.stride()), (b_scale, *b_scale.stride())
    sizes = M, N, K // FP8_BLOCK_SIZE
    return fp8_gemm_sm90[(programs,)](*descriptors, *of_a, *of_b, *sizes, VECTOR=vector, **config, num_warps=4)


def multiply(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, accumulate: bool) -> None:
    """The product, written to an output whose rows may lie apart, or added to it."""
    (M, K), N = a.shape, b.shape[0]
    hopper = a.device.type != "cpu" and capability(a.device) == (9, 0)
    if hopper and K and _tma_reads(a) and _tma_reads(b) and _tma_reads(out):
        tile = tile_for(M, N, processors(a.device))
        launch_sm90(a, a_scale, b, b_scale, out, tile, ACCUMULATE=accumulate)
        return
    config = for_device(CONFIGS, a.device)
    if accumulate:  # a tile of the output needs registers as well
        config = {**config, "BLOCK_M": 64}
    grid = (-(-M // config["BLOCK_M"]) * -(-N // config["BLOCK_N"]),)
    of_a, of_b = (a_scale, *a_scale.stride()), (b_scale, *b_scale.stride())
    sizes = M, N, K // FP8_BLOCK_SIZE
    config = {**config, "VECTOR": b_scale.shape[0] == N != 1, "ACCUMULATE": accumulate}
    _tiles[grid](a, a.stride(0), *of_a, b, b.stride(0), *of_b, out, out.stride(0), *sizes, **config)


def fp8_gemm(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    out = torch.empty((a.shape[0], b.shape[0]), dtype=out_dtype, device=a.device)
    if out.numel():
        multiply(a, a_scale, b, b_scale, out, accumulate=False)
    return out
