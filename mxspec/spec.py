"""What an op promises: its cases, how it is judged, what it costs.

`@spec(...)` stands on the reference function of an op and makes it the declaration that the switch, the
conformance engine, the benchmarks and the command line read. It changes nothing about the function.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ParamSpec, Protocol, TypeVar, overload

import torch
from torch import Tensor

from mxspec.formats import BY_DTYPE, INT_OF_BYTES
from mxspec.shapes import Shapes

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
MinSqnr = float | Mapping[torch.dtype, float]  # in dB, for every output or by its dtype


@dataclass(frozen=True)
class Case:
    """One named call of an op.

    `args` builds the positional arguments, tensors on the CPU, the same ones at every call. A case with
    `raises` is one that must be refused, with that type and with `match` in the message.
    Flags: `edge`, a value or shape at a limit of the contract; `invalid`, must be refused (set by itself);
    `large`, more than 2^31 elements: shapes are checked everywhere, bytes where the memory is there.
    """

    name: str
    args: Callable[[], tuple[Any, ...]]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    raises: type[Exception] | None = None
    match: str = ""
    flags: Collection[str] = ()

    def __post_init__(self) -> None:
        implied = frozenset({"invalid"}) if self.raises else frozenset()
        object.__setattr__(self, "flags", frozenset(self.flags) | implied)


@dataclass(frozen=True)
class Gradient:
    """How gradients flow through an op.

    `save(args, outputs)` gives what the backward needs, tensors or numbers, and `backward(saved, gradients, backend)`
    gives a gradient, or None, for each argument, from one, or None, for each output. It calls ops as
    `torch.ops.mxspec.<op>(..., backend=backend)`: the backend that ran forward, which a backward, on a thread of its
    own, could not know.
    """

    save: Callable[[tuple[Any, ...], tuple[Tensor, ...]], tuple[Any, ...]]
    backward: Callable[[tuple[Any, ...], tuple[Tensor | None, ...], str], tuple[Tensor | None, ...]]


@dataclass(frozen=True)
class Spec:
    """The promises of one op, read off its `@spec`."""

    cases: Callable[[], Iterable[Case]]
    check_args: Callable[..., None]
    min_sqnr_db: MinSqnr
    bytes_moved: Callable[[tuple[Any, ...], tuple[Tensor, ...]], int]
    flops: Callable[[tuple[Any, ...], tuple[Tensor, ...]], int]
    peer_rules: str | None
    bench_cases: Callable[[Shapes], Iterable[Case]]
    gradient: Gradient | None
    inf_is_free: bool
    in_place: bool  # it returns None, and changes its first argument

    def outputs(self, args: tuple[Any, ...], result: Any) -> tuple[Tensor, ...]:
        """The outputs of a call; of an op in place what it changed, and then nothing else is to be returned."""
        if not self.in_place:
            return outputs_of(result)
        return args[:1] if result is None else (args[0], *outputs_of(result))

    def own(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments for one call: of what an op changes in place a copy, with all the memory that it is a view of."""
        if not self.in_place:
            return args
        t = args[0]
        storage = t.untyped_storage().clone()
        copy = torch.empty(0, dtype=t.dtype, device=t.device)
        return copy.set_(storage, t.storage_offset(), t.shape, t.stride()), *args[1:]


class Reference(Protocol[P, R_co]):
    """A reference function, and, behind the switch, the public op of the same name."""

    spec: Spec
    __name__: str

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    @overload
    def __call__(self, *args: Any, backend: str | None, **kwargs: Any) -> R_co: ...


def answer_of(reference: Reference[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """The outputs of a reference; an op in place works on a copy, so the arguments stay as they are."""
    own = reference.spec.own(args)
    return reference.spec.outputs(own, reference(*own, **kwargs))


def bytes_of(args: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> int:
    """Every tensor argument read once, every output written once."""
    return sum(t.numel() * t.element_size() for t in (*args, *outputs) if isinstance(t, Tensor))


def per_element(operations: int) -> Callable[[tuple[Any, ...], tuple[Tensor, ...]], int]:
    """Flops of an op that does `operations` for each element of its first argument; conversions are not counted."""

    def flops(args: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> int:
        fmt = BY_DTYPE.get(args[0].dtype)
        return operations * args[0].numel() * (fmt.per_byte if fmt else 1)

    return flops


def spec(
    *,
    check_args: Callable[..., None],
    min_sqnr_db: MinSqnr = math.inf,
    bytes_moved: Callable[[tuple[Any, ...], tuple[Tensor, ...]], int] = bytes_of,
    flops: Callable[[tuple[Any, ...], tuple[Tensor, ...]], int] = lambda args, outputs: 0,
    peer_rules: str | None = None,
    gradient: Gradient | None = None,
    inf_is_free: bool = False,
) -> Callable[[Callable[P, R]], Reference[P, R]]:
    """Declare an op on its reference function; one annotated to return None changes its first argument in place.

    Its cases, and the calls that are worth timing, are `cases` and `bench_cases` of `mxspec/cases/<op>.py`.

    Args:
        check_args: takes the op's arguments and raises for what the contract refuses; the switch calls
            it before any kernel, so that every backend raises the same error.
        min_sqnr_db: the smallest signal-to-quantization-noise ratio against the reference, in dB, or one for each
            dtype of an output; `inf`, the default, means equal bytes, with NaN compared as a class.
        bytes_moved, flops: of one call, from its arguments and outputs; for the benchmarks.
        peer_rules: the section of `rules/peers.json` with blocks for this op; `mxspec.rules` has what peers do.
        gradient: how gradients flow; without it, asking for one raises.
        inf_is_free: whether an output that an Inf among the operands reaches may be Inf of either sign or NaN.
    """

    def declare(fn: Callable[P, R]) -> Reference[P, R]:
        def cases() -> Iterable[Case]:
            return importlib.import_module("mxspec.cases").every_case(fn)  # which imports references

        def bench_cases(shapes: Shapes) -> Iterable[Case]:
            return importlib.import_module("mxspec.cases").bench_cases(fn.__name__, shapes)

        check_args.__qualname__ = fn.__name__  # it is the first to meet a misspelt argument, and names the op then
        in_place = fn.__annotations__.get("return", "") in (None, "None")
        costs = min_sqnr_db, bytes_moved, flops
        declared = Spec(cases, check_args, *costs, peer_rules, bench_cases, gradient, inf_is_free, in_place)
        fn.spec = declared  # type: ignore[attr-defined]
        return fn  # type: ignore[return-value]  # now it has the attribute that the protocol asks for

    return declare


def given(make: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Callable[[], tuple[Tensor]]:
    """A case's arguments: the one tensor that `make(*args, **kwargs)` gives when the case is run."""
    return lambda: (make(*args, **kwargs),)


def these(*args: Any) -> Callable[[], tuple[Any, ...]]:
    """A case's arguments, ready made; for small ones."""
    return lambda: args


def outputs_of(result: Any) -> tuple[Tensor, ...]:
    """The outputs of an op as a tuple, one or many."""
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def random_bits(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Every bit pattern equally likely: all exponents, subnormals, both zeros, Inf and NaN."""
    store = INT_OF_BYTES[dtype.itemsize]
    bits = torch.iinfo(store)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(bits.min, bits.max + 1, shape, generator=generator, dtype=torch.int64).to(store).view(dtype)


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Nearly normal fp32 of mean 0 and variance 1, within -3..3, the same bits on every machine.

    The sum of three uniform integers of 21 bits has the variance 2^40, and 24 bits hold it: nothing is rounded.
    torch.randn takes logarithms and cosines, whose last bits differ from one kind of CPU to another.
    """
    bits = torch.randint(0, 2**63 - 1, shape, generator=torch.Generator().manual_seed(seed))
    total = (bits & 0x1FFFFF).add_((bits >> 21).bitwise_and_(0x1FFFFF)).add_(bits >> 42)
    return total.sub_(3 * 2**20).to(torch.float32).mul_(2.0**-20)


def power_of_two(exponent: Tensor) -> Tensor:
    """`2^exponent` as fp32, exactly, for integers from -126 to 127: by its bits, where exp2 may be an ulp off."""
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)


def random_normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Normal values whose size varies from row to row and column to column, over about 2^+-16; all finite."""
    x = normal(*shape, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    for dim in range(len(shape)):
        size = [1] * len(shape)
        size[dim] = shape[dim]
        x = x * power_of_two(torch.randint(-4, 5, size, generator=generator))
    return x.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)
