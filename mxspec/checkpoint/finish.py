"""The files of a converted checkpoint beside its shards: configuration, index, tokenizer and manifest."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import mxspec
from mxspec.checkpoint import pairs
from mxspec.checkpoint.reading import Checkpoint
from mxspec.checkpoint.resume import PARTIAL, Progress
from mxspec.checkpoint.shards import write_json
from mxspec.checkpoint.targets import hf_quant_config, quantization_config
from mxspec.checkpoint.units import Unit
from mxspec.checkpoint.work import Work

MANIFEST = "mxspec_manifest.json"
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
) -> dict[str, Any]:
    """Copy the source's other files; write the configuration, the index and, last, the manifest, which is returned."""
    plain = sorted(
        {"lm_head", *(w.unit.module for w in plan if w.note["how"] in ("copied", "dequantized") and _is_linear(w.unit))}
    )
    for path in sorted(checkpoint.path.iterdir()):
        if path.is_file() and not path.name.endswith(NOT_COPIED) and path.name not in WRITTEN:
            shutil.copyfile(path, target / path.name)
    config = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
    if quantization := quantization_config(to, plain, scales):
        config["quantization_config"] = quantization
    write_json(target / "config.json", config)
    if quant := hf_quant_config(to, plain, mxspec.__version__):
        write_json(target / "hf_quant_config.json", quant)
    tensors = state.tensors(shards)
    if len(shards) > 1:
        size = sum(planned.nbytes for w in plan for planned in w.planned)
        index = {"metadata": {"total_size": size}, "weight_map": {name: t["shard"] for name, t in tensors.items()}}
        write_json(target / "model.safetensors.index.json", index)
    shapes = [(w.unit.codes, w.unit.shape) for w in plan if len(w.planned) == 2]
    said = pairs.warnings(checkpoint.config, to, scales, shapes)
    if to == "ct_fp8_block" and any(t["dtype"] == "F32" and n.endswith("_scale") for n, t in tensors.items()):
        said.append("transformers 5.17 rounds fp32 scales of compressed-tensors to bfloat16; 5.23 keeps them")
    manifest = {**state.job, "warnings": said, "tensors": tensors}
    write_json(target / MANIFEST, manifest)
    (target / PARTIAL).unlink(missing_ok=True)
    return manifest


def _is_linear(unit: Unit) -> bool:
    return unit.codes == f"{unit.module}.{unit.codes.rpartition('.')[2]}" and len(unit.shape) == 2
