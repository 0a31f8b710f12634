"""NVFP4 matmuls of bfloat16 values on Hopper: whether TMA reaches the operands, the tile, and the launch."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mxspec.formats import NVFP4_BLOCK_SIZE
from mxspec.triton_kernels.common.launch import FUSED, capability, processors
from mxspec.triton_kernels.hopper import releases
from mxspec.triton_kernels.hopper.choice import Choice, cheapest
from mxspec.triton_kernels.hopper.fp8.launch import with_scratch
from mxspec.triton_kernels.hopper.weights import launch as weights
from mxspec.triton_kernels.tiles.nvfp4_values import nvfp4_values

if releases.refusal() is None:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from mxspec.triton_kernels.hopper.names import shared_layout
    from mxspec.triton_kernels.hopper.nvfp4.gemm import nvfp4_gemm_sm90
    from mxspec.triton_kernels.hopper.rows import rows_to_read

FEW = 128  # rows of all groups together
# The first number is the cost of one element of the output: it is higher for smaller tiles, which read more bytes per
# element. Tiles of 64 rows have one math warpgroup.
TILES: tuple[Choice, ...] = (
    (1.0, {"BLOCK_M": 128, "BLOCK_N": 256, "NUM_STAGES": 4, "REGISTERS": 232}),
    (1.05, {"BLOCK_M": 128, "BLOCK_N": 128, "NUM_STAGES": 6, "REGISTERS": 208}),
    (1.75, {"BLOCK_M": 128, "BLOCK_N": 64, "NUM_STAGES": 8, "REGISTERS": 168}),
    (1.45, {"BLOCK_M": 64, "BLOCK_N": 128, "NUM_STAGES": 8}),
    (2.3, {"BLOCK_M": 64, "BLOCK_N": 64, "NUM_STAGES": 12}),
    (2.4, {"BLOCK_M": 64, "BLOCK_N": 32, "NUM_STAGES": 16}),
)
# By GROUPED. Groups of rows have a measured cost of their own for a tile of 64 rows. Groups of K were not measured.
TILES_BY_GROUPS: dict[str, tuple[Choice, ...]] = {"": TILES, "M": (*TILES[:2], (1.3, TILES[3][1])), "K": TILES[:2]}


def turned(values: Tensor) -> bool:
    """Whether the rows of a matrix, or of a stack of matrices, lie across the memory: a row has a stride of 1."""
    return values.stride(-1) != 1 and values.stride(-2) == 1


def _stored(values: Tensor) -> Tensor:
    """The matrix in which rows are contiguous: the values, or their transpose."""
    return values.mT if turned(values) else values


def _tma_reads(values: Tensor) -> bool:
    """Whether TMA can read values: rows are contiguous, and begin at multiples of 16 bytes.

    Several matrices must lie one below the other, so that TMA sees one matrix.
    """
    t = _stored(values)
    one = t.ndim == 2 or t.shape[0] == 1 or t.stride(0) == t.shape[1] * t.stride(1)
    apart = t.stride(-2) >= t.shape[-1] or t.shape[-2] == 1
    return one and apart and t.stride(-1) == 1 and t.stride(-2) * 2 % 16 == 0 and t.data_ptr() % 16 == 0


def reads(
    a: Tensor, a_scale: Tensor | None, b: Tensor, b_scale: Tensor | None, out: Tensor, grouped: str = ""
) -> bool:  # fmt: skip
    """Whether the Gluon kernel can run: the GPU is a Hopper, and TMA can read the values and write out.

    The values of codes lie as TMA needs them.
    """
    if a.device.type == "cpu" or capability(a.device) != (9, 0) or releases.refusal() or not a.numel() or not b.numel():
        return False
    if out.shape[-1] * out.element_size() % 16 or out.data_ptr() % 16:
        return False
    if grouped == "K" and a.shape[0] == 1:  # Triton makes a size of 1 a constant, and 3.6 dies of this one
        return False
    for t, scale in ((a, a_scale), (b, b_scale)):
        if scale is not None:
            continue
        if not _tma_reads(t) or (grouped == "K" and not turned(t)):
            return False
        # TMA can begin only at a multiple of 16 bytes. At any other place it dies of an illegal instruction. A group
        # of tokens begins anywhere. So each token must be a row in memory: here for "M", above for "K".
        if grouped == "M" and t is a and turned(t):
            return False
        # TMA reads 64 rows of a transpose at a time. The last of them must not belong to the next expert.
        if t.ndim == 3 and t.shape[0] > 1 and turned(t) and t.shape[-1] % 64:
            return False
    return True


def by_memory(
    a: Tensor, a_scale: Tensor | None, a_number: Tensor, b: Tensor, b_scale: Tensor | None, b_number: Tensor,
    out: Tensor, scale_layout: str, *, offs: Tensor | None = None, grouped: str = "",
) -> Any:  # fmt: skip
    """`nvfp4_tiles` by the Gluon kernel. Another kernel first writes the values of operands that are codes."""
    of_columns = grouped if grouped == "K" else ""
    x = a if a_scale is None else nvfp4_values(a, a_scale, scale_layout, offs, grouped)
    w = b if b_scale is None else nvfp4_values(b, b_scale, scale_layout, offs if of_columns else None, of_columns)
    unit = NVFP4_BLOCK_SIZE if grouped == "K" and (a_scale is not None or b_scale is not None) else 1
    return nvfp4_sm90(x, a_number, w, b_number, out, offs=offs, grouped=grouped, unit=unit)


def few(
    a: Tensor, a_scale: Tensor | None, a_number: Tensor, b: Tensor, b_scale: Tensor, b_number: Tensor,
    out: Tensor, scale_layout: str, *, offs: Tensor | None = None, **options: Any,
) -> Any:  # fmt: skip
    """`nvfp4_tiles` of few tokens by `../weights/`, if `takes_few`. `options` override fields of the tile.

    Returns the compiled kernel.
    """
    x = a if a_scale is None else nvfp4_values(a, a_scale, scale_layout, offs, "" if offs is None else "M")
    numbers = (*_of_groups(a_number), *_of_groups(b_number))
    return weights.by_e2m1(x, b, b_scale, out, scale_layout, numbers=numbers, offs=offs, **options)


def takes_few(a: Tensor, a_scale: Tensor | None, b: Tensor, b_scale: Tensor | None) -> bool:
    """Whether `few` can run, and is faster than the other kernels."""
    if b_scale is None or not a.numel() or not weights.reads(a if a_scale is None else None, b):
        return False
    return weights.pays(a.shape[0], b)


def pays(a: Tensor, b_scale: Tensor | None) -> bool:
    """Whether it pays to write the values of all experts, where `takes_few` declines.

    It does not for a few rows, which only a few experts may have.
    """
    return a.shape[0] > FEW or b_scale is None


def tile_for(M: int, N: int, processors: int, E: int = 1, grouped: str = "") -> dict[str, Any]:
    """The tile with the least estimated cost."""
    return cheapest(TILES_BY_GROUPS[grouped], M, N, processors, E, grouped)


def nvfp4_sm90(
    a: Tensor, a_number: Tensor | None, b: Tensor, b_number: Tensor | None, out: Tensor,
    *, offs: Tensor | None = None, grouped: str = "", unit: int = 1, up: float = 1.0, **options: Any,
) -> Any:  # fmt: skip
    """`nvfp4_tiles` of bfloat16 values, by TMA and Hopper's tensor cores. Returns the compiled kernel.

    A group of K begins at a multiple of `unit`. Without tensor scales, each sum is multiplied by `up`. `options`
    override fields of the tile.
    """
    (M, K), N, E = a.shape, b.shape[-2], 1 if offs is None else offs.shape[0]
    programs = processors(a.device)
    config: dict[str, Any] = {"SWIZZLE": 8, "REGISTERS": 168, **tile_for(M, N, programs, E, grouped), **options}
    BLOCK_M, BLOCK_N, size = config["BLOCK_M"], config["BLOCK_N"], out.element_size()
    row_tiles = -(-M // BLOCK_M)
    # Two buffers take turns, so a tile has an even number of parts of 64 columns.
    config.setdefault("BUFFERS", 2 if size == 2 and BLOCK_N > 64 else 1)
    col_tiles = -(-N // BLOCK_N)
    tiles = row_tiles * col_tiles
    if grouped == "M":  # each group, and the rows that belong to no group, may begin a tile
        tiles += E * col_tiles
    elif grouped == "K":
        tiles *= E
    layout, (a_turned, b_turned) = shared_layout(128, 16), (turned(a), turned(b))
    of_columns = shared_layout(min(2 * BLOCK_N, 128), 16) if b_turned else layout
    # For groups of K, the device makes descriptors of whole tiles.
    ROWS, box_of_a = (BLOCK_M, 64) if a_turned or grouped == "K" else rows_to_read(M, BLOCK_M)
    # Across the memory, TMA can begin only at some of the rows.
    overlap = not grouped and not a_turned and 0 < M % BLOCK_M < M
    of_a, of_b = _stored(a), _stored(b)
    if grouped == "K":  # only the device knows the sizes of the groups
        operands: tuple[Any, ...] = (of_a, of_a.stride(0)), (of_b, of_b.stride(0))
    else:
        of_b = of_b.reshape(-1, of_b.shape[-1])
        operands = (
            TensorDescriptor.from_tensor(of_a, [64, 64] if a_turned else [box_of_a, 64], layout),
            TensorDescriptor.from_tensor(of_b, [64, BLOCK_N] if b_turned else [BLOCK_N, 64], of_columns),
        )
    WIDTH = min(BLOCK_N, 64)
    rows = TensorDescriptor.from_tensor(
        out.view(-1, N), [64, WIDTH], shared_layout(min(WIDTH * size, 128), 8 * size)
    )  # fmt: skip
    numbers = (*_of_groups(a_number), *_of_groups(b_number))
    blocks = offs, 0 if offs is None else offs.stride(0), E, tiles, M, N, K, row_tiles, col_tiles

    def launch() -> Any:
        return nvfp4_gemm_sm90[(min(tiles, programs),)](
            *operands, rows, out, numbers, blocks,
            A_TURNED=a_turned, B_TURNED=b_turned, GROUPED=grouped, UNIT=unit, ROWS=ROWS, OVERLAP=overlap,
            UP=up if a_number is None else None, **config, num_warps=4, **FUSED,
        )  # fmt: skip

    return with_scratch(launch, a.device) if grouped == "K" else launch()


def _of_groups(number: Tensor | None) -> tuple[Tensor | None, int]:
    return number, 0 if number is None or not number.ndim else number.stride(0)
