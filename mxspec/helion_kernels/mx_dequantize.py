"""mx_dequantize in Helion: contiguous tensors, any strides and layout along axis -1, and axis -2.

Along axis -2, the kernel transposes the codes.
"""

from __future__ import annotations

import helion.language as hl
import torch
from torch import Tensor

from mxspec.formats import ELEMENTS, MX_BLOCK_SIZE, element
from mxspec.helion_kernels.common.blocked import blocked_shape, blocked_to_row_col
from mxspec.helion_kernels.common.launch import config, extent, launch
from mxspec.helion_kernels.common.numerics import code_values, fp6_values, scale_value

RANK = {(9, 0): 2, (10, 0): 2}  # Rates on an H200: benchmarks/results/decisions.md
# Block sizes count scales, except for `turned`. Only these configurations were measured. Blackwell: compiled, not run.
_FLAT, _STRIDED = config([64], 4), config([1, 1, 64], 4)
# A grid of three dimensions needs no divisions to find a program's place, but two of its dimensions hold at most 65535.
_BLOCKED, _TALL = config([1, 1, 256], 8, pid_type="xyz"), config([1, 1, 256], 8)
_TURNED = config([1, 64, 4], 8)
CONFIGS = {
    "flat": {(9, 0): _FLAT, (10, 0): _FLAT},  # codes and plain scales contiguous
    "strided": {(9, 0): _STRIDED, (10, 0): _STRIDED},  # block sizes along (E, R, C)
    "blocked": {(9, 0): _BLOCKED, (10, 0): _BLOCKED},  # along (E, row tiles, bytes of a row of tiles)
    "tall": {(9, 0): _TALL, (10, 0): _TALL},  # blocked, more than 65535 row tiles or experts
    "turned": {(9, 0): _TURNED, (10, 0): _TURNED},  # axis -2: along (E, rows, blocks) of the transpose
}
# The multiplication has no .ftz, which would lose the subnormals. e2m1 is read in shorter words, and FP6 in bytes.
PTX = (
    r"ld\.global\.(v[24]\.)?b32|ld\.global\.b(8|16)",
    r"st\.global\.v4\.b32",
    r"cvt\.rn\.f16x2\.e[45]m[32]x2|cvt\.f32\.f16|cvt\.rn\.f32\.s",
    r"mul\.(rn\.)?f32",
)


def _codes(qdata: Tensor, place: Tensor, stride: int, fp6: str, mask: Tensor | None = None) -> Tensor:
    """The values of the codes at these places, in fp32. Three bytes of FP6, a stride apart, give four values."""
    if not fp6:
        return code_values(hl.load(qdata, [place], extra_mask=mask))
    low, middle, high = (hl.load(qdata, [place + i * stride], extra_mask=mask).to(torch.int32) for i in range(3))
    return fp6_values(low | (middle << 8) | (high << 16), ELEMENTS[fp6])


def _units(dtype: torch.dtype, fp6: str) -> tuple[int, int]:
    """The places of a block that `_codes` takes, and their distance."""
    return (8, 3) if fp6 else (16, 1) if dtype == torch.uint8 else (32, 1)


def _flat(qdata: Tensor, scale: Tensor, out: Tensor) -> None:
    for blocks in hl.tile(scale.size(0)):
        value = code_values(qdata[blocks, :]) * scale_value(scale[blocks]).unsqueeze(-1)
        out[blocks, :] = value.to(out.dtype)


def _row_and_block(row: Tensor, byte: Tensor, blocked: bool) -> tuple[Tensor, Tensor]:
    return blocked_to_row_col(row, byte) if blocked else (row, byte)


def _strided(
    qdata: Tensor, stride_e: int, stride_r: int, stride_c: int, stride_k: int, R: int, C: int,
    scale: Tensor, out: Tensor, blocked: hl.constexpr, fp6: hl.constexpr,
) -> None:  # fmt: skip
    # The loop runs over the scale bytes. qdata and out are flat, for two reasons: ref mode masks an access by one index
    # tensor only, and Helion drops the index and the mask along a dimension of size 1.
    for e, row, byte in hl.tile(scale.shape):
        matrix = e.index[:, None, None, None]
        r, c = _row_and_block(row.index[None, :, None, None], byte.index[None, None, :, None], blocked)
        units, apart = _units(qdata.dtype, fp6)
        held = hl.arange(units)[None, None, None, :] * apart
        source = matrix * stride_e + r * stride_r + c * stride_c + held * stride_k
        valid = (matrix < scale.size(0)) & (r < R) & (c < C)
        q = _codes(qdata, source, stride_k, fp6, valid.expand(source.size()))
        value = q * scale_value(scale[e, row, byte]).unsqueeze(-1)
        target = ((matrix * R + r) * C + c) * 32 + hl.arange(32)[None, None, None, :]
        hl.store(out, [target], value.to(out.dtype), extra_mask=valid.expand(target.size()))


def _turned(
    qdata: Tensor, stride_e: int, stride_r: int, stride_k: int, R: int, C: int, E: int,
    scale: Tensor, scale_stride_e: int, scale_stride_r: int, scale_stride_c: int, col_tiles: int,
    out: Tensor, blocked: hl.constexpr, fp6: hl.constexpr,
) -> None:  # fmt: skip
    # Rows and blocks are those of the transpose. Helion masks each access by the tiles that its index came from.
    for e, row, block in hl.tile([E, R, C]):
        matrix, r, c = e.index[:, None, None, None], row.index[None, :, None, None], block.index[None, None, :, None]
        k = c * 32 + hl.arange(32)[None, None, None, :]
        units, apart = _units(qdata.dtype, fp6)
        held = (c * units + hl.arange(units)[None, None, None, :]) * apart
        q = _codes(qdata, matrix * stride_e + r * stride_r + held * stride_k, stride_k, fp6)
        if blocked:
            byte = (r >> 7) * 512 * col_tiles + (c >> 2) * 512 + (r & 31) * 16 + ((r >> 5) & 3) * 4 + (c & 3)
            place = matrix * scale_stride_e + byte * scale_stride_c
        else:
            place = matrix * scale_stride_e + r * scale_stride_r + c * scale_stride_c
        value = (q * scale_value(hl.load(scale, [place]))).to(out.dtype)
        target = (matrix * C * 32 + k) * R + r
        hl.store(out, [target.permute(0, 2, 3, 1)], value.permute(0, 2, 3, 1))


def mx_dequantize(
    qdata: Tensor,
    scale: Tensor,
    *,
    axis: int = -1,
    out_dtype: torch.dtype = torch.bfloat16,
    scale_layout: str = "plain",
    elem_dtype: torch.dtype | str | None = None,
) -> Tensor:
    return dequantized(qdata, scale, axis, out_dtype, scale_layout, elem_dtype)


def dequantized(
    qdata: Tensor, scale: Tensor, axis: int, out_dtype: torch.dtype, scale_layout: str,
    elem_dtype: torch.dtype | str | None, role: str = "",
) -> Tensor:  # fmt: skip
    """`mx_dequantize` for an op that calls it twice, each time with a role: see `launch`."""
    fmt = element(qdata.dtype if elem_dtype is None else elem_dtype)
    fp6 = fmt.name if fmt.dtype is None else ""
    sizes = [fmt.held(n) if d - qdata.ndim == axis else n for d, n in enumerate(qdata.shape)]
    out = torch.empty(sizes, dtype=out_dtype, device=qdata.device)
    if not out.numel():
        return out
    blocked = scale_layout == "blocked"
    q, bytes_ = qdata.view(fmt.storage_dtype), scale.view(torch.uint8)
    if axis == -2:
        q = q.mT
    held = fmt.stored(MX_BLOCK_SIZE)  # the elements of q in a block
    *lead, R, width = q.shape
    C = width // held
    E, stride_e, scale_stride_e = (lead[0], q.stride(0), scale.stride(0)) if lead else (1, 0, 0)
    stride_r, stride_k = q.stride()[-2:]
    row_tiles, col_tiles = blocked_shape(R, C)
    flat = q.as_strided((extent(q),), (1,))
    if axis == -2:
        scales = bytes_.as_strided((extent(scale),), (1,))
        scale_strides = scale_stride_e, 0 if blocked else scale.stride(-2), scale.stride(-1)
        codes = (flat, stride_e, stride_r, stride_k, R, C, E)
        scales_of = scales, *scale_strides, col_tiles
        launch(_turned, CONFIGS["turned"], *codes, *scales_of, out.view(-1), blocked, fp6, role=role)
    elif not blocked and not fp6 and E * R * C > 1 and q.is_contiguous() and scale.is_contiguous():
        # Not for a single block: Helion does not mask along a dimension of 1. Not for FP6: a block has 24 bytes, and
        # the size of a tile is a power of two.
        values = out.view(-1, MX_BLOCK_SIZE)
        launch(_flat, CONFIGS["flat"], q.view(-1, held), bytes_.view(-1), values, role=role)
    else:
        shape = (E, row_tiles, 512 * col_tiles) if blocked else (E, R, C)
        inner = (512 * col_tiles * scale.stride(-1), scale.stride(-1)) if blocked else scale.stride()[-2:]
        scales = bytes_.as_strided(shape, (scale_stride_e, *inner))
        layout = "strided" if not blocked else "blocked" if max(E, row_tiles) < 65536 else "tall"
        strides = (stride_e, stride_r, held * stride_k, stride_k)
        launch(_strided, CONFIGS[layout], flat, *strides, R, C, scales, out.view(-1), blocked, fp6, role=role)
    return out
