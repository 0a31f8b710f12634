"""mx_quantize in Helion: one kernel for contiguous tensors (in five lines), one for every other stride and layout.

The programs of both kernels run over the scale bytes in the order in which they are stored. `tiles/mx_columns.py` has
the kernel for blocks along the columns.
"""

from __future__ import annotations

import helion.language as hl
import torch
from torch import Tensor

from mxspec.formats import MX_BLOCK_SIZE, element
from mxspec.helion_kernels.common.blocked import blocked_shape, blocked_to_row_col
from mxspec.helion_kernels.common.launch import config, extent, launch
from mxspec.helion_kernels.common.numerics import (
    FP6_WORDS,
    fp6_thirds,
    held,
    magnitude_bits,
    packed_cast,
    reciprocal_scale,
    shared_exponent,
    stored,
    widened,
    written,
)
from mxspec.helion_kernels.common.runs import dimension
from mxspec.helion_kernels.tiles.mx_columns import mx_tile

# Second: as fast as Triton's, but a call takes more host time (benchmarks/results/decisions.md).
RANK = {(9, 0): 2, (10, 0): 2}
# Block sizes count scales. The race by benchmarks/tune.py: benchmarks/results/decisions.md. Blackwell: compiled, not
# run.
_FLAT, _STRIDED = config([64], 4), config([1, 1, 64], 4)
# A grid of three dimensions needs no divisions to find a program's place, but two of its dimensions hold at most 65535.
_BLOCKED, _TALL = config([1, 1, 256], 8, pid_type="xyz"), config([1, 1, 256], 8)
CONFIGS = {
    "flat": {(9, 0): _FLAT, (10, 0): _FLAT},  # x contiguous, plain scales
    "strided": {(9, 0): _STRIDED, (10, 0): _STRIDED},  # block sizes along (E, R, C)
    "blocked": {(9, 0): _BLOCKED, (10, 0): _BLOCKED},  # along (E, row tiles, bytes of a row of tiles)
    "tall": {(9, 0): _TALL, (10, 0): _TALL},  # blocked, more than 65535 row tiles or experts
}
PTX = (
    r"ld\.global\.v4\.b32",
    r"st\.global\.(v4\.b32|b16)|0f40C00000",
    r"cvt\.rn\.satfinite\.e[45]m[32]x2\.f32|0f(40C00000|40F00000|41E00000|3FFE0000)",
)  # e2m1, FP6 and int8 have a minimum with the largest value. The narrower codes are stored in shorter words


def scaled_tile(values: Tensor, elem_dtype: torch.dtype, scaling: str) -> tuple[Tensor, Tensor]:
    """The elements before they are rounded, and the scale bytes, of a tile whose last dimension is a block."""
    fmt, wide = stored(elem_dtype), widened(values)
    byte = shared_exponent(magnitude_bits(wide).amax(-1), fmt, scaling, values.dtype)
    return wide * reciprocal_scale(byte, fmt).unsqueeze(-1), byte.to(torch.uint8)


def quantize_tile(values: Tensor, elem_dtype: torch.dtype, scaling: str) -> tuple[Tensor, Tensor]:
    """The stored codes and the scale bytes of a tile whose last dimension is a block."""
    elements, byte = scaled_tile(values, elem_dtype, scaling)
    return packed_cast(elements, stored(elem_dtype)), byte


def _row_and_block(row: Tensor, byte: Tensor, blocked: bool) -> tuple[Tensor, Tensor]:
    return blocked_to_row_col(row, byte) if blocked else (row, byte)


def _store_codes(qdata: Tensor, block: Tensor, elements: Tensor, there: Tensor) -> None:
    """Round and store the elements of blocks with these numbers."""
    size, fmt = held(qdata.dtype, 32), stored(qdata.dtype)
    if qdata.dtype in FP6_WORDS:
        place = block * size + 3 * dimension(4, 3, 4)
        for i, third in enumerate(fp6_thirds(elements, fmt)):
            hl.store(qdata, [place + i], third, extra_mask=there.expand(place.size()))
    else:
        place = block * size + dimension(size, 3, 4)
        hl.store(qdata, [place], packed_cast(elements, fmt), extra_mask=there.expand(place.size()))


def _flat(x: Tensor, qdata: Tensor, scale: Tensor, scaling: hl.constexpr) -> None:
    for blocks in hl.tile(scale.size(0)):
        codes, byte = quantize_tile(x[blocks, :], qdata.dtype, scaling)
        qdata[blocks, :] = codes
        scale[blocks] = byte


def _strided(
    x: Tensor, stride_e: int, stride_r: int, stride_c: int, stride_k: int, R: int, C: int,
    qdata: Tensor, scale: Tensor, scaling: hl.constexpr, blocked: hl.constexpr,
) -> None:  # fmt: skip
    # The loop runs over the scale bytes. A byte of padding is the scale of a block of zeros, which is 0.
    # x and qdata are flat, for two reasons. Ref mode masks an access by one index tensor only. Helion drops the index
    # and the mask of a store along a dimension of size 1, so lanes past its end would write there, too.
    for e, row, byte in hl.tile(scale.shape):
        matrix = e.index[:, None, None, None]
        r, c = _row_and_block(row.index[None, :, None, None], byte.index[None, None, :, None], blocked)
        k = hl.arange(32)[None, None, None, :]
        source = matrix * stride_e + r * stride_r + c * stride_c + k * stride_k
        valid = ((matrix < scale.size(0)) & (r < R) & (c < C)).expand(source.size())
        elements, scale_byte = scaled_tile(hl.load(x, [source], extra_mask=valid), qdata.dtype, scaling)
        _store_codes(qdata, (matrix * R + r) * C + c, elements, (matrix < scale.size(0)) & (r < R) & (c < C))
        scale[e, row, byte] = scale_byte


def mx_quantize(
    x: Tensor,
    *,
    axis: int = -1,
    elem_dtype: torch.dtype | str = torch.float8_e4m3fn,
    scaling: str = "rceil",
    scale_layout: str = "plain",
) -> tuple[Tensor, Tensor]:
    if axis == -2:
        # If the transpose of x is contiguous, blocks along the columns of x are blocks along the rows of the transpose.
        if x.stride(-1) == 1 and not x.mT.is_contiguous():
            qdata, scale = mx_tile(x, element(elem_dtype), scaling, scale_layout)
        else:
            qdata, scale = mx_quantize(x.mT, elem_dtype=elem_dtype, scaling=scaling, scale_layout=scale_layout)
        return qdata.mT, scale
    *lead, R, K = x.shape
    C, fmt = K // MX_BLOCK_SIZE, element(elem_dtype)
    row_tiles, col_tiles = blocked_shape(R, C)
    blocked = scale_layout == "blocked"
    shape = (512 * row_tiles * col_tiles,) if blocked else (R, C)
    qdata = written(x, (*lead, R, K), fmt)
    scale = torch.empty(*lead, *shape, dtype=torch.uint8, device=x.device)
    # Not for a single block: Helion does not mask along a dimension of 1. Not for FP6: a block has 12 words, and the
    # size of a tile is a power of two.
    if scale.numel() > 1 and not blocked and x.is_contiguous() and qdata.dtype not in FP6_WORDS:
        blocks, codes = x.view(-1, MX_BLOCK_SIZE), qdata.view(-1, held(qdata.dtype, MX_BLOCK_SIZE))
        launch(_flat, CONFIGS["flat"], blocks, codes, scale.view(-1), scaling)
    elif scale.numel():
        E, stride_e = (lead[0], x.stride(0)) if lead else (1, 0)
        stride_r, stride_k = x.stride()[-2:]
        rows = scale.view((E, row_tiles, 512 * col_tiles) if blocked else (E, R, C))
        layout = "strided" if not blocked else "blocked" if max(E, row_tiles) < 65536 else "tall"
        strides = (stride_e, stride_r, MX_BLOCK_SIZE * stride_k, stride_k)
        flat = x.as_strided((extent(x),), (1,))
        launch(_strided, CONFIGS[layout], flat, *strides, R, C, qdata.view(-1), rows, scaling, blocked)
    return fmt.as_codes(qdata.view(fmt.storage_dtype)), scale.view(torch.float8_e8m0fnu)
