"""Races one case of an op: our backends, the peers' kernels, a copy and a bare cast, on the same inputs."""

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

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers" / "__init__.py"  # only a checkout has it; a wheel does not


@functools.cache
def load_peers(path: Path = PEERS) -> ModuleType:
    """The adapters to other libraries' kernels."""
    spec = importlib.util.spec_from_file_location("mxspec_peers", path)
    if not path.exists() or spec is None or spec.loader is None:
        raise ValueError(f"bench: --peers needs {path.parent}; run it in a checkout of the repository")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # the files of the package import it by this name
    spec.loader.exec_module(module)
    return module


def versions_of(peers: ModuleType) -> dict[str, str]:
    """Each peer's library with its version, or with the reason why it cannot be imported."""

    def version(of: Callable[[], str]) -> str:
        try:
            return of()
        except Exception as error:  # a library may raise any error when it is imported
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
    """Race one case.

    A backend with wrong bytes is not timed, and neither is a peer with a wrong shape, dtype or strides. A peer may
    return other bytes; the race records how they differ.
    """
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
        except Exception as error:  # a valid call must not raise, so any error is the finding
            wrong[name] = f"raised on a valid call: {_sentence(error)}"
    for label, adapter in (peers.ADAPTERS.get(op, {}) if peers else {}).items():
        try:
            entrants.append(("peer", *_peer(label, adapter, case, inputs, expected, spec)))
        except Exception as error:  # a peer may raise any error; the race records it instead of a time
            absent[label] = _sentence(error)
    if not entrants:
        return Race(op, case.name, (), absent, wrong)
    cost = model.cost(reference, case)
    matmul = devices.balance(name_of(device)).is_matmul(cost.flops, cost.bytes_moved)
    limits: list[Contender] = []
    if not matmul:  # between matmuls, a copy would only let the card cool down
        try:
            limits = baselines(inputs)
        except AssertionError as error:  # the times of the others count without a baseline
            wrong["baselines"] = _sentence(error)
    race([*(contender for _, contender, _ in entrants), *limits], MATMUL if matmul else MEMORY)
    entries = []
    for kind, c, differ in entrants:
        if kind == "backend" and (problem := c.prove_again(expected, spec.min_sqnr_db)):
            wrong[c.name] = f"after it was timed: {problem}"
            continue
        # A peer may get other operands than our backends, such as both in bf16.
        moved = cost.bytes_moved if c.given is inputs else bytes_of_call(c)
        operands: Operands = "fp8" if model.is_fp8(c.inputs[0]) else "bf16"
        entries.append(Entry(c.name, kind, c.us, c.call_us, c.spread, moved, cost.flops, operands, differ))
    entries += [Entry(c.name, "baseline", c.us, c.call_us, c.spread, bytes_of_call(c), 0) for c in limits]
    return Race(op, case.name, tuple(entries), absent, wrong)


def _sentence(error: Exception) -> str:
    """The first line of an error's text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _peer(
    label: str,
    adapter: Callable[..., Any],
    case: Case,
    inputs: list[tuple[Any, ...]],
    expected: list[tuple[Tensor, ...]],
    spec: Spec,
) -> tuple[Contender, str]:
    """A peer's contender, and how its outputs differ from the reference's. A peer may have another rule than mxspec."""
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
    """The rates that the machine reaches in this run: a copy and a bare cast in GB/s, a bf16 matmul in TFLOP/s."""
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
    """The first case without flags that a backend can run, and its arguments on the GPU."""
    for case in dispatch.reference(op).spec.cases():
        if not case.flags:
            args = check.on_device(torch.device("cuda"), case.args())
            if not dispatch.refusal(op, backend, args, dict(case.kwargs)):
                return case, args
    return None


def overhead_us(op: str, backend: str) -> dict[str, float]:
    """The host's time for a call in microseconds, from the bare launch to the public op: the median of 30 loops.

    A library that launches its own kernels has no bare launch. A backend that can run no case here has no entry.
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
    for _ in range(30):  # in turn, because the host's own speed drifts by more than the differences to be measured
        for name, part in parts.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(100):
                part()
            seconds[name].append((time.perf_counter() - start) / 100)
    return {name: statistics.median(times) * 1e6 for name, times in seconds.items()}
