"""The table of layouts: functions from and to plain scales, and the description of each layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import Tensor

import mxspec
from mxspec.reference.common import checks
from mxspec.reference.common.groups import bounds, padded_rows, round_up
from mxspec.reference.to_blocked_k_groups import tile_places

E8M0 = (torch.float8_e8m0fnu, torch.uint8)
FP32 = (torch.float32,)
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """How plain scales `(R, C)` or `(E, R, C)` become a layout and come back, and the description of the layout.

    `write(plain, offs)` returns the stored tensor of contiguous plain scales. `read(stored, shape, offs)` returns the
    plain scales of that shape. offs is None for layouts without groups. `explain` prints the texts.
    """

    write: Callable[[Tensor, Any], Tensor]
    read: Callable[[Tensor, Shape, Any], Tensor]
    dtypes: Sequence[torch.dtype]  # dtypes of the scales that it holds; other dtypes are converted to the first
    who: str  # who makes or reads this layout
    shape: str
    offset: str  # the place of scale (r, c), counted in scales: an expression in r, c, R, C, Rp, Cp
    source: str
    padding: str = "none"
    loses: str = "nothing"
    holds_shape: bool = False  # whether the stored tensor has the shape of the scales; if not, reading needs the shape
    groups: str = ""  # the dimension that offs divides into groups: R or C
    line: int = 0  # places in a line of the picture; 0 means a row or a column of the stored matrix
    band: int = 1  # number of rows that share a colour


def _padded(plain: Tensor, rows: int, cols: int) -> Tensor:
    """Row-major scales with zeros up to multiples of `rows` and `cols`."""
    *lead, R, C = plain.shape
    out = torch.zeros(*lead, round_up(R, rows), round_up(C, cols), dtype=plain.dtype, device=plain.device)
    out[..., :R, :C] = plain
    return out


def _cut(stored: Tensor, shape: Shape) -> Tensor:
    return stored[..., : shape[-2], : shape[-1]]


def _mn_major(plain: Tensor, alignment: int) -> Tensor:
    """Columns one after the other in memory, each padded with zeros to a multiple of `alignment` rows."""
    return _padded(plain.mT, 1, alignment)[..., : plain.shape[-2]].mT


def _packed(plain: Tensor) -> Tensor:
    """Four columns in an int32, little endian: the first of the four columns is the lowest byte."""
    words = _padded(plain, 1, 4)
    words = words.reshape(*words.shape[:-1], words.shape[-1] // 4, 4).view(torch.int32).squeeze(-1)
    return _mn_major(words, 16 // words.element_size())


def _unpacked(stored: Tensor, shape: Shape) -> Tensor:
    quads = stored.unsqueeze(-1).contiguous().view(torch.float8_e8m0fnu)  # (..., R, Cp/4, 4)
    return _cut(quads.flatten(-2), shape)


def _tiles_of(shape: Shape) -> Shape:
    *lead, R, C = shape
    return (*lead, ceil(R / 128), ceil(C / 4), 32, 4, 4)


def _read_m_groups(stored: Tensor, shape: Shape, offs: Tensor) -> Tensor:
    (R, C), G = shape, offs.shape[0]
    rows, Cp = padded_rows(R, G, 128), stored.shape[1]
    tiles = _padded(stored.view(torch.uint8), 128, 1).flatten()[: rows * Cp]  # the rows may end inside a tile
    padded = mxspec.from_blocked(tiles, rows, C)
    return mxspec.unpad_token_groups(padded, offs, bounds(offs, 128)[0], R).view(stored.dtype)


def _read_k_groups(stored: Tensor, shape: Shape, offs: Tensor) -> Tensor:
    (R, C), G = shape, offs.shape[0]
    start, end = bounds(offs, 4)
    row_tiles, cols = ceil(R / 128), padded_rows(C, G, 4)
    tiles = stored.new_zeros(row_tiles * cols * 128, dtype=torch.uint8)
    tiles[: stored.numel()] = stored.view(torch.uint8).flatten()  # the stored bound may end inside the last tiles
    tiles = tiles.view(-1, 512)[tile_places(end, row_tiles, cols // 4)]
    padded = mxspec.from_blocked(tiles.flatten(), R, cols)
    return mxspec.unpad_token_groups(padded.mT, offs, start, C).mT.view(stored.dtype)


_TILE = "(r // 128) * 128 * Cp + c // 4 * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4"
_TILES = "Rp = 128*ceil(R/128), Cp = 4*ceil(C/4)"
_CUBLAS_1D = 'cuBLAS, "1D Block Scaling Factors Layout"; PTX ISA, tcgen05.mma block scaling'
_GROUPED = "torch.nn.functional.scaled_grouped_mm with 2-D operands; torchao, mx_block_rearrange_2d_*_groups"

LAYOUTS: dict[str, Layout] = {
    "plain": Layout(
        write=lambda plain, _: plain,
        read=lambda stored, _, __: stored,
        dtypes=(*E8M0, *FP32),
        who='every quantizer here; "K-major"',
        shape="(R, C), row-major",
        offset="C * r + c",
        source="OCP MX v1.0 leaves it open",
        holds_shape=True,
    ),
    "blocked": Layout(
        write=lambda plain, _: mxspec.to_blocked(plain),
        read=lambda stored, shape, _: mxspec.from_blocked(stored, *shape[-2:]),
        dtypes=E8M0,
        who="tcgen05.mma, cuBLAS, cuDNN, torch's scaled_mm (SWIZZLE_32_4_4), TransformerEngine's swizzled scales",
        shape=f"(Rp*Cp,); {_TILES}; (E, Rp*Cp) of experts",
        offset=_TILE,
        padding="0",
        source=_CUBLAS_1D,
        line=16,
        band=32,
    ),
    "blocked_5d": Layout(
        write=lambda plain, _: mxspec.to_blocked(plain).reshape(_tiles_of(tuple(plain.shape))),
        read=lambda stored, shape, _: mxspec.from_blocked(stored.flatten(-5), *shape[-2:]),
        dtypes=E8M0,
        who="Triton kernels around tl.dot_scaled; by TMA as .view(1, Rp/128, Cp/4, 2, 256)",
        shape=f"(Rp/128, Cp/4, 32, 4, 4), contiguous: the bytes of blocked; {_TILES}",
        offset=_TILE,
        padding="0",
        source="Triton, python/tutorials/10-block-scaled-matmul.py",
        line=16,
        band=32,
    ),
    "blocked_m_groups": Layout(
        write=lambda plain, offs: mxspec.to_blocked_m_groups(plain, offs)[0],
        read=_read_m_groups,
        dtypes=E8M0,
        who="grouped matmuls, forward and dgrad: the tokens' scales",
        shape="(R + 128*G, Cp); group g from row start[g], the sum of 128*ceil(m/128); Cp = 4*ceil(C/4)",
        offset="start[g] * Cp + the offset in blocked of row r - offs[g-1] (r for g = 0)",
        padding="0",
        source=_GROUPED,
        loses="the scales after the last group: dropped, and read as 0",
        groups="R",
        line=16,
        band=32,
    ),
    "blocked_k_groups": Layout(
        write=lambda plain, offs: mxspec.to_blocked_k_groups(plain, offs)[0],
        read=_read_k_groups,
        dtypes=E8M0,
        who="grouped matmuls, wgrad: both operands' scales",
        shape="(Rp, C + 4*G); group g from byte start[g] * Rp, start the sum of 4*ceil(c/4); Rp = 128*ceil(R/128)",
        offset="start[g] * Rp + the offset in blocked of column c - offs[g-1] (c for g = 0), within the group",
        padding="0",
        source=_GROUPED,
        loses="the scales after the last group: dropped, and read as 0",
        groups="C",
        line=16,
        band=32,
    ),
    "te_rowwise": Layout(
        write=lambda plain, _: _padded(plain, 128, 4),
        read=lambda stored, shape, _: _cut(stored, shape),
        dtypes=E8M0,
        who="TransformerEngine's MXFP8Tensor, rowwise_scale_inv, before its swizzle",
        shape=f"(Rp, Cp), row-major; {_TILES}",
        offset="Cp * r + c",
        padding="0; unspecified in TransformerEngine",
        source="TransformerEngine, pytorch/tensor/mxfp8_tensor.py, make_empty",
    ),
    "te_columnwise": Layout(
        write=lambda plain, _: _padded(plain.mT, 4, 128),
        read=lambda stored, shape, _: _cut(stored.mT, shape),
        dtypes=E8M0,
        who="TransformerEngine's MXFP8Tensor, columnwise_scale_inv; here the scales of axis=-2, of the transpose",
        shape=f"(Cp, Rp), row-major; {_TILES}",
        offset="Rp * c + r",
        padding="0; unspecified in TransformerEngine",
        source="TransformerEngine, pytorch/tensor/mxfp8_tensor.py, make_empty",
    ),
    "mn_major": Layout(
        write=lambda plain, _: _mn_major(plain, 1),
        read=lambda stored, _, __: stored,
        dtypes=FP32,
        who='cuBLAS, scales of 1x128 blocks, for R in multiples of 4; scale_major="mn" of the quantizers',
        shape="(R, C), strides (1, R)",
        offset="R * c + r",
        source='cuBLAS, "1D and 128x128 2D Block Scaling for FP8 Data Types"',
        holds_shape=True,
    ),
    "mn_major_tma_aligned": Layout(
        write=lambda plain, _: _mn_major(plain, 16 // plain.element_size()),  # TMA: strides are multiples of 16 bytes
        read=lambda stored, _, __: stored,
        dtypes=FP32,
        who="DeepGEMM on Hopper, scales of 1x128 blocks; equal to mn_major if R is a multiple of 4",
        shape="(R, C), strides (1, Rp); Rp = 4*ceil(R/4)",
        offset="Rp * c + r",
        padding="0; unspecified in DeepGEMM",
        source="DeepGEMM csrc/jit_kernels/impls/smxx_layout.hpp, get_mn_major_tma_aligned_tensor",
        holds_shape=True,
    ),
    "deepgemm_packed": Layout(
        write=lambda plain, _: _packed(plain),
        read=lambda stored, shape, _: _unpacked(stored, shape),
        dtypes=E8M0,
        who="DeepGEMM on Blackwell; four UE8M0 bytes in an int32",
        shape="(R, Cp/4) int32, strides (1, Rp); Rp = 4*ceil(R/4), Cp = 4*ceil(C/4)",
        offset="c // 4 * 4 * Rp + 4 * r + c % 4",
        padding="0",
        source="DeepGEMM csrc/jit_kernels/impls/smxx_layout.hpp, get_mn_major_tma_aligned_packed_ue8m0_tensor",
    ),
    "cublas_128x128": Layout(
        write=lambda plain, _: _padded(plain, 1, 4),
        read=lambda stored, shape, _: _cut(stored, shape),
        dtypes=FP32,
        who="cuBLAS, scales of 128x128 blocks; torch's scaled_mm takes its .t()",
        shape="(R, Cp), row-major; Cp = 4*ceil(C/4)",
        offset="Cp * r + c",
        padding="0",
        source='cuBLAS, "1D and 128x128 2D Block Scaling for FP8 Data Types"',
    ),
}


def layout_named(op: str, argument: str, name: str) -> Layout:
    checks.choice(op, argument, name, list(LAYOUTS))
    return LAYOUTS[name]


def explain(layout: str | None = None) -> str:
    """The text of one layout, or of all layouts: who reads it, its shape, the place of a scale, its dtypes, padding."""
    lines = []
    for name in LAYOUTS if layout is None else [layout]:
        entry = layout_named("layouts.explain", "layout", name)
        holds = ", ".join(str(dtype).removeprefix("torch.") for dtype in entry.dtypes)
        if torch.float32 not in entry.dtypes:
            holds += "; of float32 powers of two and NaN"
        said = {"holds": holds} | {key: getattr(entry, key) for key in ("padding", "loses", "source")}
        lines += [name, f"  who     {entry.who}", f"  shape   {entry.shape}", f"  offset  {entry.offset}"]
        lines += [f"  {key:<8}{text}" for key, text in said.items()]
    return "\n".join(lines)
