"""nvfp4_fake_quantize in Helion: a program owns a tile of whole blocks, and writes their values.

One kernel serves both axes, both kinds of blocks and every stride. PyTorch finds the largest magnitudes before.
"""

from __future__ import annotations

import helion.language as hl
import torch
from torch import Tensor

from mxspec.formats import NVFP4_BLOCK_SIZE
from mxspec.helion_kernels.common.launch import flat, for_device, launch, on_grid
from mxspec.helion_kernels.common.numerics import magnitude_bits, widened
from mxspec.helion_kernels.common.nvfp4_numerics import fake_values, of_matrix
from mxspec.helion_kernels.nvfp4_quantize import OF_MATRICES, TILES, largest_magnitudes, tensor_scales

# Beside Triton on an H100: benchmarks/results/decisions.md. Blackwell: compiled, not run.
RANK = {(9, 0): 2, (10, 0): 2}
# Without .ftz, which would lose subnormals.
PTX = (r"ld\.global\.(v[24]\.)?b(16|32)", r"mul\.(rn\.)?f32", r"fma\.rn\.f32", r"cvt\.rn\.satfinite\.e4m3x2\.f32")


def _tiles(
    x: Tensor, stride_e: int, stride_r: int, stride_k: int, E: int, R: int, C: int, amax: Tensor, amax_stride: int,
    values: Tensor, turned: hl.constexpr, square: hl.constexpr, rows: hl.constexpr, cols: hl.constexpr,
) -> None:  # fmt: skip
    # The tensors are flat, so only the mask of an access limits what it touches.
    for e, i, j in hl.grid([E, (R + rows - 1) // rows, (C + cols - 1) // cols]):
        r, c = (i * rows + hl.arange(rows)).unsqueeze(1).unsqueeze(2), (j * cols + hl.arange(cols)).unsqueeze(1)
        c = c.unsqueeze(0)
        k = c * 16 + hl.arange(16).unsqueeze(0).unsqueeze(1)
        inside = ((r < R) & (c < C)).expand(rows, cols, 16)
        wide = widened(hl.load(x, [e * stride_e + r * stride_r + k * stride_k], extra_mask=inside))
        A, wrong = of_matrix(hl.load(amax, [e * amax_stride + hl.arange(1)]).unsqueeze(1))
        bits = magnitude_bits(wide).amax(2)
        if square:
            bits = bits.reshape(rows // 16, 16, cols).amax(1).unsqueeze(1).expand(rows // 16, 16, cols)
            bits = bits.reshape(rows, cols)
        value = fake_values(wide, bits, A, wrong)
        if turned:
            target = (e * C * 16 + k) * R + r
            hl.store(values, [target.permute(1, 2, 0)], value.permute(1, 2, 0), extra_mask=inside.permute(1, 2, 0))
        else:
            hl.store(values, [(e * R + r) * (C * 16) + k], value, extra_mask=inside)


def nvfp4_fake_quantize(x: Tensor, *, axis: int = -1, block: str = "1x16") -> tuple[Tensor, Tensor]:
    values = x.new_empty(x.shape, dtype=torch.bfloat16)
    amax = largest_magnitudes(x)
    if axis == -2:
        x = x.mT
    *lead, R, K = x.shape
    T = x.new_empty(tuple(lead), dtype=torch.float32)
    E, stride_e, amax_stride = (lead[0], x.stride(0), amax.stride(0)) if lead else (1, 0, 0)
    if E:
        launch(tensor_scales, {(9, 0): OF_MATRICES}, flat(amax), amax_stride, T.view(-1))
    if values.numel():
        rows, cols, num_warps = for_device(TILES, x.device)["tall" if x.stride(-2) == 1 != x.stride(-1) else "wide"]
        # A grid of three dimensions needs no divisions to find a program's place, but two of its dimensions hold at
        # most 65535.
        pid_type = "xyz" if max(E, -(-R // rows)) < 65536 else "flat"
        launch(
            _tiles, {(9, 0): on_grid(3, num_warps, pid_type)}, flat(x), stride_e, *x.stride()[-2:],
            E, R, K // NVFP4_BLOCK_SIZE, flat(amax), amax_stride, values.view(-1),
            axis == -2, block == "16x16", rows, cols,
        )  # fmt: skip
    return values, T
