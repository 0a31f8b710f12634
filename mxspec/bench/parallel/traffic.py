"""What crosses the wire: the four exchanges of a step alone, and FSDP2's gather of the experts' weights."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import mxspec
from mxspec import check
from mxspec.bench.parallel.layer import DTYPE, Batch, Shape, batch_of, by_recipe
from mxspec.bench.parallel.report import Transfer
from mxspec.bench.parallel.turns import Clock, Entrant, Pace, first_problem, gathered, race
from mxspec.distributed import gather_codes
from mxspec.distributed._exchange import plan_of
from mxspec.distributed._wire import wires
from mxspec.nn import RECIPES, GroupedExperts
from mxspec.nn.expert_calls import ExpertCall

# The exchanges of a step: whether the rows go from the tokens' rank to the experts' rank, and whether codes may travel.
EXCHANGES = {
    "dispatch, forward": (True, True),
    "combine, forward": (False, False),
    "combine, backward": (True, True),
    "dispatch, backward": (False, False),
}
FORMATS = {"values": None, "codes of fp8_128_pow2": "fp8_128_pow2", "codes of mxfp8_rceil": "mxfp8_rceil"}


def message_of(form: str, x: Tensor) -> Tensor:
    """The message of rows, as bytes."""
    recipe = FORMATS[form]
    return wires(RECIPES[recipe], None)[0].encode(x) if recipe else x.view(torch.uint8)


def exchanges(shape: Shape, batch: Batch, device: torch.device, pace: Pace, clock: Clock) -> list[Transfer]:
    """Time each exchange with the splits of the layer's own plan. If it delivers other bytes, it gets no time."""
    ranks, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    assert group is not None
    experts = shape.experts * ranks
    plan = plan_of("bench", ExpertCall(batch.x, batch.offs), None, {}, experts, group, device, None, None)
    matrix = gathered(plan.send)  # the rows from each rank to each rank
    of_form: dict[str, list[Tensor]] = {}
    for form in FORMATS:
        mine = message_of(form, batch.x)
        theirs = []
        for source in range(ranks):  # any rank can make the rows of any rank
            begin = sum(matrix[source][:rank])
            rows = batch_of(source, shape, ranks, device).x[begin : begin + matrix[source][rank]]
            theirs.append(message_of(form, rows.contiguous()))
        of_form[form] = [mine, torch.cat(theirs)]
    entrants, found = [], []
    for name, (to_experts, has_codes) in EXCHANGES.items():
        for form in FORMATS if has_codes else ("values",):
            there, back = of_form[form]
            given, wanted = (there, back) if to_experts else (back, there)
            splits = (plan.receive, plan.send) if to_experts else (plan.send, plan.receive)
            out = torch.empty_like(wanted)
            call = partial(_exchange, out, given, *splits)
            entrant = Entrant(f"{name}, {form}", call)
            wrong = first_problem(_undelivered(call, out, wanted)) or ""
            flows = matrix if to_experts else [list(each) for each in zip(*matrix, strict=True)]
            width, turned = given.shape[1], list(zip(*flows, strict=True))
            leaves = [width * (sum(rows) - rows[source]) for source, rows in enumerate(flows)]
            comes = [width * (sum(rows) - rows[target]) for target, rows in enumerate(turned)]
            entrants += [] if wrong else [entrant]
            found.append((entrant, Transfer(name, form, width, leaves, comes, None, None, wrong)))
    race(entrants, pace, clock)
    return [_timed(each, entrant) for entrant, each in found]


def _exchange(out: Tensor, given: Tensor, receive: list[int], send: list[int]) -> None:
    dist.all_to_all_single(out, given, receive, send)


def _undelivered(call: Any, out: Tensor, wanted: Tensor) -> str | None:
    problems = []
    for poison in (0xFF, 0x5A):  # both on every rank, or a rank would wait for another one
        out.fill_(poison)
        call()
        problems.append(check.difference((out,), (wanted,)))
    found = problems[0] or problems[1]
    return found and found.partition("\n")[0]


def _timed(transfer: Transfer, entrant: Entrant) -> Transfer:
    return transfer if transfer.wrong else replace(transfer, us=entrant.us, spread=entrant.spread)


# --- FSDP2 --------------------------------------------------------------------------------------------------------

GATHERED = "fp8_128"  # the recipe whose codes are gathered
READY = "gathered, and the codes of both directions made"


def _weights(layer: GroupedExperts) -> list[Tensor]:
    return [layer.w_gate_up, layer.w_down]


def _ready(layer: Any) -> list[Tensor]:
    """Gather the weights, and make what the matmuls of forward and backward read."""
    layer.unshard()
    scale_format = layer.recipe.scale_format
    of_weights = [
        mxspec.fp8_quantize_128x128(w, scale_format=scale_format, with_transpose=True) for w in _weights(layer)
    ]
    return [part for parts in of_weights for part in parts]


def fsdp_gather(shape: Shape, mesh: DeviceMesh, device: torch.device, pace: Pace, clock: Clock) -> list[Transfer] | str:
    """Time FSDP2's gather of the weights of `shape.experts` experts: their values in bfloat16, and their codes.

    Returns why nothing was timed, if the ranks cannot share the experts evenly.
    """
    torch.manual_seed(0)
    whole = GroupedExperts(shape.experts, shape.dim, shape.hidden, GATHERED, device, DTYPE)
    layers: dict[str, Any] = {"values": by_recipe(whole, GATHERED), "codes": by_recipe(whole, GATHERED)}
    said = set(gather_codes(layers["codes"], mesh).values())
    if said != {"codes"}:
        return "; ".join(sorted(said))
    # FSDP2 frees what it gathered by shrinking its storage, so the gathered memory cannot be poisoned from here.
    for layer in layers.values():
        fully_shard(layer, mesh=mesh)
    of_values, of_codes = (_ready(layer) for layer in layers.values())
    problem = check.difference(tuple(of_codes), tuple(of_values))
    if not problem:
        full = [w.to_local() if isinstance(w, DTensor) else w for w in _weights(layers["values"])]
        problem = check.difference(tuple(w.detach() for w in full), tuple(w.detach() for w in _weights(whole)))
    wrong = first_problem(problem and problem.partition("\n")[0]) or ""
    ranks, elements = mesh.size(), sum(w.numel() for w in _weights(whole))
    scales = sum(part.numel() for part in of_codes[1::4])
    share = {"values": elements * 2 // ranks, "codes": (elements + 4 * scales) // ranks}
    entrants, found = [], []
    for what, run in (("gathered", lambda layer: layer.unshard()), (READY, _ready)):
        for form, layer in layers.items():
            layer.reshard()
            entrant = Entrant(f"{what}, {form}", partial(run, layer), before=layer.reshard)
            entrants += [] if wrong else [entrant]
            leaves = [(ranks - 1) * share[form]] * ranks  # each rank sends its share to every other rank
            found.append((entrant, Transfer(what, form, 0, leaves, leaves, None, None, wrong)))
    race(entrants, replace(pace, repeats=1), clock)  # a gather follows a reshard, which is not timed
    return [_timed(each, entrant) for entrant, each in found]
