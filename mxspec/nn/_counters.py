"""Counters of what quantization loses. They are tensors on the device of the data, so that the host never waits.

A counter quantizes its tensor a second time, with the op that defines the layer's codes, and with plain scales. The
blocks of an operand lie along the dimension that its matmul sums over, here always the last dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

import mxspec
from mxspec.formats import E2M1, FP8_BLOCK_SIZE, MX_BLOCK_SIZE, NVFP4_BLOCK_SIZE, element

if TYPE_CHECKING:
    from mxspec.nn._format import Format
    from mxspec.nn._nvfp4 import NVFP4Values

SAMPLED_ROWS = 64
PIECE = 2**24  # elements that are counted at once, which bounds the memory
# A scale of fp8_128, and the product of both scales of nvfp4, is rounded twice. So the largest representable value of a
# block may be a little below its amax.
_ROUNDING = {"mxfp8": 1.0, "fp8_128": 1 + 2.0**-22, "nvfp4": 1 + 2.0**-22}
_WIDTH = {"mxfp8": MX_BLOCK_SIZE, "fp8_128": FP8_BLOCK_SIZE, "nvfp4": NVFP4_BLOCK_SIZE}

COUNTS = ("elements", "saturated", "underflowed", "blocks", "nonfinite_blocks", "nonzero_blocks")


class Quantized(NamedTuple):
    """An operand in the order of its blocks: values and codes `(..., R, L)`, and the scale of each block.

    The codes of nvfp4 are given as their values, in bfloat16. Its scale is the block's scale times the tensor scale.
    """

    values: Tensor
    codes: Tensor
    scale: Tensor  # (..., ceil(R / height), ceil(L / width))
    height: int
    width: int


class Counters:
    """The sums over all calls of one operand."""

    def __init__(self, device: torch.device) -> None:
        with torch.inference_mode(False):  # so that calls outside of inference mode can add to them
            self.counts = torch.zeros(len(COUNTS), dtype=torch.int64, device=device)
            self.scale_min = torch.full((), torch.inf, device=device)
            self.scale_max = torch.full((), -torch.inf, device=device)
            self.power = torch.zeros(2, dtype=torch.float64, device=device)  # of the sample: signal, noise

    def add(self, other: Counters) -> None:
        self.counts += other.counts
        self.power += other.power
        torch.minimum(self.scale_min, other.scale_min, out=self.scale_min)
        torch.maximum(self.scale_max, other.scale_max, out=self.scale_max)


def count_tokens(
    by: Format, x: Tensor, offs: Tensor | None, elem_dtype: torch.dtype, along_tokens: bool,
    random: Tensor | None = None,
) -> Counters:  # fmt: skip
    """Count activations or gradients `(M, K)` in one direction. Rows without a group, and padding, do not count.

    Padding counts if a transform mixes it with tokens. random: the seed and the offset of nvfp4's stochastic rounding.
    """
    (M, K), width = x.shape, _WIDTH[by.recipe.format]
    elements: Any = M * K
    blocks: Any = -(-M // width) * K if along_tokens else M * -(-K // width)
    if offs is not None:
        tokens = torch.diff(offs, prepend=offs.new_zeros(1)).long()  # of each group
        elements = tokens.sum() * K
        blocks = ((tokens + width - 1) // width).sum() * K if along_tokens else tokens.sum() * -(-K // width)
    if by.recipe.format == "nvfp4":
        of = cast("NVFP4Values", by)
        if along_tokens and of.signs is not None:
            elements = blocks * width
        return _count(by, _nvfp4_tokens(of, x, offs, random, along_tokens), elements, blocks)
    if offs is not None and along_tokens:
        x, *_ = mxspec.pad_token_groups(x, offs, width, backend=by.backend)
    elif offs is not None:
        x = x.masked_fill((torch.arange(M, device=x.device) >= offs[-1:])[:, None], 0)
    elif along_tokens:
        x = pad(x, (0, 0, 0, -M % width))
    return _count(by, _quantized(by, x, elem_dtype, -2 if along_tokens else -1), elements, blocks)


def count_weight(by: Format, w: Tensor, axis: int) -> Counters:
    """Count a weight `(N, K)` or `(E, N, K)`. The square blocks of fp8_128 and nvfp4 are the same along both axes."""
    if by.recipe.format == "mxfp8":
        quantized = _quantized(by, w, torch.float8_e4m3fn, axis)
    elif by.recipe.format == "nvfp4":
        quantized = _nvfp4_weight(by, w)
    else:
        codes, scale = mxspec.fp8_quantize_128x128(w, scale_format=by.recipe.scale_format, backend=by.backend)
        quantized = Quantized(w, codes, scale, FP8_BLOCK_SIZE, FP8_BLOCK_SIZE)
    return _count(by, quantized, w.numel(), quantized.scale.numel())


def _quantized(by: Format, x: Tensor, elem_dtype: torch.dtype, axis: int) -> Quantized:
    if by.recipe.format == "mxfp8":
        options: Any = {"elem_dtype": elem_dtype, "scaling": by.recipe.scaling, "backend": by.backend}
        codes, scale = mxspec.mx_quantize(x, axis=axis, **options)
    else:
        options = {"scale_format": by.recipe.scale_format, "backend": by.backend}
        codes, scale = mxspec.fp8_quantize_1x128(x, axis=axis, **options)
    return Quantized(*((x, codes) if axis == -1 else (x.mT, codes.mT)), scale, 1, _WIDTH[by.recipe.format])


def _nvfp4_tokens(
    by: NVFP4Values, x: Tensor, offs: Tensor | None, random: Tensor | None, along_tokens: bool
) -> Quantized:
    """The numbers of one direction of `nvfp4_fake_quantize_rowcol_groups`, as codes and scales."""
    size, axis = NVFP4_BLOCK_SIZE, -2 if along_tokens else -1
    groups = torch.full((1,), x.shape[0], dtype=torch.int32, device=x.device) if offs is None else offs
    op = mxspec.nvfp4_fake_quantize_rowcol_groups
    rows, row_scale, columns, column_scale, start, end = op(x, groups, random, signs=by.signs, backend=by.backend)
    padded, *_ = mxspec.pad_token_groups(x, groups, size, backend=by.backend)
    if along_tokens and by.signs is not None:
        padded = mxspec.hadamard_16(padded, axis=-2, signs=by.signs, backend=by.backend)
    # Each 16 rows are a matrix of one group, and have the amax of this group.
    blocks = padded.unflatten(0, (-1, size))  # (R/16, 16, K)
    first_row = torch.arange(len(blocks), dtype=torch.int32, device=x.device) * size
    group = torch.searchsorted(end, first_row, right=True)  # the number of groups for rows after the last group
    largest = blocks.float().abs().view(torch.int32).flatten(1).amax(1)  # in the order of the magnitudes; NaN last
    amax = largest.new_zeros(len(groups) + 1).scatter_reduce(0, group, largest, "amax").view(torch.float32)
    _, scale, _ = mxspec.nvfp4_quantize(blocks, amax[group], axis=axis, backend=by.backend)
    tensor_scale = pad(column_scale if along_tokens else row_scale, (0, 1))
    if along_tokens:
        scale, of_row = scale.float().squeeze(-1).mT, tensor_scale[group]  # (K, R/16), (R/16,)
        return Quantized(padded.mT, _codes_of(columns.mT, scale), scale * of_row, 1, size)
    scale = mxspec.unpad_token_groups(scale.float().flatten(0, 1), groups, start, len(x), backend=by.backend)
    group = torch.searchsorted(groups, torch.arange(len(x), dtype=torch.int32, device=x.device), right=True)
    x = x.masked_fill((group == len(groups))[:, None], 0)
    return Quantized(x, _codes_of(rows, scale), scale * tensor_scale[group][:, None], 1, size)


def _nvfp4_weight(by: Format, w: Tensor) -> Quantized:
    qdata, scale, tensor_scale = mxspec.nvfp4_quantize(w, block="16x16", backend=by.backend)
    values = mxspec.nvfp4_dequantize(qdata, scale, torch.ones_like(tensor_scale), backend=by.backend)
    codes = _codes_of(values, scale.float())
    scale = scale.float()[..., ::NVFP4_BLOCK_SIZE, :] * tensor_scale[..., None, None]
    return Quantized(w, codes, scale, NVFP4_BLOCK_SIZE, NVFP4_BLOCK_SIZE)


def _codes_of(values: Tensor, scale: Tensor) -> Tensor:
    """The values of the codes, from the values `code * scale` along the last dimension. The quotients are exact."""
    blocks = values.float().unflatten(-1, (scale.shape[-1], NVFP4_BLOCK_SIZE))
    codes = torch.where(scale[..., None] == 0, blocks, blocks / scale[..., None])
    return codes.flatten(-2).to(torch.bfloat16)


def _count(by: Format, operand: Quantized, elements: Any, blocks: Any) -> Counters:
    sums = Counters(operand.values.device)
    sums.counts[0] += elements
    sums.counts[3] += blocks
    if operand.values.numel():
        for piece in _pieces(operand):
            _add_blocks(sums, piece, _ROUNDING[by.recipe.format])
        _add_sample(sums, operand)
    return sums


def _pieces(operand: Quantized) -> Iterator[Quantized]:
    values, codes, scale, height, width = operand
    rows = max(1, PIECE // values[0].numel())
    height = height if values.ndim == 2 else 1
    rows = -(-rows // height) * height
    for part in zip(values.split(rows), codes.split(rows), scale.split(rows // height), strict=True):
        yield Quantized(*part, operand.height, width)


def _add_blocks(sums: Counters, piece: Quantized, rounding: float) -> None:
    fmt, scale = E2M1 if piece.codes.dtype == torch.bfloat16 else element(piece.codes.dtype), piece.scale.float()
    values = _in_blocks(piece.values, piece)  # (..., row blocks, height, column blocks, width)
    magnitudes = _in_blocks(piece.codes.to(torch.bfloat16), piece).abs()  # exact
    nonzero, is_nan = values != 0, scale.isnan()
    used = nonzero.any(-1).any(-2) & ~is_nan
    # In a block with a NaN or an Inf, the scale and all codes are NaN. So no element of it saturates or underflows.
    largest = (scale * (fmt.max * rounding)).unsqueeze(-2).unsqueeze(-1)
    saturated = (magnitudes == fmt.max) & (values.abs() > largest)
    underflowed = (magnitudes == 0) & nonzero
    for place, found in ((1, saturated), (2, underflowed), (4, is_nan), (5, used)):
        sums.counts[place] += found.sum()
    torch.minimum(sums.scale_min, scale.masked_fill(~used, torch.inf).amin(), out=sums.scale_min)
    torch.maximum(sums.scale_max, scale.masked_fill(~used, -torch.inf).amax(), out=sums.scale_max)


def _in_blocks(x: Tensor, piece: Quantized) -> Tensor:
    """`(..., R, L)` as `(..., row blocks, height, column blocks, width)`. Zeros fill a block that is shorter."""
    rows, columns = piece.scale.shape[-2:]
    missing = (columns * piece.width - x.shape[-1], rows * piece.height - x.shape[-2])
    if any(missing):
        x = pad(x, (0, missing[0], 0, missing[1]))
    return x.unflatten(-2, (rows, piece.height)).unflatten(-1, (columns, piece.width))


def _add_sample(sums: Counters, operand: Quantized) -> None:
    """Add the powers of the signal and of the noise, over every s-th row of each matrix."""
    values, codes, scale, height, width = operand
    rows = values.shape[:-1].numel()
    step = min(-(-rows // SAMPLED_ROWS), values.shape[-2])
    if height > 1:
        scale = scale.repeat_interleave(height, -2)[..., : values.shape[-2], :]
    values, codes, scale = (t[..., ::step, :] for t in (values, codes, scale))
    signal = values.double()
    if codes.dtype == torch.bfloat16:
        read = (codes.unflatten(-1, (-1, width)).double() * scale[..., None]).flatten(-2)
    else:
        dequantize: Any = mxspec.mx_dequantize if scale.dtype == torch.float8_e8m0fnu else mxspec.fp8_dequantize
        read = dequantize(codes, scale, out_dtype=torch.float32).double()
    is_nan = scale.float().isnan().repeat_interleave(width, -1)[..., : values.shape[-1]]
    powers = signal.square(), (read - signal).square()
    sums.power += torch.stack([power.masked_fill(is_nan, 0).sum() for power in powers])
