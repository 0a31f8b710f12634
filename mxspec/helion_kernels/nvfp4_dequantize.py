"""nvfp4_dequantize in Helion: a program owns a tile of whole blocks. One kernel serves both axes and every layout.

Along axis -2, codes and scales are stored transposed, and the output is not: the kernel writes a transposed tile.
"""

from __future__ import annotations

import helion.language as hl
import torch
from torch import Tensor

from mxspec.formats import NVFP4_BLOCK_SIZE
from mxspec.helion_kernels.common.blocked import blocked_shape
from mxspec.helion_kernels.common.launch import flat, for_device, launch, on_grid
from mxspec.helion_kernels.common.nvfp4_numerics import values_of_pairs

# As fast as Triton for large matrices (benchmarks/results/decisions.md). Blackwell: compiled, not run.
RANK = {(9, 0): 2, (10, 0): 2}
# Rows and blocks of a tile, warps. No other tile was measured.
_HOPPER = {"rows": (16, 16, 4), "turned": (64, 4, 4)}
TILES = {(9, 0): _HOPPER, (10, 0): _HOPPER}
# The multiplications have no .ftz, which would lose the subnormals.
PTX = (r"st\.global\.v[24]\.b32", r"cvt\.rn\.f16x2\.e4m3x2", r"mul\.(rn\.)?f32")


def _tiles(
    qdata: Tensor, stride_e: int, stride_r: int, stride_k: int, E: int, R: int, C: int,
    scale: Tensor, scale_stride_e: int, scale_stride_r: int, scale_stride_c: int, col_tiles: int,
    tensor_scale: Tensor, tensor_scale_stride: int, out: Tensor,
    blocked: hl.constexpr, scaled: hl.constexpr, turned: hl.constexpr, rows: hl.constexpr, cols: hl.constexpr,
) -> None:  # fmt: skip
    # The tensors are flat, so only the mask of an access limits what it touches.
    for e, i, j in hl.grid([E, (R + rows - 1) // rows, (C + cols - 1) // cols]):
        r, c = (i * rows + hl.arange(rows)).unsqueeze(1), (j * cols + hl.arange(cols)).unsqueeze(0)
        inside = (r < R) & (c < C)
        if blocked:
            byte = (r >> 7) * 512 * col_tiles + (c >> 2) * 512 + (r & 31) * 16 + ((r >> 5) & 3) * 4 + (c & 3)
            place = e * scale_stride_e + byte * scale_stride_c
        else:
            place = e * scale_stride_e + r * scale_stride_r + c * scale_stride_c
        s = hl.load(scale, [place], extra_mask=inside)
        pair = c.unsqueeze(2) * 8 + hl.arange(8).unsqueeze(0).unsqueeze(1)
        source = e * stride_e + r.unsqueeze(2) * stride_r + pair * stride_k
        q = hl.load(qdata, [source], extra_mask=inside.unsqueeze(2).expand(rows, cols, 8))
        T = hl.load(tensor_scale, [e * tensor_scale_stride + hl.arange(1)]).unsqueeze(1) if scaled else None
        value = values_of_pairs(q, s, T, out.dtype)
        k = c.unsqueeze(2) * 16 + hl.arange(16).unsqueeze(0).unsqueeze(1)
        mask = inside.unsqueeze(2).expand(rows, cols, 16)
        if turned:
            target = (e * C * 16 + k) * R + r.unsqueeze(2)
            hl.store(out, [target.permute(1, 2, 0)], value.permute(1, 2, 0), extra_mask=mask.permute(1, 2, 0))
        else:
            hl.store(out, [(e * R + r.unsqueeze(2)) * (C * 16) + k], value, extra_mask=mask)


def nvfp4_dequantize(
    qdata: Tensor,
    scale: Tensor,
    tensor_scale: Tensor,
    *,
    axis: int = -1,
    out_dtype: torch.dtype = torch.bfloat16,
    scale_layout: str = "plain",
) -> Tensor:
    return dequantized(qdata, scale, tensor_scale, axis, out_dtype, scale_layout == "blocked")


def dequantized(
    qdata: Tensor, scale: Tensor, tensor_scale: Tensor | None, axis: int, out_dtype: torch.dtype, blocked: bool,
    role: str = "",
) -> Tensor:  # fmt: skip
    """`nvfp4_dequantize`, also with a tensor scale of 1 (None). An op that calls it twice gives roles: see `launch`."""
    sizes = [2 * n if d - qdata.ndim == axis else n for d, n in enumerate(qdata.shape)]
    out = qdata.new_empty(sizes, dtype=out_dtype)
    if not out.numel():
        return out
    q = qdata.view(torch.uint8)
    if axis == -2:
        q = q.mT
    *lead, R, stored = q.shape
    C, E = 2 * stored // NVFP4_BLOCK_SIZE, lead[0] if lead else 1
    of_experts = (q.stride(0), scale.stride(0)) if lead else (0, 0)
    numbers = scale if tensor_scale is None else tensor_scale  # the scales take the place of numbers that are not read
    scale_strides = of_experts[1], 0 if blocked else scale.stride(-2), scale.stride(-1)
    rows, cols, num_warps = for_device(TILES, q.device)["rows" if axis == -1 else "turned"]
    # A grid of three dimensions needs no divisions to find a program's place, but two of its dimensions hold at most
    # 65535.
    pid_type = "xyz" if max(E, -(-R // rows)) < 65536 else "flat"
    launch(
        _tiles, {(9, 0): on_grid(3, num_warps, pid_type)}, flat(q), of_experts[0], *q.stride()[-2:], E, R, C,
        flat(scale), *scale_strides, blocked_shape(R, C)[1], flat(numbers), numbers.stride(0) if lead else 0,
        out.view(-1), blocked, tensor_scale is not None, axis == -2, rows, cols, role=role,
    )  # fmt: skip
    return out
