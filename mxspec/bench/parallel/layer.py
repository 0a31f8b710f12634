"""One step of `GroupedExperts` under `ExpertParallel`, forward and backward: its arms, their check, and their parts.

An arm is a recipe and what travels. All arms have the same weights, tokens and gradients.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from mxspec import check
from mxspec.bench.parallel.turns import Clock
from mxspec.distributed import ExpertParallel, combine_reference, dispatch_reference, expert_parallel, wire_reference
from mxspec.distributed._exchange import Plan
from mxspec.nn import GroupedExperts

RESULTS = ("output", "gradient of the tokens", "gradient of w_gate_up", "gradient of w_down")
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Shape:
    """The sizes of a run."""

    rows: int  # on each rank: tokens times the experts of a token
    dim: int
    hidden: int
    experts: int  # on each rank
    routing: str  # even or skewed

    def counts(self, ranks: int) -> list[int]:
        """The number of a rank's rows for each expert of all ranks. It is the same for every rank.

        `skewed`: the number falls as the expert's number to the power -0.5, so the first rank gets most rows.
        """
        E = self.experts * ranks
        shares = [1.0 if self.routing == "even" else (i + 1) ** -0.5 for i in range(E)]
        ends = [round(sum(shares[: i + 1]) / sum(shares) * self.rows) for i in range(E)]
        return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


class Batch(NamedTuple):
    """The rows of a rank, sorted by expert."""

    x: Tensor  # (rows, dim)
    offs: Tensor  # (experts of all ranks,) int32
    grad: Tensor  # (rows, dim), the gradient of the output


def batch_of(rank: int, shape: Shape, ranks: int, device: torch.device) -> Batch:
    """Any rank can make the batch of any rank."""
    generator = torch.Generator(device).manual_seed(1 + rank)
    x, grad = (torch.randn(shape.rows, shape.dim, generator=generator, device=device, dtype=DTYPE) for _ in range(2))
    return Batch(x, torch.tensor(shape.counts(ranks), device=device).cumsum(0, dtype=torch.int32), grad)


class Arm(NamedTuple):
    recipe: str
    wire: str

    def __str__(self) -> str:
        return f"{self.recipe}, {self.wire}"


ARMS = (
    Arm("bf16", "values"), Arm("fp8_128_pow2", "values"), Arm("fp8_128_pow2", "codes"),
    Arm("mxfp8_rceil", "values"), Arm("mxfp8_rceil", "codes"),
)  # fmt: skip


def whole_layer(shape: Shape, ranks: int, device: torch.device) -> GroupedExperts:
    """The layer with the experts of all ranks, as one process has it."""
    torch.manual_seed(0)
    return GroupedExperts(shape.experts * ranks, shape.dim, shape.hidden, "bf16", device, DTYPE)


def by_recipe(layer: GroupedExperts, recipe: str) -> GroupedExperts:
    """A layer with the same parameters, in another recipe."""
    other = copy.copy(layer)
    other._parameters = dict(layer._parameters)  # or a new parameter of the copy would be one of the layer too
    other.set_recipe(recipe)
    return other


def sharded_layers(whole: GroupedExperts, mesh: DeviceMesh) -> dict[Arm, GroupedExperts]:
    """The layer of each arm, on all ranks of the mesh. The layers have the same parameters."""
    layers: dict[Arm, GroupedExperts] = {}
    for arm in ARMS:
        layer: Any = parallelize_module(by_recipe(whole, arm.recipe), mesh, ExpertParallel(wire=arm.wire))
        for first in list(layers.values())[:1]:
            layer.w_gate_up, layer.w_down = first.w_gate_up, first.w_down
        layers[arm] = layer
    return layers


def step(layer: GroupedExperts, batch: Batch, mark: Callable[[Tensor], Tensor] = lambda x: x) -> list[Tensor]:
    """One forward and backward: the `RESULTS` of this rank."""
    for weight in layer.parameters():
        weight.grad = None
    x = batch.x.detach().requires_grad_()
    out = layer(mark(x), batch.offs)
    out.backward(batch.grad)
    gradients: list[Any] = [x.grad, *(weight.grad for weight in layer.parameters())]
    return [out.detach(), *(g.to_local() if hasattr(g, "to_local") else g for g in gradients)]


# --- the check ----------------------------------------------------------------------------------------------------


def expected(arm: Arm, whole: GroupedExperts, batches: list[Batch], rank: int) -> list[Tensor]:
    """This rank's part of the results of one process that runs the layer on the batches of all ranks."""
    layer, ranks = by_recipe(whole, arm.recipe), len(batches)
    leaves = [batch.x.clone().requires_grad_() for batch in batches]
    codes = arm.wire == "codes"
    rows = [wire_reference(x, layer.recipe) for x in leaves] if codes else leaves
    there = dispatch_reference(rows, [batch.offs for batch in batches])
    outs = combine_reference(layer(there.tokens, there.offs), there)
    if codes:
        outs = [wire_reference(out, layer.recipe, of_gradient=True) for out in outs]
    torch.autograd.backward(outs, [batch.grad for batch in batches])
    gradients = []
    for weight in layer.parameters():
        assert weight.grad is not None
        gradients.append(weight.grad.chunk(ranks)[rank] / ranks)  # the mean, as ExpertParallel computes it by default
        weight.grad = None
    grad = leaves[rank].grad
    assert grad is not None
    return [outs[rank].detach(), grad, *gradients]


def problem_of(layer: GroupedExperts, batch: Batch, wanted: list[Tensor]) -> str | None:
    """How this rank's results differ from the expected ones, if every new tensor begins full of 0xFF, then of 0x5A.

    Every rank must call this. A rank with a problem makes the second step too, or the others would wait for it.
    """
    problems = []
    for poison in (0xFF, 0x5A):
        with check.poisoned(poison) as overrun:
            got = step(layer, batch)
            problems.append(differing(got, wanted) or overrun())
    return problems[0] or problems[1]


def differing(got: list[Tensor], wanted: list[Tensor]) -> str | None:
    for name, mine, theirs in zip(RESULTS, got, wanted, strict=True):
        if problem := check.difference((mine,), (theirs,)):
            return f"{name}: {problem.partition(chr(10))[0].removeprefix('output 0: ')}"
    return None


def bytes_of_check(shape: Shape, ranks: int) -> int:
    """A generous estimate of the memory that one process needs to check an arm, in bytes."""
    weights = 3 * shape.experts * ranks * shape.dim * shape.hidden
    return 8 * weights + shape.rows * ranks * (24 * shape.dim + 24 * shape.hidden)


def digest(results: list[Tensor]) -> list[int]:
    """A number for each result, which another bit or another order of the elements changes."""
    found = []
    for t in results:
        total = torch.zeros((), dtype=torch.int64, device=t.device)
        for number, part in enumerate(t.contiguous().view(torch.int16).flatten().split(2**24)):
            places = torch.arange(len(part), device=t.device) * 2 + 1
            total = total * 31 + (part.long() * places).sum() + number  # int64 wraps, the same on every device
        found.append(int(total))
    return found


# --- the parts ----------------------------------------------------------------------------------------------------

PARTS = (
    "counts and plan", "dispatch, forward", "experts, forward", "combine, forward",
    "combine, backward", "experts, backward", "dispatch, backward",
)  # fmt: skip
BETWEEN = "between forward and backward"
REST = "the rest"


class _Mark(torch.autograd.Function):
    """The tensor itself. Its backward calls `note`."""

    @staticmethod
    def forward(x: Tensor, note: Callable[[], None]) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.note = inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.note()
        return gradients[0], None


Stamps = list[tuple[str, Any]]  # the name of each part, and when it ended


class Watched:
    """A step that notes when each of its parts ends."""

    def __init__(self, layer: GroupedExperts, batch: Batch, clock: Clock) -> None:
        self.layer, self.batch, self.clock = layer, batch, clock
        self.stamps: Stamps = []

    def note(self, part: str) -> None:
        self.stamps.append((part, self.clock.stamp()))

    def _noted(self, place: Any, name: str, part: str, in_backward: str | None) -> Any:
        """Patch a function, so that its end is noted, and the end of the backward of what follows it."""
        call = getattr(place, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            out = call(*args, **kwargs)
            self.note(part)
            return _Mark.apply(out, partial(self.note, in_backward)) if in_backward else out

        return mock.patch.object(place, name, noted)

    def __call__(self) -> Stamps:
        self.stamps = []
        seams = (
            (expert_parallel, "plan_of", PARTS[0], None),
            (Plan, "dispatch", PARTS[1], PARTS[5]),
            (self.layer, "feed_forward", PARTS[2], PARTS[4]),
            (Plan, "combine", PARTS[3], BETWEEN),
        )
        with ExitStack() as stack:
            for seam in seams:
                stack.enter_context(self._noted(*seam))
            self.note("begin")
            step(self.layer, self.batch, lambda x: _Mark.apply(x, partial(self.note, PARTS[6])))
            self.note(REST)
        return self.stamps

    def times(self, stamps: Stamps) -> dict[str, float]:
        """The time of each part of a call in us. Their sum is the time of the call."""
        names = [name for name, _ in stamps]
        wanted = ["begin", *PARTS[:4], BETWEEN, *PARTS[4:], REST]
        if names != wanted:
            raise RuntimeError(f"bench: the parts of a step ended in the order {names}; needs {wanted}")
        found = dict.fromkeys((*PARTS, REST), 0.0)
        for (_, begin), (name, end) in itertools.pairwise(stamps):
            found[REST if name == BETWEEN else name] += self.clock.us(begin, end)
        return found
