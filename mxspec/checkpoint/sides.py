"""The two sides that `verify` compares: the weights of a directory, or of a live module, by module name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mxspec.checkpoint import live
from mxspec.checkpoint.fused import layer_of
from mxspec.checkpoint.live import Part
from mxspec.checkpoint.reading import Checkpoint, CheckpointError
from mxspec.checkpoint.schemes import SCHEMES, Blocks, is_power_of_two, widened_scale
from mxspec.checkpoint.units import Unit, blocks, one_scale, units
from mxspec.nn._cache import QuantizesWeights
from mxspec.nn._weight_only_experts import WeightOnlyExperts
from mxspec.rules import vllm_requant

LOADERS = ("vllm", "sglang", "transformers")


@dataclass(frozen=True)
class Weight:
    """A weight of one side.

    Attributes:
        shape: `(N, K)` of a matrix; for other tensors their own shape.
        dtype: the dtype of a plain tensor; float32 for a quantized tensor, whose values are `fp32(q * scale)`.
        blocks: the codes and scales; None for a plain tensor.
        rows: the values of some rows.
        scheme: the scheme of the codes, a name in `SCHEMES`; None for a plain tensor.
        live: the codes that a layer of mxspec computes with, of a plain weight of a live module.
        multiplied: for NVFP4, the values of some rows as engines compute them, which multiply by the tensor scale.
        divides: whether the tensor scale of NVFP4 is a divisor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: Callable[[], Blocks] | None
    rows: Callable[[slice], Tensor]
    scheme: str | None = None
    live: Callable[[], Blocks] | None = None
    multiplied: Callable[[slice], Tensor] | None = None
    divides: bool = False

    def computed(self, other: Weight) -> Weight | None:
        """This weight as its layer computes with it, if the other one has codes of the same scheme."""
        if self.live is None or self.scheme != other.scheme or other.blocks is None:
            return None
        found = self.live()
        return Weight(self.shape, torch.float32, lambda: found, lambda rows: found.values(torch.float32, rows))


def weights(side: Any, as_loaded: str | None = None) -> dict[str, Weight]:
    """The weights of a directory, or of a module, by name. An expert of a fused weight has a name of its own."""
    if as_loaded not in (None, *LOADERS):
        raise ValueError(f"verify: as_loaded is {as_loaded!r}; needs {', '.join(LOADERS)}")
    if isinstance(side, nn.Module):
        if as_loaded:
            raise ValueError("verify: as_loaded changes a directory; got a module")
        return _of_module(side)
    checkpoint, found = Checkpoint.open(Path(side)), {}
    every = units(checkpoint)
    stored = {one.module: one_scale(checkpoint, one.tensor_scale) for one in every if one.tensor_scale}
    for unit in every:
        largest = None
        if as_loaded in ("vllm", "sglang") and unit.tensor_scale:
            largest = max(stored[module] for module in layer_of(unit.module) if module in stored)
        for matrix in range(unit.matrices if unit.packed else 1):
            name = f"{unit.module}.{matrix}" if unit.packed else unit.module
            if unit.scheme:
                found[name] = _quantized(checkpoint, unit, matrix, as_loaded, largest)
            else:
                found[name] = _unquantized(checkpoint, unit, matrix)
    return found


def _unquantized(checkpoint: Checkpoint, unit: Unit, matrix: int) -> Weight:
    dtype = checkpoint.tensors[unit.codes].dtype
    if unit.packed:
        cache: list[Tensor] = []

        def transposed(rows: slice) -> Tensor:
            if not cache:
                cache.append(checkpoint.read_rows(unit.codes, matrix, matrix + 1)[0].mT)
            return cache[0][rows]

        return Weight(unit.shape[-2:], dtype, None, transposed)

    def rows(rows: slice) -> Tensor:
        return checkpoint.read_rows(unit.codes, rows.start, rows.stop) if unit.shape else checkpoint.read(unit.codes)

    return Weight(unit.shape, dtype, None, rows)


def _quantized(
    checkpoint: Checkpoint, unit: Unit, matrix: int, as_loaded: str | None, tensor_scale: Tensor | None
) -> Weight:
    """A quantized weight; for an engine that loads NVFP4, with the tensor scale of its fused layer."""
    cache: list[Blocks] = []  # holds one weight at a time: `verify` drops each weight after it has compared it

    def read() -> Blocks:
        found = blocks(checkpoint, unit, matrix)
        if tensor_scale is not None:
            found = replace(found, tensor_scale=tensor_scale)
        if as_loaded in ("vllm", "sglang") and found.scheme == "fp8_128x128" and not is_power_of_two(found.scale):
            dtype = torch.float32 if as_loaded == "vllm" else torch.bfloat16
            K = found.shape[1]
            if K % 128:
                raise CheckpointError(f"{unit.codes}: K = {K}; {as_loaded} requantizes multiples of 128")
            found = Blocks(found.scheme, *vllm_requant.requantize(found.codes, widened_scale(found.scale), dtype=dtype))
        return found

    def held() -> Blocks:
        if not cache:
            cache.append(read())
        return cache[0]

    def rows(rows: slice) -> Tensor:
        if as_loaded == "transformers":
            return _as_transformers(unit.codes, held(), rows)
        return held().values(torch.float32, rows)

    def multiplied(rows: slice) -> Tensor:
        return held().values(torch.float32, rows, multiplied=True)

    if as_loaded == "transformers":
        return Weight(unit.shape[-2:], torch.bfloat16, None, rows, unit.scheme)
    engines = multiplied if unit.tensor_scale else None
    return Weight(unit.shape[-2:], torch.float32, read, rows, unit.scheme, None, engines, unit.divides)


def _as_transformers(name: str, found: Blocks, rows: slice) -> Tensor:
    """The values as transformers reads them: it computes the size of a block as the weight's shape // the grid."""
    N, K = found.shape
    R, C = found.scale.shape
    if N % R or K % C:
        raise CheckpointError(f"{name}: transformers raises, because {(N, K)} is no multiple of the scales {(R, C)}")
    if found.scheme == "nvfp4" or SCHEMES[found.scheme].block == (N // R, K // C):
        return found.values(torch.bfloat16, rows)
    wide = widened_scale(found.scale).repeat_interleave(N // R, 0)[rows].repeat_interleave(K // C, 1)
    return (found.codes[rows].float() * wide).bfloat16()


def _of_module(module: nn.Module) -> dict[str, Weight]:
    found = {}
    latest: dict[QuantizesWeights, list[Blocks]] = {}  # the codes of one layer
    if held := [name for name, layer in module.named_modules() if isinstance(layer, WeightOnlyExperts)]:
        raise CheckpointError(
            f"verify: {held[0] or 'the model'} holds its weights in MXFP4 (quantize_weights), and verify compares no "
            "such layer. Store the model, and compare the folders."
        )
    for part in live.parts(module, every_expert=True):
        found[part.name.removesuffix(".weight")] = _of_part(part, latest)
    return found


def _of_part(part: Part, latest: dict[QuantizesWeights, list[Blocks]]) -> Weight:
    x, layer = part.x, part.layer

    def codes() -> Blocks:
        assert layer is not None
        if layer not in latest:
            latest.clear()
            latest[layer] = live.codes_of(layer)
        held = live.blocks_of(part, latest[layer])
        return Blocks(held.scheme, held.codes.cpu(), held.scale.cpu())

    def rows(rows: slice) -> Tensor:
        return (x if x.ndim == 0 else x[rows]).cpu()

    if layer is None or not live.begins_a_block(part):
        return Weight(tuple(x.shape), x.dtype, None, rows)
    if layer.recipe.format not in live.SCHEME_OF:
        raise CheckpointError(
            f"verify: {part.name} has the recipe {layer.recipe.format}, and no file stores what its layer multiplies. "
            "Compare a plain checkpoint of the model."
        )
    return Weight(tuple(x.shape), x.dtype, None, rows, live.SCHEME_OF[layer.recipe.format], codes)
