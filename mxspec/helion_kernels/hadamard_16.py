"""hadamard_16 in Helion: a program owns a tile of whole blocks of 16 elements. One kernel serves both axes."""

from __future__ import annotations

from typing import NamedTuple

import helion.language as hl
import torch
from torch import Tensor

from mxspec.helion_kernels.common.launch import flat, for_device, launch, on_grid
from mxspec.helion_kernels.common.numerics import widened

RANK = {(9, 0): 2, (10, 0): 2}  # no GPU has run it: compiled for Hopper and Blackwell, and interpreted


class Tile(NamedTuple):
    rows: int
    cols: int  # in blocks
    num_warps: int


_HOPPER = {"wide": Tile(16, 16, 4), "tall": Tile(64, 4, 4)}  # from nvfp4_quantize, not measured
TILES = {(9, 0): _HOPPER, (10, 0): _HOPPER}
# Without .ftz, which would lose subnormals.
PTX = (r"add\.(rn\.)?f32", r"sub\.(rn\.)?f32", r"mul\.(rn\.)?f32")


def _stage(v: Tensor) -> Tensor:
    """The sums and the differences of the pairs in the last dimension. That dimension then becomes the third.

    After four stages, the four dimensions of 2 have their order again.
    """
    a, b = hl.split(v)
    return hl.join(a + b, a - b).permute(0, 1, 5, 2, 3, 4)


def transformed(v: Tensor, signs: int) -> Tensor:
    """The transforms of blocks `(rows, cols, 16)` in fp32, each sum rounded once."""
    rows, cols, _ = v.shape
    element = hl.arange(16).unsqueeze(0).unsqueeze(1)
    negative = (((element * 0 + signs) >> element) << 31).to(torch.int32)
    v = (v.view(torch.int32) ^ negative).view(torch.float32).reshape(rows, cols, 2, 2, 2, 2)
    return _stage(_stage(_stage(_stage(v)))).reshape(rows, cols, 16) * 0.25


def _tiles(
    x: Tensor, stride_e: int, stride_r: int, stride_k: int, E: int, R: int, C: int, y: Tensor, y_stride_r: int,
    y_stride_k: int, signs: int, rows: hl.constexpr, cols: hl.constexpr,
) -> None:  # fmt: skip
    for e, i, j in hl.grid([E, (R + rows - 1) // rows, (C + cols - 1) // cols]):
        r = (i * rows + hl.arange(rows)).unsqueeze(1).unsqueeze(2)
        c = (j * cols + hl.arange(cols)).unsqueeze(0).unsqueeze(2)
        k = c * 16 + hl.arange(16).unsqueeze(0).unsqueeze(1)
        inside = ((r < R) & (c < C)).expand(rows, cols, 16)
        v = widened(hl.load(x, [e * stride_e + r * stride_r + k * stride_k], extra_mask=inside))
        v = transformed(v, signs)
        hl.store(y, [e * R * C * 16 + r * y_stride_r + k * y_stride_k], v.to(y.dtype), extra_mask=inside)


def hadamard_16(x: Tensor, *, axis: int = -1, signs: int = 0xD7E8) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return y
    if axis == -2:
        x = x.mT
    *lead, R, K = x.shape
    E, stride_e = (lead[0], x.stride(0)) if lead else (1, 0)
    y_strides = (1, R) if axis == -2 else (K, 1)
    rows, cols, num_warps = for_device(TILES, x.device)["tall" if axis == -2 else "wide"]
    # A grid of three dimensions needs no divisions, but two of its dimensions hold at most 65535.
    pid_type = "xyz" if max(E, -(-R // rows)) < 65536 else "flat"
    launch(
        _tiles, {(9, 0): on_grid(3, num_warps, pid_type)}, flat(x), stride_e, *x.stride()[-2:], E, R, K // 16,
        y.view(-1), *y_strides, signs, rows, cols,
    )  # fmt: skip
    return y
