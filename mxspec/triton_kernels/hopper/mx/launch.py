"""MX matmuls on Hopper in three launches: `mx_values`, the Gluon kernel of `gemm.py`, and `mx_tiles` for marked tiles.

`mx_sm90` takes the arguments of `mx_tiles`. For few tokens, `mx_few` has the kernel of `../weights/` in place of the
second.

1. `mx_values` turns the second operand into bf16. If the rows of a are in token groups, a takes the place of the
   second operand, so each weight is read once, as a code. Then `mx_values` also writes the plan, that is, the rows of
   each tile.
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
from mxspec.triton_kernels.hopper.mx.values import VALUES, copy_experts, mx_values
from mxspec.triton_kernels.hopper.plan import tiles_of
from mxspec.triton_kernels.hopper.weights import launch as weights
from mxspec.triton_kernels.tiles.mx_matmul import mx_tiles

if releases.refusal() is None:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from mxspec.triton_kernels.hopper.mx.conversion import E4M3, E5M2
    from mxspec.triton_kernels.hopper.mx.gemm import mx_gemm_sm90
    from mxspec.triton_kernels.hopper.names import shared_layout
    from mxspec.triton_kernels.hopper.rows import rows_to_read

    CODES = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2}  # the constants of each code format
# By code format: the exponent by which its values are shifted. The shift makes the smallest value, 2^-9 or 2^-16 times
# 2^-127, at least a subnormal bf16.
SHIFT = {torch.float8_e4m3fn: 4, torch.float8_e5m2: 10}
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

    TMA needs rows that begin at multiples of 16 bytes. If b holds the weights of experts, TMA reads b and not a. Then
    `mx_sm90` copies a b that TMA cannot read.
    """
    if a.device.type == "cpu" or capability(a.device) != (9, 0) or releases.refusal() or not a.numel() or not b.numel():
        return False
    rows_fit = b.ndim == 3 or (a.stride(0) % 16 == 0 and a.data_ptr() % 16 == 0)
    return rows_fit and max(out.stride()[-2:]) * out.element_size() % 16 == 0 and out.data_ptr() % 16 == 0


def reads_experts(b: Tensor) -> bool:
    """Whether TMA can read the weights of all experts as one matrix: their first rows are whole rows apart."""
    if b.stride(1) <= 0 or (b.shape[0] > 1 and b.stride(0) % b.stride(1)):
        return False
    return b.stride(1) % 16 == 0 and b.data_ptr() % 16 == 0


def copied(b: Tensor) -> Tensor:
    """A contiguous copy of the weights of experts, by a kernel, so that a launch plan can hold it."""
    E, N, K = b.shape
    out = b.new_empty(E, N, K)
    copy_experts[(-(-E * N // VALUES["ROWS"]), -(-K // 128))](
        b, *b.stride()[:2], out, E * N, N, K, **VALUES, **UNFUSED
    )  # fmt: skip
    return out


def tile_for(M: int, N: int, processors: int, E: int = 1, grouped: str = "") -> dict[str, Any]:
    """The tile with the least estimated cost. wgrad has no narrow tiles."""
    return cheapest(TILES[:2] if grouped == "K" else TILES, M, N, processors, E, grouped)


def values_and_plan(
    codes: Tensor, scale: Tensor, scale_layout: str, marks: Tensor, offs: Tensor | None, grouped: str, tile: int
) -> tuple[Tensor, Tensor | None]:
    """The values of one operand for the Gluon kernel, and the plan if token groups divide its rows (grouped "M").

    The plan is for tiles of `tile` rows. It holds four numbers for each: see `Scheduler`. The fourth is the tile's
    number if each group is padded to tiles of 128 rows.

    The number of marks is set to 0.
    """
    (R, K), E, blocked = codes.shape, 1 if offs is None else offs.shape[0], scale_layout == "blocked"
    plan, tiles, padded, more = None, 0, R, 0
    if grouped == "M" and offs is not None:
        tiles = tiles_of(R, E, tile)
        plan = offs.new_empty(tiles, 4)
        # A last tile is read to its end: TMA takes longer for rows past the end of an operand.
        more, padded = tile, -(-R // 128) * 128 + 128 * E if blocked else R
    columns, rows = -(-K // 128) + (E if grouped == "K" else 0), -(-padded // VALUES["ROWS"])
    out = codes.new_empty(R + more, K if grouped == "K" else -(-K // 64) * 64, dtype=torch.bfloat16)
    mx_values[(max(rows, tiles), columns)](  # as many programs as the plan has tiles, so that each plans one
        codes, codes.stride(0), scale.view(torch.uint8), *((0, 0) if blocked else scale.stride()), out, out.stride(0),
        R, K, offs, 0 if offs is None else offs.stride(0), E, plan, tiles, marks,
        grouped, blocked, chunk(E), SHIFT[codes.dtype], tile if grouped == "M" else 0, **VALUES, **UNFUSED,
    )  # fmt: skip
    return out, plan


def mx_sm90(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, scale_layout: str,
    *, offs: Tensor | None = None, grouped: str = "", **options: Any,
) -> Any:  # fmt: skip
    """`mx_tiles` by Hopper's bf16 tensor cores. `options` override fields of the tile. Returns the compiled kernel.

    Weights of experts that TMA cannot read are copied first. So the bits of a token do not depend on the number of
    tokens, for any strides.
    """
    K, E, of_groups = a.shape[1], 1 if offs is None else offs.shape[0], grouped == "M"
    turned = of_groups or (out.stride(-2) == 1 and a.shape[0] > 1)
    # The Gluon kernel reads the codes of the first operand, and the values of the second.
    first, first_scale, second, second_scale = (b, b_scale, a, a_scale) if of_groups else (a, a_scale, b, b_scale)
    (M, N), C, blocked = (first.shape[-2], second.shape[0]), K // MX_BLOCK_SIZE, scale_layout == "blocked"
    first_shift, second_shift, first_scale = SHIFT[first.dtype], SHIFT[second.dtype], first_scale.view(torch.uint8)
    programs, row_tiles = processors(a.device), -(-M // 128)
    of_kernel = "N" if of_groups else grouped  # the kernel's name for the groups: they are its columns
    config = {"SWIZZLE": 16 if of_groups else 8, **tile_for(M, N, programs, E, of_kernel), **options}
    BLOCK_N = config["BLOCK_N"]
    col_tiles = -(-N // BLOCK_N) + (E if of_groups else 0)
    tiles = row_tiles * col_tiles * (E if grouped == "K" else 1)
    rows_apart = 0
    if of_groups:
        first = first if reads_experts(first) else copied(first)
        first, rows_apart = weights.one_matrix(first)
    # Each of the two math warpgroups may mark a tile, and a tile of 256 tokens has two marks.
    marks = out.new_empty(1 + (8 if of_groups else 4) * tiles, dtype=torch.int32)
    values, plan = values_and_plan(second, second_scale, scale_layout, marks, offs, grouped, BLOCK_N)

    size, chunk_size = out.element_size(), min(128, BLOCK_N)
    rows_of_out = out.mT.reshape(-1, M) if turned and not of_groups else out.view(-1, out.shape[-1])
    # TMA reads all rows of the widest tile. With groups it reads all rows of each tile: with less, Triton 3.7 keeps
    # registers of wgrad in local memory, and the rows after a group along N are those of other groups.
    few = BLOCK_N < WIDEST_TILE and not grouped
    columns, box = rows_to_read(N, BLOCK_N) if few else (BLOCK_N, BLOCK_N)
    descriptors = (
        TensorDescriptor.from_tensor(first.view(torch.int8), [128, 64], shared_layout(64, 8)),
        TensorDescriptor.from_tensor(values, [box, 64], shared_layout(128, 16)),
        TensorDescriptor.from_tensor(
            rows_of_out,
            [chunk_size, 64] if turned else [64, chunk_size],
            shared_layout(128 if turned else min(128, chunk_size * size), 8 * size),
        ),
    )
    of_matrix = first_scale.stride(0) if of_groups else 0
    of_first = (of_matrix, 0, 0) if blocked else (of_matrix, *first_scale.stride()[-2:])
    blocks = plan if of_groups else offs, 0 if offs is None else offs.stride(0), E, tiles, M, N, C, row_tiles, col_tiles
    compiled = mx_gemm_sm90[(min(tiles, programs),)](
        *descriptors, out, (first_scale, *of_first, C), blocks, marks, rows_apart,
        GROUPED=of_kernel, BLOCKED=blocked, CHUNK=chunk(E), FORMAT=CODES[first.dtype], TURNED=turned,
        A_SHIFT=first_shift, UNSHIFT=2.0 ** -(first_shift + second_shift), COLUMNS=columns, **config, num_warps=4,
        **FUSED,
    )  # fmt: skip
    only: Any = {"marks": marks, "width": 64 if of_groups else BLOCK_N, "programs": programs}
    mx_tiles(a, a_scale, b, b_scale, out, scale_layout, offs=offs, grouped=grouped, **only)
    return compiled


def mx_few(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, scale_layout: str,
    *, offs: Tensor | None = None, **options: Any,
) -> Any:  # fmt: skip
    """`mx_tiles` of few tokens by `../weights/`, if `takes_few`. `options` override fields of the tile.

    Several tiles of tokens may mark the same 128 rows. The last kernel then computes them as often. Returns the
    compiled kernel.
    """
    (M, N), shift, grouped = out.shape, SHIFT[b.dtype], "" if offs is None else "M"
    tile = {**weights.tile_for(M, b, b_scale), **options}
    of_tokens = -(-M // tile["BLOCK_M"]) if offs is None else tiles_of(M, offs.shape[0], tile["BLOCK_M"])
    of_columns = -(-N // tile["BLOCK_N"]) * (tile["BLOCK_N"] // 64)
    marks = out.new_empty(1 + 2 * of_tokens * of_columns, dtype=torch.int32)
    values, plan = values_and_plan(a, a_scale, scale_layout, marks, offs, grouped, tile["BLOCK_M"])
    unshift = 2.0 ** -(shift + SHIFT[a.dtype])
    compiled = weights.by_weights(
        values, b, b_scale, out, scale_layout, unshift, shift=shift, plan=plan, marks=marks, **tile
    )
    only: Any = {"marks": marks, "width": 64, "programs": processors(a.device)}
    mx_tiles(a, a_scale, b, b_scale, out, scale_layout, offs=offs, grouped=grouped, **only)
    return compiled


def takes_few(a: Tensor, b: Tensor, out: Tensor) -> bool:
    """Whether `mx_few` can run, and is faster than the other kernels.

    If TMA cannot write the output, plain tiles are for many tokens. They sum in another order, so they are for few
    tokens, too.
    """
    if not a.numel() or out.stride(-2) * out.element_size() % 16 or out.data_ptr() % 16:
        return False
    return weights.reads(None, b) and weights.pays(a.shape[0], b)
