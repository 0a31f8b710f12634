"""The tensors of a live model, by the names that files have, and the codes that its layers compute with."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import mxspec
from mxspec.checkpoint.reading import CheckpointError
from mxspec.checkpoint.schemes import SCHEMES, Blocks
from mxspec.formats import MX_BLOCK_SIZE
from mxspec.nn._cache import QuantizesWeights
from mxspec.nn.experts import GroupedExperts

SCHEME_OF = {"fp8_128": "fp8_128x128", "mxfp8": "mxfp8"}  # of a recipe's format
HALVES = {"gate_up_proj": ("gate_proj", "up_proj"), "w_gate_up": ("gate_proj", "up_proj")}
WHOLE = {"up_proj": "up_proj", "down_proj": "down_proj", "w_down": "down_proj"}


@dataclass(frozen=True)
class Part:
    """A tensor of a file, as a live model holds it.

    Attributes:
        name: its name in a file.
        source: the name of the parameter or buffer in the model's state dict.
        x: its values.
        layer: the layer whose forward quantizes it; None if it stays plain.
        weight: which of the layer's weights it belongs to.
        matrix: the expert; None if x is no expert, or all of them.
        rows: the rows of the matrix; None for all.
    """

    name: str
    source: str
    x: Tensor
    layer: QuantizesWeights | None = None
    weight: int = 0
    matrix: int | None = None
    rows: slice | None = None


def parts(model: nn.Module, every_expert: bool = False) -> list[Part]:
    """The tensors of a model, by the names that files have.

    A model of transformers is named as its `save_pretrained` names it. In any other model, a fused weight of experts
    that mxspec runs becomes one tensor for each expert: `gate_proj`, `up_proj` and `down_proj`.

    The order is that of the state dict, so that the tensors of a layer lie together.

    Args:
        model: the model.
        every_expert: take apart every fused weight of experts, also one that files hold fused.

    Raises:
        CheckpointError: the state dict has something else than tensors, or transformers cannot name the files' tensors.
    """
    state = model.state_dict()
    if strange := [name for name, x in state.items() if not isinstance(x, Tensor)]:
        raise CheckpointError(f"{strange[0]}: the state dict holds a {type(state[strange[0]]).__name__}; needs tensors")
    layers, library = owners(model), library_of(model)
    found: list[Part] = []
    for part in _of_library(library, model, state, layers) if library else _plainly(state, layers):
        layer, _ = layers.get(part.source, (None, 0))
        ours = isinstance(layer, GroupedExperts) or (layer is not None and library is None)
        if part.x.ndim == 3 and (ours or (every_expert and ".experts." in part.name)):
            transposed = f"{part.source}_bias" in state or bool(layer is not None and layer.is_transposed)
            found += _experts(part, transposed)
        else:
            found.append(part)
    order = {name: i for i, name in enumerate(state)}
    return sorted(found, key=lambda part: order.get(part.source, len(order)))


def codes_of(layer: QuantizesWeights) -> list[Blocks]:
    """The codes and scales that the layer's forward multiplies: one `Blocks` for each weight, with experts in front.

    Inside a `cache_weights` block these are the codes that it holds. If it holds bf16 values, the codes are made anew.
    """
    with torch.no_grad():
        quantized = layer._quantized(None)
    found = []
    for weight in quantized:
        assert weight is not None
        codes, scale = weight.codes, weight.scale
        assert scale is not None  # never bf16 values: they were not asked for
        N, K = codes.shape[-2:]
        if scale.ndim < codes.ndim:  # the layout of grouped matmuls
            scale = mxspec.from_blocked(scale, N, K // MX_BLOCK_SIZE, backend="reference")
        if layer.recipe.format == "mxfp8":
            scale = scale.view(torch.uint8)
        found.append(Blocks(SCHEME_OF[layer.recipe.format], codes.contiguous(), scale.contiguous()))
    return found


def begins_a_block(part: Part) -> bool:
    """Whether the first row of a quantized tensor is the first row of a block."""
    if part.layer is None or part.rows is None or part.layer.recipe.format not in SCHEME_OF:
        return True
    return bool(part.rows.start % SCHEMES[SCHEME_OF[part.layer.recipe.format]].block[0] == 0)


def blocks_of(part: Part, codes: list[Blocks]) -> Blocks:
    """The codes and scales of a tensor that begins a block, from those that `codes_of` gave for its layer."""
    whole = codes[part.weight]
    q, scale = (
        (whole.codes, whole.scale) if part.matrix is None else (x[part.matrix] for x in (whole.codes, whole.scale))
    )
    if part.rows is None:
        return Blocks(whole.scheme, q, scale)
    start, stop, height = part.rows.start, part.rows.stop, SCHEMES[whole.scheme].block[0]
    return Blocks(whole.scheme, q[start:stop], scale[start // height : -(-stop // height)])


def owners(model: nn.Module) -> dict[str, tuple[QuantizesWeights, int]]:
    """The layers of mxspec, by the names of their weights in the state dict."""
    found = {}
    for path, layer in model.named_modules(remove_duplicate=False):
        if isinstance(layer, QuantizesWeights):
            for i, name in enumerate(layer.weight_names):
                found[f"{path}.{name}" if path else name] = layer, i
    return found


def library_of(model: nn.Module) -> Any:
    """The module of `mxspec.integrations` that knows the names of the model's files; None if there is none."""
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return None
    from mxspec.integrations import _transformers_files as library

    return library


def _part(name: str, source: str, x: Tensor, layers: Mapping[str, tuple[QuantizesWeights, int]], **more: Any) -> Part:
    layer, weight = layers.get(source, (None, 0))
    quantizes = layer is not None and layer.recipe.format != "bf16"
    return Part(name, source, x, layer if quantizes else None, weight, **more)


def _plainly(state: Mapping[str, Tensor], layers: Mapping[str, tuple[QuantizesWeights, int]]) -> Iterator[Part]:
    for name, x in state.items():
        yield _part(name, name, x, layers)


def _of_library(
    library: Any, model: nn.Module, state: Mapping[str, Tensor], layers: Mapping[str, tuple[QuantizesWeights, int]]
) -> Iterator[Part]:
    """The tensors as the library names and cuts them.

    The library cuts tensors of row numbers in place of the weights. So the numbers say which rows a file's tensor has.
    """
    state = library.without_ties(model, state)
    chosen = [name for name, x in state.items() if x.ndim in (2, 3) and (name in layers or _is_fused(name, x))]
    starts, numbers, at = [], {}, 0
    for name in chosen:
        shape = state[name].shape[:-1]
        numbers[name] = torch.arange(at, at + 2 * shape.numel(), dtype=torch.int32).view(*shape, 2)
        starts.append(at)
        at += 2 * shape.numel()
    left = dict(state)
    try:
        cuts = library.named_as_files(model, numbers)
    except Exception as error:  # whatever an operation of transformers raises on tensors of other sizes
        raise CheckpointError(f"transformers does not name the tensors of {type(model).__name__}: {error}") from error
    for name, cut in cuts.items():
        first, size = int(cut.flatten()[0]), cut.numel()
        place = bisect_right(starts, first) - 1
        source, x = chosen[place], state[chosen[place]]
        row, count, N = (first - starts[place]) // 2, size // 2, x.shape[-2]
        in_order = cut.flatten().equal(torch.arange(first, first + size, dtype=torch.int32))
        if in_order and count == x.shape[:-1].numel() and cut.ndim == x.ndim:
            part = _part(name, source, x, layers)
        elif in_order and x.ndim == 2:
            part = _part(name, source, x[row : row + count], layers, rows=slice(row, row + count))
        elif in_order and row // N == (row + count - 1) // N:
            matrix, rows = row // N, slice(row % N, row % N + count)
            part = _part(name, source, x[matrix, rows], layers, matrix=matrix, rows=rows)
        elif _part(name, source, x, layers).layer is None:
            continue  # the library cuts a plain weight itself, below
        else:
            raise CheckpointError(
                f"{source}: transformers changes the order of its rows in files, and its blocks cannot follow. Leave "
                "this layer out of mxspec.nn.convert by filter_fn."
            )
        left.pop(source, None)
        yield part
    for name, x in library.named_as_files(model, left).items():
        yield Part(name, name, x)


def _is_fused(name: str, x: Tensor) -> bool:
    return x.ndim == 3 and ".experts." in name and x.dtype.is_floating_point


def _experts(part: Part, transposed: bool) -> Iterator[Part]:
    """The experts of a fused weight: a transposed one by number, the others by the names of files."""
    head, dot, leaf = part.name.rpartition(".")

    def expert(name: str, i: int, x: Tensor, rows: slice | None = None) -> Part:
        return Part(name, part.source, x, part.layer, part.weight, i, rows)

    if transposed:
        yield from (expert(f"{part.name}.{i}", i, x.mT) for i, x in enumerate(part.x))
        return
    N = part.x.shape[1]
    names = HALVES.get(leaf, (WHOLE.get(leaf, leaf),))
    for i, x in enumerate(part.x):
        for half, name in enumerate(names):
            rows = slice(half * N // len(names), (half + 1) * N // len(names))
            yield expert(f"{head}{dot}{i}.{name}.weight", i, x[rows], rows)
