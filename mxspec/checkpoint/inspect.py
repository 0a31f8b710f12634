"""Say what a checkpoint holds, what is wrong with it, and which loaders read it as it is meant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from mxspec.checkpoint import defects, pairs, values
from mxspec.checkpoint.families import QuantizedWeight, method, quantization, weights
from mxspec.checkpoint.files import Problem, scan
from mxspec.checkpoint.fused import differing
from mxspec.checkpoint.groups import Group, add
from mxspec.checkpoint.loaders import EFFECTS, LOADERS, READERS, SGLANG, VLLM, WRONG
from mxspec.checkpoint.reading import Checkpoint
from mxspec.checkpoint.statistics import Scales, codes, scales
from mxspec.checkpoint.targets import TARGETS
from mxspec.checkpoint.traps import SHARED, TRAPS

INPUT_SCALES = (".input_scale", ".input_global_scale")


@dataclass(frozen=True)
class Trapped:
    """A trap: its loaders, effect, message and source, the number of weights that it affects, and the first weight."""

    loaders: tuple[str, ...]
    effect: str
    message: str
    source: str
    weights: int
    first: str


@dataclass
class Inspection:
    """What `inspect` found.

    Attributes:
        path: what was inspected.
        groups: the quantized weights whose names differ only in numbers, with the counts of their scales and codes.
        plain: the other tensors: how many there are of each dtype of safetensors.
        problems: the defects of the checkpoint.
        traps: the cases in which a loader does not read the weights as they are meant.
        loaders: for each known loader, `yes`, `not known to read` a family, or the worst effect of a trap.
        notes: what was not read, and why.
    """

    path: str
    groups: list[Group] = field(default_factory=list)
    plain: dict[str, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    traps: list[Trapped] = field(default_factory=list)
    loaders: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0 if there is no defect, 1 if there is one, 2 if the checkpoint cannot be read. A trap is not a defect."""
        return 2 if any(problem.fatal for problem in self.problems) else 1 if self.problems else 0

    def __str__(self) -> str:
        from mxspec.checkpoint.report import text

        return text(self)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "path": self.path,
            "exit_code": self.exit_code,
            "groups": [group.to_json() for group in self.groups],
            "plain": self.plain,
            "problems": [vars(problem) for problem in self.problems],
            "traps": [{**vars(trap), "loaders": list(trap.loaders)} for trap in self.traps],
            "loaders": self.loaders,
            "notes": self.notes,
        }


def inspect(
    path: str | Path,
    *,
    include: Sequence[str] = (),
    progress: Callable[[Sequence[QuantizedWeight]], Iterable[QuantizedWeight]] = lambda found: found,
) -> Inspection:
    """Read a checkpoint, and say what it holds, what is wrong with it, and which loaders read it as it is meant.

    Nothing is unpickled. At most one tensor of scales and a piece of a tensor of codes are in memory.

    Args:
        path: a directory, or a safetensors file.
        include: globs; only tensors whose names match one of them are inspected.
        progress: wraps the list of quantized weights, as `mxspec.console.progress` does.

    Returns:
        An `Inspection`. If the checkpoint cannot be read, one of its problems is fatal.

    Raises:
        FileNotFoundError: there is nothing at the path.
        ValueError: no tensor has a name that `include` matches.

    Example:
        >>> import tempfile, torch
        >>> from safetensors.torch import save_file
        >>> folder = tempfile.TemporaryDirectory()
        >>> file = Path(folder.name, "model.safetensors")
        >>> save_file({"q.weight": torch.zeros(128, 128).to(torch.float8_e4m3fn)}, file)
        >>> print(inspect(file).problems[0])
        q.weight: has F8_E4M3 codes and no scale; needs q.weight_scale_inv or q.scale or q.weight_scale

    Source: mxspec.
    """
    scanned, found = scan(path), Inspection(str(path))
    found.notes += scanned.notes
    if scanned.elsewhere:
        found.notes.append(f"{len(scanned.elsewhere)} tensors of the index are in other shards, and are not read")
    found.problems += scanned.problems
    if found.exit_code == 2:
        return found
    checkpoint = Checkpoint(Path(path), scanned)
    every = list(weights(checkpoint.tensors, method(checkpoint.config, checkpoint.hf_quant_config)))
    shown = [w for w in every if not include or any(fnmatchcase(n, g) for n in (w.codes, w.scale) for g in include)]
    named = [name for name in checkpoint.tensors if any(fnmatchcase(name, glob) for glob in include)]
    if include and not named:
        raise ValueError(f"inspect: no tensor of {path} matches {', '.join(include)}")
    found.problems += [p for p in defects.defects(checkpoint, every) if not include or p.where in named]
    groups: dict[tuple[Any, ...], Group] = {}
    tensor_scales: dict[str, float] = {}
    for weight in progress(shown):
        second = _read(checkpoint, weight, found, groups)
        if second is not None:
            tensor_scales[weight.module] = second.largest
    found.groups = list(groups.values())
    used = {name for weight in every for name in (weight.codes, weight.scale, weight.second)}
    rest = (checkpoint.tensors[n].stored for n in (named if include else checkpoint.tensors) if n not in used)
    found.plain = dict(Counter(rest))
    if layers := differing(tensor_scales):
        count = sum(len(layer) for layer in layers)
        found.traps.append(Trapped((VLLM, SGLANG), WRONG, pairs.several_scales(layers), SHARED, count, layers[0][0]))
    if of_inputs := [name for name in checkpoint.tensors if name.endswith(INPUT_SCALES) and name not in used]:
        found.notes.append(f"{len(of_inputs)} of the plain tensors are scales of activations, as {of_inputs[0]}")
    _judge(checkpoint, found)
    return found


def _read(
    checkpoint: Checkpoint, w: QuantizedWeight, found: Inspection, groups: dict[tuple[Any, ...], Group]
) -> Scales | None:
    """Count the scales and codes of one weight. Returns the counts of its tensor scale, if it has one."""
    of_scales = scales(checkpoint, w.scale)
    of_codes = codes(checkpoint, w.codes, w.family.element)
    second: Scales | None = scales(checkpoint, w.second) if w.second else None
    found.problems += values.defects(checkpoint, w, of_scales, of_codes, second)
    if quantization(checkpoint.config).get("scale_fmt") == "ue8m0" and not of_scales.powers_of_two:
        message = "has scales that are no powers of two; config.json has scale_fmt ue8m0"
        found.problems.append(Problem("configuration", w.scale, message))
    add(groups, checkpoint, w, of_scales, of_codes)
    return second


def _judge(checkpoint: Checkpoint, found: Inspection) -> None:
    """The traps, and what each loader does."""
    for trap in TRAPS:
        said: dict[str, list[Group]] = {}
        for group in found.groups:
            if message := trap.test(group.facts(checkpoint.config)):
                said.setdefault(message, []).append(group)
        for message, hit in said.items():
            count = sum(group.weights for group in hit)
            found.traps.append(Trapped(trap.loaders, trap.effect, message, trap.source, count, hit[0].first))
    families = {group.family.name for group in found.groups}
    refused = [why for name in sorted(families & TARGETS.keys()) if (why := pairs.refusal(checkpoint.config, name))]
    if refused and checkpoint.config:
        found.problems += [Problem("no loader", "config.json", why) for why in refused]
    for loader in LOADERS:
        effects = sorted((t.effect for t in found.traps if loader in t.loaders), key=EFFECTS.index)
        unread = sorted(name for name in families if loader not in READERS.get(name, ()))
        if unread and not (effects and effects[0] == WRONG):
            found.loaders[loader] = f"not known to read {', '.join(unread)}"
        else:
            found.loaders[loader] = effects[0] if effects else "yes"
