"""fp8_quantize_1x128 in Helion: contiguous tensors, any other strides, and blocks that lie across memory.

The kernel for contiguous tensors has five lines.

Blocks along the columns of x are blocks along the rows of its transpose, and both results are transposed in the same
way.
"""

from __future__ import annotations

from typing import NamedTuple

import helion.language as hl
import torch
from torch import Tensor

from mxspec.formats import E4M3FN, FP8_BLOCK_SIZE, fp32_bits
from mxspec.helion_kernels.common.fp8_numerics import factors
from mxspec.helion_kernels.common.launch import config, flat, for_device, launch, on_grid
from mxspec.helion_kernels.common.numerics import magnitude_bits, saturating_cast, widened
from mxspec.helion_kernels.common.runs import dimension
from mxspec.helion_kernels.tiles.fp8_columns import turn, turned_index


class Tile(NamedTuple):
    blocks: int
    cols: int
    num_warps: int


_FLAT, _ALONG = config([16], 4), config([32, 1], 8)
CONFIGS = {
    "flat": {(9, 0): _FLAT, (10, 0): _FLAT},
    "along": {(9, 0): _ALONG, (10, 0): _ALONG},
}
_HOPPER = {"across, k": Tile(1, 128, 4), "across, mn": Tile(1, 128, 4)}
TILES = {(9, 0): _HOPPER, (10, 0): _HOPPER}
RANK = {(9, 0): 2, (10, 0): 2}  # Blackwell: compiled, not run
PTX = (r"ld\.global\.v4\.b32", r"st\.global\.v4\.b32", r"cvt\.rn\.satfinite\.e4m3x2\.f32")


def _quantize(wide: Tensor, eps_bits: int, pow2: bool) -> tuple[Tensor, Tensor]:
    """The codes and the reciprocal factors of a tile whose last dimension is a block."""
    s, back = factors(magnitude_bits(wide).amax(-1), eps_bits, pow2)
    return saturating_cast(wide * s.unsqueeze(-1), E4M3FN), back


def _flat(x: Tensor, qdata: Tensor, scale: Tensor, eps_bits: int, pow2: hl.constexpr) -> None:
    for blocks in hl.tile(scale.size(0)):
        codes, back = _quantize(widened(x[blocks, :]), eps_bits, pow2)
        qdata[blocks, :] = codes
        scale[blocks] = back


def _along(
    x: Tensor, stride_r: int, stride_k: int, R: int, C: int, K: int, qdata: Tensor,
    scale: Tensor, scale_stride_r: int, scale_stride_c: int, eps_bits: int, pow2: hl.constexpr, tail: hl.constexpr,
) -> None:  # fmt: skip
    # All tensors are flat, so only the mask of an access limits what it touches.
    for row, block in hl.tile([R, C]):
        r, c = row.index[:, None, None], block.index[None, :, None]
        k = c * 128 + hl.arange(128)[None, None, :]
        # With a tail, the last block of a row is shorter.
        inside, width = (r < R) & (k < K if tail else c < C), K if tail else C * 128
        place = r * stride_r + k * stride_k
        values = hl.load(x, [place], extra_mask=inside.expand(place.size()))
        codes, back = _quantize(widened(values), eps_bits, pow2)
        hl.store(qdata, [r * width + k], codes, extra_mask=inside.expand(place.size()))
        r, c = row.index[:, None], block.index[None, :]
        hl.store(scale, [r * scale_stride_r + c * scale_stride_c], back, extra_mask=(r < R) & (c < C))


def _tile(
    x: Tensor, stride_r: int, stride_k: int, R: int, K: int, qdata: Tensor,
    scale: Tensor, scale_stride_r: int, scale_stride_c: int, eps_bits: int, pow2: bool,
    even: bool, tail: bool, blocks: int, cols: int, r_tile: int, c_tile: int,
) -> None:  # fmt: skip
    """`blocks` blocks of each of `cols` rows. These rows are columns of memory."""
    r, run = turned_index(cols)
    r, c = r_tile * cols + r, c_tile * blocks + dimension(blocks, 2, 4)
    inside = None if even else (r < R) & (c * 128 < K)
    # A run has 16 elements, and K is a multiple of 16. So a run lies in the row as a whole, or not at all.
    runs = c.unsqueeze(1) * 128 + run < K if tail else None
    back = turn(
        x, r * stride_r, c.unsqueeze(1) * 128 + run, stride_k, qdata, r * K + c * 128, inside, None, None, eps_bits,
        pow2, runs,
    )  # fmt: skip
    hl.store(scale, [r * scale_stride_r + c * scale_stride_c], back, extra_mask=inside)


def _across(
    x: Tensor, stride_r: int, stride_k: int, R: int, K: int, qdata: Tensor,
    scale: Tensor, scale_stride_r: int, scale_stride_c: int, eps_bits: int,
    pow2: hl.constexpr, even: hl.constexpr, tail: hl.constexpr, blocks: hl.constexpr, cols: hl.constexpr,
) -> None:  # fmt: skip
    for r_tile, c_tile in hl.grid([(R + cols - 1) // cols, ((K + 127) // 128 + blocks - 1) // blocks]):
        _tile(
            x, stride_r, stride_k, R, K, qdata, scale, scale_stride_r, scale_stride_c, eps_bits, pow2,
            even, tail, blocks, cols, r_tile, c_tile,
        )  # fmt: skip


def fp8_quantize_1x128(
    x: Tensor, *, axis: int = -1, scale_format: str = "fp32", scale_major: str = "k", eps: float = 1e-12
) -> tuple[Tensor, Tensor]:
    rows = x if axis == -1 else x.mT  # from here on the blocks lie along the last dimension
    R, K = rows.shape
    C, tail, rule = -(-K // FP8_BLOCK_SIZE), K % FP8_BLOCK_SIZE != 0, (fp32_bits(eps), scale_format == "pow2")
    qdata = torch.empty((R, K), dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty((R, C) if scale_major == "k" else (C, R), dtype=torch.float32, device=x.device)
    flat_scale, scale_strides = scale.view(-1), (C, 1) if scale_major == "k" else (1, R)
    if not x.numel():
        pass
    elif rows.stride(1) != 1 and rows.stride(0) == 1:
        blocks, cols, num_warps = for_device(TILES, x.device)[f"across, {scale_major}"]
        pid_type = "xyz" if -(-R // cols) < 65536 else "flat"
        even = R % cols == 0 == C % blocks and not tail
        launch(
            _across, {(9, 0): on_grid(2, num_warps, pid_type)}, flat(rows),
            *rows.stride(), R, K, qdata.view(-1), flat_scale, *scale_strides, *rule, even, tail, blocks, cols,
        )  # fmt: skip
    elif rows.is_contiguous() and (scale_major == "k" or C == 1) and R * C > 1 and not tail:
        # Not for a single block: Helion does not mask along a dimension of 1.
        launch(_flat, CONFIGS["flat"], rows.view(-1, FP8_BLOCK_SIZE), qdata.view(-1, FP8_BLOCK_SIZE), flat_scale, *rule)
    else:
        results = qdata.view(-1), flat_scale, *scale_strides
        launch(_along, CONFIGS["along"], flat(rows), *rows.stride(), R, C, K, *results, *rule, tail)
    return qdata if axis == -1 else qdata.mT, scale if scale_major == "k" else scale.mT
