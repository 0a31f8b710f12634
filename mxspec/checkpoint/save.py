"""Write the codes that trained layers compute with as a checkpoint, without a detour by bfloat16."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import mxspec
from mxspec.checkpoint import live, pairs
from mxspec.checkpoint.files import INDEX
from mxspec.checkpoint.finish import WRITTEN, describe, plain_linears
from mxspec.checkpoint.live import Part
from mxspec.checkpoint.reading import CheckpointError
from mxspec.checkpoint.resume import entries
from mxspec.checkpoint.saveable import format_of, refuse_fused, refuse_other_weights
from mxspec.checkpoint.schemes import SCHEMES, Blocks
from mxspec.checkpoint.shards import DTYPES, Planned, write_json
from mxspec.checkpoint.targets import SQUARE, TARGETS, scale_dtype
from mxspec.checkpoint.units import Unit
from mxspec.checkpoint.work import COPIED_AT_ONCE, Work, Write, refuse_nan
from mxspec.checkpoint.writing import write_shard
from mxspec.nn._cache import QuantizesWeights

SHARD_BYTES = 5_000_000_000


def save(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    to: str,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[Sequence[str]], Iterable[str]] = lambda shards: shards,
) -> dict[str, Any]:
    """Write a model whose layers compute with codes as a checkpoint of these codes.

    For each weight of a `Float8BlockwiseLinear`, an `MXLinear`, a `GroupedExperts` or converted experts of
    transformers, the file holds the codes and scales that the layer's forward multiplies, byte for byte. They are not
    rounded to bfloat16 or quantized again between. Inside a `cache_weights` block they are the codes that it holds.
    All other tensors are written in their dtype, and the configuration excludes them.

    A model of transformers gets its own config.json and the names that `save_pretrained` gives: each expert has tensors
    of its own. The tokenizer and the code of a model with code of its own are not written. In another model,
    `experts.w_gate_up` becomes `experts.0.gate_proj.weight`, `experts.0.up_proj.weight` and so on, and config.json has
    the quantization alone.

    A file has its name only when it is whole. The manifest comes last. If an error stops the call, it removes the files
    that it wrote.

    Args:
        model: a model after `mxspec.nn.convert`, or one built from the layers. It is only read. It may be on a GPU,
            which was not run.
        directory: a new directory, or an empty one.
        to: a family that stores the format of the layers' recipe. fp8_128: `fp8_block` or `ct_fp8_block`, with fp32
            scales. mxfp8: `mxfp8`, `ct_mxfp8` or `modelopt_mxfp8`. `convert` writes other families from the result.
        shard_bytes: the largest size of a file. A larger tensor has a file of its own.
        progress: wraps the list of shards, as `mxspec.console.progress` does.

    Returns:
        The manifest, as `convert` returns it.

    Raises:
        CheckpointError: the directory holds files; no layer computes with codes, or two layers have different formats;
            a tensor is sharded or on the meta device; no loader reads the family of this model; files cannot hold the
            experts of this model; a quantized and a plain layer share a weight; a quantized weight is parametrized, or
            has a NaN or an Inf; or the model has adapters of peft. The message says what to do.
        OSError: writing failed, for example on a full disk.
        RuntimeError: a weight changed while `cache_weights` held its codes.
        TypeError: the model is no `nn.Module`.
        ValueError: `to` is no family, or one of another format; or shard_bytes is below 1.

    Example:
        >>> import tempfile
        >>> from mxspec.nn import MXLinear
        >>> model = nn.Sequential(MXLinear(64, 32), nn.LayerNorm(32))
        >>> manifest = save(model, tempfile.mkdtemp(), to="mxfp8")
        >>> [f"{name} {tensor['dtype']}" for name, tensor in manifest["tensors"].items()]
        ['0.weight F8_E4M3', '0.weight_scale_inv U8', '0.bias F32', '1.weight F32', '1.bias F32']

    Source: mxspec; the families are described in docs/guides/checkpoints.md.
    """
    target = Path(directory)
    form = format_of(model, to)
    if not isinstance(shard_bytes, int) or shard_bytes < 1:
        raise ValueError(f"save: shard_bytes = {shard_bytes!r}; needs an int of at least 1")
    configs = _configurations(model)
    config = configs.pop("config.json", {})
    if why := pairs.refusal(config, to):
        raise CheckpointError(f"save: {why}")
    refuse_other_weights(model)
    parts = live.parts(model)
    refuse_fused(parts)
    plan = _works(parts, to)
    shards = _shards(plan, shard_bytes)
    scales = "fp32" if TARGETS[to].scheme == SQUARE else "ue8m0"
    job: dict[str, Any] = {
        "to": to,
        "scales": scales,
        "format": form,
        "mxspec": mxspec.__version__,
        "source": {"model": type(model).__name__},
    }
    plain = plain_linears(plan) | {head for part in parts if (head := _plain_experts(part))}
    is_new, tensors = _new_directory(target), dict[str, Any]()
    try:
        for shard in progress(list(shards)):
            tensors |= entries(shard, shards[shard], write_shard(target / shard, shards[shard]))
        for name, other in configs.items():
            write_json(target / name, other)
        return describe(config, target, plan, job, tensors, to, scales, plain)
    except BaseException as error:
        _remove(target, {*shards, *configs, *WRITTEN, INDEX}, is_new)
        if isinstance(error, OSError):
            raise OSError(f"save: {error}; the files that were written to {target} are removed") from error
        raise


def _configurations(model: nn.Module) -> dict[str, dict[str, Any]]:
    """The configuration files that the model's library writes, by name."""
    library = live.library_of(model)
    found: dict[str, dict[str, Any]] = library.configurations(model) if library else {}
    return found


def _plain_experts(part: Part) -> str | None:
    """The module of a plain weight of experts, which a loader replaces as a whole unless it is excluded."""
    if part.layer is None and part.matrix is not None and part.name.count(".") > 2:
        return part.name.rsplit(".", 3)[0]
    return part.name.rpartition(".")[0] if part.x.ndim == 3 and ".experts." in part.name else None


def _works(parts: Sequence[Part], to: str) -> list[Work]:
    latest: dict[QuantizesWeights, list[Blocks]] = {}  # the codes of one layer: those of its parts come together

    def codes(layer: QuantizesWeights) -> list[Blocks]:
        if layer not in latest:
            latest.clear()
            latest[layer] = live.codes_of(layer)
        return latest[layer]

    return [_copied(part) if part.layer is None else _coded(part, part.layer, to, codes) for part in parts]


def _copied(part: Part) -> Work:
    """A tensor as it is."""
    x = part.x.detach()
    if x.dtype not in DTYPES:
        raise CheckpointError(f"save: {part.name} has dtype {x.dtype}, which safetensors has not")

    def run(write: Write) -> None:
        if x.ndim == 0:
            return write(part.name, x.cpu())
        row = max(1, x.shape[1:].numel() * x.dtype.itemsize)
        for piece in x.split(max(1, COPIED_AT_ONCE // row)) if x.numel() else ():
            write(part.name, piece.cpu())

    note = {"from": [part.source], "how": "copied", "lossless": True}
    return Work(_unit(part), [Planned(part.name, x.dtype, tuple(x.shape))], note, run)


def _coded(part: Part, layer: QuantizesWeights, to: str, codes: Callable[[QuantizesWeights], list[Blocks]]) -> Work:
    """The codes and scales of a quantized weight."""
    target, unit = TARGETS[to], _unit(part)
    recipe = layer.recipe
    rule = f"contract, scaling {recipe.scaling}" if recipe.format == "mxfp8" else "contract"
    rule += f", scale_format {recipe.scale_format}" if recipe.scale_format != "fp32" else ""
    assert target.scheme
    (N, K), (height, width) = part.x.shape, SCHEMES[target.scheme].block
    planned = [
        Planned(target.codes.format(unit.module), torch.float8_e4m3fn, (N, K)),
        # ct_fp8_block: float32, because bfloat16 would round the scales
        Planned(target.scale.format(unit.module), scale_dtype(to, exact_in_bf16=False), (-(-N // height), K // width)),
    ]

    def run(write: Write) -> None:
        found = live.blocks_of(part, codes(layer))
        refuse_nan(unit, found.scale, slice(0, N))
        write(planned[0].name, found.codes.cpu())
        write(planned[1].name, found.scale.cpu())

    return Work(unit, planned, {"from": [part.source], "how": "quantized", "rule": rule, "lossless": False}, run)


def _unit(part: Part) -> Unit:
    """The weight as the configuration and the warnings name it."""
    return Unit(part.name.removesuffix(".weight"), part.name, None, None, tuple(part.x.shape))


def _shards(plan: Sequence[Work], shard_bytes: int) -> dict[str, list[Work]]:
    """The files, by name, in the order of the model."""
    found: list[list[Work]] = [[]]
    size = 0
    for work in plan:
        nbytes = sum(planned.nbytes for planned in work.planned)
        if found[-1] and size + nbytes > shard_bytes:
            found.append([])
            size = 0
        found[-1].append(work)
        size += nbytes
    if len(found) == 1:
        return {"model.safetensors": found[0]}
    return {f"model-{i:05}-of-{len(found):05}.safetensors": works for i, works in enumerate(found, 1)}


def _new_directory(target: Path) -> bool:
    """Make the directory. Returns whether it is new."""
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"save: {target} is a file; needs a new directory")
    if target.is_dir() and (held := sorted(path.name for path in target.iterdir())):
        raise CheckpointError(f"save: {target} is not empty, it holds {held[0]}; needs a new directory")
    is_new = not target.exists()
    target.mkdir(parents=True, exist_ok=True)
    return is_new


def _remove(target: Path, names: set[str], is_new: bool) -> None:
    """Remove the files of a call that failed, whole or not."""
    for path in target.iterdir():
        if path.name in names or path.name.removeprefix(".").removesuffix(".partial") in names:
            path.unlink()
    if is_new:
        with contextlib.suppress(OSError):  # someone else put a file there
            target.rmdir()
