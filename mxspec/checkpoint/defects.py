"""Defects that names, dtypes, shapes and configurations show: codes without scales, wrong grids, two families."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from mxspec.checkpoint import configuration
from mxspec.checkpoint.families import (
    BYTES,
    CODES,
    FAMILIES,
    NV_ROW,
    SCALES,
    Family,
    QuantizedWeight,
    elements,
    grid_of,
)
from mxspec.checkpoint.files import Problem, missing_of_series
from mxspec.checkpoint.headers import Header
from mxspec.checkpoint.reading import Checkpoint

V4 = {"deepseek_v4", "deepseek_v4_32x32", "deepseek_v4_fp4"}  # DeepSeek-V4 holds FP8 and FP4 by design


def defects(checkpoint: Checkpoint, weights: Sequence[QuantizedWeight]) -> list[Problem]:
    """The defects that the headers and the configuration show, before any tensor is read."""
    used = {name for w in weights for name in (w.codes, w.scale, w.second) if name}
    left = {name: header for name, header in checkpoint.tensors.items() if name not in used}
    found = [*_shards(checkpoint)]
    near: dict[str, list[str]] = {}
    for name in checkpoint.tensors:
        for mark in "._":
            module, _, rest = name.rpartition(mark)
            if "scale" in rest and "input" not in rest:
                near.setdefault(module, []).append(name)
    blamed: set[str] = set()
    for name, header in left.items():
        scales, problem = _codes(checkpoint, name, header, near)
        blamed.update(scales)
        found += [problem] if problem else []
    for name, header in left.items():
        ends = next((end for end in SCALES if name.endswith(end)), None)
        apart = ends and any(name.removesuffix(ends) + codes in checkpoint.elsewhere for codes in CODES)
        norm = ends == ".scale" and len(header.shape) < 2  # norms of some models have this name
        plain = norm or (ends in ("_scales", ".scales") and header.stored != "U8")
        if ends and name not in blamed and not (apart or plain):
            said = "is a scale, and there are no codes that it belongs to"
            found.append(Problem("scale without codes", name, said))
    for w in weights:
        if w.family.second and w.second is None:
            needs = w.module + w.family.second
            found.append(Problem("missing scale", w.codes, f"has no scale of the whole tensor; needs {needs}"))
        if w.second and ((second := checkpoint.tensors[w.second]).stored != "F32" or second.shape not in ((), (1,))):
            said = f"is {second.stored} {list(second.shape)}; needs one number of F32"
            found.append(Problem("scale of the tensor", w.second, said))
        if w.family.block == NV_ROW and w.shape[-1] % NV_ROW[1]:
            said = f"has K = {w.shape[-1]}, which is no multiple of 16; NVFP4 has blocks of 16"
            found.append(Problem("grid", w.codes, said))
    return [*found, *_mixed(weights), *configuration.defects(checkpoint, weights)]


def _shards(checkpoint: Checkpoint) -> Iterator[Problem]:
    """The missing files of a numbered series. (Another check finds the files that an index names.)"""
    if checkpoint.path.is_dir():
        for missing in missing_of_series(checkpoint.shards):
            yield Problem("missing shard", missing, f"is missing; the directory has {checkpoint.shards[0]}")


def _codes(
    checkpoint: Checkpoint, name: str, header: Header, scales: Mapping[str, Sequence[str]]
) -> tuple[Sequence[str], Problem | None]:
    """The scales of a tensor of codes that no family explains, and what is wrong with them."""
    ends = next((end for end in CODES if name.endswith(end)), None)
    codes = header.stored in ("F8_E4M3", "F8_E5M2", "F4", "F6_E2M3", "F6_E3M2")
    packed = ends is not None and header.stored in ("U8", "I8")
    if not (codes or packed) or any(name.endswith(end) for end in SCALES):
        return (), None
    module = name.removesuffix(ends) if ends else name.rpartition(".")[0]
    near = [other for other in scales.get(module, ()) if other != name]
    if not near and any(module + scale in checkpoint.elsewhere for scale in SCALES):
        return near, None  # one shard is inspected, and another one has the scale
    if not near:
        fits = [f.scale for f in FAMILIES if f.codes == ends and header.stored in f.stored]
        needs = " or ".join(dict.fromkeys(module + scale for scale in fits)) or "a scale"
        return near, Problem("missing scale", name, f"has {header.stored} codes and no scale; needs {needs}")
    # The tensor scales of NVFP4 that may belong to these codes, and the block scales that come with them
    seconds = {module + f.second: module + f.scale for f in FAMILIES if f.second and f.codes == ends}
    others = [other for other in near if other not in seconds]
    if packed and not others:
        needs = seconds[near[0]]
        if needs in checkpoint.elsewhere:
            return near, None
        return near, Problem("missing scale", name, f"has {header.stored} codes and no block scale; needs {needs}")
    scale = checkpoint.tensors[near[0]]
    rows = header.shape[:1]
    if codes and scale.stored in ("F32", "BF16", "F16") and scale.shape in ((), (1,), rows, (*rows, 1)):
        return near, None  # one scale for a tensor or for a row: no block format, and no defect
    known = [f for f in FAMILIES if f.codes == ends and module + f.scale in near and header.stored in f.stored]
    if not known and (named := [f for f in FAMILIES if f.codes == ends and module + f.scale in near]):
        needs = " or ".join(dict.fromkeys(stored for f in named for stored in f.stored))
        said = f"has {header.stored} codes beside {module + named[0].scale}; needs {needs} codes"
        return near, Problem("dtype of codes", name, said)
    if not known:
        said = f"has {header.stored} codes, and no family has a scale with the name {(others or near)[0]}"
        return near, Problem("renamed scale", name, said)
    scale = checkpoint.tensors[module + known[0].scale]
    if any(second in near for second in seconds) or scale.stored == "F8_E4M3":
        known = [f for f in known if f.block == NV_ROW] or known
    return near, _misfit(name, header, module + known[0].scale, scale, known)


def _misfit(name: str, header: Header, scale: str, stored: Header, known: Sequence[Family]) -> Problem:
    """The problem of scales whose dtype or shape fits no family."""
    grids = {}
    for family in known:
        shape = elements(header, family)
        if shape and len(shape) >= 2:
            grids[family.name] = (grid_of(shape, family), family)
    has = f"{scale} is {stored.stored} {list(stored.shape)}"
    if len(stored.shape) == 1 and stored.stored in BYTES:
        return Problem("swizzled scale", name, f"{has}: scales of one dimension are swizzled; needs one for each block")
    if stored.stored == "I32":
        return Problem("packed scale", name, f"{has}: four E8M0 bytes in an int32 are the packed layout of an engine")
    fits = [family for grid, family in grids.values() if grid == stored.shape]
    if fits:
        needs = " or ".join(fits[0].scale_stored)
        cast = ": was a byte cast to a number?" if "U8" in fits[0].scale_stored else ""
        return Problem("dtype of scale", name, f"{has}; {fits[0].name} needs {needs}{cast}")
    needs = ", ".join(f"{list(grid)} ({family})" for family, (grid, _) in grids.items())
    return Problem(
        "grid", name, f"is {header.stored} {list(header.shape)}, and {has}; needs {needs or 'two dimensions'}"
    )


def _mixed(weights: Sequence[QuantizedWeight]) -> Iterator[Problem]:
    first: dict[str, str] = {}
    for weight in weights:
        first.setdefault(weight.family.name, weight.codes)
    if len(first) > 1 and not set(first) <= V4:
        said = ", ".join(f"{family} ({name})" for family, name in first.items())
        yield Problem("two families", next(iter(first.values())), f"the checkpoint mixes families: {said}")
