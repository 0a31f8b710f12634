"""nvfp4_quantize in Helion: a program owns a tile of whole blocks, and the scale bytes of the tile.

One kernel serves both axes, both kinds of blocks, every stride and every layout. The tile is wide if the elements of a
row are neighbours in memory, and tall if those of a column are.
"""

from __future__ import annotations

from typing import NamedTuple

import helion.language as hl
import torch
from torch import Tensor

from mxspec.formats import NVFP4_BLOCK_SIZE
from mxspec.helion_kernels.common.blocked import blocked_shape
from mxspec.helion_kernels.common.launch import flat, for_device, launch, on_grid
from mxspec.helion_kernels.common.numerics import magnitude_bits, widened
from mxspec.helion_kernels.common.nvfp4_numerics import (
    block_scale,
    of_matrix,
    packed_codes,
    random_bytes,
    tensor_scale,
)

# Slower than Triton on an H100 (benchmarks/results/decisions.md). Blackwell: compiled, not run.
RANK = {(9, 0): 2, (10, 0): 2}


class Tile(NamedTuple):
    rows: int  # a multiple of 16
    cols: int  # in blocks
    num_warps: int


_HOPPER = {"wide": Tile(16, 16, 4), "tall": Tile(64, 4, 4)}  # no other tile was measured
TILES = {(9, 0): _HOPPER, (10, 0): _HOPPER}
OF_MATRICES = on_grid(1, 1)
# Without .ftz, which would lose subnormals.
PTX = (r"ld\.global\.(v[24]\.)?b(16|32)", r"mul\.(rn\.)?f32", r"fma\.rn\.f32", r"cvt\.rn\.satfinite\.e4m3x2\.f32")


def tensor_scales(amax: Tensor, stride: int, T: Tensor) -> None:
    for e in hl.grid(T.size(0)):
        hl.store(T, [e + hl.arange(1)], tensor_scale(hl.load(amax, [e * stride + hl.arange(1)])))


def _tiles(
    x: Tensor, stride_e: int, stride_r: int, stride_k: int, E: int, R: int, C: int, padded_rows: int, padded_cols: int,
    amax: Tensor, amax_stride: int, qdata: Tensor, scale: Tensor,
    random: Tensor, random_e: int, random_r: int, random_k: int, drawn: hl.constexpr,
    blocked: hl.constexpr, square: hl.constexpr, rows: hl.constexpr, cols: hl.constexpr,
) -> None:  # fmt: skip
    # The tensors are flat, so only the mask of an access limits what it touches. The scales have the padded sizes.
    for e, i, j in hl.grid([E, (padded_rows + rows - 1) // rows, (padded_cols + cols - 1) // cols]):
        r, c = (i * rows + hl.arange(rows)).unsqueeze(1), (j * cols + hl.arange(cols)).unsqueeze(0)
        inside = (r < R) & (c < C)
        k = c.unsqueeze(2) * 16 + hl.arange(16).unsqueeze(0).unsqueeze(1)
        source = e * stride_e + r.unsqueeze(2) * stride_r + k * stride_k
        wide = widened(hl.load(x, [source], extra_mask=inside.unsqueeze(2).expand(rows, cols, 16)))
        A, wrong = of_matrix(hl.load(amax, [e * amax_stride + hl.arange(1)]).unsqueeze(1))
        bits = magnitude_bits(wide).amax(2)
        if square:
            bits = bits.reshape(rows // 16, 16, cols).amax(1).unsqueeze(1).expand(rows // 16, 16, cols)
            bits = bits.reshape(rows, cols)
        s, wrong = block_scale(bits, A, wrong)
        pair = (c.unsqueeze(2) * 8 + hl.arange(8).unsqueeze(0).unsqueeze(1)) + (e * R + r.unsqueeze(2)) * (C * 8)
        if drawn == "bytes":
            byte_at = e * random_e + r.unsqueeze(2) * random_r + k * random_k
            drawn_byte = hl.load(random, [byte_at], extra_mask=inside.unsqueeze(2).expand(rows, cols, 16))
            codes = packed_codes(wide, s, A, wrong, drawn_byte.to(torch.int32))
        elif drawn == "seed":
            number = ((e * R + r) * C + c).to(torch.int32)
            seed = hl.load(random, [hl.arange(1)]).unsqueeze(1)
            offset = hl.load(random, [random_k + hl.arange(1)]).unsqueeze(1)
            codes = packed_codes(wide, s, A, wrong, random_bytes(number, seed, offset))
        else:
            codes = packed_codes(wide, s, A, wrong)
        hl.store(qdata, [pair], codes, extra_mask=inside.unsqueeze(2).expand(rows, cols, 8))
        byte = torch.where(wrong, 0x7F, s.view(torch.uint8).to(torch.int32))
        if blocked:
            byte = torch.where(inside, byte, 0)
            place = (r >> 7) * (padded_cols * 128) + (c >> 2) * 512 + (r & 31) * 16 + ((r >> 5) & 3) * 4 + (c & 3)
        else:
            place = r * C + c
        owned = (r < padded_rows) & (c < padded_cols)
        hl.store(scale, [e * padded_rows * padded_cols + place], byte.to(torch.uint8), extra_mask=owned)


def largest_magnitudes(x: Tensor) -> Tensor:
    """The largest magnitude of each matrix: one launch of PyTorch. A kernel of Helion would need two."""
    if not x.numel():
        return x.new_zeros(x.shape[:-2], dtype=torch.float32)
    return torch.linalg.vector_norm(x, torch.inf, dim=(-2, -1), dtype=torch.float32)


def nvfp4_quantize(
    x: Tensor,
    tensor_amax: Tensor | None = None,
    *,
    axis: int = -1,
    block: str = "1x16",
    scale_layout: str = "plain",
) -> tuple[Tensor, Tensor, Tensor]:
    return quantized(x, tensor_amax, axis, block == "16x16", scale_layout == "blocked")


def quantized(
    x: Tensor, tensor_amax: Tensor | None, axis: int, square: bool, blocked: bool, random: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch. `random` holds a byte for each element, by which its code is rounded, or a seed and an offset."""
    amax = largest_magnitudes(x) if tensor_amax is None else tensor_amax
    drawn = ""
    strides: tuple[int, ...] = (0, 0, 0)
    if random is not None:
        drawn = "bytes" if random.dtype == torch.uint8 else "seed"
        strides = (0, 0, random.stride(0)) if drawn == "seed" else (0, *random.stride())[-3:]
    if axis == -2:
        x, strides = x.mT, strides if drawn == "seed" else (strides[0], strides[2], strides[1])
    *lead, R, K = x.shape
    C = K // NVFP4_BLOCK_SIZE
    row_tiles, col_tiles = blocked_shape(R, C)
    padded = (128 * row_tiles, 4 * col_tiles) if blocked else (R, C)
    qdata = x.new_empty((*lead, R, K // 2), dtype=torch.uint8)
    scale = x.new_empty((*lead, padded[0] * padded[1]) if blocked else (*lead, R, C), dtype=torch.uint8)
    T = x.new_empty(tuple(lead), dtype=torch.float32)
    E, stride_e, amax_stride = (lead[0], x.stride(0), amax.stride(0)) if lead else (1, 0, 0)
    if E:
        launch(tensor_scales, {(9, 0): OF_MATRICES}, flat(amax), amax_stride, T.view(-1))
    if scale.numel():
        rows, cols, num_warps = for_device(TILES, x.device)["tall" if x.stride(-2) == 1 != x.stride(-1) else "wide"]
        # A grid of three dimensions needs no divisions to find a program's place, but two of its dimensions hold at
        # most 65535.
        pid_type = "xyz" if max(E, -(-padded[0] // rows)) < 65536 else "flat"
        launch(
            _tiles, {(9, 0): on_grid(3, num_warps, pid_type)}, flat(x), stride_e, *x.stride()[-2:], E, R, C, *padded,
            flat(amax), amax_stride, qdata.view(-1), scale.view(-1), flat(x if random is None else random), *strides,
            drawn, blocked, square, rows, cols,
        )  # fmt: skip
    codes = qdata.view(torch.float4_e2m1fn_x2)
    return codes.mT if axis == -2 else codes, scale.view(torch.float8_e4m3fn), T
