"""nvfp4_quantize_groups in Helion: a program owns a tile of whole blocks of one token group.

One kernel serves both axes. `r` counts the lines along which the blocks lie, and `c` the blocks of a line. Along axis
-1 a line is a padded row. Along axis -2 it is a feature, and its blocks lie along the padded rows. Pad rows are read as
zeros, so that they get the codes and the scale bytes of the contract.
"""

from __future__ import annotations

from typing import NamedTuple

import helion.language as hl
import torch
from torch import Tensor

from mxspec.helion_kernels.common.groups import (
    chunk,
    grouped_tile,
    padded_ends,
    padded_rows,
    passed,
    tokens_of,
)
from mxspec.helion_kernels.common.launch import flat, for_device, launch, on_grid
from mxspec.helion_kernels.common.numerics import magnitude_bits, widened
from mxspec.helion_kernels.common.nvfp4_numerics import block_scale, of_matrix, packed_codes
from mxspec.helion_kernels.nvfp4_quantize import OF_MATRICES, PTX, tensor_scales

__all__ = ["PTX"]
RANK = {(9, 0): 2, (10, 0): 2}  # no GPU has run it: compiled for Hopper and Blackwell, and interpreted


class Tile(NamedTuple):
    rows: int  # a divisor of 128
    cols: int  # in blocks; along axis -2 a divisor of 8, so that the tokens of a tile belong to one group
    num_warps: int


_HOPPER = {"rows": Tile(16, 16, 4), "columns": Tile(64, 4, 4)}  # from nvfp4_quantize, not measured
TILES = {(9, 0): _HOPPER, (10, 0): _HOPPER}


# `tokens_2` is the number of tokens plus 2, so that it is never 1: see mx_quantize_groups.
def _tiles(
    x: Tensor, stride_m: int, stride_k: int, tokens_2: int, K: int, amax: Tensor, amax_stride: int, qdata: Tensor,
    R: int, C: int, scale: Tensor, padded_r: int, padded_c: int, offs: Tensor, stride_offs: int, G: int,
    start: Tensor, end: Tensor, down: int, across: int, along_tokens: hl.constexpr, blocked: hl.constexpr,
    alignment: hl.constexpr, chunk: hl.constexpr, rows: hl.constexpr, cols: hl.constexpr,
) -> None:  # fmt: skip
    # qdata has R lines of C blocks, and the scales have padded_r lines of padded_c blocks.
    for i, j in hl.grid([down, across]):
        row0 = (j * cols * 16 if along_tokens else i * rows) + hl.arange(1)
        group, begin = row0 * 0, row0 * 0
        before = hl.zeros([], dtype=torch.int32)
        for n in range(0, G, chunk):
            g, begins, ends, before = padded_ends(offs, stride_offs, G, before, n, alignment, chunk)
            group, begin = passed(group, begin, row0, g, ends, G)
            if i + j == 0:
                hl.store(start, [g], begins, extra_mask=g < G)
                hl.store(end, [g], ends, extra_mask=g < G)
        first, stop = tokens_of(group, offs, stride_offs, G)
        token0 = (first - begin).unsqueeze(1)
        r, c = (i * rows + hl.arange(rows)).unsqueeze(1), (j * cols + hl.arange(cols)).unsqueeze(0)
        k = c.unsqueeze(2) * 16 + hl.arange(16).unsqueeze(0).unsqueeze(1)
        if along_tokens:
            token, feature = token0.unsqueeze(2) + k, r.unsqueeze(2)
        else:
            token, feature = (token0 + r).unsqueeze(2), k
        last = stop.unsqueeze(1).unsqueeze(2)
        there = (token >= 0) & (token < last) & (token < tokens_2 - 2) & (feature < K)
        source = token * stride_m + feature * stride_k
        wide = widened(hl.load(x, [source], extra_mask=there.expand(rows, cols, 16)))
        A, wrong = of_matrix(hl.load(amax, [group * amax_stride], extra_mask=group < G).unsqueeze(1))
        s, wrong = block_scale(magnitude_bits(wide).amax(2), A, wrong)
        inside = (r < R) & (c < C)
        pair = (r.unsqueeze(2) * C + c.unsqueeze(2)) * 8 + hl.arange(8).unsqueeze(0).unsqueeze(1)
        hl.store(qdata, [pair], packed_codes(wide, s, A, wrong), extra_mask=inside.unsqueeze(2).expand(rows, cols, 8))
        byte = torch.where(wrong, 0x7F, s.view(torch.uint8).to(torch.int32))
        owned = (r < padded_r) & (c < padded_c)
        if blocked:
            in_tile = (r & 31) * 16 + ((r >> 5) & 3) * 4 + (c & 3)
            if along_tokens:
                byte = torch.where(r < K, byte, 0)
                tokens = torch.div(stop - first + (alignment - 1), alignment, rounding_mode="trunc") * (alignment // 64)
                tile, exists = grouped_tile(
                    (c >> 2), (r >> 7), group.unsqueeze(1), (begin >> 6).unsqueeze(1), tokens.unsqueeze(1), G,
                    padded_r >> 7, padded_c >> 2,
                )  # fmt: skip
                hl.store(scale, [tile * 512 + in_tile], byte.to(torch.uint8), extra_mask=owned & exists)
            else:
                byte = torch.where(c < C, byte, 0)
                place = (r >> 7) * (padded_c * 128) + (c >> 2) * 512 + in_tile
                hl.store(scale, [place], byte.to(torch.uint8), extra_mask=owned)
        else:
            hl.store(scale, [r * C + c], byte.to(torch.uint8), extra_mask=owned)


def largest_of_groups(x: Tensor, offs: Tensor) -> Tensor:
    """The largest magnitude of each group, by PyTorch, without a wait for the device."""
    (M, K), G = x.shape, offs.shape[0]
    largest = torch.zeros(G + 1, dtype=torch.int32, device=x.device)
    if M * K:
        of_token = torch.linalg.vector_norm(x, torch.inf, dim=1, dtype=torch.float32).view(torch.int32) & 0x7FFFFFFF
        token = torch.arange(M, dtype=torch.int32, device=x.device)
        # As integers, the bits have the order of the magnitudes, and NaN is the largest.
        group = torch.searchsorted(offs.contiguous(), token, right=True)
        largest.scatter_reduce_(0, group, of_token, "amax")
    return largest[:G].view(torch.float32)


def nvfp4_quantize_groups(
    x: Tensor,
    offs: Tensor,
    tensor_amax: Tensor | None = None,
    *,
    axis: int = -1,
    pad_to: int = 128,
    scale_layout: str = "blocked",
    check_offs: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    (M, K), G, blocked, along_tokens = x.shape, offs.shape[0], scale_layout == "blocked", axis == -2
    amax = largest_of_groups(x, offs) if tensor_amax is None else tensor_amax
    padded = padded_rows(M, G, pad_to)
    start, end = (offs.new_empty(G) for _ in range(2))
    T = x.new_empty(G, dtype=torch.float32)
    R, C = (K, padded // 16) if along_tokens else (padded, K // 16)
    scales = (R, C)
    if blocked:
        scales = (-(-K // 128) * 128, C + 4 * G) if along_tokens else (R + 128 * G, -(-C // 4) * 4)
    qdata = x.new_empty((R, C * 8), dtype=torch.uint8)
    scale = x.new_empty(scales, dtype=torch.uint8)
    if G:
        launch(tensor_scales, {(9, 0): OF_MATRICES}, flat(amax), amax.stride(0), T)
    if padded:
        rows, cols, num_warps = for_device(TILES, x.device)["columns" if along_tokens else "rows"]
        # At least one program, which writes start and end even if there are no columns.
        down, across = max(1, -(-scales[0] // rows)), max(1, -(-scales[1] // cols))
        launch(
            _tiles, {(9, 0): on_grid(2, num_warps, "xyz" if down < 65536 else "flat")}, flat(x), *x.stride(), M + 2, K,
            flat(amax), amax.stride(0), flat(qdata), R, C, flat(scale), *scales, flat(offs), offs.stride(0), G,
            flat(start), flat(end), down, across, along_tokens, blocked, pad_to, chunk(G), rows, cols,
        )  # fmt: skip
    codes = qdata.view(torch.float4_e2m1fn_x2)
    return codes.mT if along_tokens else codes, scale.view(torch.float8_e4m3fn), T, start, end
