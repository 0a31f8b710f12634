"""Count the codes and scales of a weight, piece by piece: a whole tensor of codes is never in memory."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from math import inf
from typing import Any

import torch
from torch import Tensor

from mxspec.checkpoint.families import QuantizedWeight
from mxspec.checkpoint.headers import BITS
from mxspec.checkpoint.reading import NAMES, Checkpoint
from mxspec.formats import E2M3, E8M0FNU
from mxspec.reference.common.numerics import unpacked

PIECE = 3 << 19  # bytes that are read at a time, a multiple of the three bytes that hold four codes of FP6
LARGEST = {"e4m3": 448.0, "e2m3": 7.5, "e2m1": 6.0}
SATURATED = {"e4m3": (0x7E, 0xFE), "e2m3": (0x1F, 0x3F), "e2m1": (0x7, 0xF)}
NAN_CODES = {"e4m3": (0x7F, 0xFF), "e2m3": (), "e2m1": ()}


@dataclass
class Scales:
    """The scales of one weight, or of several.

    Attributes:
        count: the number of scales.
        least, largest: the smallest and the largest of the positive finite scales.
        nan, infinite, negative, zero: the number of scales that are NaN, infinite, negative or zero.
        bytes_ff: the number of E8M0 bytes 0xFF, which are NaN.
        powers_of_two: whether every positive finite scale is a power of two.
        exact_in_bf16: whether bfloat16 holds every finite scale.
        whole_numbers: whether every scale is a whole number from 1 to 255. Bytes that were cast to numbers are so.
    """

    count: int = 0
    least: float = inf
    largest: float = 0.0
    nan: int = 0
    infinite: int = 0
    negative: int = 0
    zero: int = 0
    bytes_ff: int = 0
    powers_of_two: bool = True
    exact_in_bf16: bool = True
    whole_numbers: bool = True

    def add(self, scale: Tensor) -> None:
        """Count float32 scales."""
        finite = scale[scale.isfinite()]
        positive = finite[finite > 0]
        self.count += scale.numel()
        self.nan += int(scale.isnan().sum())
        self.infinite += int(scale.isinf().sum())
        self.negative += int((scale < 0).sum())
        self.zero += int((scale == 0).sum())
        if positive.numel():
            self.least = min(self.least, float(positive.min()))
            self.largest = max(self.largest, float(positive.max()))
        # frexp takes subnormal numbers too
        self.powers_of_two &= bool((torch.frexp(positive).mantissa == 0.5).all())
        self.exact_in_bf16 &= bool((finite.bfloat16().float() == finite).all())
        self.whole_numbers &= bool(((scale >= 1) & (scale <= 255) & (scale == scale.round())).all())


@dataclass
class Codes:
    """The codes of one weight, or of several: how often each of them occurs."""

    element: str
    counts: list[int] = field(default_factory=list)

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def saturated(self) -> int:
        """The codes of largest magnitude."""
        return self._sum(SATURATED)

    @property
    def nan(self) -> int:
        return self._sum(NAN_CODES)

    @property
    def zero(self) -> int:
        """The codes of +0 and -0."""
        return self.counts[0] + self.counts[len(self.counts) // 2] if self.counts else 0

    @property
    def numbers(self) -> int:
        """How many codes of the format are not NaN."""
        return len(self.counts) - len(NAN_CODES[self.element])

    @property
    def unused(self) -> int:
        """How many of these codes never occur in the weight."""
        return sum(not n for i, n in enumerate(self.counts) if i not in NAN_CODES[self.element])

    def _sum(self, codes: dict[str, Any]) -> int:
        return sum(self.counts[code] for code in codes[self.element]) if self.counts else 0

    def to_json(self) -> dict[str, Any]:
        names = ("count", "saturated", "nan", "zero", "numbers", "unused")
        return {"element": self.element, **{name: getattr(self, name) for name in names}}


def scales(checkpoint: Checkpoint, name: str) -> Scales:
    """Count the scales of a tensor: numbers, or bytes of E8M0, which are powers of two."""
    entry, found = checkpoint.tensors[name], Scales()
    dtype = NAMES[entry.stored]
    for start in range(0, entry.nbytes, PIECE):
        piece = checkpoint.read_bytes(name, start, start + PIECE)
        if entry.stored in ("U8", "I8", "F8_E8M0"):
            found.bytes_ff += int((piece == E8M0FNU.nan_code).sum())
            dtype = torch.float8_e8m0fnu
        found.add(piece.view(dtype).float())
    return found


def codes(checkpoint: Checkpoint, name: str, element: str) -> Codes | None:
    """Count the codes of a tensor; None for a dtype of FP6: safetensors does not say how it packs the codes."""
    entry = checkpoint.tensors[name]
    if element not in SATURATED or BITS[entry.stored] not in (4, 8):
        return None
    if element == "e2m3":
        counts = torch.zeros(64, dtype=torch.int64)
        for start in range(0, entry.nbytes, PIECE):
            piece = checkpoint.read_bytes(name, start, start + PIECE)
            counts += torch.bincount(unpacked(piece, E2M3), minlength=64)
        return Codes(element, counts.tolist())
    counts = torch.zeros(256, dtype=torch.int64)
    for start in range(0, entry.nbytes, PIECE):
        counts += torch.bincount(checkpoint.read_bytes(name, start, start + PIECE), minlength=256)
    if element == "e2m1":  # two codes in a byte
        pairs = counts.view(16, 16)
        counts = pairs.sum(0) + pairs.sum(1)
    return Codes(element, counts.tolist())


def zero_scale_over_codes(checkpoint: Checkpoint, weight: QuantizedWeight) -> tuple[int, int] | None:
    """The first block with a scale of zero and a code that is not zero, among the first thousand scales of zero."""
    if len(weight.grid) != 2 or weight.family.element != "e4m3":
        return None
    height, width = weight.family.block
    grid = checkpoint.read(weight.scale)
    for row, column in (grid.float() == 0).nonzero()[:1000].tolist():
        N, K = weight.shape
        first, last = row * height, min((row + 1) * height, N)
        rows = checkpoint.read_bytes(weight.codes, first * K, last * K).view(last - first, K)
        if bool((rows[:, column * width : (column + 1) * width] & 0x7F).any()):
            return row, column
    return None


def merged(a: Scales, b: Scales) -> Scales:
    """The counts of a and b together."""
    x, y = asdict(a), asdict(b)
    both = {key: x[key] and y[key] if isinstance(x[key], bool) else x[key] + y[key] for key in x}
    return Scales(**{**both, "least": min(a.least, b.least), "largest": max(a.largest, b.largest)})
