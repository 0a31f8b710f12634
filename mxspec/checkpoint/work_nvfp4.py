"""What `convert` does with a weight that becomes NVFP4: quantize it, or keep its values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mxspec.checkpoint import nvfp4
from mxspec.checkpoint.fused import Shared
from mxspec.checkpoint.lossless import NotLossless
from mxspec.checkpoint.reading import Checkpoint, CheckpointError
from mxspec.checkpoint.schemes import SCHEMES, Blocks, quantizer, strips
from mxspec.checkpoint.shards import Planned
from mxspec.checkpoint.targets import TARGETS
from mxspec.checkpoint.units import Unit, numbers, one_scale, plain_strips
from mxspec.checkpoint.work import Options, Work, Write, planned_of, refuse_nan


def quantized(checkpoint: Checkpoint, unit: Unit, options: Options, shared: Shared) -> Work:
    """A plain weight, quantized by a rule with the tensor scale of its layer."""
    _refuse_sizes(checkpoint, unit, options)
    shared.add(unit)
    note: dict[str, Any] = {"how": "quantized", "rule": options.rule, "lossless": False}
    planned = _planned(unit, options)

    def run(write: Write) -> None:
        _quantize(plain_strips(checkpoint, unit), unit, planned, options, shared, note, write)

    return Work(unit, planned, note, run)


def changed(checkpoint: Checkpoint, unit: Unit, options: Options, shared: Shared) -> Work:
    """A quantized weight as NVFP4: kept, or changed if that is allowed."""
    _refuse_sizes(checkpoint, unit, options)
    shared.add(unit)
    note: dict[str, Any] = {"how": "kept", "lossless": True}
    planned = _planned(unit, options)

    def run(write: Write) -> None:
        old = numbers(checkpoint, unit)
        new, why = _kept(old, unit, options, shared)
        if why and not options.allow_lossy:
            by = "rounds the tensor scale" if new else "quantizes it again by a rule"
            raise CheckpointError(f"{unit.codes}: {why}; --allow-lossy {by}")
        if why:
            note.update(lossless=False, why=why)
        if new is None:
            note.update(how="quantized again", rule=options.rule)
            values = ((rows, old.values(torch.float32, rows)) for rows in strips(unit.shape[-2]))
            _quantize(values, unit, planned, options, shared, note, write)
        else:
            if old.divides != new.divides and (count := _unequal(old, new)):
                note["bf16_values_that_differ"] = count
            if why:
                note["how"] = "rounded"
            write(planned[0].name, new.codes)
            write(planned[1].name, new.scale)
            _write_scale(new.tensor_scale, planned[2], note, write)
        if unit.input_scale:
            scale, exact = one_scale(checkpoint, unit.input_scale), True
            if unit.divides != TARGETS[options.to].divides:
                scale, exact = nvfp4.changed_direction(scale, TARGETS[options.to].divides)
            if not exact and not options.allow_lossy:
                raise CheckpointError(f"{unit.input_scale}: {_no_divisor(scale.reciprocal())}; --allow-lossy rounds it")
            if not exact:
                how = "rounded" if note["how"] == "kept" else note["how"]
                note.update(how=how, lossless=False, why_input_scale=_no_divisor(scale.reciprocal()))
            write(planned[3].name, scale)

    return Work(unit, planned, note, run)


def _kept(old: Blocks, unit: Unit, options: Options, shared: Shared) -> tuple[Blocks | None, str]:
    """The weight with the same codes or values, and why a value changes; no weight if it must be quantized again."""
    divides = TARGETS[options.to].divides
    if old.scheme == "nvfp4":
        assert old.tensor_scale is not None
        if old.divides == divides:
            return old, ""
        scale, exact = nvfp4.changed_direction(old.tensor_scale, divides)
        return Blocks("nvfp4", old.codes, old.scale, scale, divides), "" if exact else _no_divisor(old.tensor_scale)
    if old.scheme != "mxfp4":
        return None, f"no lossless way from {old.scheme} to nvfp4 is known"
    t = shared.exponent(unit)
    made = nvfp4.mxfp4_to_nvfp4(old.codes, old.scale, exponent=t)
    if isinstance(made, NotLossless):
        return None, str(made)
    if t is None:
        names = ", ".join(one.codes for one in shared.layer(unit))
        return None, f"engines fuse {names}, and no tensor scale keeps the values of all of them"
    codes, block_scale, tensor_scale = made
    return Blocks("nvfp4", codes, block_scale, tensor_scale.reciprocal() if divides else tensor_scale, divides), ""


def _no_divisor(multiplier: Tensor) -> str:
    return f"no fp32 divisor has the reciprocal {multiplier.item()!r}, by which engines multiply"


def _quantize(
    strips_of: Iterable[tuple[slice, Tensor]],
    unit: Unit,
    planned: list[Planned],
    options: Options,
    shared: Shared,
    note: dict[str, Any],
    write: Write,
) -> None:
    quantize, amax = quantizer("nvfp4", options.rule, options.scales), shared.amax(unit)
    scale = torch.ones(())
    for rows, x in strips_of:
        try:
            codes, block_scale, multiplier, divisor = quantize(x, amax)
        except (NotImplementedError, ValueError) as error:  # the peer has no rule for this dtype or these numbers
            raise CheckpointError(f"{unit.codes}: {error}") from error
        refuse_nan(unit, block_scale, rows)
        scale = divisor if TARGETS[options.to].divides else multiplier
        write(planned[0].name, codes)
        write(planned[1].name, block_scale)
    if not (scale.isfinite() and scale > 0):
        raise CheckpointError(
            f"{unit.codes}: the largest magnitude is {amax.item()!r}, and the tensor scale would be {scale.item()}; "
            "needs a positive finite number"
        )
    _write_scale(scale, planned[2], note, write)


def _write_scale(scale: Tensor | None, planned: Planned, note: dict[str, Any], write: Write) -> None:
    assert scale is not None
    note["tensor_scale"] = scale.item()
    write(planned.name, scale)


def _planned(unit: Unit, options: Options) -> list[Planned]:
    target = TARGETS[options.to]
    shape = (1,) if target.divides else ()
    names = [target.tensor_scale, *([target.input_scale] if unit.input_scale else [])]
    return [
        *planned_of(unit, options, exact_in_bf16=True),
        *(Planned(name.format(unit.module), torch.float32, shape) for name in names),
    ]


def _refuse_sizes(checkpoint: Checkpoint, unit: Unit, options: Options) -> None:
    size, shard = SCHEMES["nvfp4"].block[1], checkpoint.tensors[unit.codes].shard
    if unit.packed:
        raise CheckpointError(f"{unit.codes} in {shard}: {options.to} has no names for fused experts {unit.shape}")
    if unit.shape[-1] % size:
        raise CheckpointError(
            f"{unit.codes} in {shard}: K = {unit.shape[-1]} is no multiple of {size}; NVFP4 has blocks of {size}; "
            "--exclude leaves it as it is"
        )


def _unequal(old: Blocks, new: Blocks) -> int:
    """The number of values that the libraries of the two families read as other numbers of bfloat16."""
    pairs = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0, 0, 0, 0]], dtype=torch.uint8).expand(127, 8)  # all magnitudes
    scales = torch.arange(127, dtype=torch.uint8).view(127, 1).view(torch.float8_e4m3fn)
    every = [replace(one, codes=pairs, scale=scales).values(torch.bfloat16) for one in (old, new)]
    if every[0].equal(every[1]):
        return 0
    return sum(
        int((old.values(torch.bfloat16, rows) != new.values(torch.bfloat16, rows)).sum())
        for rows in strips(old.shape[0])
    )


def refuse_some_input_scales(plan: list[Work]) -> None:
    """Raise if some weights have input scales and others have none: the configuration has one answer for all."""
    made = [w.unit for w in plan if len(w.planned) > 2]
    without = [unit for unit in made if not unit.input_scale]
    if without and (having := [unit for unit in made if unit.input_scale]):
        raise CheckpointError(
            f"convert: {having[0].codes} has {having[0].input_scale}, and {without[0].codes} has no input scale; the "
            "configuration needs input scales of all weights, or of none; --exclude leaves weights out"
        )
