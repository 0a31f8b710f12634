"""What `convert` does with one weight: copy, quantize, keep in another scheme, or dequantize it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mxspec.checkpoint.lossless import NotLossless, retype
from mxspec.checkpoint.reading import Checkpoint, CheckpointError
from mxspec.checkpoint.schemes import SCHEMES, Blocks, keeping, quantizer, strips
from mxspec.checkpoint.shards import Planned
from mxspec.checkpoint.targets import SQUARE, TARGETS, scale_dtype
from mxspec.checkpoint.units import Unit, numbers, plain_strips

Write = Callable[[str, Tensor], None]
COPIED_AT_ONCE = 1 << 24  # bytes


@dataclass(frozen=True)
class Options:
    """How to convert: the arguments of `convert` that change bytes."""

    to: str
    scales: str
    rule: str
    allow_lossy: bool


@dataclass
class Work:
    """The tensors that a unit becomes. `run` writes them, and may add to `note`, which goes into the manifest."""

    unit: Unit
    planned: list[Planned]
    note: dict[str, Any]
    run: Callable[[Write], None]


def copied(checkpoint: Checkpoint, unit: Unit) -> Work:
    """The tensor as it is."""
    entry = checkpoint.tensors[unit.codes]

    def run(write: Write) -> None:
        if not entry.shape:
            return write(unit.codes, checkpoint.read(unit.codes))
        row = max(1, torch.Size(entry.shape[1:]).numel() * entry.dtype.itemsize)
        step = max(1, COPIED_AT_ONCE // row)
        for start in range(0, entry.shape[0], step):
            write(unit.codes, checkpoint.read_rows(unit.codes, start, min(start + step, entry.shape[0])))

    return Work(unit, [Planned(unit.codes, entry.dtype, tuple(entry.shape))], {"how": "copied", "lossless": True}, run)


def quantized(checkpoint: Checkpoint, unit: Unit, options: Options) -> Work:
    """A plain weight, quantized by a rule, strip by strip."""
    scheme = TARGETS[options.to].scheme
    assert scheme
    in_bf16 = checkpoint.tensors[unit.codes].dtype == torch.bfloat16 and options.rule == "compressed_tensors"
    planned = planned_of(unit, options, in_bf16 or options.scales == "ue8m0")
    quantize = quantizer(scheme, options.rule, options.scales)

    def run(write: Write) -> None:
        for matrix in range(unit.matrices):
            for rows, x in plain_strips(checkpoint, unit, matrix):
                try:
                    codes, scale = quantize(x)
                except NotImplementedError as error:  # the peer has no rule for this dtype
                    raise CheckpointError(f"{unit.codes}: {error}") from error
                refuse_nan(unit, scale, rows)
                write(planned[0].name, codes)
                write(planned[1].name, scale.to(planned[1].dtype))

    return Work(unit, planned, {"how": "quantized", "rule": options.rule, "lossless": False}, run)


def changed(checkpoint: Checkpoint, unit: Unit, options: Options) -> Work:
    """A quantized weight in the scheme and the names of another family: kept, or quantized again if that is allowed."""
    scheme = TARGETS[options.to].scheme
    assert scheme
    planned = planned_of(unit, options, _exact_in_bf16(checkpoint, unit, options))
    note: dict[str, Any] = {"how": "kept", "lossless": True}
    if unit.input_scale:
        note["left_out"] = unit.input_scale

    def run(write: Write) -> None:
        for matrix in range(unit.matrices):
            old = numbers(checkpoint, unit, matrix)
            new = keeping(old, scheme, planned[1].dtype)
            if isinstance(new, Blocks) and scheme == SQUARE and options.scales == "ue8m0":
                powers = retype(new.scale, torch.uint8)
                new = powers if isinstance(powers, NotLossless) else new
            if isinstance(new, Blocks):
                write(planned[0].name, new.codes)
                write(planned[1].name, new.scale)
                continue
            why = f"no lossless way from {old.scheme} to {scheme} is known" if new is None else str(new)
            if not options.allow_lossy:
                raise CheckpointError(f"{unit.codes}: {why}; --allow-lossy quantizes it again by a rule")
            note.update(how="quantized again", rule=options.rule, lossless=False, why=why)
            _again(old, unit, planned, options, write)

    return Work(unit, planned, note, run)


def _again(old: Blocks, unit: Unit, planned: list[Planned], options: Options, write: Write) -> None:
    """The values in fp32, quantized by the rule."""
    quantize = quantizer(TARGETS[options.to].scheme or "", options.rule, options.scales)
    for rows in strips(unit.shape[-2]):
        codes, scale = quantize(old.values(torch.float32, rows))
        refuse_nan(unit, scale, rows)
        write(planned[0].name, codes)
        write(planned[1].name, scale.to(planned[1].dtype))


def dequantized(checkpoint: Checkpoint, unit: Unit) -> Work:
    """The values in bfloat16, as every loader computes them: `bfloat16(fp32(q * scale))`."""
    name = unit.module if unit.packed else f"{unit.module}.weight"
    *lead, N, K = unit.shape
    planned = [Planned(name, torch.bfloat16, (*lead, K, N) if unit.packed else (N, K))]
    note: dict[str, Any] = {"how": "dequantized", "lossless": True}
    if unit.input_scale:
        note["left_out"] = unit.input_scale

    def run(write: Write) -> None:
        for matrix in range(unit.matrices):
            old, whole = numbers(checkpoint, unit, matrix), []
            for rows in strips(N):
                wide = old.values(torch.float32, rows)
                values = wide.bfloat16()
                note["lossless"] &= bool((values.float() == wide).all())
                if unit.packed:
                    whole.append(values)
                else:
                    write(name, values)
            if unit.packed:
                write(name, torch.cat(whole).mT.contiguous())

    return Work(unit, planned, note, run)


def planned_of(unit: Unit, options: Options, exact_in_bf16: bool) -> list[Planned]:
    """The codes and the scales of a weight in the target family."""
    target = TARGETS[options.to]
    assert target.scheme
    scheme = SCHEMES[target.scheme]
    height, width = scheme.block
    *lead, N, K = unit.shape
    grid = (*lead, -(-N // height), -(-K // width))
    codes: tuple[int, ...] = (*lead, N, scheme.element.stored(K))
    if target.packed:
        codes = (*lead, N, K // 32, 16)
    names = target.codes.format(unit.module), target.scale.format(unit.module)
    return [Planned(names[0], scheme.stored, codes), Planned(names[1], scale_dtype(options.to, exact_in_bf16), grid)]


def _exact_in_bf16(checkpoint: Checkpoint, unit: Unit, options: Options) -> bool:
    """Whether bfloat16 holds the scales that the unit will have."""
    if options.to != "ct_fp8_block" or unit.scheme != SQUARE:
        return True  # powers of two
    return unit.scale is None or isinstance(retype(checkpoint.read(unit.scale), torch.bfloat16), Tensor)


def refuse_nan(unit: Unit, scale: Tensor, rows: slice) -> None:
    finite = scale.ne(255) if scale.dtype == torch.uint8 else scale.float().isfinite()
    if not bool(finite.all()):
        raise CheckpointError(f"{unit.codes}: rows {rows.start} to {rows.stop - 1} hold a NaN or an Inf; needs numbers")
