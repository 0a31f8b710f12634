"""The declaration of an op: its cases, how it is judged, what it costs.

`@spec(...)` stands on the reference function of an op. The switch (`mxspec.dispatch`), the checker (`mxspec.check`),
the benchmarks and the command line read the declaration there. It does not change what the function computes. The
contract of an op is what the docstring of its reference function promises.
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
MinSqnr = float | Mapping[torch.dtype, float]  # in dB: one number for all outputs, or one for each output dtype


@dataclass(frozen=True)
class Case:
    """One named call of an op.

    `args` builds the positional arguments: tensors on the CPU, the same at every call. A case with `raises` must be
    refused, with an error of that type and with `match` in the message.

    - Flag `edge`: a value or a shape at a limit of the contract.
    - Flag `invalid`: the call must be refused. A case with `raises` has it automatically.
    - Flag `large`: more than 2^31 elements. Shapes are checked everywhere, bytes only on machines with enough memory.
    - Flag `generated`: made by a program and not written by hand.
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

    `save(args, outputs)` returns what the backward pass needs: tensors or numbers.
    `backward(saved, gradients, backend)` takes a gradient, or None, for each output, and returns a gradient, or None,
    for each argument. It calls ops as `torch.ops.mxspec.<op>(..., backend=backend)` with the backend that ran the
    forward pass: a backward pass runs on its own thread and cannot know that backend.
    """

    save: Callable[[tuple[Any, ...], tuple[Tensor, ...]], tuple[Any, ...]]
    backward: Callable[[tuple[Any, ...], tuple[Tensor | None, ...], str], tuple[Tensor | None, ...]]


@dataclass(frozen=True)
class Spec:
    """The promises of one op, as its `@spec` declares them."""

    cases: Callable[[], Iterable[Case]]
    check_args: Callable[..., None]
    min_sqnr_db: MinSqnr
    bytes_moved: Callable[[tuple[Any, ...], tuple[Tensor, ...]], int]
    flops: Callable[[tuple[Any, ...], tuple[Tensor, ...]], int]
    peer_rules: str | None
    bench_cases: Callable[[Shapes], Iterable[Case]]
    gradient: Gradient | None
    inf_is_free: bool
    in_place: bool  # the op returns None and changes its first argument

    def outputs(self, args: tuple[Any, ...], result: Any) -> tuple[Tensor, ...]:
        """The outputs of a call. For an op in place: its first argument, then any tensor that it returns."""
        if not self.in_place:
            return outputs_of(result)
        return args[:1] if result is None else (args[0], *outputs_of(result))

    def own(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments for one call. An op in place gets a copy of its first argument and of the memory behind it."""
        if not self.in_place:
            return args
        t = args[0]
        storage = t.untyped_storage().clone()
        copy = torch.empty(0, dtype=t.dtype, device=t.device)
        return copy.set_(storage, t.storage_offset(), t.shape, t.stride()), *args[1:]


class Reference(Protocol[P, R_co]):
    """A reference function, or the public op of the same name behind the switch."""

    spec: Spec
    __name__: str

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    @overload
    def __call__(self, *args: Any, backend: str | None, **kwargs: Any) -> R_co: ...


def answer_of(reference: Reference[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """The outputs of a reference. An op in place works on a copy, so the arguments do not change."""
    own = reference.spec.own(args)
    return reference.spec.outputs(own, reference(*own, **kwargs))


def bytes_of(args: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> int:
    """The bytes moved if every tensor argument is read once and every output is written once."""
    return sum(t.numel() * t.element_size() for t in (*args, *outputs) if isinstance(t, Tensor))


def per_element(operations: int) -> Callable[[tuple[Any, ...], tuple[Tensor, ...]], int]:
    """The flops of an op that does `operations` per element of its first argument; conversions do not count."""

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
    """Declare an op on its reference function. A function annotated to return None changes its first argument.

    The cases of the op and the calls that are worth timing are `cases` and `bench_cases` in `mxspec/cases/<op>.py`.

    Args:
        check_args: takes the op's arguments and raises for calls that the contract refuses. The switch calls it before
            any kernel, so every backend raises the same error.
        min_sqnr_db: the smallest signal-to-quantization-noise ratio against the reference, in dB, or one number per
            output dtype. The default `inf` requires equal bytes, where any NaN equals any NaN.
        bytes_moved, flops: the bytes and flops of one call, from its arguments and outputs; for the benchmarks.
        peer_rules: the section of `rules/peers.json` that has test blocks for this op, or `nvfp4`. A peer is another
            library; `mxspec.rules` has the rules of the peers.
        gradient: how gradients flow. Without it, asking for a gradient raises.
        inf_is_free: whether an output that depends on an Inf of an operand may be Inf of either sign or NaN.
    """

    def declare(fn: Callable[P, R]) -> Reference[P, R]:
        def cases() -> Iterable[Case]:
            # Imported here, because cases import references.
            return importlib.import_module("mxspec.cases").every_case(fn)

        def bench_cases(shapes: Shapes) -> Iterable[Case]:
            return importlib.import_module("mxspec.cases").bench_cases(fn.__name__, shapes)

        # `check_args` is the first to meet a misspelt argument, so its error should name the op.
        check_args.__qualname__ = fn.__name__
        in_place = fn.__annotations__.get("return", "") in (None, "None")
        costs = min_sqnr_db, bytes_moved, flops
        declared = Spec(cases, check_args, *costs, peer_rules, bench_cases, gradient, inf_is_free, in_place)
        fn.spec = declared  # type: ignore[attr-defined]
        return fn  # type: ignore[return-value]  # now it has the attribute that the protocol asks for

    return declare


def given(make: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Callable[[], tuple[Tensor]]:
    """A case's arguments: the single tensor that `make(*args, **kwargs)` returns when the case runs."""
    return lambda: (make(*args, **kwargs),)


def these(*args: Any) -> Callable[[], tuple[Any, ...]]:
    """A case's arguments, ready made; for small tensors."""
    return lambda: args


def outputs_of(result: Any) -> tuple[Tensor, ...]:
    """The outputs of an op as a tuple, whether it has one or many."""
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def meta(value: Any) -> Any:
    """A tensor with the same shape, strides and place in its storage, without the storage.

    Any other value stays as it is.
    """
    if not isinstance(value, Tensor):
        return value
    storage = torch.empty(value.untyped_storage().nbytes() // value.element_size(), dtype=value.dtype, device="meta")
    return storage.as_strided(value.shape, value.stride(), value.storage_offset())


def random_bits(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Random bits, every pattern equally likely: all exponents, subnormals, both zeros, Inf and NaN."""
    store = INT_OF_BYTES[dtype.itemsize]
    bits = torch.iinfo(store)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(bits.min, bits.max + 1, shape, generator=generator, dtype=torch.int64).to(store).view(dtype)


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Nearly normal fp32 numbers of mean 0 and variance 1, within -3..3: the same bits on every machine.

    Each number is the sum of three uniform integers of 21 bits. The sum has the variance 2^40 and fits in 24 bits, so
    nothing is rounded. torch.randn takes logarithms and cosines, whose last bits differ between kinds of CPUs.
    """
    bits = torch.randint(0, 2**63 - 1, shape, generator=torch.Generator().manual_seed(seed))
    total = (bits & 0x1FFFFF).add_((bits >> 21).bitwise_and_(0x1FFFFF)).add_(bits >> 42)
    return total.sub_(3 * 2**20).to(torch.float32).mul_(2.0**-20)


def power_of_two(exponent: Tensor) -> Tensor:
    """`2^exponent` as fp32, exact, for integers from -126 to 127; set by its bits, as exp2 may be wrong by an ulp."""
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)


def random_normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Normal values whose size varies by row and by column, over about 2^-16 to 2^16; all finite."""
    x = normal(*shape, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    for dim in range(len(shape)):
        size = [1] * len(shape)
        size[dim] = shape[dim]
        x = x * power_of_two(torch.randint(-4, 5, size, generator=generator))
    return x.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)
