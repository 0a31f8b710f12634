"""Counters of what quantization loses. They are tensors on the device of the data, so that the host never waits.

A counter quantizes its tensor a second time, with the op that defines the layer's codes, and with plain scales. The
blocks of an operand lie along the dimension that its matmul sums over, here always the last dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

import mxspec
from mxspec.formats import FP8_BLOCK_SIZE, MX_BLOCK_SIZE, element

if TYPE_CHECKING:
    from mxspec.nn._format import Format

SAMPLED_ROWS = 64
PIECE = 2**24  # elements that are counted at once, which bounds the memory
# A scale of fp8_128 is rounded twice, so the largest representable value of a block may be a little below its amax.
_ROUNDING = {"mxfp8": 1.0, "fp8_128": 1 + 2.0**-22}

COUNTS = ("elements", "saturated", "underflowed", "blocks", "nonfinite_blocks", "nonzero_blocks")


class Quantized(NamedTuple):
    """An operand in the order of its blocks: values and codes `(..., R, L)`, and the scale of each block."""

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


def count_tokens(by: Format, x: Tensor, offs: Tensor | None, elem_dtype: torch.dtype, along_tokens: bool) -> Counters:
    """Count activations or gradients `(M, K)` in one direction. Rows without a group, and padding, do not count."""
    (M, K), width = x.shape, _width(by)
    elements: Any = M * K
    blocks: Any = -(-M // width) * K if along_tokens else M * -(-K // width)
    if offs is not None:
        tokens = torch.diff(offs, prepend=offs.new_zeros(1)).long()  # of each group
        elements = tokens.sum() * K
        blocks = ((tokens + width - 1) // width).sum() * K if along_tokens else tokens.sum() * -(-K // width)
    if offs is not None and along_tokens:
        x, *_ = mxspec.pad_token_groups(x, offs, width, backend=by.backend)
    elif offs is not None:
        x = x.masked_fill((torch.arange(M, device=x.device) >= offs[-1:])[:, None], 0)
    elif along_tokens:
        x = pad(x, (0, 0, 0, -M % width))
    return _count(by, _quantized(by, x, elem_dtype, -2 if along_tokens else -1), elements, blocks)


def count_weight(by: Format, w: Tensor, axis: int) -> Counters:
    """Count a weight `(N, K)` or `(E, N, K)`. The 128x128 blocks of fp8_128 are the same along both axes."""
    if by.recipe.format == "mxfp8":
        quantized = _quantized(by, w, torch.float8_e4m3fn, axis)
    else:
        codes, scale = mxspec.fp8_quantize_128x128(w, scale_format=by.recipe.scale_format, backend=by.backend)
        quantized = Quantized(w, codes, scale, FP8_BLOCK_SIZE, FP8_BLOCK_SIZE)
    return _count(by, quantized, w.numel(), quantized.scale.numel())


def _width(by: Format) -> int:
    return MX_BLOCK_SIZE if by.recipe.format == "mxfp8" else FP8_BLOCK_SIZE


def _quantized(by: Format, x: Tensor, elem_dtype: torch.dtype, axis: int) -> Quantized:
    if by.recipe.format == "mxfp8":
        options: Any = {"elem_dtype": elem_dtype, "scaling": by.recipe.scaling, "backend": by.backend}
        codes, scale = mxspec.mx_quantize(x, axis=axis, **options)
    else:
        options = {"scale_format": by.recipe.scale_format, "backend": by.backend}
        codes, scale = mxspec.fp8_quantize_1x128(x, axis=axis, **options)
    return Quantized(*((x, codes) if axis == -1 else (x.mT, codes.mT)), scale, 1, _width(by))


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
    fmt, scale = element(piece.codes.dtype), piece.scale.float()
    values = _in_blocks(piece.values, piece)  # (..., row blocks, height, column blocks, width)
    magnitudes = _in_blocks(piece.codes.view(torch.uint8), piece) & 0x7F
    nonzero, is_nan = values != 0, scale.isnan()
    used = nonzero.any(-1).any(-2) & ~is_nan
    # In a block with a NaN or an Inf, the scale and all codes are NaN. So no element of it saturates or underflows.
    largest = (scale * (fmt.max * rounding)).unsqueeze(-2).unsqueeze(-1)
    saturated = (magnitudes == fmt.largest_code) & (values.abs() > largest)
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
    dequantize: Any = mxspec.mx_dequantize if scale.dtype == torch.float8_e8m0fnu else mxspec.fp8_dequantize
    signal, read = values.double(), dequantize(codes, scale, out_dtype=torch.float32).double()
    is_nan = scale.float().isnan().repeat_interleave(width, -1)[..., : values.shape[-1]]
    powers = signal.square(), (read - signal).square()
    sums.power += torch.stack([power.masked_fill(is_nan, 0).sum() for power in powers])
