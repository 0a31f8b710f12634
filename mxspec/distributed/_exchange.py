"""The two exchanges of expert parallelism: tokens go to the ranks of their experts, and results come back.

| step | what a rank does | waits for the device |
|---|---|---|
| 1 | gather every rank's counts: the number of its tokens for each of the E experts | yes, for the counts |
| 2 | send the rows of each rank's experts to that rank (`all_to_all_single`) | no |
| 3 | sort the rows that came, from (source rank, expert) to (expert, source rank) | no |
| 4 | after the experts, both steps in reverse | no |

Both lists of sizes of an `all_to_all_single` come from the same matrix, so the ranks cannot disagree. No collective
depends on a count: a rank without tokens takes part in each of them.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from mxspec.distributed._agreement import raise_everywhere
from mxspec.nn.routing import permute


@dataclass(frozen=True)
class Plan:
    """Where the tokens of one forward go."""

    send: list[int]  # the number of rows for each rank
    receive: list[int]  # the number of rows from each rank
    order: Tensor  # (M,), which received row lies at each place
    places: Tensor  # (M,), the place of each received row: the inverse of `order`
    offs: Tensor  # (E / R,) int32, the exclusive end of each local expert's rows
    group: dist.ProcessGroup

    def dispatch(self, x: Tensor) -> Tensor:
        """The rows for this rank's experts, sorted by (expert, source rank, position)."""
        received = _Exchange.apply(x[: sum(self.send)], self.send, self.receive, self.group)
        return permute(received, self.order, self.places)

    def combine(self, out: Tensor, num_tokens: int) -> Tensor:
        """The result of each of this rank's tokens, at the token's place. Rows without an expert are 0."""
        out = _Exchange.apply(permute(out, self.places, self.order), self.receive, self.send, self.group)
        return pad(out, (0, 0, 0, num_tokens - out.shape[0]))


def plan_of(
    name: str, x: Tensor | None, offs: Tensor | None, error: Exception | None, facts: dict[str, Any], experts: int,
    group: dist.ProcessGroup, device: torch.device,
) -> Plan:  # fmt: skip
    """Exchange the counts and derive the plan. Every rank must call this, also one whose arguments have an error.

    Args:
        name: the name of the layer, for error texts.
        x, offs: the tokens of this rank and their ends. None if there is an error.
        error: why this rank cannot run. It is then raised on every rank.
        facts: what must be the same on every rank.
        experts: E, the number of experts of all ranks.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    counts = torch.zeros(experts, dtype=torch.int64, device=device)
    if offs is not None:
        counts = torch.diff(offs.to(torch.int64), prepend=counts[:1])
    rows = 0 if x is None else x.shape[0]
    head = torch.tensor([error is not None, zlib.crc32(repr(facts).encode()), rows], device=device)
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
        *_orders(matrix[:, mine], sum(sum(each[mine]) for each in values)),
        group,
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


class _Exchange(torch.autograd.Function):
    """`all_to_all_single` of rows. Its backward is the exchange in the other direction."""

    @staticmethod
    def forward(x: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
        out = x.new_empty(sum(receive), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), receive, send, group)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.send, ctx.receive, ctx.group = inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _Exchange.apply(gradients[0], ctx.receive, ctx.send, ctx.group), None, None, None
