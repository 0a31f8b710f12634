"""Convert a checkpoint from one family to another: tensor by tensor, with a manifest of every tensor's digest."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

import mxspec
from mxspec.checkpoint import pairs, work, work_nvfp4
from mxspec.checkpoint.files import missing_of_series
from mxspec.checkpoint.finish import finish
from mxspec.checkpoint.fused import Shared
from mxspec.checkpoint.pairs import counted
from mxspec.checkpoint.reading import Checkpoint, CheckpointError
from mxspec.checkpoint.resume import Progress, source_digest
from mxspec.checkpoint.schemes import rules_that_do
from mxspec.checkpoint.shards import ShardWriter
from mxspec.checkpoint.targets import SQUARE, TARGETS
from mxspec.checkpoint.units import PLAIN_DTYPES, Unit, units
from mxspec.checkpoint.work import Options, Work
from mxspec.checkpoint.writing import fill_shard
from mxspec.formats import MX_BLOCK_SIZE

SHOWN = 4  # missing files that an error names
SMALLEST = 16  # rows and columns of the matrices of a stack; kernels of convolutions are smaller
# Weights that loaders expect in bfloat16, whatever the family.
NEVER = ("*embed*", "*lm_head*", "*norm*", "*.gate.weight", "*.gate.wg.weight", "*expert_gate*", "*router*", "*.conv*")


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    to: str,
    scales: str | None = None,
    rule: str = "contract",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    allow_lossy: bool = False,
    workers: int = 2,
    progress: Callable[[Sequence[str]], Iterable[str]] = lambda shards: shards,
) -> dict[str, Any]:
    """Write a checkpoint in another family. The source is only read.

    The weights of a plain checkpoint are quantized by `rule`. Quantized weights keep their values, and `convert` checks
    this for every block. If a weight cannot keep its values, `convert` raises, or with `allow_lossy` quantizes the
    weight again. The family bf16 holds the values that every loader computes, `bfloat16(fp32(q * scale))`. Embeddings,
    `lm_head`, norms and routers are copied. If the source has quantized weights, its plain weights are copied too. A
    shard gets its final name only when it is complete. If a call is interrupted, a second call with the same arguments
    goes on from the last complete shard.

    Args:
        src: a directory of safetensors files with config.json.
        dst: a new directory, not inside src.
        to: a family: `bf16`, `fp8_block`, `mxfp8`, `ct_fp8_block`, `ct_mxfp8`, `ct_mxfp6`, `ct_mxfp4`,
            `ct_nvfp4`, `gptoss_mxfp4`, `modelopt_mxfp8`, `modelopt_mxfp4` or `modelopt_nvfp4`.
        scales: `fp32` or `ue8m0` (powers of two) for FP8 blocks; the default is fp32. The MX families have ue8m0, and
            the NVFP4 families have e4m3.
        rule: `contract`, or a peer in `mxspec.rules.peers()` that quantizes to the family's scheme.
        include: globs. If there are any, exactly the tensors whose name matches a glob are quantized in dst. A
            quantized weight that matches none becomes bfloat16.
        exclude: globs. Tensors whose name matches a glob are not quantized in dst: a quantized weight becomes bfloat16,
            and a plain weight is copied.
        allow_lossy: quantize a weight again if its values cannot be kept. The manifest says so.
        workers: the number of threads.
        progress: wraps the list of shards, as `mxspec.console.progress` does.

    Returns:
        The manifest, as in `mxspec_manifest.json`: the options, the warnings, and for each tensor its shard, dtype,
        shape, SHA-256, sources, rule, and whether it keeps the values of the source.

    Raises:
        CheckpointError: the source cannot be read as a checkpoint, no loader reads the family of this model, dst holds
            other files, a scale is NaN, or a weight cannot keep its values.
        OSError: reading or writing failed, for example on a full disk. The message names the shards that are missing.
        ValueError: an argument has a value that is not listed above.

    Example:
        >>> import json, pathlib, tempfile
        >>> from safetensors.torch import save_file
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> (folder / "a").mkdir()
        >>> save_file({"q_proj.weight": torch.ones(128, 128).bfloat16()}, folder / "a/model.safetensors")
        >>> _ = (folder / "a/config.json").write_text('{"model_type": "llama"}')
        >>> manifest = convert(folder / "a", folder / "b", to="fp8_block", scales="ue8m0", rule="deepseek")
        >>> list(manifest["tensors"])
        ['q_proj.weight', 'q_proj.weight_scale_inv']

    Source: mxspec; the families are described in docs/guides/checkpoints.md.
    """
    options = _checked(to, scales, rule, allow_lossy)
    source, target = Path(src), Path(dst)
    _refuse_overlap(source, target)
    checkpoint = Checkpoint.open(source)
    if why := pairs.refusal(checkpoint.config, to):
        raise CheckpointError(f"convert: {why}")
    if missing := missing_of_series(checkpoint.shards):
        raise CheckpointError(
            f"convert: {source} lacks {', '.join(missing[:SHOWN])}{' and more' * (len(missing) > SHOWN)}; it has "
            f"{checkpoint.shards[0]}"
        )
    found = units(checkpoint)
    if why := pairs.refusal_of_source(checkpoint.config, found):
        raise CheckpointError(f"convert: {why}")
    plain_source = not any(unit.scheme for unit in found)
    shared = Shared(checkpoint)
    plan = [_work(checkpoint, unit, options, include, exclude, plain_source, shared) for unit in found]
    work_nvfp4.refuse_some_input_scales(plan)
    made = [w for w in plan if w.note["how"] != "copied"]
    stacks = [u for u in found if _is_stack(checkpoint, u, options.to) and _wanted(u, include, exclude, plain_source)]
    if stacks and not made:
        stack = checkpoint.tensors[stacks[0].codes]
        raise CheckpointError(
            f"convert: {stacks[0].codes} in {stack.shard} is a stack of matrices {tuple(stack.shape)}, and {to} has no "
            "names for stacks; needs a tensor for each expert, (N, K), whose name ends with .weight"
        )
    others = [
        f"{u.codes} in {checkpoint.tensors[u.codes].shard} is {checkpoint.tensors[u.codes].dtype}"
        for u in found
        if _is_matrix_of_another_dtype(checkpoint, u, to) and _wanted(u, include, exclude, plain_source)
    ]
    needs = f"convert quantizes {', '.join(map(str, PLAIN_DTYPES))}"
    if not made:
        why = f"{others[0]}; {needs}" if others else "needs other globs, or another family"
        raise CheckpointError(f"convert: no weight of {source} is to be changed; {why}")
    job = {
        "to": to,
        "scales": options.scales,
        "rule": rule,
        "include": list(include),
        "exclude": list(exclude),
        "allow_lossy": allow_lossy,
        "mxspec": mxspec.__version__,
        "source": source_digest(checkpoint),
    }
    target.mkdir(parents=True, exist_ok=True)
    state = Progress(target, job)
    shards = list(dict.fromkeys(checkpoint.tensors[w.unit.codes].shard for w in plan))
    try:
        _write(checkpoint, target, plan, progress(shards), state, workers)
    except OSError as error:
        missing = [s for s in shards if not state.has(s)]
        raise OSError(f"convert: {error}; missing in {target}: {', '.join(missing)}") from error
    more = []
    uneven = [
        u for u in found
        if _is_matrix(checkpoint, u, to) and _has_part_of_a_block(u, to) and _wanted(u, include, exclude, plain_source)
    ]  # fmt: skip
    if uneven:
        more.append(
            f"{counted(len(uneven), 'weight', 'are')} copied, the first is {uneven[0].codes}: K = "
            f"{uneven[0].shape[-1]} is no multiple of {MX_BLOCK_SIZE}, the block size of {to}"
        )
    if others:
        more.append(f"{counted(len(others), 'weight', 'are')} copied, the first: {others[0]}; {needs}")
    if stacks:
        more.append(
            f"{counted(len(stacks), 'stack of matrices', 'are')} copied, the first is {stacks[0].codes}: {to} has no "
            "names for stacks"
        )
    return finish(checkpoint, target, plan, shards, state, options.to, options.scales, more)


def _write(
    checkpoint: Checkpoint, target: Path, plan: list[Work], shards: Iterable[str], state: Progress, workers: int
) -> None:
    """Write the shards that `state` lacks. While a shard goes to the disk, the next one is computed."""
    with (
        ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool,
        ThreadPoolExecutor(1) as disk,
    ):
        before: Future[None] | None = None
        try:
            for shard in shards:
                if state.has(shard):
                    continue
                mine = [w for w in plan if checkpoint.tensors[w.unit.codes].shard == shard]
                writer = fill_shard(target / shard, mine, pool)

                def to_disk(shard: str = shard, mine: list[Work] = mine, writer: ShardWriter = writer) -> None:
                    state.add(shard, mine, dict(writer.finish()))

                last, before = before, disk.submit(to_disk)
                if last:
                    last.result()
        finally:
            if before:
                before.result()


def _checked(to: str, scales: str | None, rule: str, allow_lossy: bool) -> Options:
    if to not in TARGETS:
        raise ValueError(f"convert: no family is named {to!r}; there are {', '.join(TARGETS)}")
    scheme = TARGETS[to].scheme
    having = {SQUARE: ("fp32", "ue8m0"), "nvfp4": ("e4m3",)}.get(scheme or "", ("ue8m0",))
    if scales not in (None, *having):
        raise ValueError(f"convert: {to} has no scales {scales!r}; needs {' or '.join(having)}")
    scales = scales or having[0]
    if scheme:
        try:
            work.quantizer(scheme, rule, scales)(torch.ones(1, 128, dtype=torch.bfloat16))
        except NotImplementedError as error:
            raise ValueError(
                f"convert: {rule} does not quantize to {to} with scales {scales}: {error}. "
                f"{rules_that_do(scheme, scales)}"
            ) from error
    return Options(to, scales, rule, allow_lossy)


def _refuse_overlap(source: Path, target: Path) -> None:
    if not source.is_dir():
        raise CheckpointError(f"convert: {source} is not a directory; needs a directory of safetensors files")
    a, b = source.resolve(), target.resolve()
    if b == a or a in b.parents:
        what = "is the source" if b == a else f"lies inside the source {source}"
        raise CheckpointError(f"convert: the destination {target} {what}; needs a directory elsewhere")


def _work(
    checkpoint: Checkpoint,
    unit: Unit,
    options: Options,
    include: Sequence[str],
    exclude: Sequence[str],
    plain_source: bool,
    shared: Shared,
) -> Work:
    scheme = TARGETS[options.to].scheme
    if unit.scheme:
        keep = scheme and not _matches(unit, exclude) and (not include or _matches(unit, include))
        if keep and scheme == "nvfp4":
            return work_nvfp4.changed(checkpoint, unit, options, shared)
        return work.changed(checkpoint, unit, options) if keep else work.dequantized(checkpoint, unit)
    if scheme and _is_matrix(checkpoint, unit, options.to) and _wanted(unit, include, exclude, plain_source):
        if scheme == "nvfp4":
            return work_nvfp4.quantized(checkpoint, unit, options, shared)
        if not _has_part_of_a_block(unit, options.to):
            return work.quantized(checkpoint, unit, options)
    return work.copied(checkpoint, unit)


def _wanted(unit: Unit, include: Sequence[str], exclude: Sequence[str], plain_source: bool) -> bool:
    """Whether the globs choose a plain weight."""
    chosen = _matches(unit, include) if include else plain_source and not _matches(unit, NEVER)
    return chosen and not _matches(unit, exclude)


def _is_matrix(checkpoint: Checkpoint, unit: Unit, to: str) -> bool:
    """Whether a plain tensor is a weight that the family has names for."""
    return _has_a_name(unit, to) and checkpoint.tensors[unit.codes].dtype in PLAIN_DTYPES


def _is_matrix_of_another_dtype(checkpoint: Checkpoint, unit: Unit, to: str) -> bool:
    """Whether a weight that the family has names for is stored in a dtype that is not quantized, such as float64."""
    quantizes = TARGETS[to].scheme is not None
    return quantizes and _has_a_name(unit, to) and checkpoint.tensors[unit.codes].dtype not in PLAIN_DTYPES


def _has_a_name(unit: Unit, to: str) -> bool:
    fits = unit.packed if TARGETS[to].packed else unit.codes.endswith(".weight") and len(unit.shape) == 2
    return fits and unit.scheme is None


def _has_part_of_a_block(unit: Unit, to: str) -> bool:
    """Whether K is no multiple of the MX block. FP8 blocks may be shorter, and `work_nvfp4` refuses such a K."""
    return TARGETS[to].scheme not in (None, SQUARE, "nvfp4") and unit.shape[-1] % MX_BLOCK_SIZE != 0


def _is_stack(checkpoint: Checkpoint, unit: Unit, to: str) -> bool:
    """Whether a plain weight is a stack of matrices, such as experts, that the family has no names for."""
    plain = unit.scheme is None and checkpoint.tensors[unit.codes].dtype in PLAIN_DTYPES
    matrices = len(unit.shape) == 3 and min(unit.shape[1:]) >= SMALLEST
    return plain and matrices and TARGETS[to].scheme is not None and not TARGETS[to].packed


def _matches(unit: Unit, globs: Sequence[str]) -> bool:
    return any(fnmatch(name, glob) for glob in globs for name in (unit.codes, unit.module))
