"""Checks the arms of the layer's step against one process, and times those that are right, whole and in parts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from statistics import fmean, median

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mxspec.bench.parallel.layer import (
    Arm,
    Batch,
    Shape,
    Watched,
    batch_of,
    bytes_of_check,
    digest,
    expected,
    problem_of,
    sharded_layers,
    step,
    whole_layer,
)
from mxspec.bench.parallel.report import Step
from mxspec.bench.parallel.turns import STEPS, Clock, Entrant, Pace, first_problem, gathered, peak_memory, race
from mxspec.nn import GroupedExperts

Layers = dict[Arm, GroupedExperts]


def check_and_time(shape: Shape, mesh: DeviceMesh, batch: Batch, clock: Clock) -> tuple[int, list[Step]]:
    """The steps of all arms, and the rows of each rank that were compared with one process."""
    ranks = dist.get_world_size()
    whole = whole_layer(shape, ranks, clock.device)
    layers = sharded_layers(whole, mesh)
    small = replace(shape, rows=_rows_of_check(shape, ranks, clock))
    wrong = _compare(layers, whole, small, clock)
    del whole
    digests = {}
    for arm, layer in _right(layers, wrong).items():
        first = step(layer, batch)
        digests[arm] = digest(first)
        if small.rows < shape.rows:
            problem = first_problem(problem_of(layer, batch, first))
            wrong |= {arm: f"two steps with {shape.rows} rows differ: {problem}"} if problem else {}
        del first
        _free(clock)
    found = _time(_right(layers, wrong), batch, clock)
    for arm, layer in _right(layers, wrong).items():
        changed = digest(step(layer, batch)) != digests[arm]
        if problem := first_problem("other bits than before the timing" if changed else None):
            wrong[arm] = problem
    return small.rows, [Step(*arm, wrong=wrong[arm]) if arm in wrong else found[arm] for arm in layers]


def _right(layers: Layers, wrong: dict[Arm, str]) -> Layers:
    return {arm: layer for arm, layer in layers.items() if arm not in wrong}


def _rows_of_check(shape: Shape, ranks: int, clock: Clock) -> int:
    """The rows of each rank that fit one GPU in the check: all, or a half, a quarter and so on. On a CPU, all."""
    if not clock.on_gpu:
        return shape.rows
    _free(clock)
    free, rows = min(gathered(torch.cuda.mem_get_info(clock.device)[0])), shape.rows
    while rows > 1 and bytes_of_check(replace(shape, rows=rows), ranks) > free:
        rows //= 2
    return rows


def _compare(layers: Layers, whole: GroupedExperts, shape: Shape, clock: Clock) -> dict[Arm, str]:
    """Which arms differ from one process, and how."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    batches = [batch_of(source, shape, ranks, clock.device) for source in range(ranks)]
    wrong = {}
    for arm, layer in layers.items():
        wanted = expected(arm, whole, batches, rank)
        _free(clock)
        if problem := first_problem(problem_of(layer, batches[rank], wanted)):
            wrong[arm] = problem
        del wanted
        _free(clock)
    return wrong


def _time(layers: Layers, batch: Batch, clock: Clock) -> dict[Arm, Step]:
    if not layers:
        return {}
    pace = STEPS[clock.device.type]
    entrants = {arm: Entrant(str(arm), partial(step, layer, batch)) for arm, layer in layers.items()}
    race(list(entrants.values()), pace, clock)
    parts = _parts({arm: Watched(layer, batch, clock) for arm, layer in layers.items()}, entrants, pace, clock)
    found = {}
    for arm, layer in layers.items():
        with peak_memory(clock.device) as most:
            step(layer, batch)
        peaks = [bytes_ for each in gathered(most) for bytes_ in each]
        raced = entrants[arm]
        found[arm] = Step(*arm, raced.us, raced.spread, max(peaks, default=None), parts[arm])
    return found


def _parts(
    watched: dict[Arm, Watched], entrants: dict[Arm, Entrant], pace: Pace, clock: Clock
) -> dict[Arm, dict[str, float]]:
    """The parts of each arm's step: the median of the mean over the ranks. The arms take turns, as in the race."""
    found: dict[Arm, list[dict[str, float]]] = {arm: [] for arm in watched}
    for _ in range(pace.rounds):
        for arm, each in watched.items():
            for _ in range(max(1, entrants[arm].settling)):
                entrants[arm].call()
            stamps = []
            for _ in range(pace.samples):
                clock.together()
                stamps.append(each())
            found[arm] += map(each.times, stamps)
    medians = {}
    for arm, *of_ranks in zip(found, *gathered(list(found.values())), strict=True):
        steps = list(zip(*of_ranks, strict=True))  # for each step, the times on each rank
        medians[arm] = {part: median(fmean(times[part] for times in each) for each in steps) for part in steps[0][0]}
    return medians


def _free(clock: Clock) -> None:
    if clock.on_gpu:
        torch.cuda.empty_cache()
