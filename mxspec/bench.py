"""Timing on a GPU: a kernel beside a copy and a bare cast of the same shape, read in the same run.

Calls are captured into a CUDA graph over as many input sets as fill four times the L2, so that a replay times the
kernels and neither the launches nor the cache. Before it is timed, that same graph must have written every byte of
outputs full of 0xFF, and the bytes must be the reference's: a launch that skips part of its work looks fast.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from mxspec import check, devices, dispatch
from mxspec.spec import Case, Reference, bytes_of, outputs_of

ROUNDS = 7  # interleaved, so that a drift of the clocks meets every contender; the first is not counted
ROUND_US = 20_000  # about how long a contender is replayed in a round


@dataclass(frozen=True)
class Figure:
    """One measured contender. `spread` is (max - min) / median over the rounds."""

    op: str
    case: str
    backend: str  # or `bare cast`, `copy`
    us: float
    gbps: float
    of_copy: float
    of_cast: float
    spread: float


class Contender:
    """A call captured over all input sets, and the bytes that one call moves."""

    def __init__(
        self,
        name: str,
        call: Callable[..., Any],
        inputs: list[tuple[Any, ...]],
        bytes_moved: Callable[[tuple[Any, ...], tuple[Tensor, ...]], int] = bytes_of,
    ):
        self.name = name
        for args in inputs[:2]:
            outputs_of(call(*args))  # compile, and fill every cache, before the capture
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        self.calls = len(inputs) * max(1, 32 // len(inputs) if inputs[0][0].numel() < 2**26 else 1)
        with torch.cuda.graph(self.graph):
            self.outputs = [outputs_of(call(*inputs[i % len(inputs)])) for i in range(self.calls)]
        self.bytes = bytes_moved(inputs[0], self.outputs[0])
        self.replays = 3
        self.medians: list[float] = []

    def prove(self, inputs: list[tuple[Any, ...]], reference: Callable[..., Any], spec: Any) -> None:
        """Replay into poisoned outputs and compare all of them; raises where a byte is wrong or was left."""
        for outputs in self.outputs:
            for out in outputs:
                check.fill_bytes(out, 0xFF)
        self.graph.replay()
        for i, args in enumerate(inputs):
            expected = outputs_of(reference(*args))
            for outputs in self.outputs[i :: len(inputs)]:
                if problem := check.difference(outputs, expected, spec):
                    raise AssertionError(f"{self.name}: not timed, its bytes are wrong: {problem}")

    def round(self) -> float:
        times = []
        for _ in range(self.replays):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            self.graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / self.calls)
        return statistics.median(times)

    @property
    def us(self) -> float:
        return statistics.median(self.medians)

    @property
    def gbps(self) -> float:
        return self.bytes / self.us / 1e3


def _bare_cast(x: Tensor) -> Tensor:
    from mxspec.triton_kernels._bare_cast import bare_cast

    return bare_cast(x)


def _copy(x: Tensor) -> Tensor:
    return torch.empty_like(x).copy_(x)


def input_sets(reference: Reference[..., Any], case: Case) -> list[tuple[Any, ...]]:
    """As many sets of arguments on the GPU as move four times what the L2 holds."""
    device = torch.device("cuda", torch.cuda.current_device())

    def on_gpu(seed: int) -> tuple[Any, ...]:
        torch.cuda.manual_seed(seed)
        with device:  # a case for the benchmarks makes its tensors on the default device
            return case.args()

    first = on_gpu(0)
    moved = reference.spec.bytes_moved(first, outputs_of(reference(*first, **case.kwargs)))
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    return [first, *(on_gpu(seed) for seed in range(1, -(-4 * l2_bytes // moved)))]


def baselines(inputs: list[tuple[Any, ...]]) -> tuple[Contender, Contender]:
    """A bare cast and a copy of the first argument of every set."""
    xs = [(args[0],) for args in inputs]
    return Contender("bare cast", _bare_cast, xs), Contender("copy", _copy, xs)


def race(contenders: list[Contender]) -> None:
    """Time all contenders in turn, round after round."""
    for c in contenders:
        c.replays = max(3, round(ROUND_US / (c.round() * c.calls)))
    for _ in range(ROUNDS - 1):
        for c in contenders:
            c.medians.append(c.round())


def measure(op: str, case: Case, names: list[str]) -> list[Figure]:
    """Time one case on each backend that supports it, beside the copy and the bare cast."""
    reference = dispatch.reference(op)
    inputs = input_sets(reference, case)
    contenders = []
    for name in names:
        if name == "reference" or dispatch.refusal(op, name, inputs[0], dict(case.kwargs)):
            continue
        call = partial(dispatch.public(op), backend=name, **case.kwargs)
        contender = Contender(name, call, inputs, reference.spec.bytes_moved)
        contender.prove(inputs, partial(reference, **case.kwargs), reference.spec)
        contenders.append(contender)
    cast, copy = baselines(inputs)
    contenders += [cast, copy]
    race(contenders)
    return [
        Figure(
            op, case.name, c.name, c.us, c.gbps, c.gbps / copy.gbps, c.gbps / cast.gbps,
            (max(c.medians) - min(c.medians)) / c.us,
        )
        for c in contenders
    ]  # fmt: skip


def overhead_us(op: str, case: Case, backend: str) -> dict[str, float]:
    """What a call costs on the host, from the bare launch up; microseconds, the median of 30 loops."""
    from triton.runtime.jit import JITFunction

    args = check.on_device(torch.device("cuda"), case.args())
    public, kernel = dispatch.public(op), getattr(dispatch.kernel_module(op, backend), op)
    launches: list[tuple[Any, ...]] = []
    run = JITFunction.run

    def record(self: Any, *a: Any, **kw: Any) -> Any:
        launches.append((self, a, kw))
        return run(self, *a, **kw)

    with mock.patch.object(JITFunction, "run", record):
        results = outputs_of(kernel(*args, **case.kwargs))
    (jit, a, kw), *_ = launches

    parts: dict[str, Callable[[], Any]] = {
        "bare launch": lambda: run(jit, *a, **kw),
        "its outputs allocated": lambda: [torch.empty_like(r) for r in results],
        "the backend's function": lambda: kernel(*args, **case.kwargs),
        "the op, backend by name": lambda: public(*args, backend=backend, **case.kwargs),
        "the op, auto": lambda: public(*args, **case.kwargs),
    }
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(30):  # in turn, because the host's own speed drifts by more than what is looked for
        for name, part in parts.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(100):
                part()
            seconds[name].append((time.perf_counter() - start) / 100)
    return {name: statistics.median(times) * 1e6 for name, times in seconds.items()}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m mxspec bench", description=__doc__)
    parser.add_argument("--op", choices=dispatch.ops())
    parser.add_argument("--backend", choices=dispatch.backends())
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench: there is no GPU here; the figures that it would take mean nothing on a CPU")
        return 1
    console = Console(width=None if Console().is_terminal else 120)
    gpu = torch.cuda.get_device_name()
    peak = devices.device(gpu)
    roof = f", {peak.memory_gbps:.0f} GB/s by its data sheet" if peak else ""
    console.print(f"{gpu}{roof}; torch {torch.__version__}; bytes = inputs + outputs; CUDA graph replay")
    figures: list[Figure] = []
    overheads: dict[str, dict[str, float]] = {}
    for op in [options.op] if options.op else dispatch.ops():
        names = [b for b in dispatch.backends() if options.backend in (None, b)]
        cases = list(dispatch.reference(op).spec.bench_cases())
        for case in cases:
            figures += measure(op, case, names)
            torch.cuda.empty_cache()
        for name in names:
            if cases and name != "reference" and dispatch.has_kernel(op, name):
                small = next(c for c in dispatch.reference(op).spec.cases() if not c.flags)
                overheads[f"{op}, {name}"] = overhead_us(op, small, name)
    if not figures:
        raise ValueError(f"bench: {options.op} has no cases to time on {options.backend or 'any backend'}")
    table = Table("op", "case", "contender", "us", "GB/s", "of copy", "of cast", "spread")
    for f in figures:
        cells = (f"{f.us:.2f}", f"{f.gbps:.0f}", f"{f.of_copy:.3f}", f"{f.of_cast:.3f}", f"{100 * f.spread:.1f}%")
        table.add_row(f.op, f.case, f.backend, *cells, end_section=f.backend == "copy")
    console.print(table)
    for name, parts in overheads.items():
        console.print(f"host time of a call, us: {name}: " + ", ".join(f"{k} {v:.1f}" for k, v in parts.items()))
    if options.json:
        versions = {"torch": torch.__version__, "triton": metadata.version("triton")}
        record = {"gpu": gpu, **versions, "figures": list(map(asdict, figures)), "overhead_us": overheads}
        options.json.write_text(json.dumps(record, indent=1))
    return 0
