"""The launch of `gemm.py`: few bfloat16 tokens by weights in codes, on Hopper."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from mxspec.formats import MX_BLOCK_SIZE, NVFP4_BLOCK_SIZE
from mxspec.triton_kernels.common.launch import FUSED, capability, processors
from mxspec.triton_kernels.hopper import releases
from mxspec.triton_kernels.hopper.plan import plan_of
from mxspec.triton_kernels.hopper.weights.tokens import even_first
from mxspec.triton_kernels.tiles.mx_weights import UNSHIFT

if releases.refusal() is None:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from mxspec.triton_kernels.hopper.names import shared_layout
    from mxspec.triton_kernels.hopper.weights.gemm import weights_sm90

# By format, and by the largest number of tokens of a tile: the columns of K of a stage, the stages, and the parts of a
# stage. With more tiles than two for each processor, a processor holds several programs, and a matrix has stages of its
# own (`OF_MANY`). So do experts. Most of these tiles let a processor hold three programs, or two of 128 tokens. With
# some numbers of tiles for each processor, the last one would run alone, and be slow. For these numbers, a tile with
# which a processor holds more programs or fewer is faster (`BY_NUMBER`). The races: benchmarks/results/decisions.md.
_E2M1 = {16: (256, 4, 1), 32: (256, 4, 1), 64: (128, 4, 1), 128: (128, 3, 1)}
_MXFP4_OF_MANY = {16: (512, 2, 2), 32: (256, 3, 1), 64: (128, 3, 1), 128: (128, 3, 1)}
_NVFP4_OF_MANY = {**_MXFP4_OF_MANY, 32: (512, 2, 2)}
_E2M1_OF_EXPERTS = {16: (256, 2, 2), 32: (256, 2, 2), 64: (128, 3, 1), 128: (128, 3, 1)}
_FP8 = {16: (256, 3, 1), 32: (128, 4, 1), 64: (256, 3, 1), 128: (128, 3, 1)}
_FP8_OF_MANY = {**_FP8, 64: (128, 3, 1)}
_FP8_OF_EXPERTS = {16: (256, 2, 2), 32: (128, 4, 1), 64: (128, 3, 1), 128: (128, 2, 1)}
TILES = {"mxfp4": _E2M1, "nvfp4": _E2M1, "fp8": _FP8}
TILES_OF_MANY = {"mxfp4": _MXFP4_OF_MANY, "nvfp4": _NVFP4_OF_MANY, "fp8": _FP8_OF_MANY}
TILES_OF_EXPERTS = {"mxfp4": _E2M1_OF_EXPERTS, "nvfp4": _E2M1_OF_EXPERTS, "fp8": _FP8_OF_EXPERTS}
TILES_BY_NUMBER = {
    3: {"mxfp4": {128: (128, 2, 1)}, "nvfp4": {128: (128, 2, 1)}},
    4: {
        "mxfp4": {16: (256, 3, 2), 64: (128, 4, 1)},
        "nvfp4": {64: (128, 4, 1)},
        "fp8": {16: (256, 2, 2), 32: (128, 3, 1), 64: (128, 4, 1)},
    },
}
# When tokens are sorted for e2m1 weights, which then take fewer instructions. For one matrix that is one more launch,
# so the matrix must have this many weights. For experts it is the launch that plans their tiles. It pays for tiles of
# up to 32 tokens, and for others if the experts have this many rows of weights for each token.
SORT_FROM = 2**26
ROWS_FOR_A_TOKEN = 64
# The most tokens per expert for which a tile has 16, 32 or 64. Some experts have more than others.
PER_EXPERT = {16: 10, 32: 40, 64: 96}
# The most tokens, and the most tokens per expert, for which this kernel is faster on average than those for many
# tokens. At the limit it may be slower: with 128 tokens an expert, MXFP8 takes 0.81 to 1.07 of the time. With e2m1
# codes, many tokens need the values of all weights in memory.
LIMITS = {torch.float4_e2m1fn_x2: (384, 384), torch.float8_e4m3fn: (64, 128), torch.float8_e5m2: (64, 128)}
MOST = 384  # tokens that were measured by one matrix
MOST_COLUMNS = 2**28  # the place of a scale in its row is then a number of 32 bits
BLOCK_N = 64
NVFP4_UNSHIFT = 2.0**7  # see `Format`
# By bytes that are read at once.
UNITS = {4: torch.int32, 2: torch.uint16, 1: torch.uint8}
CODES = {torch.float4_e2m1fn_x2: "e2m1", torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


def reads(x: Tensor | None, b: Tensor) -> bool:
    """Whether the Gluon kernel can run: the GPU is a Hopper, and TMA can read the operands.

    x has the tokens, as bfloat16 numbers. If it is None, another kernel will write them as TMA needs them.
    """
    if b.device.type == "cpu" or capability(b.device) != (9, 0) or releases.refusal() or not b.numel():
        return False
    if not all(_tma_reads(t) for t in (x, b) if t is not None) or _columns(b) >= MOST_COLUMNS:
        return False
    return b.ndim == 2 or b.shape[0] == 1 or b.stride(0) % b.stride(1) == 0


def bytes_at_once(b: Tensor, b_scale: Tensor, scale_layout: str) -> int:
    """How many scale bytes of a row the kernel can read at once: 4, 2 or 1.

    Each row must have whole units of that size. The address and all strides must be multiples of it.
    """
    # PyTorch sees larger units in bytes only if the offset in the storage and the strides of sizes of 1 are, too.
    apart = b_scale.stride()[: b.ndim - 2] if scale_layout == "blocked" else b_scale.stride()[:-1]
    if scale_layout == "plain" and b_scale.stride(-1) != 1:
        return 1
    numbers = (*apart, b_scale.storage_offset(), b_scale.data_ptr(), _columns(b) // _block(b_scale))
    return math.gcd(4, *numbers)


def _columns(b: Tensor) -> int:
    return b.shape[-1] * (2 if CODES[b.dtype] == "e2m1" else 1)


def _block(b_scale: Tensor) -> int:
    return NVFP4_BLOCK_SIZE if b_scale.dtype == torch.float8_e4m3fn else MX_BLOCK_SIZE


def _tma_reads(t: Tensor) -> bool:
    """Whether rows are contiguous, begin at multiples of 16 bytes, and do not share memory."""
    of_row = t.stride(-2) * t.element_size()
    return t.stride(-1) == 1 and t.stride(-2) >= t.shape[-1] and (of_row | t.data_ptr()) % 16 == 0


def one_matrix(b: Tensor) -> tuple[Tensor, int]:
    """The weights of all experts as one matrix for TMA, and the number of its rows from one expert to the next.

    The first rows of the experts are whole rows apart.
    """
    E, N, K = b.shape
    apart = b.stride(0) // b.stride(1)
    return b.as_strided(((E - 1) * apart + N, K), b.stride()[1:]), apart


def pays(M: int, b: Tensor) -> bool:
    """Whether this kernel is faster than those for many tokens."""
    dense, of_expert = LIMITS[b.dtype]
    if b.ndim == 3:
        return of_expert * b.shape[0] >= M
    tiles = -(-M // 64) * -(-b.shape[0] // BLOCK_N)
    return dense >= M or (min(MOST, b.shape[0]) >= M and tiles <= 2 * processors(b.device))


def tile_for(M: int, b: Tensor, b_scale: Tensor) -> dict[str, int]:
    """The tile for M tokens by weights b."""
    format, of_columns, programs = _format(b, b_scale), -(-b.shape[-2] // BLOCK_N), processors(b.device)
    if b.ndim == 3:
        rows = next((rows for rows, most in PER_EXPERT.items() if most * b.shape[0] >= M), 128)
        return _tile(rows, *TILES_OF_EXPERTS[format][rows])
    rows = next((rows for rows in TILES[format] if rows >= M), 128)
    if rows == 128 and -(-M // 64) * of_columns <= programs:
        rows = 64
    of_each = -(-of_columns * -(-M // rows) // programs)
    tiles = (TILES if of_each <= 2 else TILES_OF_MANY)[format]
    return _tile(rows, *{**tiles, **TILES_BY_NUMBER.get(of_each, {}).get(format, {})}[rows])


def _format(b: Tensor, b_scale: Tensor) -> str:
    if CODES[b.dtype] != "e2m1":
        return "fp8"
    return "nvfp4" if b_scale.dtype == torch.float8_e4m3fn else "mxfp4"


def _tile(rows: int, step: int, stages: int, parts: int) -> dict[str, int]:
    return {"BLOCK_M": rows, "BLOCK_N": BLOCK_N, "STEP": step, "STAGES": stages, "PARTS": parts}


def sorts(M: int, b: Tensor, rows: int) -> bool:
    """Whether M tokens, in tiles of `rows`, are first sorted for e2m1 weights b: see `SORT_FROM`.

    The weights are then read in pairs of bytes, and PyTorch sees these only from an even place of the storage on.
    """
    if b.storage_offset() % 2:
        return False
    if b.ndim == 2:
        return 2 * b.numel() >= SORT_FROM
    return rows <= 32 or b.shape[0] * b.shape[1] >= ROWS_FOR_A_TOKEN * M


def by_e2m1(
    x: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, scale_layout: str, up: float = 1.0,
    *, numbers: tuple[Tensor | int | None, ...] | None = None, offs: Tensor | None = None, **options: Any,
) -> Any:  # fmt: skip
    """Multiply tokens x by e2m1 weights. If `sorts` says so, a kernel sorts the tokens first. See `by_weights`.

    `offs`: the ends of the experts' tokens. `options` override fields of the tile. Returns the compiled kernel.
    """
    M, plan = x.shape[0], None
    tile = {**tile_for(M, b, b_scale), **options}
    if sorted_first := sorts(M, b, tile["BLOCK_M"]):
        x, plan = even_first(x, offs, tile["BLOCK_M"])
    elif offs is not None:
        plan = plan_of(offs, M, tile["BLOCK_M"])
    return by_weights(x, b, b_scale, out, scale_layout, up, numbers=numbers, plan=plan, EVEN_FIRST=sorted_first, **tile)


def by_weights(
    x: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, scale_layout: str, up: float = 1.0, *, shift: int = 0,
    numbers: tuple[Tensor | int | None, ...] | None = None, plan: Tensor | None = None, marks: Tensor | None = None,
    EVEN_FIRST: bool = False, **tile: Any,
) -> Any:  # fmt: skip
    """Multiply tokens x, `(M, K)`, by codes b and by `up`, into `out`. Returns the compiled kernel.

    - `shift`: the values of fp8 codes are multiplied by 2^shift. Their tokens are in the order of `mx_values`.
    - `numbers`: the tensor scales of a, their stride, those of b, and their stride, for NVFP4.
    - `plan`: see `Scheduler`, for tiles of BLOCK_M tokens.
    - `EVEN_FIRST`: the tokens are in the order of `tokens.py`, for e2m1 codes.
    - `marks`: of the sums of fp8 codes. It starts with 0.

    `tile` are the fields of the tile, as those of `tile_for`.
    """
    (M, N), K, blocked = out.shape, _columns(b), scale_layout == "blocked"
    codes, nvfp4, block = CODES[b.dtype], b_scale.dtype == torch.float8_e4m3fn, _block(b_scale)
    rows, columns, STEP = (tile.pop(name) for name in ("BLOCK_M", "BLOCK_N", "STEP"))
    size = bytes_at_once(b, b_scale, scale_layout)
    rows_apart, stride_e, matrix = 0, 0, b
    if b.ndim == 3:
        matrix, rows_apart = one_matrix(b)
        stride_e = b_scale.stride(0) // size
    if blocked:
        stride_r, stride_c = 512 // size * -(-K // (4 * block)), 512 // size
    else:
        stride_r, stride_c = b_scale.stride(-2) // size, 1 if size > 1 else b_scale.stride(-1)
    of_step = STEP // 2 if codes == "e2m1" else STEP
    unit = 2 if EVEN_FIRST else 1
    descriptors = (
        TensorDescriptor.from_tensor(x, [rows, STEP], shared_layout(128, 16)),
        TensorDescriptor.from_tensor(
            matrix.view(UNITS[unit]), [columns, of_step // unit], shared_layout(min(of_step, 128), 8 * unit)
        ),
    )
    tiles = -(-M // rows) if plan is None else plan.shape[0]
    if codes == "e2m1":
        up *= NVFP4_UNSHIFT if nvfp4 else UNSHIFT
    return weights_sm90[(-(-N // columns) * tiles,)](
        *descriptors, b_scale.view(UNITS[size]), stride_e, stride_r, stride_c,
        out, out.stride(0), numbers, plan, rows_apart, marks, M, N, K,
        CODES=codes, SCALES="e4m3" if nvfp4 else "e8m0", BLOCK=block, SHIFT=shift, UP=up, BLOCKED=blocked, SIZE=size,
        EVEN_FIRST=EVEN_FIRST, ODD=-(-K // (STEP // tile["PARTS"])) % 2 == 1, **tile, num_warps=columns // 16, **FUSED,
    )  # fmt: skip
