"""The files of a converted checkpoint beside its shards: configuration, index, tokenizer and manifest."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mxspec
from mxspec.checkpoint import pairs
from mxspec.checkpoint.families import quantization
from mxspec.checkpoint.files import INDEX
from mxspec.checkpoint.reading import Checkpoint
from mxspec.checkpoint.resume import MANIFEST, PARTIAL, Progress
from mxspec.checkpoint.shards import write_json
from mxspec.checkpoint.targets import TARGETS, hf_quant_config, quantization_config
from mxspec.checkpoint.units import Unit
from mxspec.checkpoint.work import Work

WRITTEN = (MANIFEST, "config.json", "hf_quant_config.json")
NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".safetensors.index.json")


def finish(
    checkpoint: Checkpoint,
    target: Path,
    plan: list[Work],
    shards: list[str],
    state: Progress,
    to: str,
    scales: str,
    more: Iterable[str] = (),
) -> dict[str, Any]:
    """Copy the source's other files; write the configuration, the index and, last, the manifest, which is returned."""
    for path in sorted(checkpoint.path.iterdir()):
        if path.is_file() and not path.name.endswith(NOT_COPIED) and path.name not in WRITTEN:
            shutil.copyfile(path, target / path.name)
    plain = {"lm_head", *plain_linears(plan)}
    more = [*more, *_of_source(checkpoint)]
    manifest = describe(checkpoint.config, target, plan, state.job, state.tensors(shards), to, scales, plain, more)
    (target / PARTIAL).unlink(missing_ok=True)
    return manifest


def describe(
    config: Mapping[str, Any],
    target: Path,
    plan: Sequence[Work],
    job: Mapping[str, Any],
    tensors: Mapping[str, Any],
    to: str,
    scales: str,
    plain: Iterable[str],
    more: Iterable[str] = (),
) -> dict[str, Any]:
    """Write the configuration, the index and, last, the manifest, which is returned.

    Args:
        config: the model's config.json.
        target: the directory, which holds the shards.
        plan: the works that wrote the shards.
        job: the manifest's first entries.
        tensors: the manifest's entries of the tensors.
        to: the family.
        scales: `fp32` or `ue8m0`.
        plain: the modules that the configuration excludes.
        more: further warnings.
    """
    excluded = sorted(set(plain))
    config = {key: value for key, value in config.items() if key != "quantization_config"}
    ends = TARGETS[to].input_scale.removeprefix("{}")
    made = (p.name for w in plan if w.note["how"] != "copied" for p in w.planned)
    input_scales = bool(ends) and any(name.endswith(ends) for name in made)
    if quant := quantization_config(to, excluded, scales, input_scales):
        config["quantization_config"] = quant
    write_json(target / "config.json", config)
    if of_modelopt := hf_quant_config(to, excluded, mxspec.__version__, input_scales):
        write_json(target / "hf_quant_config.json", of_modelopt)
    if len({entry["shard"] for entry in tensors.values()}) > 1:
        size = sum(planned.nbytes for w in plan for planned in w.planned)
        index = {"metadata": {"total_size": size}, "weight_map": {name: t["shard"] for name, t in tensors.items()}}
        write_json(target / INDEX, index)
    shapes = [(w.unit.codes, w.unit.shape) for w in plan if len(w.planned) > 1]
    warned = [*pairs.warnings(config, to, scales, shapes, input_scales), *pairs.of_tensors(to, tensors), *more]
    if to == "ct_fp8_block" and any(t["dtype"] == "F32" and n.endswith("_scale") for n, t in tensors.items()):
        warned.append("transformers 5.17 rounds fp32 scales of compressed-tensors to bfloat16; 5.23 keeps them")
    if "model_type" not in config:
        said = "the config.json that was written names no model_type, because there was none: add the model's own"
        warned.append(said)
    manifest = {**job, "warnings": warned, "tensors": dict(tensors)}
    write_json(target / MANIFEST, manifest)
    return manifest


def _of_source(checkpoint: Checkpoint) -> list[str]:
    """What the written configuration does not say of the source."""
    quant, hf = quantization(checkpoint.config), (checkpoint.hf_quant_config or {}).get("quantization")
    caches = [("config.json", "kv_cache_scheme", quant.get("kv_cache_scheme"))]
    if isinstance(hf, dict):
        caches.append(("hf_quant_config.json", "kv_cache_quant_algo", hf.get("kv_cache_quant_algo")))
    rotated = (
        "the source has a transform_config, which rotates activations; the configuration that was written has none"
    )
    return ([rotated] if quant.get("transform_config") else []) + [
        f"the source quantizes the KV cache ({key} {value!r} in {file}); the configuration that was written does not"
        for file, key, value in caches
        if value
    ]


def plain_linears(plan: Sequence[Work]) -> set[str]:
    """The modules whose weight is a plain matrix."""
    return {w.unit.module for w in plan if w.note["how"] in ("copied", "dequantized") and _is_linear(w.unit)}


def _is_linear(unit: Unit) -> bool:
    return unit.codes == f"{unit.module}.{unit.codes.rpartition('.')[2]}" and len(unit.shape) == 2
