"""Defects that the values of codes and scales show."""

from __future__ import annotations

from collections.abc import Iterator

from mxspec.checkpoint.families import QuantizedWeight
from mxspec.checkpoint.files import Problem
from mxspec.checkpoint.reading import Checkpoint
from mxspec.checkpoint.statistics import LARGEST, Codes, Scales, zero_scale_over_codes

TOO_LARGE = 1e4  # weights of trained models are far below
TOO_SMALL = 1e-20


def defects(
    checkpoint: Checkpoint, weight: QuantizedWeight, scales: Scales, codes: Codes | None, second: Scales | None
) -> Iterator[Problem]:
    """The defects of one weight.

    Args:
        checkpoint: the checkpoint. The function reads only blocks with a scale of zero again.
        weight: the weight.
        scales, codes, second: the counts of its tensors.
    """
    name = weight.scale
    if scales.nan:
        as_bytes = f", {scales.bytes_ff} of them the byte 0xFF" if scales.bytes_ff else ""
        yield Problem("NaN scale", name, f"{scales.nan} of {scales.count} scales are NaN{as_bytes}")
    if scales.infinite:
        yield Problem("infinite scale", name, f"{scales.infinite} of {scales.count} scales are infinite")
    if scales.negative:
        yield Problem("negative scale", name, f"{scales.negative} of {scales.count} scales are negative")
    if codes and codes.nan:
        yield Problem("NaN code", weight.codes, f"{codes.nan} of {codes.count} codes are NaN")
    if codes and codes.count and codes.zero == codes.count and scales.largest > 2.0**-100:
        yield Problem("zero codes", weight.codes, f"all {codes.count} codes are zero, and the scales are not")
    nonzero = codes is None or codes.zero < codes.count
    stored = checkpoint.tensors[name].stored
    if nonzero and scales.count and scales.zero == scales.count:
        yield Problem("zero scale", name, f"all {scales.count} scales are zero: were they ever written?")
    elif scales.zero and (block := zero_scale_over_codes(checkpoint, weight)):
        yield Problem("zero scale", name, f"the scale of block {block} is zero, and its codes are not")
    if stored in ("U8", "F8_E8M0") and nonzero and scales.largest == 2.0**-127:
        yield Problem("zero scale", name, f"all {scales.count} bytes are zero, or 2^-127: were they ever written?")
    elif scales.largest:
        yield from _magnitude(weight, scales, second, stored)


def _magnitude(weight: QuantizedWeight, scales: Scales, second: Scales | None, stored: str) -> Iterator[Problem]:
    """Whether the values have the size of weights. A divisor that is taken as a multiplier shows here."""
    factor = 1.0
    if second is not None:
        if not second.largest or second.nan or second.infinite or second.zero or second.negative:
            said = "is zero, negative, infinite or NaN; needs a positive number"
            yield Problem("scale of the tensor", str(weight.second), said)
            return
        factor = 1 / second.largest if weight.family.direction == "divisor" else second.largest
    least, largest = (LARGEST[weight.family.element] * s * factor for s in (scales.least, scales.largest))
    if stored in ("F32", "BF16", "F16") and scales.whole_numbers and scales.count > 1 and scales.largest > 64:
        yield Problem(
            "byte cast to a number", weight.scale, "all scales are whole numbers up to 255: E8M0 bytes as numbers"
        )
    elif second is not None and largest > TOO_LARGE:
        said = f"values reach {largest:.3g}: is {weight.second} inverted? It is a {weight.family.direction} here"
        yield Problem("direction", weight.codes, said)
    elif least > TOO_LARGE:
        said = f"every block reaches {least:.3g} or more: the scales may be divisors, or of another format"
        yield Problem("direction", weight.codes, said)
    elif largest < TOO_SMALL:
        said = f"no value is above {largest:.3g}: the scales may be wrong"
        yield Problem("direction", weight.codes, said)
