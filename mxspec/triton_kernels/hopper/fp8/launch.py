"""FP8 matmuls on Hopper: which tile the Gluon kernel of `gemm.py` takes, and how it is launched."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import triton
from torch import Tensor

from mxspec.formats import FP8_BLOCK_SIZE
from mxspec.triton_kernels.common.launch import FUSED, capability, processors
from mxspec.triton_kernels.hopper import releases

if releases.refusal() is None:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from mxspec.triton_kernels.hopper.fp8.gemm import fp8_gemm_sm90
    from mxspec.triton_kernels.hopper.names import shared_layout

T = TypeVar("T")
# Tiles of the Gluon kernel. The cost is that of an element of the output: smaller tiles read more for it. Three stages
# leave room for a large tile's output; many keep enough loads in flight where M is small. There a tile takes less time
# than its scales are on their way, which are asked for several blocks ahead: N 7168 on an H200, us, with DeepGEMM's:
# K 7168, 16 rows 16.2 (17.2), 64 rows 17.0 (17.1), 128 rows 22.9 (23.8); K 2048, 7.8 (7.3), 7.9 (7.0), 9.1 (8.5).
TILES = (
    (1.0, {"BLOCK_M": 256, "BLOCK_N": 128, "WARPGROUPS": 2, "NUM_STAGES": 3}),
    (1.2, {"BLOCK_M": 128, "BLOCK_N": 128, "WARPGROUPS": 2, "NUM_STAGES": 4}),
    (1.7, {"BLOCK_M": 128, "BLOCK_N": 64, "WARPGROUPS": 2, "NUM_STAGES": 7, "AHEAD": 4}),
    (2.0, {"BLOCK_M": 64, "BLOCK_N": 64, "WARPGROUPS": 1, "NUM_STAGES": 11, "AHEAD": 8}),
)


def _tma_reads(matrix: Tensor) -> bool:
    """Whether TMA reads, or writes, a row-major matrix: it starts, and its rows lie, at multiples of 16 bytes."""
    aligned = matrix.data_ptr() % 16 == 0 and matrix.stride(-2) * matrix.element_size() % 16 == 0
    return aligned and matrix.stride(-1) == 1


def reads(a: Tensor, b: Tensor, out: Tensor) -> bool:
    """Whether the Gluon kernel can run: on Hopper, where TMA reads a and b and writes out; several matrices as one."""
    if a.device.type == "cpu" or capability(a.device) != (9, 0) or releases.refusal() or not a.numel() or not b.numel():
        return False
    one = all(t.ndim == 2 or t.shape[0] == 1 or t.stride(0) == t.shape[1] * t.stride(1) for t in (b, out))
    return one and _tma_reads(a) and _tma_reads(b) and _tma_reads(out)


def tile_for(M: int, N: int, processors: int, E: int = 1, grouped: str = "") -> dict[str, Any]:
    """The tile with which the output takes the least time, in waves of as many tiles as there are processors.

    A group of rows may end anywhere: its last tile is taken for half empty.
    """

    def cost(choice: tuple[float, dict[str, int]]) -> float:
        of_element, tile = choice
        BLOCK_M, BLOCK_N = tile["BLOCK_M"], tile["BLOCK_N"]
        rows = -(-M // BLOCK_M) + E // 2 if grouped == "M" else -(-M // BLOCK_M) * E
        return -(-rows * -(-N // BLOCK_N) // processors) * BLOCK_M * BLOCK_N * of_element

    return min(TILES, key=cost)[1]


def _with_scratch(launch: Callable[[], T], device: torch.device) -> T:
    """Launch a kernel that writes descriptors to memory, which Triton asks for; a caller's allocator stays his."""

    def allocate(size: int, alignment: int, stream: int | None) -> Tensor:
        return torch.empty(size, dtype=torch.int8, device=device)

    context = contextvars.copy_context()
    context.run(triton.set_allocator, allocate)
    return context.run(launch)


def fp8_sm90(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor,
    *, offs: Tensor | None = None, grouped: str = "", accumulate: bool = False, tile: dict[str, Any] | None = None,
    **options: Any,
) -> Any:  # fmt: skip
    """`fp8_tiles` by the Gluon kernel, with a tile of TILES and what `options` change of it; gives what was compiled.

    Of several matrices of b or of out each lies below the one before.
    """
    (M, K), N, E = a.shape, b.shape[-2], 1 if offs is None else offs.shape[0]
    programs = processors(a.device)
    tile = tile or tile_for(M, N, programs, E, grouped)
    vector = grouped == "K" or (grouped == "" and b_scale.shape[0] == N)
    config = {
        "SWIZZLE": 16 if vector else 8,
        "TURNS": 2,
        "chunk": tile["BLOCK_N"],
        "AHEAD": 1,
        "rows": tile["BLOCK_M"] if M > 32 else 32 if M > 16 else 16,
        **tile,
        **options,
    }
    if config["WARPGROUPS"] == 1:
        config["TURNS"] = 0  # there is no other to wait for
    M_tiles, N_tiles = -(-M // config["BLOCK_M"]), -(-N // config["BLOCK_N"])
    tiles = M_tiles * N_tiles
    if grouped == "M":  # each group, and the rows of none, may begin a tile
        tiles += E * N_tiles
    elif grouped == "K":
        tiles *= E
    halves = config["BLOCK_M"] // (64 * config["WARPGROUPS"])
    # The scales of the columns, 32 a thread, are read once a block where registers are left for them: shared memory is
    # what bounds this kernel, and every thread's own 128 bytes of scales count as much there as operands.
    # From Triton 3.9 on a thread needs some registers more: a tile of two halves then has none left for them.
    cramped = halves == 2 and releases.release() not in ("3.6", "3.7", "3.8")
    config.setdefault("ONCE", vector and (halves == 1 or (out.element_size() == 4 and not cramped)))
    config.setdefault("BUFFERS", halves if out.element_size() == 2 else 1)
    # Of 504 registers, for a thread of each warpgroup, the two that multiply take so many and the third the rest.
    config.setdefault("REGISTERS", 184 if halves == 1 else 232 if vector and not cramped else 224)
    row_bytes = config["chunk"] * out.element_size()
    codes, rows = shared_layout(128, 8), shared_layout(min(row_bytes, 128), 8 * out.element_size())
    of_rows, of_a, of_b = out.view(-1, N), a, b.view(-1, K)
    if grouped != "K":  # whose matrices have strides that only the device knows
        of_a = TensorDescriptor.from_tensor(of_a, [config["rows"], FP8_BLOCK_SIZE], codes)
        of_b = TensorDescriptor.from_tensor(of_b, [config["BLOCK_N"], FP8_BLOCK_SIZE], codes)
    operands = of_a, of_b, TensorDescriptor.from_tensor(of_rows, [64, config.pop("chunk")], rows)
    config.pop("rows")
    scales = a_scale, *a_scale.stride(), b_scale, *((0,) if b_scale.ndim == 2 else ()), *b_scale.stride()
    stride = 0 if offs is None else offs.stride(0)
    blocks = offs, stride, E, tiles, M, N, K // FP8_BLOCK_SIZE, M_tiles, N_tiles

    def launch() -> Any:
        return fp8_gemm_sm90[(min(tiles, programs),)](
            *operands, (out, of_rows.stride(0)), scales, blocks,
            GROUPED=grouped, VECTOR=vector, ACCUMULATE=accumulate, **config, num_warps=4, **FUSED,
        )  # fmt: skip

    return _with_scratch(launch, a.device) if grouped == "K" else launch()
