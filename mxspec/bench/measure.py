"""One case of an op, raced: our backends, the peers' kernels, a copy and a bare cast, on the same inputs."""

from __future__ import annotations

import functools
import importlib.util
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from mxspec import check, devices, dispatch
from mxspec.bench import model
from mxspec.bench.record import Entry, Kind, Operands, Race
from mxspec.bench.timing import MATMUL, MEMORY, Contender, baselines, bytes_of_call, input_sets, race
from mxspec.spec import Case, Reference, Spec

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers" / "__init__.py"  # in a checkout; a wheel leaves it out


@functools.cache
def load_peers(path: Path = PEERS) -> ModuleType:
    """The adapters to other libraries' kernels."""
    spec = importlib.util.spec_from_file_location("mxspec_peers", path)
    if not path.exists() or spec is None or spec.loader is None:
        raise ValueError(f"bench: --peers needs {path.parent}, which is in a checkout of the repository")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its files find the package
    spec.loader.exec_module(module)
    return module


def versions_of(peers: ModuleType) -> dict[str, str]:
    """Each peer's library with its version, or with what keeps it from being imported."""

    def version(of: Callable[[], str]) -> str:
        try:
            return of()
        except Exception as error:  # a library may fail to load in any way that it likes
            return f"absent: {_sentence(error)}"

    return {name: version(of) for name, of in peers.LIBRARIES.items()}


def name_of(device: torch.device) -> str:
    """A GPU's product name, or `CPU` and its architecture."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU {platform.machine()}"


def measure(
    reference: Reference[..., Any],
    case: Case,
    backends: Iterable[str],
    device: torch.device,
    peers: ModuleType | None = None,
) -> Race:
    """Race one case. What is wrong is not timed: a backend's bytes, or a peer's form; a peer's bytes are reported."""
    op, spec = reference.__name__, reference.spec
    inputs = input_sets(reference, case, device)
    expected = [spec.outputs(own, reference(*own, **case.kwargs)) for own in map(spec.own, inputs)]
    absent: dict[str, str] = {}
    wrong: dict[str, str] = {}
    entrants: list[tuple[Kind, Contender, str]] = []
    for name in backends:
        if reason := dispatch.refusal(op, name, inputs[0], dict(case.kwargs)):
            absent[name] = reason
            continue
        call = reference if name == "reference" else partial(dispatch.public(op), backend=name)
        try:
            contender = Contender(name, partial(call, **case.kwargs), inputs, spec=spec)
            if problem := contender.prove(expected, spec.min_sqnr_db):
                wrong[name] = problem
            else:
                entrants.append(("backend", contender, ""))
        except Exception as error:  # whatever a kernel raises on a valid call is the finding
            wrong[name] = f"raised on a valid call: {_sentence(error)}"
    for label, adapter in (peers.ADAPTERS.get(op, {}) if peers else {}).items():
        try:
            entrants.append(("peer", *_peer(label, adapter, case, inputs, expected, spec)))
        except Exception as error:  # theirs to raise: what is said is reported in its place
            absent[label] = _sentence(error)
    if not entrants:
        return Race(op, case.name, (), absent, wrong)
    cost = model.cost(reference, case)
    matmul = devices.balance(name_of(device)).is_matmul(cost.flops, cost.bytes_moved)
    limits = [] if matmul else baselines(inputs)  # beside matmuls they would only let the card rest
    race([*(contender for _, contender, _ in entrants), *limits], MATMUL if matmul else MEMORY)
    entries = []
    for kind, c, differ in entrants:
        if kind == "backend" and (problem := c.prove_again(expected, spec.min_sqnr_db)):
            wrong[c.name] = f"after it was timed: {problem}"
            continue
        # A peer may be handed other operands than ours, such as both in bf16.
        moved = cost.bytes_moved if c.given is inputs else bytes_of_call(c)
        operands: Operands = "fp8" if model.is_fp8(c.inputs[0]) else "bf16"
        entries.append(Entry(c.name, kind, c.us, c.call_us, c.spread, moved, cost.flops, operands, differ))
    entries += [Entry(c.name, "baseline", c.us, c.call_us, c.spread, bytes_of_call(c), 0) for c in limits]
    return Race(op, case.name, tuple(entries), absent, wrong)


def _sentence(error: Exception) -> str:
    """The first line of what an error says."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _peer(
    label: str,
    adapter: Callable[..., Any],
    case: Case,
    inputs: list[tuple[Any, ...]],
    expected: list[tuple[Tensor, ...]],
    spec: Spec,
) -> tuple[Contender, str]:
    """A peer's contender, and how its outputs differ from the reference's; its rule may be another than ours."""
    prepare = getattr(adapter, "prepare", None)
    prepared = [prepare(*args, **case.kwargs) for args in inputs] if prepare else inputs
    waits = getattr(adapter, "waits", False)
    contender = Contender(label, partial(adapter, **case.kwargs), prepared, waits, spec)
    problem = contender.prove(None) or check.form_difference(contender.outputs[0], expected[0])
    if problem:
        raise RuntimeError(f"not timed: {problem}")
    differ = contender.prove_again(expected, spec.min_sqnr_db) or ""
    return contender, differ.partition("\n")[0]


def machine(device: torch.device) -> dict[str, float]:
    """The rates that the machine itself reaches today: a copy, a bare cast and a bf16 matmul, in GB/s and TFLOP/s."""
    M, K, N = (32768, 7168, 8192) if device.type == "cuda" else (1024, 2048, 512)
    limits = baselines([(torch.randn(M, K, device=device, dtype=torch.bfloat16),)])
    race(limits)
    found = {"cast_gbps" if c.name == "bare cast" else "copy_gbps": bytes_of_call(c) / c.us / 1e3 for c in limits}
    a, b = (torch.randn(N, N, device=device, dtype=torch.bfloat16) for _ in range(2))
    matmul = Contender("bf16 matmul", torch.mm, [(a, b.mT)])
    if problem := matmul.prove(None):
        raise AssertionError(f"the bf16 matmul is wrong: {problem}")
    race([matmul], MATMUL)
    return {**found, "bf16_tflops": 2 * N**3 / matmul.us / 1e6}


def _small_call(op: str, backend: str) -> tuple[Case, tuple[Any, ...]] | None:
    """The first plain case that a backend takes, and its arguments on the GPU."""
    for case in dispatch.reference(op).spec.cases():
        if not case.flags:
            args = check.on_device(torch.device("cuda"), case.args())
            if not dispatch.refusal(op, backend, args, dict(case.kwargs)):
                return case, args
    return None


def overhead_us(op: str, backend: str) -> dict[str, float]:
    """What a call costs on the host, from the bare launch up; microseconds, the median of 30 loops.

    A library that launches its own kernels has no bare launch; a backend that takes no call here has nothing at all.
    """
    from triton.runtime.jit import JITFunction

    if (small := _small_call(op, backend)) is None:
        return {}
    case, args = small
    public, kernel = dispatch.public(op), getattr(dispatch.kernel_module(op, backend), op)
    spec = dispatch.reference(op).spec
    launches: list[tuple[Any, ...]] = []
    run = JITFunction.run

    def record(self: Any, *a: Any, **kw: Any) -> Any:
        launches.append((self, a, kw))
        return run(self, *a, **kw)

    with mock.patch.object(JITFunction, "run", record):
        results = spec.outputs(args, kernel(*args, **case.kwargs))
    parts: dict[str, Callable[[], Any]] = {}
    if launches:
        (jit, a, kw), *_ = launches
        parts["bare launch"] = lambda: run(jit, *a, **kw)
    if not spec.in_place:
        parts["its outputs allocated"] = lambda: [torch.empty_like(r) for r in results]
    parts |= {
        "the backend's function": lambda: kernel(*args, **case.kwargs),
        "the op, backend by name": lambda: public(*args, backend=backend, **case.kwargs),
    }
    if dispatch.explain(op, *args, **case.kwargs).backend == backend:
        parts["the op, auto"] = lambda: public(*args, **case.kwargs)
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(30):  # in turn, because the host's own speed drifts by more than what is looked for
        for name, part in parts.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(100):
                part()
            seconds[name].append((time.perf_counter() - start) / 100)
    return {name: statistics.median(times) * 1e6 for name, times in seconds.items()}
