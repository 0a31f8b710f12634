"""FP8 matmuls on Hopper: the choice of a tile for the Gluon kernel of `gemm.py`, and its launch."""

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
    from mxspec.triton_kernels.hopper.rows import rows_to_read

T = TypeVar("T")
# Tiles of the Gluon kernel, for a scale of b that 128 columns share. The first number is the cost of one element of the
# output: it is higher for smaller tiles, which read more bytes per element and wait more often for the tensor cores. A
# tile with RIGHT has a left part of 128 columns and a right part of RIGHT columns. Tiles of 192 and of 160 columns fill
# the last wave of some outputs better.
# A tile with few rows takes less time than a load of its scales, so the scales are requested AHEAD blocks early. A
# stage holds OF_STAGE blocks of K. The race against DeepGEMM: benchmarks/results/decisions.md.
_FEW: dict[str, Any] = {"BLOCK_M": 64, "WARPGROUPS": 1, "AHEAD": 8, "OF_STAGE": 2}
WIDE: dict[str, Any] = {
    "BLOCK_M": 128, "BLOCK_N": 256, "RIGHT": 128, "WARPGROUPS": 2, "NUM_STAGES": 4, "chunk": 64, "BUFFERS": 1,
    "SWIZZLE": 16,
}  # fmt: skip
TILES: tuple[tuple[float, dict[str, Any]], ...] = (
    (1.0, WIDE),
    (1.07, {**WIDE, "BLOCK_N": 192, "RIGHT": 64}),
    (1.15, {**WIDE, "BLOCK_N": 160, "RIGHT": 32, "chunk": 32}),
    (1.18, {"BLOCK_M": 128, "BLOCK_N": 128, "WARPGROUPS": 2, "NUM_STAGES": 4}),
    (1.22, {**_FEW, "BLOCK_N": 128, "NUM_STAGES": 4}),
    (1.48, {"BLOCK_M": 128, "BLOCK_N": 64, "WARPGROUPS": 2, "NUM_STAGES": 7, "AHEAD": 4}),
    (1.75, {**_FEW, "BLOCK_N": 64, "NUM_STAGES": 6}),
    (2.7, {**_FEW, "BLOCK_N": 32, "NUM_STAGES": 6}),
    (4.6, {**_FEW, "BLOCK_N": 16, "NUM_STAGES": 6}),
)
# A tile of 64 rows costs token groups more than it costs one matrix, by measured times.
OF_GROUPS_LOW = 1.08
# Tiles for a scale of each column: of wgrad, and of 1x128 by 1x128. Three stages leave room in shared memory for the
# output of a large tile.
VECTOR_TILES: tuple[tuple[float, dict[str, Any]], ...] = (
    (1.0, {"BLOCK_M": 256, "BLOCK_N": 128, "WARPGROUPS": 2, "NUM_STAGES": 3}),
    (1.2, {"BLOCK_M": 128, "BLOCK_N": 128, "WARPGROUPS": 2, "NUM_STAGES": 4}),
    (1.7, {"BLOCK_M": 128, "BLOCK_N": 64, "WARPGROUPS": 2, "NUM_STAGES": 7, "AHEAD": 4}),
    (2.0, {"BLOCK_M": 64, "BLOCK_N": 64, "WARPGROUPS": 1, "NUM_STAGES": 11, "AHEAD": 8}),
)
# The large tile of wgrad for groups of fewer than SHORT_BLOCKS blocks of K on average. It has a fourth stage and less
# room for the output. The load warp makes new TMA descriptors for each group. Meanwhile, the math warpgroups multiply
# the loaded stages, and with four stages they do not run out of work. Figures: benchmarks/results/decisions.md.
SHORT_GROUPS: dict[str, Any] = {**VECTOR_TILES[0][1], "NUM_STAGES": 4, "chunk": 64, "BUFFERS": 1}
SHORT_BLOCKS = 8
# The tile WIDE by Triton release: for one matrix, for token groups, and with two unequal parts. Each release has an
# assembler of its own. Another number of registers of a math thread, or the other GUARDED, costs up to 7%: the loop's
# instructions have another order then, or they spill. With 208 registers under 3.9, unequal parts are up to 3% faster,
# but an N that is no multiple of 16 spills.
WIDE_BY_RELEASE: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "3.6": ({"REGISTERS": 216, "GUARDED": True}, {"REGISTERS": 232}, {"REGISTERS": 216, "GUARDED": True}),
    "3.7": ({"REGISTERS": 216, "GUARDED": True}, {"REGISTERS": 232}, {"REGISTERS": 216, "GUARDED": True}),
    "3.8": ({"REGISTERS": 232}, {"REGISTERS": 224}, {"REGISTERS": 232, "GUARDED": True}),
    "3.9": ({"REGISTERS": 232}, {"REGISTERS": 224}, {"REGISTERS": 232, "GUARDED": True}),
}
# With more rows of wide tiles than this, the last one does not overlap the one above: benchmarks/results/decisions.md.
OVERLAPPED = 10
SHARED_BYTES = 232448  # what one program may take on Hopper


def _tma_reads(matrix: Tensor) -> bool:
    """Whether TMA can read or write a row-major matrix: start and stride of rows are multiples of 16 bytes."""
    aligned = matrix.data_ptr() % 16 == 0 and matrix.stride(-2) * matrix.element_size() % 16 == 0
    return aligned and matrix.stride(-1) == 1


def reads(a: Tensor, b: Tensor, out: Tensor) -> bool:
    """Whether the Gluon kernel can run: the GPU is a Hopper, and TMA can read a and b and write out.

    Several matrices of b or of out must lie one below the other, so that TMA sees one matrix.
    """
    if a.device.type == "cpu" or capability(a.device) != (9, 0) or releases.refusal() or not a.numel() or not b.numel():
        return False
    one = all(t.ndim == 2 or t.shape[0] == 1 or t.stride(0) == t.shape[1] * t.stride(1) for t in (b, out))
    return one and _tma_reads(a) and _tma_reads(b) and _tma_reads(out)


def tiles_along_n(N: int, BLOCK_N: int, right: int) -> int:
    """How many tiles an output of N columns needs. Unequal parts of several tiles share a run of columns."""
    left = BLOCK_N - right
    if right in (0, left):
        return -(-N // BLOCK_N)
    together = left // right
    runs, rest = divmod(N, together * BLOCK_N)
    return runs * together + min(together, -(-rest // left))


def box_of_b(BLOCK_N: int, right: int) -> int:
    """How many rows of b TMA reads at once: those of the tile, or those of the smaller of two unequal parts."""
    return BLOCK_N if right in (0, BLOCK_N - right) else right


def tile_for(
    M: int, N: int, processors: int, E: int = 1, grouped: str = "", vector: bool = False, short_groups: bool = False,
    alignment: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """The tile with the least estimated cost: the number of waves, times the cost of a tile.

    A wave is as many tiles as there are processors.

    Groups of rows have sizes that are multiples of `alignment`. Where a group may end inside a tile, its last tile
    counts as half empty. The device alone knows how many tiles such groups have, so they count as 0.4 of a wave more
    than they fill. If groups have whole tiles, the last of several waves counts half of what it lacks. These rules give
    the order of the measured times.

    With `short_groups`, SHORT_GROUPS takes the place of the large tile.
    """

    def cost(choice: tuple[float, dict[str, Any]]) -> float:
        of_element, tile = choice
        BLOCK_M, BLOCK_N = tile["BLOCK_M"], tile["BLOCK_N"]
        rows, columns = -(-M // BLOCK_M), tiles_along_n(N, BLOCK_N, tile.get("RIGHT", 0))
        ends_inside = grouped == "M" and E > 1 and alignment % BLOCK_M > 0
        tiles = columns * (rows + E // 2 if ends_inside else rows if grouped == "M" else rows * E)
        exact, waves = tiles / processors, float(-(-tiles // processors))
        if ends_inside:
            waves = max(1, exact + 0.4)
        elif grouped == "M" and waves > 1:
            waves = (exact + waves) / 2
        if grouped == "M" and BLOCK_M == 64:
            of_element *= OF_GROUPS_LOW
        return waves * BLOCK_M * BLOCK_N * of_element

    choices = VECTOR_TILES if vector else TILES
    if M <= 128:  # the weights take the time, and more programs read them faster
        choices = tuple(choice for choice in choices if "RIGHT" not in choice[1])
    tile = min(choices, key=cost)[1]
    return SHORT_GROUPS if short_groups and tile is VECTOR_TILES[0][1] else tile


def with_scratch(launch: Callable[[], T], device: torch.device) -> T:
    """Launch a kernel that writes TMA descriptors to memory.

    Triton asks for that memory. The caller's allocator stays set.
    """

    def allocate(size: int, alignment: int, stream: int | None) -> Tensor:
        return torch.empty(size, dtype=torch.int8, device=device)

    context = contextvars.copy_context()
    context.run(triton.set_allocator, allocate)
    return context.run(launch)


def fp8_sm90(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor,
    *, offs: Tensor | None = None, grouped: str = "", alignment: int = 1, accumulate: bool = False,
    tile: dict[str, Any] | None = None, **options: Any,
) -> Any:  # fmt: skip
    """`fp8_tiles` by the Gluon kernel, with a tile of TILES or VECTOR_TILES. Returns the compiled kernel.

    `options` override fields of the tile.

    Several matrices of b or of out must lie one below the other.
    """
    (M, K), N, E = a.shape, b.shape[-2], 1 if offs is None else offs.shape[0]
    programs = processors(a.device)
    # An output of fp32 leaves no room for a fourth stage.
    short_groups = grouped == "K" and out.element_size() == 2 and K < SHORT_BLOCKS * FP8_BLOCK_SIZE * E
    vector = grouped == "K" or (grouped == "" and b_scale.shape[0] == N)
    tile = tile or tile_for(M, N, programs, E, grouped, vector, short_groups, alignment)
    wide, unequal = "RIGHT" in tile, tile.get("RIGHT", 128) != 128
    # Experts have a small K, so their tiles end often. A second buffer for the output saves half of the waits for it.
    apart = wide and grouped == "M"
    of_tile, box_of_a = rows_to_read(M, tile["BLOCK_M"], 1 if grouped else 4)  # for groups, registers are scarce
    config = {
        "SWIZZLE": 16 if vector else 8,
        "TURNS": 2,
        "GUARDED": False,
        "APART": apart,
        "chunk": tile["BLOCK_N"],
        "AHEAD": 1,
        "OF_STAGE": 1,
        "RIGHT": 0,
        "ROWS": tile["BLOCK_M"] if grouped == "K" else of_tile,
        **tile,
        **(WIDE_BY_RELEASE[releases.release()][2 if unequal else apart] if wide else {}),
        **({"BUFFERS": 4 // out.element_size()} if apart else {}),
        # The columns of the last tile take more registers, and so do the scales of two parts in two layouts.
        **({"REGISTERS": 232} if apart and (N % 16 or unequal) else {}),
        **options,
    }
    if config["WARPGROUPS"] == 1:
        config["TURNS"] = 0  # there is no other warpgroup to wait for
    M_tiles, N_tiles = -(-M // config["BLOCK_M"]), tiles_along_n(N, config["BLOCK_N"], config["RIGHT"])
    tiles = M_tiles * N_tiles
    box = box_of_b(config["BLOCK_N"], config["RIGHT"])
    if config["RIGHT"]:  # shared memory has room for two left parts
        config["BLOCK_N"] = 2 * (config["BLOCK_N"] - config["RIGHT"])
    # A sum must be added once. A large tile for scales of columns would spill. With many wide tiles, the other order of
    # the loop's instructions costs more than the overlap saves.
    once = grouped or accumulate or vector or (wide and M_tiles > OVERLAPPED)
    overlap = not once and 0 < M % config["BLOCK_M"] < M
    if M_tiles == 1 and not grouped:  # the order of the blocks needs no divisions then
        config["SWIZZLE"] = 0
    if grouped == "M":  # each group, and the rows that belong to no group, may begin a tile
        tiles += E * N_tiles
    elif grouped == "K":
        tiles *= E
    halves = config["BLOCK_M"] // (64 * config["WARPGROUPS"])
    # ONCE: a thread reads its 32 column scales once a block of K, if registers are left for them. Shared memory limits
    # this kernel, and the 128 bytes of scales that each thread reads count as much there as operands. From Triton 3.9
    # on a thread needs a few registers more, so a tile of two halves has none left for the scales.
    newer = releases.release() not in ("3.6", "3.7", "3.8")
    cramped = halves == 2 and newer
    config.setdefault("ONCE", vector and (halves == 1 or (out.element_size() == 4 and not cramped)))
    config.setdefault("BUFFERS", halves if out.element_size() == 2 else 1)
    output = config["WARPGROUPS"] * config["BUFFERS"] * 64 * config["chunk"] * out.element_size()
    # Codes, and scales in fp32. 32 bytes are for barriers and the group, and 512 bytes for alignment.
    factors = (2 if wide and not apart else 1) * config["BLOCK_M"] + (config["BLOCK_N"] if vector else 4)
    of_block = (config["BLOCK_M"] + config["BLOCK_N"]) * FP8_BLOCK_SIZE + 4 * factors + 32
    stages = (SHARED_BYTES - 512 - output) // (of_block * config["OF_STAGE"])
    config["NUM_STAGES"] = min(config["NUM_STAGES"], stages)
    # Three warpgroups share 504 registers, counted for one thread of each. Each math warpgroup takes this many, and the
    # third warpgroup gets the rest.
    of_halves = 184 if halves == 1 else 232 if vector and not cramped else 224
    config.setdefault("REGISTERS", of_halves)
    row_bytes = config["chunk"] * out.element_size()
    codes, rows = shared_layout(128, 8), shared_layout(min(row_bytes, 128), 8 * out.element_size())
    of_rows, of_a, of_b = out.view(-1, N), a, b.view(-1, K)
    if grouped != "K":  # with "K", only the device knows the strides of the matrices
        of_a = TensorDescriptor.from_tensor(of_a, [box_of_a, FP8_BLOCK_SIZE], codes)
        of_b = TensorDescriptor.from_tensor(of_b, [box, FP8_BLOCK_SIZE], codes)
    operands = of_a, of_b, TensorDescriptor.from_tensor(of_rows, [64, config.pop("chunk")], rows)
    scales = a_scale, *a_scale.stride(), b_scale, *((0,) if b_scale.ndim == 2 else ()), *b_scale.stride()
    stride = 0 if offs is None else offs.stride(0)
    # The last block of K may be shorter. The descriptors have the real K. So TMA fills the columns past K with zeros,
    # as it fills the rows past M and N, and counts a whole box on the mbarrier. With "K", K is the number of padded
    # tokens, whose blocks are whole.
    blocks = offs, stride, E, tiles, M, N, -(-K // FP8_BLOCK_SIZE), M_tiles, N_tiles

    def launch() -> Any:
        return fp8_gemm_sm90[(min(tiles, programs),)](
            *operands, (out, of_rows.stride(0)), scales, blocks,
            GROUPED=grouped, VECTOR=vector, ACCUMULATE=accumulate, OVERLAP=overlap, **config, num_warps=4, **FUSED,
        )  # fmt: skip

    return with_scratch(launch, a.device) if grouped == "K" else launch()
