"""The two exchanges of expert parallelism: tokens go to the ranks of their experts, and results come back.

| step | what a rank does | waits for the device |
|---|---|---|
| 1 | gather every rank's counts: the number of its rows for each of the E experts | yes, for the counts |
| 2 | send the rows of each rank's experts to that rank (`all_to_all_single`) | no |
| 3 | sort the rows that came, from (source rank, expert) to (expert, source rank) | no |
| 4 | after the experts, both steps in reverse | no |

With a wire, the device encodes the tokens while the host waits for the counts. The host makes the order of step 3 while
the rows travel.

Both lists of sizes of an `all_to_all_single` come from the same matrix, so the ranks cannot disagree. No collective
depends on a count: a rank without tokens takes part in each of them.

A row is what one expert gets: a token, or a (token, expert) pair if the layer sorts the tokens itself. A token that
goes to k experts is encoded once, and its message is copied k times. A block of codes lies in one row, so the copies
are what the encoded copies would be.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from mxspec.distributed._agreement import raise_everywhere
from mxspec.distributed._coded import rows_of
from mxspec.distributed._wire import Wire
from mxspec.nn.expert_calls import ExpertCall
from mxspec.nn.routing import Routing


@dataclass(frozen=True)
class Plan:
    """Where the tokens of one forward go."""

    send: list[int]  # the number of rows for each rank
    receive: list[int]  # the number of rows from each rank
    counts: Tensor  # (R, E / R), the number of rows from each rank for each local expert
    group: dist.ProcessGroup
    num_rows: int  # M_r, the number of this rank's rows, also of those without an expert
    pairs: Routing | None  # how this rank's tokens become rows. None if its tokens are the rows
    of_tokens: Wire | None  # what sends the tokens as codes
    of_gradient: Wire | None  # what sends the gradient of the results as codes

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor, Tensor]:
        """`_orders`, made after the first exchange is launched: the host makes its many small kernels meanwhile."""
        return _orders(self.counts, sum(self.receive))

    @property
    def offs(self) -> Tensor:
        """`(E / R,)` int32, the exclusive end of each local expert's rows."""
        return self._places[2]

    def dispatch(self, x: Tensor, message: Tensor | None = None) -> Tensor:
        """The rows for this rank's experts, sorted by (expert, source rank, position), from this rank's tokens.

        `message` is the message of x, if there is a wire and the caller has it.
        """
        return _There.apply(x, self, self.pairs, self.of_tokens, message)

    def combine(self, out: Tensor) -> Tensor:
        """The result of each of this rank's rows, at the row's place. Rows without an expert are 0."""
        return _Back.apply(out, self, None, self.of_gradient)

    def send_there(self, x: Tensor, pairs: Routing | None, wire: Wire | None, message: Tensor | None = None) -> Tensor:
        """Send rows to the ranks of their experts, and sort the rows that come by expert.

        With `pairs`, x is tokens, and each is sent once for each of its experts. With a wire, codes are sent.
        """
        if message is None:
            message = x.contiguous() if wire is None else wire.encode(x)
        if pairs is not None:
            message = pairs.gather(message)
        received = self._exchange(message[: sum(self.send)], self.send, self.receive)
        rows = received[self._places[0]]
        return rows if wire is None else rows_of(rows, wire, x.shape[1], x.dtype)

    def send_back(self, rows: Tensor, pairs: Routing | None) -> Tensor:
        """Send rows that are sorted by expert back to their places. With `pairs`, add up the rows of each token."""
        x = self._exchange(rows[self._places[1]], self.receive, self.send)
        if missing := self.num_rows - x.shape[0]:
            x = pad(x, (0, 0, 0, missing))
        return x if pairs is None else pairs.combine(x)

    def _exchange(self, message: Tensor, send: list[int], receive: list[int]) -> Tensor:
        out = message.new_empty(sum(receive), message.shape[1])
        dist.all_to_all_single(out, message, receive, send, self.group)
        return out


def plan_of(
    name: str, call: ExpertCall | None, error: Exception | None, facts: dict[str, Any], experts: int,
    group: dist.ProcessGroup, device: torch.device, of_tokens: Wire | None, of_gradient: Wire | None,
) -> Plan:  # fmt: skip
    """Exchange the counts and derive the plan. Every rank must call this, also one whose arguments have an error.

    Args:
        name: the name of the layer, for error texts.
        call: the tokens of this rank and where they go. None if there is an error.
        error: why this rank cannot run. It is then raised on every rank.
        facts: what must be the same on every rank.
        experts: E, the number of experts of all ranks.
        of_tokens, of_gradient: the wires, if codes travel.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    counts = torch.zeros(experts, dtype=torch.int64, device=device)
    if call is not None:
        counts = torch.diff(call.offs.to(torch.int64), prepend=counts[:1])
    rows = 0 if call is None else call.num_rows()
    # Not `torch.tensor`: its copy from the host would wait for the device.
    head = torch.cat(
        [counts.new_full((1,), n) for n in (int(error is not None), zlib.crc32(repr(facts).encode()), rows)]
    )
    heads = [torch.empty(3 + experts, dtype=torch.int64, device=device) for _ in range(ranks)]
    dist.all_gather(heads, torch.cat([head, counts]), group)
    matrix = torch.stack(heads)
    values = matrix.tolist()  # the only time that the host waits for the device
    wrong = [min(each, default=0) < 0 or sum(each) > most for _, _, most, *each in values]
    if any(wrong) or any(flag for flag, *_ in values) or len({crc for _, crc, *_ in values}) > 1:
        if error is None and wrong[rank]:
            _, _, most, *each = values[rank]
            ends = torch.tensor(each).cumsum(0).tolist()
            error = ValueError(f"{name}: offs = {ends}; needs ends that never decrease and are 0 to {most}")
        raise_everywhere(name, error, facts, group)
    local = experts // ranks
    mine = slice(3 + rank * local, 3 + (rank + 1) * local)
    sent = values[rank][3:]
    return Plan(
        [sum(sent[i : i + local]) for i in range(0, experts, local)],
        [sum(each[mine]) for each in values],
        matrix[:, mine],
        group,
        rows,
        None if call is None else call.pairs,
        of_tokens,
        of_gradient,
    )


def _orders(counts: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """For counts `(source rank, expert)`: which received row lies at each place, the inverse, and the experts' ends."""
    received, wanted = counts.flatten(), counts.mT.flatten()
    begin = (received.cumsum(0) - received).view_as(counts)  # where a segment begins, in the order of the ranks
    place = (wanted.cumsum(0) - wanted).view_as(counts.mT)  # and in the order of the experts
    numbers = torch.arange(rows, device=counts.device)
    shift = begin.mT - place
    order = numbers + shift.flatten().repeat_interleave(wanted, output_size=rows)
    places = numbers - shift.mT.flatten().repeat_interleave(received, output_size=rows)
    return order, places, counts.sum(0).cumsum(0, dtype=torch.int32)


class _There(torch.autograd.Function):
    """`Plan.send_there`. The backward sends the gradient back."""

    @staticmethod
    def forward(x: Tensor, plan: Plan, pairs: Routing | None, wire: Wire | None, message: Tensor | None) -> Tensor:
        return plan.send_there(x, pairs, wire, message)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, *ctx.given, _ = inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _Back.apply(gradients[0], *ctx.given), None, None, None, None


class _Back(torch.autograd.Function):
    """`Plan.send_back`. The backward sends the gradient there, by the wire."""

    @staticmethod
    def forward(rows: Tensor, plan: Plan, pairs: Routing | None, wire: Wire | None) -> Tensor:
        return plan.send_back(rows, pairs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, *ctx.given = inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _There.apply(gradients[0], *ctx.given, None), None, None, None
