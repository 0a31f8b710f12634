"""Whose rule is it? What other libraries do differently, as presets on the reference.

`rules.<peer>.<op>` is an op with a peer's arithmetic: the op's signature and layouts, and that peer's scales and codes.
A peer is a file of this folder, and its ops are the functions in it that are named like ours. Each file says as

- `NAME` what the peer is called,
- `RECORDED` which entries of `vectors/peers.json` it gives back bit for bit, and with which options,
- `SOURCE_DIFFERS`, where it does, on which blocks an entry that was transcribed, not run, is not what the source says.

A default is the peer's own where it has one rule only. What a peer does not do raises NotImplementedError, or
ValueError where it depends on the values. Compare with `mxspec/reference/`, which has the contract.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from mxspec import dispatch
from mxspec.formats import same_bits
from mxspec.rules._recorded import Probe, matches, probes
from mxspec.spec import outputs_of

__all__ = ["Probe", "explaining", "matches", "peers", "probes", "report"]

# The options that choose numbers; the others choose a layout, and probe blocks are compared in the plain one.
_NUMERIC = ("elem_dtype", "scaling", "scale_format", "eps")


@functools.cache
def peers() -> tuple[str, ...]:
    """The peers, by file name.

    >>> from mxspec import rules
    >>> [peer for peer in peers() if hasattr(getattr(rules, peer), "fp8_quantize_1x128")]
    ['deepgemm', 'te', 'te_reference', 'torchao']
    """
    return tuple(sorted(path.stem for path in Path(__file__).parent.glob("[!_]*.py")))


def __getattr__(name: str) -> ModuleType:
    """A peer's file, imported when it is first asked for."""
    if name in peers():
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"mxspec.rules has no peer {name!r}; it has {', '.join(peers())}")


def explaining(op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], got: Any) -> list[str]:
    """The peers whose rule gives exactly these outputs for a call, NaN as a class.

    First each peer is asked what the call asks; then for its other rules, which are named: `torchao, scaling='floor'`.

    >>> import mxspec
    >>> tiny, odd = torch.full((1, 32), 2.0**-126), torch.full((1, 32), 257.0)
    >>> mxspec.rules.explaining("mx_quantize", (tiny,), {}, mxspec.rules.torchao_0_18.mx_quantize(tiny))
    ['torchao_0_18', 'torchao_0_18_triton']
    >>> mxspec.rules.explaining("mx_quantize", (odd,), {}, mxspec.mx_quantize(odd, scaling="ceil"))
    ["torchao, scaling='ceil'", "torchao_0_18, scaling='ceil'"]
    """
    if not isinstance(args, tuple):
        raise TypeError(f"explaining: args is a {type(args).__name__}; needs a tuple")
    dispatch.reference(op)  # which refuses a name that no op has
    outputs = outputs_of(got)
    found = []
    for peer in peers():
        names = [name for name, rule in _rules(op, peer, kwargs) if _same(_outputs(rule, *args), outputs)]
        found += names[:1]
    return found


def report(op: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Whose rule a quantizer follows: on a call's own inputs, and on the probe blocks of `vectors/peers.json`."""
    reference = dispatch.reference(op)
    numeric = {name: value for name, value in kwargs.items() if name in _NUMERIC}
    blocks = _blocks(op, numeric)
    try:
        on_case = explaining(op, args, kwargs, call(*args, **kwargs))
        got = [outputs_of(call(probe.x.to(args[0].device), **numeric)) for probe in blocks]
    except Exception:  # the finding was reported; this only looks for its origin
        return None
    leaving = [
        probe.name
        for probe, outputs in zip(blocks, got, strict=True)
        if not _same(_outputs(reference, probe.x, **numeric), outputs)
    ]
    on_probes = [
        name
        for peer in peers()
        for name, theirs in _on_probes(op, peer, tuple(numeric.items()))
        # What a peer refuses is no evidence, and so never for leaving the contract.
        if leaving
        and all(
            probe.name not in leaving if t is None else _same(t, g)
            for probe, t, g in zip(blocks, theirs, got, strict=True)
        )
    ]
    named = ", ".join(leaving[:4]) + (", ..." if len(leaving) > 4 else "")
    where = f"{len(blocks)} probe blocks, which leave the contract on {len(leaving)} of them ({named})"
    if both := [name for name in on_case if name in on_probes]:
        return f"your bytes are {_titles(both)} on this case and on all {where}"
    lines = [f"your bytes are {_titles(on_case)} on this case"] if on_case else []
    if on_probes:
        lines.append(f"your bytes are {_titles(on_probes)} on all {where}")
    elif leaving:
        lines.append(f"your bytes are no known peer's rule on the {where}")
    return "\n".join(lines) or None


def _rules(op: str, peer: str, kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """What a peer does with an op, by name: as a call asks, and by each other rule that is recorded of it."""
    module = __getattr__(peer)
    function = getattr(module, op, None)
    if function is None:
        return
    yield peer, functools.partial(function, **kwargs)
    asked = {name: p.default for name, p in inspect.signature(function).parameters.items()} | dict(kwargs)
    for options in {tuple(o.items()): o for section in module.RECORDED.values() for o in section.values()}.values():
        other = {name: value for name, value in options.items() if name in asked and asked[name] != value}
        if other and options.keys() <= asked.keys():
            said = ", ".join(f"{name}={value!r}" for name, value in other.items())
            yield f"{peer}, {said}", functools.partial(function, **{**kwargs, **other})


def _outputs(rule: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Tensor, ...] | None:
    """What a rule gives, None where the peer does not do it."""
    try:
        return outputs_of(rule(*args, **kwargs))
    except (NotImplementedError, ValueError, TypeError):
        return None


@functools.cache  # a report is asked for at each case that fails
def _on_probes(
    op: str, peer: str, numeric: tuple[tuple[str, Any], ...]
) -> list[tuple[str, list[tuple[Tensor, ...] | None]]]:
    """What each rule of a peer makes of the probe blocks."""
    blocks = _blocks(op, dict(numeric))
    return [(name, [_outputs(rule, probe.x) for probe in blocks]) for name, rule in _rules(op, peer, dict(numeric))]


def _blocks(op: str, numeric: Mapping[str, Any]) -> list[Probe]:
    """The probe blocks for an op and its element format."""
    section = dispatch.reference(op).spec.peer_rules
    return probes(section, numeric.get("elem_dtype", torch.float8_e4m3fn)) if section else []


def _same(ours: tuple[Tensor, ...] | None, theirs: tuple[Tensor, ...]) -> bool:
    """Equal shapes, dtypes and bytes, NaN as a class."""
    return ours is not None and len(ours) == len(theirs) and all(map(_same_bytes, ours, theirs))


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    return (a.shape, a.dtype) == (b.shape, b.dtype) and bool(same_bits(a, b.to(a.device)).all())


def _titles(names: list[str]) -> str:
    return ", ".join(f"{__getattr__(name.split(',')[0]).NAME}'s (rules.{name})" for name in names)
