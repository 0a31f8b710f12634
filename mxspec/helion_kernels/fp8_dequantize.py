"""fp8_dequantize in Helion: contiguous tensors, any strides along axis -1, and axis -2.

Along axis -2, threads transpose the codes.
"""

from __future__ import annotations

from typing import NamedTuple

import helion.language as hl
import torch
from torch import Tensor

from mxspec.formats import FP8_BLOCK_SIZE
from mxspec.helion_kernels.common.launch import config, flat, for_device, launch, on_grid
from mxspec.helion_kernels.common.runs import dimension, load_run


class Tile(NamedTuple):
    cols: int
    num_warps: int


_FLAT, _ALONG = config([32], 4), config([1, 32, 1], 4)
CONFIGS = {
    "flat": {(9, 0): _FLAT, (10, 0): _FLAT},  # codes and 1x128 scales contiguous
    "along": {(9, 0): _ALONG, (10, 0): _ALONG},  # block sizes along (E, rows, blocks)
}
_HOPPER = {"turned": Tile(128, 4), "turned, ragged": Tile(128, 8)}  # as in Triton
TILES = {(9, 0): _HOPPER, (10, 0): _HOPPER}
# The multiplication has no .ftz, which would lose the subnormals.
RANK = {(9, 0): 2, (10, 0): 2}  # Blackwell: compiled, not run
PTX = (r"ld\.global\.(v[24]\.)?b32", r"st\.global\.v4\.b32", r"cvt\.rn\.f16x2\.e4m3x2", r"mul\.(rn\.)?f32")


def _flat(qdata: Tensor, scale: Tensor, out: Tensor) -> None:
    for blocks in hl.tile(scale.size(0)):
        out[blocks, :] = (qdata[blocks, :].to(torch.float32) * scale[blocks].unsqueeze(-1)).to(out.dtype)


def _along(
    qdata: Tensor, stride_e: int, stride_r: int, stride_k: int, E: int, R: int, C: int, K: int,
    scale: Tensor, scale_stride_e: int, scale_stride_r: int, scale_stride_c: int, out: Tensor, square: hl.constexpr,
    tail: hl.constexpr,
) -> None:  # fmt: skip
    # All tensors are flat, so only the mask of an access limits what it touches.
    for matrix, row, block in hl.tile([E, R, C]):
        e, r, c = matrix.index[:, None, None], row.index[None, :, None], block.index[None, None, :]
        inside = (e < E) & (r < R) & (c < C)
        rows = r >> 7 if square else r
        place = e * scale_stride_e + rows * scale_stride_r + c * scale_stride_c
        value = hl.load(scale, [place], extra_mask=inside)[:, :, :, None]
        e, r = matrix.index[:, None, None, None], row.index[None, :, None, None]
        k = block.index[None, None, :, None] * 128 + hl.arange(128)[None, None, None, :]
        place = e * stride_e + r * stride_r + k * stride_k
        width = K if tail else C * 128  # with a tail, the last block of a row is shorter
        valid = ((e < E) & (r < R) & (k < width)).expand(place.size())
        value = hl.load(qdata, [place], extra_mask=valid).to(torch.float32) * value
        hl.store(out, [(e * R + r) * width + k], value.to(out.dtype), extra_mask=valid)


def _tile(
    qdata: Tensor, stride_e: int, stride_r: int, stride_k: int, R: int, K: int,
    scale: Tensor, scale_stride_e: int, scale_stride_r: int, scale_stride_c: int, out: Tensor,
    square: bool, even: bool, tail: bool, cols: int, e: int, c: int, r_tile: int,
) -> None:  # fmt: skip
    """128 rows by `cols` columns of the output. They are one block of each of `cols` rows of the transpose.

    A thread has 16 elements along the block of each of 8 neighbouring rows: 8 loads of 16 codes, then 16 stores of 8
    values.
    """
    r = r_tile * cols + dimension(4, 0, 4) * 8 + dimension(cols // 32, 2, 4) * 32
    k = c * 128 + dimension(8, 1, 4) * 16 + dimension(16, 3, 4)
    # A thread stores this many values at once. Triton would give the rest of a longer run to another thread.
    part = 16 // out.dtype.itemsize
    column = r.unsqueeze(-1).unsqueeze(-1) + dimension(8 // part, 4, 6) * part + dimension(part, 5, 6)
    mask = left = inside = owned = None
    if not even:
        # With a tail, the last block is shorter. A thread has all of its 16 codes or none: K is a multiple of 16.
        mask, left = ((r < R) & (k < K) if tail else r < R).expand(4, 8, cols // 32, 16), R - r
        inside = column < R
        stored = inside & (k < K).unsqueeze(-1).unsqueeze(-1) if tail else inside
        owned = stored.expand(4, 8, cols // 32, 16, 8 // part, part)
    q = load_run(qdata, r, stride_r, e * stride_e + k * stride_k, mask, 8, left=left)
    value = q.to(torch.float32).reshape(4, 8, cols // 32, 16, 8 // part, part)
    rows = column >> 7 if square else column
    place = e * scale_stride_e + rows * scale_stride_r + c * scale_stride_c
    value = (value * hl.load(scale, [place], extra_mask=inside)).to(out.dtype)
    hl.store(out, [(e * K + k).unsqueeze(-1).unsqueeze(-1) * R + column], value, extra_mask=owned)


def _turned(
    qdata: Tensor, stride_e: int, stride_r: int, stride_k: int, E: int, R: int, K: int,
    scale: Tensor, scale_stride_e: int, scale_stride_r: int, scale_stride_c: int, out: Tensor,
    square: hl.constexpr, even: hl.constexpr, tail: hl.constexpr, cols: hl.constexpr,
) -> None:  # fmt: skip
    for e, c, r_tile in hl.grid([E, (K + 127) // 128, (R + cols - 1) // cols]):
        _tile(
            qdata, stride_e, stride_r, stride_k, R, K, scale, scale_stride_e, scale_stride_r, scale_stride_c, out,
            square, even, tail, cols, e, c, r_tile,
        )  # fmt: skip


def fp8_dequantize(qdata: Tensor, scale: Tensor, *, axis: int = -1, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    out = torch.empty(qdata.shape, dtype=out_dtype, device=qdata.device)
    if not out.numel():
        return out
    q = qdata if axis == -1 else qdata.mT  # from here on the blocks lie along the last dimension
    *lead, R, K = q.shape
    C, tail, square = -(-K // FP8_BLOCK_SIZE), K % FP8_BLOCK_SIZE != 0, scale.shape[-2] != R
    E, stride_e, scale_stride_e = (lead[0], q.stride(0), scale.stride(0)) if lead else (1, 0, 0)
    codes = flat(q), stride_e, *q.stride()[-2:], E, R
    scales = flat(scale), scale_stride_e, *scale.stride()[-2:]
    if axis == -2:
        tiles = for_device(TILES, q.device)
        even = R % tiles["turned"].cols == 0 and not tail
        cols, num_warps = tiles["turned" if even else "turned, ragged"]
        pid_type = "xyz" if max(E, C) < 65536 else "flat"
        launch(
            _turned, {(9, 0): on_grid(3, num_warps, pid_type)}, *codes, K, *scales, out.view(-1), square, even, tail,
            cols,
        )  # fmt: skip
    elif not square and not tail and E * R * C > 1 and q.is_contiguous() and scale.is_contiguous():
        # Not for a single block: Helion does not mask along a dimension of 1.
        blocks = (-1, FP8_BLOCK_SIZE)
        launch(_flat, CONFIGS["flat"], q.view(blocks), scale.view(-1), out.view(blocks))
    else:
        launch(_along, CONFIGS["along"], *codes, C, K, *scales, out.view(-1), square, tail)
    return out
