"""Facts about calls, and the pairs of facts that the cases of an op show.

A bug of a kernel usually needs one or two facts together, such as more than 32 experts, or a NaN in a transposed input.
A case shows all pairs of its facts. A pair that no valid case shows is a blind spot of the judge: a candidate that is
wrong only for this pair passes. Facts are measured on the tensors of a call. Nothing here names an op.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mxspec import cases, dispatch
from mxspec.formats import BY_DTYPE, E2M1, E8M0FNU, INT_OF_BYTES, MX_BLOCK_SIZE
from mxspec.spec import Case

# Sizes are compared with these numbers, because lanes, blocks, tiles and grids of kernels end at powers of two.
THRESHOLDS = (8, 32, 256, 1024, 4096)


class Fact(NamedTuple):
    """One property of a call: its name, `about`, and its value. Two facts with the same `about` make no pair."""

    about: str
    value: str

    def __str__(self) -> str:
        return f"{self.about} {self.value}"


Pair = frozenset[Fact]


def facts_of(op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> frozenset[Fact]:
    """The facts of one call."""
    signature = inspect.signature(dispatch.reference(op))
    found = set[Fact]()
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            found.add(Fact(name, f"= {kwargs[name]}" if name in kwargs else "not given"))
        elif parameter.default is None and len(args) <= list(signature.parameters).index(name):
            found.add(Fact(name, "not given"))
    for position, (name, value) in enumerate(zip(signature.parameters, args, strict=False)):
        if name.startswith("tensor_") or name.endswith("_tensor_scale"):
            found |= set(_of_matrices(name, value))
        elif name.endswith("_scale") and value is None:  # the operand beside it holds values
            continue
        elif position and name.endswith("scale"):
            found |= set(_beside(name, value, args[position - 1]))
            if dispatch.reference(op).spec.inf_is_free:  # the op does not specify results that depend on an Inf
                found -= {Fact(f"{name}.{sign}Inf", "somewhere") for sign in "+-"}
        elif not isinstance(value, Tensor):
            found |= {Fact(name, text) for text in _number(value, beside_groups="offs" in signature.parameters)}
        elif value.dtype == torch.int32 and value.ndim == 1:
            found |= set(_offsets(name, value, cases.tokens(op, dict(zip(signature.parameters, args, strict=False)))))
        elif args[position + 1 : position + 2] == (None,) and f"{name}_scale" in signature.parameters:
            found |= set(_tensor(name, value, False, moved=True)) | set(_unscaled(name, value))
        else:
            of_tensor = set(_tensor(name, value, cases.across(op, kwargs), cases.moves_bytes(op)))
            if value.dtype == torch.bfloat16 and dispatch.reference(op).spec.min_sqnr_db != math.inf:
                of_tensor = {
                    fact for fact in of_tensor
                    if fact.about.partition(".")[2] not in _OF_CASTS and not fact.value.startswith("in the ")
                }  # fmt: skip
            found |= of_tensor
    spec = dispatch.reference(op).spec
    if spec.in_place and spec.min_sqnr_db != math.inf:  # a sum in place: its sizes follow from the operands' sizes
        first = next(iter(signature.parameters))
        found = {fact for fact in found if fact.about not in {f"{first}.{what}" for what in _NOT_OF_SUMS}}
    told = cases.told_before(op)
    return frozenset(fact for fact in found if fact.about not in told)


# A matmul casts no operand. Facts of a bfloat16 operand that matter to a cast alone.
_OF_CASTS = ("tie of e4m3fn", "tie of e5m2", "block", "saturating block", "-0", "subnormal", "largest", "negative")
_NOT_OF_SUMS = ("experts", "rows", "cols", "rank", "tie of e4m3fn", "tie of e5m2", "block", "saturating block")


def _number(n: int, beside_groups: bool) -> Iterator[str]:
    """A number that is a size. In a call with token groups it counts rows, so only zero or not matters."""
    if not beside_groups:
        yield from _size(n)
    else:
        yield "= 0" if n == 0 else "> 0"


def _size(n: int, thresholds: tuple[int, ...] = THRESHOLDS, divided: bool = True) -> Iterator[str]:
    if n < 2:
        yield f"= {n}"
    yield from (f"> {limit}" for limit in thresholds if n > limit)
    if not divided:
        return
    if n % 2:
        yield "odd"
    elif n and n % 16 == 0:
        yield "a multiple of 128" if n % 128 == 0 else "a multiple of 16"


def _tensor(name: str, t: Tensor, across: bool, moved: bool) -> Iterator[Fact]:
    yield Fact(f"{name}.dtype", str(t.dtype).removeprefix("torch."))
    dims = {1: ("length",), 2: ("rows", "cols"), 3: ("experts", "rows", "cols")}[t.ndim]
    for dim, size in zip(dims, t.shape, strict=True):
        of_matrix = dim != "experts"  # the number of experts sets the size of a grid, never of a tile
        yield from (
            Fact(f"{name}.{dim}", text) for text in _size(size, THRESHOLDS if of_matrix else THRESHOLDS[:3], of_matrix)
        )
    if len(dims) > 1:
        yield Fact(f"{name}.rank", str(len(dims)))
    if not t.numel():
        return
    if t.ndim > 1 and t.shape[-2] == t.shape[-1] > 1:
        yield Fact(f"{name}.shape", "square")
    yield from (Fact(f"{name}.strides", text) for text in _strides(t))
    yield Fact(f"{name}.begins", _begins(t))
    if t.is_neg():
        yield Fact(f"{name}.sign", "of a negated view")
    if moved:
        return
    values = t.resolve_neg().mT if across and t.ndim > 1 else t.resolve_neg()
    if t.dtype == E8M0FNU.dtype:
        yield from _bytes(name, t)
    elif t.dtype in BY_DTYPE:
        yield from (Fact(f"{name}.{what}", "somewhere") for what in _codes(values))
    elif t.dtype.is_floating_point:
        yield from _floats(name, values)


def _beside(name: str, scale: Tensor | None, codes: Tensor) -> Iterator[Fact]:
    """The facts of a scale that belongs to codes. Its sizes follow from the sizes of the codes."""
    if scale is None or not scale.numel():
        return
    yield from (Fact(f"{name}.strides", text) for text in _strides(scale))
    yield Fact(f"{name}.begins", _begins(scale))
    if scale.dtype == E8M0FNU.dtype:
        yield from _bytes(name, scale)
        return
    if scale.dtype != torch.float32:  # e4m3fn, whose blocks lie along a row
        scale = scale.float()
    elif codes.shape[-2] > 1:
        yield Fact(f"{name}.blocks", "of one row" if scale.shape[-2] in codes.shape[-2:] else "of 128 rows")
    kinds = {
        "NaN": scale.isnan(),
        "+Inf": scale == torch.inf,
        "-Inf": scale == -torch.inf,
        "-0": scale.view(torch.int32) == torch.iinfo(torch.int32).min,
        "zero": scale.view(torch.int32) == 0,
        "subnormal": (scale != 0) & (scale.abs() < torch.finfo().smallest_normal),
        "negative": (scale < 0) & scale.isfinite(),
    }
    yield from (Fact(f"{name}.{kind}", "somewhere") for kind, where in kinds.items() if where.any())


def _of_matrices(name: str, t: Tensor | None) -> Iterator[Fact]:
    """The facts of a tensor that holds one number for each matrix. Its size follows from the stack of matrices."""
    if t is None or not t.numel():
        return
    if t.numel() > 1:
        yield Fact(f"{name}.strides", {1: "dense", 0: "one repeated"}.get(t.stride(0), "apart"))
    yield Fact(f"{name}.begins", _begins(t))
    ordinary = t.isfinite() & (t >= torch.finfo().smallest_normal)
    if not ordinary.all():
        yield Fact(f"{name}.values", "some zero, subnormal, negative, NaN or Inf")


def _begins(t: Tensor) -> str:
    offset = t.storage_offset() * t.element_size()
    return "at 0" if not offset else "between words" if offset % 16 else "at a later word"


def _bytes(name: str, scale: Tensor) -> Iterator[Fact]:
    codes = scale.view(torch.uint8)
    yield from (Fact(f"{name}.byte {byte}", "somewhere") for byte in (0, 127, 254, 255) if (codes == byte).any())


def _strides(t: Tensor) -> Iterator[str]:
    """How a tensor lies in memory. The stride of a dimension with one element has no meaning and is ignored."""
    many = [(dim, stride) for dim, size, stride in zip(range(-t.ndim, 0), t.shape, t.stride(), strict=True) if size > 1]
    names = {-1: "column", -2: "row", -3: "expert"}
    repeated = [names[dim] for dim, stride in many if stride == 0]
    yield from (f"one {name} repeated" for name in repeated)
    if repeated or not many:
        return
    order = [dim for dim, _ in sorted(many, key=lambda found: -found[1])]
    if order != sorted(order):
        if order[0] != -3 and any(dim == -3 for dim in order):
            yield "experts inside the rows"
        else:
            yield "column-major"
    elif t.is_contiguous():
        yield "row-major"
    elif many[-1][1] != 1:
        yield f"{names[many[-1][0]]}s apart"
    else:
        yield "experts apart" if t.ndim == 3 and t[0].is_contiguous() else "rows apart"


def _codes(t: Tensor) -> Iterator[str]:
    """The special codes of an element format that a tensor holds."""
    fmt = BY_DTYPE[t.dtype]
    bits = t.view(torch.uint8)
    if fmt is E2M1:
        bits = torch.stack([bits & 15, bits >> 4])
    sign = 1 << (fmt.bits - 1)
    if ((bits & (sign - 1)) == 0).all(-1).any():
        yield "row of zeros"
    bits = bits.flatten().bincount().nonzero()  # every code that occurs, once
    largest, magnitude = fmt.largest_code, bits & (sign - 1)
    if fmt.twos_complement:
        if (bits == largest).any():
            yield "largest"
        return
    kinds = {
        "NaN": (magnitude > largest) & (magnitude != (fmt.inf_code or 0)) & (bits < sign),
        "-NaN": (magnitude > largest) & (magnitude != (fmt.inf_code or 0)) & (bits >= sign),
        "+Inf": (magnitude == fmt.inf_code) & (bits < sign) if fmt.inf_code else bits < 0,
        "-Inf": (magnitude == fmt.inf_code) & (bits >= sign) if fmt.inf_code else bits < 0,
        "-0": bits == sign,
        "subnormal": (magnitude > 0) & (magnitude < 1 << fmt.mantissa_bits),
        "largest": magnitude == largest,
    }
    yield from (kind for kind, where in kinds.items() if where.any())


def _unscaled(name: str, t: Tensor) -> Iterator[Fact]:
    """The facts of a matrix of numbers that stands in place of codes with scales."""
    kinds = {
        "NaN": t.isnan() & ~t.signbit(),
        "-NaN": t.isnan() & t.signbit(),
        "+Inf": t == torch.inf,
        "-Inf": t == -torch.inf,
        "-0": (t == 0) & t.signbit(),
        "subnormal": (t != 0) & (t.abs() < torch.finfo(t.dtype).smallest_normal),
        "row of zeros": (t == 0).all(-1) if t.numel() else t == 0,
    }
    yield from (Fact(f"{name}.{kind}", "somewhere") for kind, where in kinds.items() if where.any())


def _floats(name: str, t: Tensor) -> Iterator[Fact]:
    """The special values that a tensor holds. For NaN, also whether it is the first or the last element."""
    bits = t.reshape(-1, t.shape[-1]).view(INT_OF_BYTES[t.element_size()])
    kinds = {"NaN": t.isnan(), "+Inf": t == torch.inf, "-Inf": t == -torch.inf}
    for kind, where in kinds.items():
        if where.any():
            found = where.reshape(-1)
            yield Fact(f"{name}.{kind}", "somewhere")
            if kind == "NaN":
                yield from (Fact(f"{name}.NaN", f"in the {end} element") for end, i in _ENDS.items() if found[i])
    if not any(where.any() for where in kinds.values()):
        yield Fact(f"{name}.values", "all finite")
    x, finfo = t.float().reshape(-1, t.shape[-1]), torch.finfo(t.dtype)
    word = x.contiguous().view(torch.int32)
    sign = torch.iinfo(bits.dtype).min
    simple = {
        "-0": bits == sign,
        "subnormal": (x != 0) & (x.abs() < finfo.smallest_normal),
        "largest": x.abs() == finfo.max,
        "negative": x < 0,
        "tie of e4m3fn": (word & 0xFFFFF) == 0x80000,
        "tie of e5m2": (word & 0x1FFFFF) == 0x100000,
    }
    yield from (Fact(f"{name}.{kind}", "somewhere") for kind, where in simple.items() if where.any())
    whole = x.shape[-1] // MX_BLOCK_SIZE * MX_BLOCK_SIZE
    amax = x[:, :whole].unflatten(-1, (-1, MX_BLOCK_SIZE)).abs().amax(-1) if whole else x.new_ones(1)
    if (amax == 0).any():
        yield Fact(f"{name}.block", "of zeros")
    if (amax.isfinite() & ((amax.view(torch.int32) & 0x7FFFFF) > 0x600000)).any():
        yield Fact(f"{name}.saturating block", "somewhere")


_ENDS = {"first": 0, "last": -1}


def _offsets(name: str, t: Tensor, tokens: int | None) -> Iterator[Fact]:
    """How the token groups of `offs` are arranged. `start` has the same dtype and rank; only its order matters."""
    if name == "offs":
        yield from (Fact(f"{name}.groups", text) for text in _size(len(t), THRESHOLDS[:3]))
    if not len(t):
        return
    if len(t) > 1:
        yield Fact(f"{name}.strides", {1: "dense", 0: "one repeated"}.get(t.stride(0), "apart"))
    yield Fact(f"{name}.begins", "at 0" if not t.storage_offset() else "later")
    if name != "offs":
        yield Fact(f"{name}.order", "rising" if (t.diff() >= 0).all() else "mixed")
        yield Fact(f"{name}.first", "at 0" if t[0] == 0 else "later")
        return
    sizes = t.diff(prepend=t.new_zeros(1)).tolist()
    for where, size in (("first", sizes[0]), ("last", sizes[-1])):
        if size == 0:
            yield Fact(f"{name}.{where} group", "empty")
    if 0 in sizes[1:-1]:
        yield Fact(f"{name}.inner group", "empty")
    if 1 in sizes:
        yield Fact(f"{name}.some group", "of one token")
    if max(sizes) > 0:
        yield Fact(f"{name}.tokens", "all to one" if len(sizes) > 1 and sizes.count(0) == len(sizes) - 1 else "spread")
        yield Fact(f"{name}.sizes", "multiples of 128" if not any(size % 128 for size in sizes) else "ragged")
    else:
        yield Fact(f"{name}.tokens", "in no group")
    if tokens is not None:
        yield Fact(f"{name}.rest", "tokens past the last group" if sum(sizes) < tokens else "none")


def pairs(facts: Iterable[Fact]) -> Iterator[Pair]:
    """All pairs of facts about different properties. "square" pairs only with the axis: nothing else depends on it."""
    for one, other in itertools.combinations(sorted(facts), 2):
        square = "square" in (one.value, other.value)
        if one.about != other.about and (not square or "axis" in (one.about, other.about)):
            yield frozenset((one, other))


class Coverage(NamedTuple):
    """The pairs of an op's facts: which pairs its valid cases show, which are impossible, and which are missing."""

    facts: tuple[Fact, ...]
    shown: dict[Pair, str]  # pair -> the name of the smallest case that shows it
    impossible: dict[Pair, str]  # pair -> why no call can show it
    missing: tuple[Pair, ...]


def coverage(op: str, chosen: Callable[[Case], bool] = lambda case: True) -> Coverage:
    """Measure the valid cases of an op, except cases with more than 2^31 elements."""
    shown: dict[Pair, tuple[int, str]] = {}
    seen = set[Fact]()
    for case in dispatch.reference(op).spec.cases():
        if case.raises or "large" in case.flags or not chosen(case):
            continue
        args = case.args()
        found = facts_of(op, args, case.kwargs)
        size = sum(a.untyped_storage().nbytes() for a in args if isinstance(a, Tensor))
        seen |= found
        for pair in pairs(found):
            shown[pair] = min(shown.get(pair, (size, case.name)), (size, case.name))
    impossible, missing = {}, []
    for pair in pairs(seen):
        if pair not in shown:
            reason = cases.why_not(op, pair)
            if reason:
                impossible[pair] = reason
            else:
                missing.append(pair)
    names = {pair: name for pair, (_, name) in shown.items()}
    return Coverage(tuple(sorted(seen)), names, impossible, tuple(missing))
