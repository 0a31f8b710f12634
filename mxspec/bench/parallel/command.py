"""Runs `bench --parallel`: connects the ranks, checks and times, and shows the figures on rank 0."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from rich.markup import escape
from torch.distributed.device_mesh import init_device_mesh

from mxspec.bench.measure import name_of
from mxspec.bench.parallel.layer import Shape, batch_of
from mxspec.bench.parallel.report import ParallelRun, heading, markdown, sheets
from mxspec.bench.parallel.steps import check_and_time
from mxspec.bench.parallel.traffic import exchanges, fsdp_gather
from mxspec.bench.parallel.turns import MESSAGES, Clock
from mxspec.bench.tables import print_sheet
from mxspec.bench.versions import said_by, versions
from mxspec.console import console, notices

TIMEOUT = timedelta(seconds=300)  # for a rank that waits for another rank, which may be compiling kernels
# DeepSeek-V3's experts, 8 of them on a rank, with 4096 tokens that go to 8 experts each; and a shape for a CPU.
DEFAULTS = {
    "cuda": Shape(rows=32768, dim=7168, hidden=2048, experts=8, routing="even"),
    "cpu": Shape(rows=96, dim=256, hidden=128, experts=2, routing="even"),
}


def main(options: argparse.Namespace) -> int:
    """Run on this rank. Rank 0 prints and stores. The exit code is the same on every rank."""
    with connected() as device:
        given = {name: value for name in asdict(DEFAULTS["cpu"]) if (value := getattr(options, name)) is not None}
        run = measure(replace(DEFAULTS[device.type], **given), device, _command(given))
        rank = dist.get_rank()
    if rank == 0:
        _show(run, options.markdown, options.json)
    return 1 if run.wrong else 0


@contextmanager
def connected() -> Iterator[torch.device]:
    """Join the process group of torchrun: NCCL with a GPU for each rank, or gloo on CPUs. Yields this rank's device."""
    given = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    if None in given.values() or int(given["WORLD_SIZE"] or 0) < 2:
        raise ValueError(
            "bench: --parallel needs 2 processes or more, with one GPU each; start them by: "
            "torchrun --nproc-per-node 2 -m mxspec bench --parallel"
        )
    device, on_this_host = torch.device("cpu"), int(given["LOCAL_RANK"] or 0)
    if torch.cuda.is_available():
        if on_this_host >= torch.cuda.device_count():
            raise ValueError(
                f"bench: --parallel: process {on_this_host} of this host has no GPU, because the host has "
                f"{torch.cuda.device_count()}; needs at most one process for each GPU"
            )
        device = torch.device("cuda", on_this_host)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=TIMEOUT, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=TIMEOUT)
    yield device  # after an error the group is left as it is: to end it would wait for the other ranks
    dist.destroy_process_group()


def measure(shape: Shape, device: torch.device, command: str) -> ParallelRun:
    """Check and time on all ranks. Every rank must call this, and gets the same run."""
    began = time.perf_counter()
    ranks, clock = dist.get_world_size(), Clock(device)
    mesh = init_device_mesh(device.type, (ranks,))
    batch = batch_of(dist.get_rank(), shape, ranks, device)
    checked_rows, steps = check_and_time(shape, mesh, batch, clock)
    moved = exchanges(shape, batch, device, MESSAGES[device.type], clock)
    gathers = fsdp_gather(shape, mesh, device, MESSAGES[device.type], clock)
    on_gpu = device.type == "cuda"
    return ParallelRun(
        device=name_of(device),
        ranks=ranks,
        backend=dist.get_backend(),
        date=time.strftime("%Y-%m-%d"),
        command=command,
        versions=versions(on_gpu) | ({"nccl": ".".join(map(str, torch.cuda.nccl.version()))} if on_gpu else {}),
        environment={name: value for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")},
        topology=said_by("nvidia-smi", "topo", "-m") if on_gpu else "",
        shape=asdict(shape),
        counts=shape.counts(ranks),
        checked_rows=checked_rows,
        steps=tuple(steps),
        exchanges=tuple(moved),
        gathers=() if isinstance(gathers, str) else tuple(gathers),
        not_timed={"FSDP2's gather": gathers} if isinstance(gathers, str) else {},
        seconds=time.perf_counter() - began,
    )


def _command(given: dict[str, int | str]) -> str:
    """The command of a run on one host with these sizes. `--json` and `--markdown` are left out."""
    words = [f"--{name} {value}" for name, value in given.items()]
    start = f"torchrun --nproc-per-node {dist.get_world_size()} -m mxspec bench --parallel"
    return " ".join([start, *words])


def _show(run: ParallelRun, as_markdown: bool, path: Path | None) -> None:
    """Print and store a run. If it cannot be stored, it is printed first."""
    unwritten = None
    if path:
        try:
            run.write(path)
        except OSError as error:
            unwritten = f"bench: --json {path}: {error.strerror}; the run is not stored"
    if as_markdown:
        print(markdown(run))
    else:
        console.print(escape(heading(run)), highlight=False, soft_wrap=True)
        for sheet in sheets(run):
            print_sheet(sheet, console)
    for what in run.wrong:
        notices.print(f"WRONG, not timed: {what}", markup=False, highlight=False, soft_wrap=True)
    if unwritten:
        raise ValueError(unwritten)
