"""Weights whose names differ only in numbers, as the layers and experts of a model do, are counted together."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

from mxspec.checkpoint.families import Family, QuantizedWeight
from mxspec.checkpoint.loaders import Facts
from mxspec.checkpoint.reading import Checkpoint
from mxspec.checkpoint.statistics import Codes, Scales, merged


@dataclass
class Group:
    """Quantized weights of one family, shape and kind of scales.

    Attributes:
        pattern: the name of the codes, with `*` for numbers.
        first: the name of the first weight's codes.
        weights: the number of weights.
        family: how they are stored.
        shape, grid: the shape of a weight in elements, and the shape of its scales.
        stored, scale_stored: the safetensors dtypes of the codes and of the scales.
        other_shard: the number of weights whose scales lie in another file than their codes.
        scales, codes: the counts over all of them; codes is None for a dtype of FP6.
    """

    pattern: str
    first: str
    weights: int
    family: Family
    shape: tuple[int, ...]
    grid: tuple[int, ...]
    stored: str
    scale_stored: str
    other_shard: int
    scales: Scales
    codes: Codes | None

    def facts(self, config: Mapping[str, Any]) -> Facts:
        """The facts that the test of a trap gets."""
        return Facts(self.family, self.first, self.shape, self.grid, self.scale_stored, self.scales, config)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        named = ("pattern", "first", "weights", "stored", "scale_stored", "other_shard")
        counts = asdict(self.scales)
        if not isfinite(counts["least"]):
            counts["least"] = None  # no scale is positive
        return {
            **{name: getattr(self, name) for name in named},
            "family": self.family.name,
            "element": self.family.element,
            "block": list(self.family.block),
            "direction": self.family.direction,
            "shape": list(self.shape),
            "grid": list(self.grid),
            "scales": counts,
            "codes": self.codes.to_json() if self.codes else None,
        }


def add(
    groups: dict[tuple[Any, ...], Group],
    checkpoint: Checkpoint,
    weight: QuantizedWeight,
    scales: Scales,
    codes: Codes | None,
) -> None:
    """Count a weight in its group."""
    own, other = checkpoint.tensors[weight.codes], checkpoint.tensors[weight.scale]
    pattern = re.sub(r"\d+", "*", weight.codes)
    key = (pattern, weight.family, weight.shape, other.stored, scales.powers_of_two)
    apart = int(own.shard != other.shard)
    group = groups.get(key)
    if group is None:
        groups[key] = Group(
            pattern,
            weight.codes,
            1,
            weight.family,
            weight.shape,
            weight.grid,
            own.stored,
            other.stored,
            apart,
            scales,
            codes,
        )
        return
    group.weights += 1
    group.other_shard += apart
    group.scales = merged(group.scales, scales)
    if group.codes and codes:
        group.codes = Codes(codes.element, [a + b for a, b in zip(group.codes.counts, codes.counts, strict=True)])
