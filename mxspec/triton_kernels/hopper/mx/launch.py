"""MX matmuls on Hopper in three launches: `mx_values`, the Gluon kernel of `gemm.py`, and `mx_tiles` for marked tiles.

`mx_sm90` takes the arguments of `mx_tiles`.

1. `mx_values` turns the second operand into bf16. If the rows of a are in token groups, it also writes the plan, that
   is, the rows of each tile.
2. The Gluon kernel multiplies, and marks each tile with a sum that is not finite. A NaN, an infinite code, or an
   exponent past the range of bf16 causes such a sum.
3. `mx_tiles` computes the sums of the marked tiles that are not finite again, exactly. If no tile is marked, its
   programs only read the count.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mxspec.formats import MX_BLOCK_SIZE
from mxspec.triton_kernels.common.groups import chunk
from mxspec.triton_kernels.common.launch import FUSED, UNFUSED, capability, processors
from mxspec.triton_kernels.hopper import releases
from mxspec.triton_kernels.hopper.choice import Choice, cheapest
from mxspec.triton_kernels.hopper.mx.values import VALUES, mx_values
from mxspec.triton_kernels.tiles.mx_matmul import mx_tiles

if releases.refusal() is None:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from mxspec.triton_kernels.hopper.mx.conversion import E4M3, E5M2
    from mxspec.triton_kernels.hopper.mx.gemm import mx_gemm_sm90
    from mxspec.triton_kernels.hopper.names import shared_layout
    from mxspec.triton_kernels.hopper.rows import rows_to_read

    # By code format: its constants, and the exponent by which its values are shifted. The shift makes the smallest
    # value, 2^-9 or 2^-16 times 2^-127, at least a subnormal bf16.
    CODES = {torch.float8_e4m3fn: (E4M3, 4), torch.float8_e5m2: (E5M2, 10)}
# The first number is the cost of one element of the output: it is higher for narrower tiles, which turn more codes into
# bf16 per element.
TILES: tuple[Choice, ...] = (
    (1.0, {"BLOCK_N": 256, "NUM_STAGES": 4, "AHEAD": 4, "REGISTERS": 224}),
    (1.4, {"BLOCK_N": 128, "NUM_STAGES": 6, "AHEAD": 4, "REGISTERS": 208}),
    (2.2, {"BLOCK_N": 64, "NUM_STAGES": 10, "AHEAD": 4, "REGISTERS": 208}),
    (4.1, {"BLOCK_N": 32, "NUM_STAGES": 12, "AHEAD": 4, "REGISTERS": 208}),
)
WIDEST_TILE = 256


def reads(a: Tensor, b: Tensor, out: Tensor) -> bool:
    """Whether the Gluon kernel can run: the GPU is a Hopper, and TMA can read a and write out.

    TMA needs rows that begin at multiples of 16 bytes.
    """
    if a.device.type == "cpu" or capability(a.device) != (9, 0) or releases.refusal() or not a.numel() or not b.numel():
        return False
    rows_fit = a.stride(0) % 16 == 0 and max(out.stride()[-2:]) * out.element_size() % 16 == 0
    return rows_fit and a.data_ptr() % 16 == 0 and out.data_ptr() % 16 == 0


def tile_for(M: int, N: int, processors: int, E: int = 1, grouped: str = "") -> dict[str, Any]:
    """The tile with the least estimated cost. Narrow tiles are for one matrix."""
    return cheapest(TILES[:2] if grouped else TILES, M, N, processors, E, grouped)


def mx_sm90(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, scale_layout: str,
    *, offs: Tensor | None = None, grouped: str = "", **options: Any,
) -> Any:  # fmt: skip
    """`mx_tiles` by Hopper's bf16 tensor cores. `options` override fields of the tile. Returns the compiled kernel."""
    (M, K), N, E = a.shape, b.shape[-2], 1 if offs is None else offs.shape[0]
    C, blocked, row_tiles = K // MX_BLOCK_SIZE, scale_layout == "blocked", -(-M // 128)
    (a_format, a_shift), (_, b_shift) = CODES[a.dtype], CODES[b.dtype]
    a_scale, b_scale = a_scale.view(torch.uint8), b_scale.view(torch.uint8)
    plan, plan_tiles, offs_stride, all_tiles = None, 0, 0 if offs is None else offs.stride(0), row_tiles
    if grouped == "M" and offs is not None:
        all_tiles = plan_tiles = row_tiles + E  # each group, and the rows that belong to no group, may begin a tile
        plan = offs.new_empty(3 * plan_tiles)
    elif grouped == "K":
        all_tiles = row_tiles * E
    programs = processors(a.device)
    config = {"SWIZZLE": 8, **tile_for(M, N, programs, E, grouped), **options}
    BLOCK_N = config["BLOCK_N"]
    col_tiles = -(-N // BLOCK_N)
    tiles = all_tiles * col_tiles
    marks = out.new_empty(1 + 4 * tiles, dtype=torch.int32)  # each of the two math warpgroups may mark a tile
    R = b.numel() // K
    values = b.new_empty(R, K if grouped == "K" else -(-K // 64) * 64, dtype=torch.bfloat16)
    of_b = b_scale.stride(0) if b.ndim == 3 else 0, *((0, 0) if blocked else b_scale.stride()[-2:])
    tokens = offs if grouped else None
    columns = -(-K // 128) + (E if grouped == "K" else 0)
    mx_values[(-(-R // VALUES["ROWS"]), columns)](
        b, b.stride(0) if b.ndim == 3 else 0, b.stride(-2), b_scale, *of_b, values, values.stride(0),
        R, N, K, tokens, offs_stride, E, plan, plan_tiles, M, marks, grouped, blocked, chunk(E), b_shift,
        **VALUES, **UNFUSED,
    )  # fmt: skip

    turned, size, chunk_size = out.stride(-2) == 1 and M > 1, out.element_size(), min(128, BLOCK_N)
    rows = out.mT.reshape(-1, M) if turned else out.view(-1, N)
    # TMA reads all rows of the widest tile of b. Its kernel has no registers left to leave out what was not read.
    columns, box_of_b = rows_to_read(N, BLOCK_N) if BLOCK_N < WIDEST_TILE and b.ndim == 2 else (BLOCK_N, BLOCK_N)
    descriptors = (
        TensorDescriptor.from_tensor(a.view(torch.int8), [128, 64], shared_layout(64, 8)),
        TensorDescriptor.from_tensor(values, [box_of_b, 64], shared_layout(128, 16)),
        TensorDescriptor.from_tensor(
            rows,
            [chunk_size, 64] if turned else [64, chunk_size],
            shared_layout(128 if turned else min(128, chunk_size * size), 8 * size),
        ),
    )
    of_a = (0, 0) if blocked else a_scale.stride()
    blocks = plan if grouped == "M" else tokens, offs_stride, E, tiles, M, N, K, plan_tiles or row_tiles, col_tiles
    compiled = mx_gemm_sm90[(min(tiles, programs),)](
        *descriptors, out, (a_scale, *of_a, C), blocks, marks,
        GROUPED=grouped, BLOCKED=blocked, CHUNK=chunk(E), FORMAT=a_format, TURNED=turned, A_SHIFT=a_shift,
        UNSHIFT=2.0 ** -(a_shift + b_shift), COLUMNS=columns, **config, num_warps=4, **FUSED,
    )  # fmt: skip
    only: Any = {"marks": marks, "width": BLOCK_N, "programs": programs}
    mx_tiles(a, a_scale, b, b_scale, out, scale_layout, offs=offs, grouped=grouped, **only)
    return compiled
