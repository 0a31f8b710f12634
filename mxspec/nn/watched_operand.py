"""`WatchedOperand`: what quantization lost in one operand of a layer."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mxspec.nn._counters import COUNTS
from mxspec.nn._watch_log import Key, Sums


@dataclass(frozen=True)
class WatchedOperand:
    """What quantization lost in one operand of a layer, over all its calls in a `watch` block.

    Args:
        layer: the dotted name of the layer in the model.
        weight: the name of the weight of the operand's matmul. An activation is the input of this matmul, and a
            gradient is the gradient of its output.
        tensor: `activation`, `weight` or `gradient`.
        matmul: the matmuls that read the codes: `forward`, `dgrad` (the gradient of the input), `wgrad` (the gradient
            of the weight), or `forward, dgrad` if the same codes serve both. The blocks lie along the dimension that
            the matmul sums over.
        calls: how often the operand was quantized.
        elements: the number of elements, without padding, and without rows that belong to no token group. With the
            transform of nvfp4, wgrad reads 16 transformed tokens in each block. All of them count, also where padding
            filled the block before the transform.
        saturated: elements whose code has the largest magnitude of the format, and whose own magnitude is larger than
            the largest representable value of their block, `max * scale`. For fp8_128 and nvfp4 it must be larger by
            a factor of more than `1 + 2^-22`, because the scale itself is rounded.
        underflowed: elements that are not zero and whose code is zero.
        blocks: the number of blocks that hold at least one element besides padding.
        zero_blocks: blocks whose elements are all zero.
        nonfinite_blocks: blocks with a NaN or an Inf. All codes of such a block are NaN. For nvfp4, these are all
            blocks of a matrix or of a token group with a NaN or an Inf, because they share a tensor scale.
        scale_min, scale_max: the smallest and the largest scale of the blocks that are neither zero nor nonfinite; NaN
            if there is no such block. An element is read back as `code * scale`. For nvfp4, this scale is the product
            of the block's scale and the tensor scale. It is 0 if the block's scale rounds to 0.
        sqnr_db: `10 log10(sum x^2 / sum (q - x)^2)` in float64, with q the element that is read back. The sums go over
            the sampled rows of all calls, without nonfinite blocks. `inf` if no sampled element changed; NaN if all
            sampled elements are zero. The sample is every s-th row of the operand as its matmul reads it, from row 0
            on, with `s = ceil(rows / 64)`. For wgrad, a row of the operand is a feature. For experts, `rows` counts
            the rows of all experts, and every expert has at least its first row in the sample.
    """

    layer: str
    weight: str
    tensor: str
    matmul: str
    calls: int
    elements: int
    saturated: int
    underflowed: int
    blocks: int
    zero_blocks: int
    nonfinite_blocks: int
    scale_min: float
    scale_max: float
    sqnr_db: float

    @property
    def name(self) -> str:
        """The dotted name of the layer, and the name of the weight if the layer may have several."""
        return ".".join(filter(None, [self.layer, "" if self.layer and self.weight == "weight" else self.weight]))

    @property
    def loss(self) -> float:
        """The number by which `worst` sorts: `inf` with a nonfinite block, else the larger of two shares.

        One share is the noise's power divided by the signal's power, `10^(-sqnr_db / 10)`. The other share is the
        number of underflowed elements divided by the number of all elements.
        """
        if self.nonfinite_blocks:
            return math.inf
        noise = 0.0 if math.isnan(self.sqnr_db) else 10 ** (-self.sqnr_db / 10)
        return max(noise, self.underflowed / max(self.elements, 1))


def operand_of(key: Key, sums: Sums) -> WatchedOperand:
    """The counts of an operand on all its devices. Waits for the devices."""
    of = list(sums.on.values())
    numbers = [sum(counts) for counts in zip(*(counters.counts.tolist() for counters in of), strict=True)]
    found = dict(zip(COUNTS, numbers, strict=True))
    found["zero_blocks"] = found["blocks"] - found["nonfinite_blocks"] - found["nonzero_blocks"]
    low, high = min(float(c.scale_min) for c in of), max(float(c.scale_max) for c in of)
    signal, noise = (sum(powers) for powers in zip(*(counters.power.tolist() for counters in of), strict=True))
    if not found.pop("nonzero_blocks"):
        low = high = math.nan
    return WatchedOperand(*key, sums.calls, **found, scale_min=low, scale_max=high, sqnr_db=_decibels(signal, noise))


def _decibels(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf if signal else math.nan
    return 10 * math.log10(signal / noise) if signal and math.isfinite(noise) else -math.inf
