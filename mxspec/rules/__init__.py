"""The rules of other libraries, as presets on the reference: what they compute differently under the same names.

A peer is another library that has a format of the same name. `rules.<peer>.<op>` is an op with a peer's arithmetic. It
has the op's signature and layouts, and the peer's scales and codes. Each peer is a file in this folder; its ops are the
functions in the file that have the names of mxspec's ops. Each file has

- `NAME`: the name of the peer;
- `RECORDED`: the entries of `rules/peers.json` and `rules/nvfp4.json` that it reproduces bit for bit, each with its
  options;
- `SOURCE_DIFFERS`, if needed: the blocks for which a transcribed entry differs from the peer's source. A transcribed
  entry was worked out from the source and not run.

If a peer has only one rule, the options have this rule as their default here. A preset raises NotImplementedError for
options that the peer does not have, and ValueError for values that the peer refuses, or for which its bytes depend on
the machine. A preset has no gradient, and no `backend=`. The contract is what mxspec's own op computes, as
`mxspec/reference/` defines it.

A file may have no op. FlashInfer's NVFP4 has no preset, because its kernel takes its reciprocals from an instruction
that approximates them (`rcp.approx.ftz`): the last bits depend on the GPU. `rules.flashinfer` gives the scales that the
kernel may write, and judges codes and scales.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from mxspec import dispatch
from mxspec.formats import same_bits
from mxspec.rules._recorded import Probe, matches, probes
from mxspec.rules._round_trips import RoundTrips
from mxspec.rules._round_trips import fixed_points as _fixed_points
from mxspec.spec import outputs_of

__all__ = ["Probe", "RoundTrips", "explaining", "fixed_points", "matches", "peers", "probes", "report"]

# The options that change numbers. All other options choose a layout, and probe blocks are compared in the plain layout.
_RULES = ("scaling", "scale_format", "eps", "block")
_NUMERIC = ("elem_dtype", *_RULES)
_CONTRACT = "contract"  # listed beside the peers, because an implementation may use another rule than the call asks for


@functools.cache
def peers() -> tuple[str, ...]:
    """The peers, by file name.

    >>> from mxspec import rules
    >>> [peer for peer in peers() if hasattr(getattr(rules, peer), "fp8_quantize_1x128")]
    ['compressed_tensors', 'deepgemm', 'deepseek', 'te', 'te_reference', 'torchao', 'transformers']
    """
    return tuple(sorted(path.stem for path in Path(__file__).parent.glob("[!_]*.py")))


def __getattr__(name: str) -> ModuleType:
    """The module of a peer, imported when it is first named."""
    if name in peers():
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"mxspec.rules has no peer {name!r}; it has {', '.join(peers())}")


def fixed_points(peer: str, op: str, *, dtype: torch.dtype = torch.float32, **options: Any) -> RoundTrips:
    """Quantize, read back and quantize again, for every mantissa of a block's largest magnitude, `amax`.

    A rule is a fixed point if the second quantization gives the scale of the first. If a scale is not a power of two,
    its last bit may move although every code stays. If it is a power of two, it may fall by one while the values stay,
    because an amax just above a power of two may be rounded down to it.

    Args:
        peer: a name in `peers()`, or `contract`.
        op: `mx_quantize`, `fp8_quantize_1x128` or `fp8_quantize_128x128`.
        dtype: the dtype in which the values are kept between the two quantizations. torch.float32 tries 2^23 amaxes,
            from 1 up to 2; torch.bfloat16 tries 128.
        **options: `scale_format` of an FP8 op; `elem_dtype` and, for the contract, `scaling` of `mx_quantize`.

    Returns:
        The number of blocks tried, of moved scales and of moved largest values, and the first amax whose scale moves.

    Raises:
        AttributeError: no peer has this name.
        NotImplementedError: the peer has no rule for the op, or none of this kind.
        TypeError: dtype is another dtype, or the op has no such option.
        ValueError: op is another op.

    Example:
        >>> fixed_points("deepseek", "fp8_quantize_128x128", dtype=torch.bfloat16)
        RoundTrips(blocks=128, scales=0, values=0, first=None)

    Source: mxspec; the rules are those of the peers' files.
    """
    return _fixed_points(None if peer == _CONTRACT else __getattr__(peer), op, dtype, options)


def explaining(op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], got: Any) -> list[str]:
    """The rules that give exactly these outputs for a call: the op's own, called `contract`, and the peers'.

    Any NaN equals any NaN. The function first tries each peer with the options of the call, then with the peer's other
    rules, which it names: `torchao, scaling='floor'`.

    >>> import mxspec
    >>> tiny, odd = torch.full((1, 32), 2.0**-126), torch.full((1, 32), 257.0)
    >>> mxspec.rules.explaining("mx_quantize", (tiny,), {}, mxspec.rules.torchao_0_18.mx_quantize(tiny))
    ['torchao_0_18', 'torchao_0_18_triton']
    >>> mxspec.rules.explaining("mx_quantize", (odd,), {}, mxspec.mx_quantize(odd, scaling="ceil"))
    ["contract, scaling='ceil'", "torchao, scaling='ceil'", "torchao_0_18, scaling='ceil'"]
    """
    return _one_each(_explaining(op, args, kwargs, got))


def _explaining(op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], got: Any) -> list[str]:
    """The same, with every rule of a peer that fits."""
    if not isinstance(args, tuple):
        raise TypeError(f"explaining: args is a {type(args).__name__}; needs a tuple")
    dispatch.reference(op)  # raises if no op has this name
    outputs = outputs_of(got)
    rules = (rule for source in (_CONTRACT, *peers()) for rule in _rules(op, source, kwargs))
    return [name for name, rule in rules if _same(_outputs(rule, *args), outputs)]


def _one_each(names: list[str]) -> list[str]:
    """The first rule of each peer."""
    first: dict[str, str] = {}
    for name in names:
        first.setdefault(name.partition(",")[0], name)
    return list(first.values())


def report(op: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Say whose rule a quantizer follows, on a call's own inputs and on the recorded probe blocks.

    The report is one sentence. A rule that explains both is named alone. Otherwise the sentence names the rules for
    each.
    """
    reference = dispatch.reference(op)
    numeric = {name: value for name, value in kwargs.items() if name in _NUMERIC}
    blocks = _blocks(op, numeric)
    try:
        result = outputs_of(call(*args, **kwargs))
        # A block that the call refuses, for example because of its dtype, is no evidence.
        got = [_outputs(call, *probe.args(args[0].device), **numeric) for probe in blocks]
    except Exception:  # the failure is already reported; this only looks for its origin
        return None
    # A call may be right on its inputs and wrong on views of them. If it is right, no rule needs to explain it.
    on_case = _explaining(op, args, kwargs, result)
    if right := _CONTRACT in on_case:
        on_case = []
    leaving = [
        probe.name
        for probe, outputs in zip(blocks, got, strict=True)
        if outputs and not _same(_outputs(reference, *probe.args(), **numeric), outputs)
    ]
    on_probes = [
        name
        for source in (_CONTRACT, *peers())
        for name, theirs in _on_probes(op, source, tuple(numeric.items()))
        # A block that the peer refuses is no evidence. But if the call leaves the contract on such a block, this rule
        # cannot explain it.
        if leaving
        and all(
            probe.name not in leaving if t is None else _same(t, g)
            for probe, t, g in zip(blocks, theirs, got, strict=True)
            if g
        )
    ]
    if both := [name for name in on_case if name in on_probes]:
        on_case = on_probes = both
    on_case, on_probes = _one_each(on_case), _one_each(on_probes)
    named = ", ".join(leaving[:4]) + (", ..." if len(leaving) > 4 else "")
    left = "what was asked for" if any(name.startswith(_CONTRACT) for name in on_case + on_probes) else "the contract"
    tried = len([outputs for outputs in got if outputs])
    where = f"{tried} probe blocks, and differ from {left} on {len(leaving)} of them ({named})"
    case = f"{_titles(on_case)} on this case"
    if both:
        return f"your bytes are {case} and on all {where}"
    if not leaving:
        return f"your bytes are {case}, and the contract's on all {tried} probe blocks" if on_case else None
    here = f"{case}, but " if on_case else ""
    if not on_probes:
        return f"your bytes are {here}no known peer's rule on the {where}"
    nobodys = "" if on_case or right else "; on this case they are no known peer's"
    return f"your bytes are {here}{_titles(on_probes)} on all {where}{nobodys}"


def _rules(op: str, source: str, kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield what a peer does with an op, by name: first as the call asks, then by each other recorded rule of the peer.

    The contract has the rules that the op's cases ask for. Rules that differ from the call in fewer options come first.
    """
    function: Callable[..., Any] | None
    if source == _CONTRACT:
        reference = dispatch.reference(op)
        # An op in place would change the inputs.
        function, recorded = None if reference.spec.in_place else reference, _options(op)
    else:
        module = __getattr__(source)
        function = getattr(module, op, None)
        recorded = [options for section in module.RECORDED.values() for options in section.values()]
    if function is None:
        return
    yield source, functools.partial(function, **kwargs)
    asked = {name: p.default for name, p in inspect.signature(function).parameters.items()} | dict(kwargs)
    known = [options for options in recorded if options.keys() <= asked.keys()]
    others = [{name: value for name, value in options.items() if asked[name] != value} for options in known]
    for other in sorted({tuple(o.items()): o for o in others if o}.values(), key=len):
        said = ", ".join(f"{name}={value!r}" for name, value in other.items())
        yield f"{source}, {said}", functools.partial(function, **{**kwargs, **other})


@functools.cache
def _options(op: str) -> list[dict[str, Any]]:
    """The rules that an op's cases ask for: all combinations of the values of its options."""
    reference = dispatch.reference(op)
    parameters = inspect.signature(reference).parameters
    values = {name: {parameters[name].default: None} for name in _RULES if name in parameters}
    for case in reference.spec.cases():
        for name in values.keys() & (() if case.raises else case.kwargs.keys()):
            values[name][case.kwargs[name]] = None
    return [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())]


def _outputs(rule: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Tensor, ...] | None:
    """The outputs of a rule; None if the peer does not support the call."""
    try:
        return outputs_of(rule(*args, **kwargs))
    except (NotImplementedError, ValueError, TypeError):
        return None


@functools.cache  # each failing case asks for a report
def _on_probes(
    op: str, source: str, numeric: tuple[tuple[str, Any], ...]
) -> list[tuple[str, list[tuple[Tensor, ...] | None]]]:
    """The outputs of each rule of a peer, or of the contract, for the probe blocks."""
    blocks = _blocks(op, dict(numeric))
    return [
        (name, [_outputs(rule, *probe.args()) for probe in blocks]) for name, rule in _rules(op, source, dict(numeric))
    ]


def _blocks(op: str, numeric: Mapping[str, Any]) -> list[Probe]:
    """The probe blocks for an op and its element format, without those that a peer reads by chance."""
    section = dispatch.reference(op).spec.peer_rules
    if not section:
        return []
    options = {"block": numeric.get("block", "1x16")}
    found = probes(section, numeric.get("elem_dtype", torch.float8_e4m3fn))
    return [p for p in found if not p.options or (p.options == options and all(o[-1] for o in p.recorded.values()))]


def _same(ours: tuple[Tensor, ...] | None, theirs: tuple[Tensor, ...]) -> bool:
    """Whether shapes, dtypes and bytes are equal; any NaN equals any NaN."""
    return ours is not None and len(ours) == len(theirs) and all(map(_same_bytes, ours, theirs))


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    return (a.shape, a.dtype) == (b.shape, b.dtype) and bool(same_bits(a, b.to(a.device)).all())


def _titles(names: list[str]) -> str:
    def title(name: str) -> str:
        source, _, options = name.partition(", ")
        if source == _CONTRACT:
            return f"the contract's own with {options}"
        return f"{__getattr__(source).NAME}'s (rules.{name})"

    return ", ".join(map(title, names))
