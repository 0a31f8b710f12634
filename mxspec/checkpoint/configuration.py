"""Check the configuration of a checkpoint against its weights."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from mxspec.checkpoint.families import QuantizedWeight, method, quantization
from mxspec.checkpoint.files import Problem
from mxspec.checkpoint.reading import Checkpoint

EXCLUDED = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")


def defects(checkpoint: Checkpoint, weights: Sequence[QuantizedWeight]) -> Iterator[Problem]:
    """The problems of a `config.json` or `hf_quant_config.json` that does not describe the weights."""
    config, said = checkpoint.config, method(checkpoint.config, checkpoint.hf_quant_config)
    if not checkpoint.path.is_dir():
        return
    if said is None and weights:
        yield _said(f"has no quantization_config; {weights[0].codes} is quantized")
    if said is not None and not weights:
        yield Problem("configuration", "config.json", f"says {said!r}, and no weight is quantized in a known way")
    if said is None or not weights:
        return
    if strangers := [w for w in weights if w.family.method != said]:
        w = strangers[0]
        yield Problem(
            "configuration", "config.json", f"says {said!r}; {w.codes} is stored as {w.family.name}, with {w.scale}"
        )
    quant = quantization(config)
    size = quant.get("weight_block_size")
    wrong = [w for w in weights if size is not None and w.family.element == "e4m3" and list(w.family.block) != size]
    if wrong:
        w = wrong[0]
        yield Problem(
            "configuration", "config.json", f"has weight_block_size {size}; {w.codes} has {list(w.family.block)}"
        )
    inner = (checkpoint.hf_quant_config or {}).get("quantization")
    lists = [quant.get(key) for key in EXCLUDED] + [(inner if isinstance(inner, dict) else {}).get("exclude_modules")]
    excluded = [glob for one in lists if isinstance(one, list) for glob in one if isinstance(glob, str)]
    for weight in weights:
        if glob := next((g for g in excluded if fnmatchcase(weight.module, g)), None):
            yield Problem("configuration", weight.codes, f"is quantized, and the configuration excludes {glob!r}")
            break
    if said in ("fp8", "mxfp8"):
        quantized = {re.sub(r"\d+", "*", w.module) for w in weights}
        for name, header in checkpoint.tensors.items():
            module = name.removesuffix(".weight")
            alike = header.stored in ("BF16", "F16", "F32") and re.sub(r"\d+", "*", module) in quantized
            if alike and module != name and not any(g in module or fnmatchcase(module, g) for g in excluded):
                reason = "is plain, other layers quantize this weight, and the configuration does not exclude it"
                yield Problem("configuration", name, reason)
                break


def _said(message: str) -> Problem:
    return Problem("configuration", "config.json", message)
