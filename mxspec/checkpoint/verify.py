"""Compare two checkpoints, or a live module and a checkpoint: are the values equal, or did a rule make A from B?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mxspec.checkpoint.fused import layer_of
from mxspec.checkpoint.schemes import SCHEMES, strips
from mxspec.checkpoint.sides import Weight, weights
from mxspec.checkpoint.which_rule import names, rules_of
from mxspec.formats import INT_OF_BYTES

EQUAL, MADE, DIFFERS, MISSING = "equal", "made by a rule", "differs", "missing"


@dataclass(frozen=True)
class Finding:
    """What `verify` found out about one tensor.

    Attributes:
        name: the module of a weight, or the name of another tensor.
        status: `equal`, `made by a rule`, `differs` or `missing`.
        rules: the rules that make exactly the codes and scales of A from the values of B.
        detail: where the sides differ first, with both values in hex, or where the tensor is missing.
    """

    name: str
    status: str
    rules: tuple[str, ...] = ()
    detail: str = ""


@dataclass
class Verdict:
    """What `verify` found.

    Attributes:
        findings: one for each tensor.
        rules: the rules that explain every tensor that is `made by a rule`; empty if no single rule explains them all.
    """

    findings: list[Finding] = field(default_factory=list)

    @property
    def rules(self) -> tuple[str, ...]:
        made = [set(f.rules) for f in self.findings if f.status == MADE]
        common = set.intersection(*made) if made else set()
        return tuple(name for name in names() if name in common)

    @property
    def ok(self) -> bool:
        """Whether every tensor is equal, or made by one rule."""
        wrong = any(f.status in (DIFFERS, MISSING) for f in self.findings)
        return not wrong and (bool(self.rules) or not any(f.status == MADE for f in self.findings))

    def __str__(self) -> str:
        counts = {status: sum(f.status == status for f in self.findings) for status in (EQUAL, MADE, DIFFERS, MISSING)}
        plural = {DIFFERS: "differ"}
        said = ", ".join(
            f"{count} {status if count == 1 else plural.get(status, status)}"
            for status, count in counts.items()
            if count
        )
        if counts[MADE]:
            said += f"; the rule: {', '.join(self.rules) or 'no single one'}"
        return said


def verify(
    a: Any,
    b: Any,
    *,
    as_loaded: str | None = None,
    progress: Callable[[Sequence[str]], Iterable[str]] = lambda names: names,
) -> Verdict:
    """Say for each tensor whether A has the same bits as B, or which rule quantizes B to exactly A.

    Two quantized weights are compared by `fp32(q * scale)`. If one has NVFP4's tensor scale as a divisor and the other
    one as a multiplier, both values are computed with the number by which engines multiply. A quantized and a plain
    weight are compared in the dtype of the plain weight, as a loader would store it. If the values differ and A is
    quantized, the function looks for a rule that makes the codes and scales of A from the values of B. It tries the
    rules of `mxspec.rules`, and the requantization of vLLM and SGLang. A rule for NVFP4 gets the largest magnitude of
    the weight, or of all plain weights of B that engines fuse with it.

    A layer of mxspec in a live module is compared by the codes that its forward computes with, if the other side has
    codes of the same scheme: then a checkpoint that `save` wrote is equal to the module.

    Args:
        a: a directory, a safetensors file, or a live `torch.nn.Module`.
        b: the same.
        as_loaded: `vllm`, `sglang` or `transformers`: compare A as that loader changes it.
        progress: wraps the list of names, as `mxspec.console.progress` does.

    Returns:
        A `Verdict`: `ok`, `rules`, and a `Finding` for each tensor.

    Raises:
        CheckpointError: a side cannot be read as a checkpoint.
        ValueError: as_loaded has another value, or A is a module and as_loaded is given.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(128, 128)
        >>> print(verify(layer, layer))
        2 equal

    Source: mxspec.
    """
    mine, theirs = weights(a, as_loaded), weights(b)
    found = Verdict()
    plain = {name: weight for name, weight in theirs.items() if weight.blocks is None}
    for name in progress(list(dict.fromkeys((*mine, *theirs)))):
        if name not in mine or name not in theirs:
            found.findings.append(Finding(name, MISSING, detail=f"in {'A' if name not in mine else 'B'}"))
        else:
            layer = [plain[other] for other in layer_of(name) if other in plain]
            found.findings.append(_compared(name, mine.pop(name), theirs.pop(name), layer))
    return found


def _compared(name: str, a: Weight, b: Weight, layer: Sequence[Weight]) -> Finding:
    """A layer of mxspec agrees with a file of the values of its codes, and with one that a rule made of its weight."""
    x, y = a.computed(b), b.computed(a)
    if x is None and y is None:
        return _compare(name, a, b, layer)
    found = _compare(name, x or a, y or b, layer)
    return found if found.status == EQUAL or x is not None else _compare(name, a, b, layer)


def _compare(name: str, a: Weight, b: Weight, layer: Sequence[Weight]) -> Finding:
    if a.shape != b.shape:
        return Finding(name, DIFFERS, detail=f"in shape: A is {a.shape}, B is {b.shape}")
    dtype = torch.float32
    if a.blocks is None or b.blocks is None:
        dtype = a.dtype if a.blocks is None else b.dtype
        if a.blocks is None and b.blocks is None and a.dtype != b.dtype:
            return Finding(name, DIFFERS, detail=f"in dtype: A is {a.dtype}, B is {b.dtype}")
    of_a, of_b = a.rows, b.rows
    if a.multiplied and b.multiplied and a.divides != b.divides:
        of_a, of_b = a.multiplied, b.multiplied
    for rows in _strips(a.shape):
        x, y = (values(rows).to(dtype) for values in (of_a, of_b))
        bits = INT_OF_BYTES[dtype.itemsize]
        unequal = x.contiguous().view(bits) != y.contiguous().view(bits)
        if bool(unequal.any()):
            made = rules_of(a, b, layer) if a.blocks is not None and len(a.shape) == 2 else ()
            if made:
                return Finding(name, MADE, made)
            exchange = "; to ask which rule made B from A, exchange them" if a.blocks is None and b.blocks else ""
            return Finding(name, DIFFERS, detail=_first(a, b, rows, unequal, x, y) + exchange)
    return Finding(name, EQUAL)


def _strips(shape: tuple[int, ...]) -> Iterable[slice]:
    return strips(shape[0]) if shape else [slice(None)]


def _first(a: Weight, b: Weight, rows: slice, unequal: Tensor, x: Tensor, y: Tensor) -> str:
    """The first differing element, its block, and both values in hex."""
    at = [int(i) for i in unequal.nonzero()[0]] if unequal.ndim else []
    place = (at[0] + (rows.start or 0), *at[1:]) if at else ()
    height, width = next((SCHEMES[s.blocks().scheme].block for s in (a, b) if s.blocks), (128, 128))
    block = f"in block ({place[0] // height}, {place[1] // width}), " if len(place) == 2 else "in "
    count = int(unequal.sum())
    values = " and ".join(f"{side} {_hex(t[tuple(at)])}" for side, t in (("A", x), ("B", y)))
    differ, n = "differs" if count == 1 else "differ", x.shape[0] if x.ndim else 1
    return f"{block}element {place}: {values}; {count} {differ} in {'this row' if n == 1 else f'these {n} rows'}"


def _hex(value: Tensor) -> str:
    size = value.dtype.itemsize
    bits = int(value.contiguous().view(INT_OF_BYTES[size]).item()) & ((1 << 8 * size) - 1)
    return f"0x{bits:0{2 * size}x} ({value.item():.6g})"
