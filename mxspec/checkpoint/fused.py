"""Weights that engines fuse into one matmul, such as q, k and v: in NVFP4 they must have the same tensor scale."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from mxspec.checkpoint import nvfp4
from mxspec.checkpoint.reading import Checkpoint, CheckpointError
from mxspec.checkpoint.schemes import strips
from mxspec.checkpoint.units import Unit, blocks, numbers, plain_strips

# The last parts of the names of weights that are fused, if the rest of their names is equal.
# Source: vLLM, `packed_modules_mapping` of its models; nvidia-modelopt 0.47.0, export/layer_utils.py (`_GATE_UP_PAIRS`)
FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)
_LAYER_OF = {leaf: leaves for leaves in FUSED for leaf in leaves}


def layer_of(module: str) -> tuple[str, ...]:
    """The names of all weights of the fused layer of a weight; the name alone if the weight is not fused."""
    head, dot, leaf = module.rpartition(".")
    return tuple(f"{head}{dot}{other}" for other in _LAYER_OF.get(leaf, (leaf,)))


def differing(scales: Mapping[str, float]) -> list[tuple[str, ...]]:
    """The fused layers whose weights have several tensor scales.

    Args:
        scales: the tensor scale of each weight, by the name of its module.
    """
    layers = dict.fromkeys(layer_of(module) for module in scales)
    present = [tuple(module for module in layer if module in scales) for layer in layers]
    return [layer for layer in present if len({scales[module] for module in layer}) > 1]


class Shared:
    """What the weights of a fused layer share, computed once for each layer. Threads may ask at the same time.

    Only the weights that were given to `add` count. All of them are added before the first question.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._units: dict[str, Unit] = {}
        self._kept: dict[Any, Any] = {}
        self._locks: dict[Any, Lock] = defaultdict(Lock)
        self._lock = Lock()

    def add(self, unit: Unit) -> None:
        """Note a weight that becomes NVFP4."""
        self._units[unit.module] = unit

    def layer(self, unit: Unit) -> list[Unit]:
        """The weights of the layer of a weight."""
        return [self._units[module] for module in layer_of(unit.module) if module in self._units]

    def amax(self, unit: Unit) -> Tensor:
        """The largest magnitude of the layer, in the dtype of its weights; fp32 for quantized weights.

        Raises:
            CheckpointError: a weight has a NaN or an Inf, or the weights of the layer have several dtypes.
        """
        found = [self._once(self._amax, one) for one in self.layer(unit)]
        if len({amax.dtype for amax in found}) > 1:
            said = ", ".join(f"{one.codes} is {amax.dtype}" for one, amax in zip(self.layer(unit), found, strict=True))
            raise CheckpointError(f"{said}: engines fuse these weights, and NVFP4 needs one tensor scale and one dtype")
        return torch.stack(found).amax()

    def exponent(self, unit: Unit) -> int | None:
        """The exponent of a tensor scale with which all MXFP4 weights of the layer keep their values, or None."""
        if any(one.scheme != "mxfp4" for one in self.layer(unit)):
            return None
        found = [self._once(self._exponents, one) for one in self.layer(unit)]
        least, greatest, usual = (reduce(n[i] for n in found) for i, reduce in enumerate((max, min, max)))
        t = nvfp4.chosen((least, greatest, usual))
        return t if least <= t <= greatest else None

    def _once(self, compute: Callable[[Unit], Any], unit: Unit) -> Any:
        key = compute.__name__, unit.module
        with self._lock:
            lock = self._locks[key]
        with lock:
            if key not in self._kept:
                self._kept[key] = compute(unit)
            return self._kept[key]

    def _exponents(self, unit: Unit) -> tuple[int, int, int]:
        held = blocks(self._checkpoint, unit)
        return nvfp4.exponents(held.codes, held.scale)

    def _amax(self, unit: Unit) -> Tensor:
        found = [x.abs().amax() for x in self._values(unit) if x.numel()]
        amax = torch.stack(found).amax() if found else torch.zeros(())
        if not amax.isfinite():
            shard = self._checkpoint.tensors[unit.codes].shard
            raise CheckpointError(f"{unit.codes} in {shard}: {self._not_finite(unit)}; needs finite numbers")
        return amax

    def _not_finite(self, unit: Unit) -> str:
        """The number of values that are NaN or Inf, and the place of the first."""
        count, row, first = 0, 0, (0, 0)
        for x in self._values(unit):
            wrong = ~x.isfinite()
            if bool(wrong.any()) and not count:
                at = wrong.nonzero()[0].tolist()
                first = row + at[0], at[1]
            count += int(wrong.sum())
            row += x.shape[0]
        are = "value is" if count == 1 else "values are"
        return f"{count} {are} NaN or Inf, the first is {first}"

    def _values(self, unit: Unit) -> Iterable[Tensor]:
        if unit.scheme is None:
            return (x for _, x in plain_strips(self._checkpoint, unit))
        held = numbers(self._checkpoint, unit)
        return (held.values(torch.float32, rows) for rows in strips(unit.shape[-2]))
