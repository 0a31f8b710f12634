"""One kernel quantizes token groups to MX in both directions: tokens, their SwiGLU, or the gradient of SwiGLU.

The tiles are those of `mx_columns.py`. A program owns 128 padded tokens of one group by 128 features. So it has whole
blocks in both directions. Pad rows are read as zeros, so that they get the codes and the scale bytes of the contract.
"""

from __future__ import annotations

import helion.language as hl
import torch
from torch import Tensor

from mxspec.formats import element
from mxspec.helion_kernels.common.groups import (
    chunk,
    grouped_tile,
    padded_ends,
    padded_rows,
    passed,
    tokens_left,
    tokens_of,
)
from mxspec.helion_kernels.common.launch import flat, for_device, launch, on_grid
from mxspec.helion_kernels.common.numerics import widened
from mxspec.helion_kernels.common.runs import load_run
from mxspec.helion_kernels.common.swiglu import gradient_run, swiglu_run
from mxspec.helion_kernels.tiles.mx_columns import TILES, column_codes, column_scale, store_rows, tile_index

PTX = (r"ld\.global\.v[24]\.b32", r"st\.global\.v[24]\.b32", r"cvt\.rn\.satfinite\.e[45]m[32]x2\.f32")


# `tokens_2` is the number of tokens plus 2, so that it is never 1. With a constant 1, ptxas 12.8 generates wrong code
# (see mx_quantize_groups).
def _both_ways(
    x: Tensor, stride_m: int, stride_k: int, dh: Tensor, dh_stride_m: int, dh_stride_k: int,
    tokens_2: int, K: int, half: int,
    q_row: Tensor, s_row: Tensor, q_col: Tensor, s_col: Tensor, R: int,
    offs: Tensor, stride_offs: int, G: int, start: Tensor, end: Tensor, row_tiles: int, col_programs: int,
    how: hl.constexpr, empty: hl.constexpr, scaling: hl.constexpr, blocked: hl.constexpr, alignment: hl.constexpr,
    chunk: hl.constexpr, cols: hl.constexpr, part: hl.constexpr, run: hl.constexpr,
) -> None:  # fmt: skip
    C, k_blocks = R // 32, K // 32  # computed on the host, so that Triton keeps its divisible-by-16 specialization
    k_tiles = (K + 127) // 128
    runs, parts = 128 // run, cols // part
    for m_tile, k_tile in hl.grid([row_tiles, col_programs]):  # features first, as memory has them
        # Groups are padded to multiples of 128, so these rows belong to one group.
        tile = m_tile + hl.arange(1)
        group, begin = tile * 0, tile * 0
        before = hl.zeros([], dtype=torch.int32)
        for i in range(0, G, chunk):
            g, begins, ends, before = padded_ends(offs, stride_offs, G, before, i, alignment, chunk)
            group, begin = passed(group, begin, tile * 128, g, ends, G)
            if k_tile + m_tile == 0:
                hl.store(start, [g], begins, extra_mask=g < G)
                hl.store(end, [g], ends, extra_mask=g < G)
        first, stop = tokens_of(group, offs, stride_offs, G)
        token0 = (first + tile * 128 - begin).sum(0)  # a scalar fits masks of any layout, without shared memory
        token = (token0 + hl.arange(runs) * run).unsqueeze(1).unsqueeze(2)
        left = tokens_left(token, stop, tokens_2 - 2)
        _m, k = tile_index(m_tile, k_tile, runs, parts, part, run)
        source = k * stride_k
        if how == "tokens":
            values = load_run(x, token, stride_m, source, k < K, run, left=left)
        elif how == "swiglu":
            values = swiglu_run(x, token, stride_m, source, (half + k) * stride_k, k < K, left, run)
        else:  # the first half of the features are those of gate
            in_gate = k < half
            feature = torch.where(in_gate, k, k - half)
            of_gate, of_up, of_h = feature * stride_k, (half + feature) * stride_k, feature * dh_stride_k
            values = gradient_run(x, dh, token, stride_m, dh_stride_m, of_gate, of_up, of_h, in_gate, k < K, left, run)
        wide = widened(values).reshape(runs, parts, part, run)
        byte = column_scale(wide, q_col.dtype, scaling, x.dtype)
        if not empty:  # after both maxima, so that the magnitudes free their registers
            store_rows(
                wide, q_row, s_row, 0, m_tile, k_tile, R, K, k_blocks, row_tiles, scaling, x.dtype, blocked, False
            )
        byte = column_codes(wide, byte, q_col, 0, m_tile, k_tile, R, K, False)
        if blocked:  # cols is 128. (c, k // 32, k % 32) -> (k % 32, k // 32, c)
            size = torch.div(stop - first + (alignment - 1), alignment, rounding_mode="trunc") * (alignment // 128)
            place, owned = grouped_tile(tile, k_tile, group, begin >> 7, size, G, k_tiles, row_tiles)
            tiles = byte.reshape(4, 4, 32).permute(2, 1, 0).reshape(512)
            hl.store(s_col, [place * 512 + hl.arange(512)], tiles, extra_mask=owned.expand(512))
        else:
            row, c = k.reshape(cols, 1), (m_tile * 4 + hl.arange(4)).unsqueeze(0)
            hl.store(s_col, [row * C + c], byte.permute(1, 0), extra_mask=(row < K) & (c < C))


def rowcol_groups(
    how: str, x: Tensor, offs: Tensor, pad_to: int, elem_dtype: torch.dtype | str, scaling: str, scale_layout: str,
    dh: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Quantize x in both directions. `how` is `tokens`; or `swiglu` or `gradient`, where x is gate and up.

    `gradient` needs `dh`, the gradient of SwiGLU.
    """
    (M, D), G, fmt, blocked = x.shape, offs.shape[0], element(elem_dtype), scale_layout == "blocked"
    K = D // 2 if how == "swiglu" else D  # columns of the results
    dh = x if dh is None else dh
    R, col_tiles = padded_rows(M, G, pad_to), -(-K // 128)
    rows = R + 128 * G if blocked else R  # the number of rows with scales
    q_row, q_col = (x.new_empty(shape, dtype=fmt.dtype) for shape in ((R, K), (K, R)))
    shapes = ((rows, 4 * col_tiles), (128 * col_tiles, rows // 32)) if blocked else ((R, K // 32), (K, R // 32))
    s_row, s_col = (x.new_empty(shape, dtype=torch.uint8) for shape in shapes)
    start, end = (offs.new_empty(G) for _ in range(2))
    if rows:
        tile = for_device(TILES, x.device)["rowcol"]
        # A grid of two dimensions needs no division to find a program's place, but the second holds at most 65535. At
        # least one program across: with no columns, start and end are still written.
        pid_type = "xyz" if rows // 128 < 65536 else "flat"
        launch(
            _both_ways, {(9, 0): on_grid(2, tile.num_warps, pid_type)}, flat(x), *x.stride(),
            flat(dh), *dh.stride(), M + 2, K, D // 2, flat(q_row), flat(s_row), flat(q_col), flat(s_col), R,
            flat(offs), offs.stride(0), G, flat(start), flat(end), rows // 128, max(1, col_tiles),
            how, K == 0, scaling, blocked, pad_to, chunk(G), tile.cols, tile.part, tile.run,
        )  # fmt: skip
    e8m0 = torch.float8_e8m0fnu
    return q_row, s_row.view(e8m0), q_col.mT, s_col.view(e8m0), start, end
