"""`python -m mxspec bench`: time the ops, and compare the times with the machine's limits and with other libraries.

On a GPU, a kernel is timed only if it has written every byte of its outputs and has given the right results. If a
kernel has not, the exit code is 1. Without a GPU, only the references are timed. Their times say nothing about a
kernel.
"""

from __future__ import annotations

import argparse
import math
import os
import time
import warnings
from collections.abc import Iterable
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from mxspec import dispatch
from mxspec.bench import model, moe, tables
from mxspec.bench.measure import load_peers, machine, measure, name_of, overhead_us, versions_of
from mxspec.bench.record import Race, Run, Step, read
from mxspec.bench.versions import versions
from mxspec.console import console, notices, progress
from mxspec.shapes import KINDS, SETS, Shapes
from mxspec.spec import Case, Reference

# The parts of a complete run. An op that is judged by SQNR is a matmul. Each part takes less than a quarter of an hour.
PARTS = ("quantizers", "matmuls", "nvfp4_quantizers", "nvfp4_matmuls")


_SIZES = {
    "rows": "the rows of each rank: its tokens times the experts of a token; default: 32768, without a GPU 96",
    "dim": "the width of a token; default: 7168, without a GPU 256",
    "hidden": "the width of an expert; default: 2048, without a GPU 128",
    "experts": "the experts of each rank; default: 8, without a GPU 2",
}


class _Once(argparse.Action):
    """An option that may be given once. argparse would take the last one without a word."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if getattr(namespace, self.dest) is not None:
            parser.error(f"got {option_string} twice; needs it once")
        setattr(namespace, self.dest, values)


def _size(text: str) -> int:
    if not (text.isdecimal() and 0 < int(text) < 2**31):
        raise argparse.ArgumentTypeError(f"got {text}; needs an integer of at least 1")
    return int(text)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m mxspec bench", description=__doc__)
    p.add_argument("--op", action=_Once, help="time only this op")
    p.add_argument("--backend", choices=dispatch.backends(), help="time only this backend; default: every kernel")
    kinds = "; ".join(f"{kind}: [[{sizes}], ...]" for kind, sizes in KINDS.items())
    p.add_argument(
        "--shapes",
        nargs="+",
        metavar="SET",
        help=f"{', '.join(SETS)}, or a JSON file with an object that has some of {kinds}; default: {', '.join(SETS)}; "
        "without a GPU: small",
    )
    p.add_argument(
        "--peers",
        action="store_true",
        help="time the kernels of other libraries too, if they can be imported; needs a GPU",
    )
    what = p.add_mutually_exclusive_group()
    what.add_argument("--moe", action="store_true", help="time each kernel of a grouped linear (of MoE experts)")
    what.add_argument(
        "--parallel", action="store_true", help="time expert parallelism on the ranks that torchrun started"
    )
    what.add_argument("--model", action="store_true", help="print the expected times on each GPU, from its data sheet")
    what.add_argument(
        "--complete",
        nargs="?",
        const="everything",
        choices=("everything", *PARTS),
        metavar="PART",
        help=f"time all ops, shapes and peers, the host and --moe; PART: {', '.join(PARTS)}; default: everything",
    )
    what.add_argument("--from", dest="stored", type=Path, metavar="FILE", help="show a run that --json stored")
    of_parallel = p.add_argument_group("the shape of --parallel")
    for name, meaning in _SIZES.items():
        of_parallel.add_argument(f"--{name}", type=_size, metavar="N", help=meaning)
    of_parallel.add_argument("--routing", choices=("even", "skewed"), help="the rows of each expert; default: even")
    p.add_argument("--json", type=Path, metavar="FILE", help="store the run in this file")
    p.add_argument("--markdown", action="store_true", help="print Markdown")
    p.add_argument("--plot", type=Path, metavar="DIR", help="draw PNG pictures into this folder")
    return p


# For each option, the other options that have no meaning beside it.
_EXCLUDED = {
    "moe": ("op", "backend", "peers"),
    "parallel": ("op", "backend", "shapes", "peers", "plot"),
    "model": ("backend", "peers", "json", "plot"),
    "complete": ("op", "backend", "shapes", "peers"),
    "stored": ("op", "backend", "shapes", "peers", "json"),
}


def main(argv: list[str]) -> int:
    p = parser()
    options = p.parse_args(argv)
    for chosen, others in _EXCLUDED.items():
        for other in others:
            if getattr(options, chosen) and getattr(options, other):
                p.error(f"got --{'from' if chosen == 'stored' else chosen} and --{other}; needs only one of them")
    for other in (*_SIZES, "routing"):
        if getattr(options, other) and not options.parallel:
            p.error(f"got --{other} without --parallel; needs both")
    if options.json and not (options.json.parent.is_dir() and not options.json.is_dir()):
        raise ValueError(f"bench: --json {options.json}: needs a file name in a folder that exists")
    if options.json and not os.access(options.json if options.json.exists() else options.json.parent, os.W_OK):
        raise ValueError(f"bench: --json {options.json}: needs a file that may be written")
    if options.parallel:
        from mxspec.bench.parallel import command  # not at the top: it imports torch.distributed

        return command.main(options)
    draw = _plots(options.plot) if options.plot else None
    if options.model:
        return show_model(options)
    run = read(options.stored) if options.stored else run_all(options)
    unwritten = _unwritten(run, options.json) if options.json else None
    if options.markdown:
        print(tables.markdown(run))
    else:
        tables.show(run, console)
    if unwritten:  # raise only now, when the figures are on the screen and not lost
        raise ValueError(unwritten)
    for path in draw.draw(run, options.plot) if draw else ():
        notices.print(f"drawn: {path}", highlight=False, soft_wrap=True)
    for what in run.wrong:
        notices.print(f"WRONG, not timed: {what}", markup=False, highlight=False, soft_wrap=True)
    if not (run.races or run.moe):
        notices.print("nothing was timed")
        return 1
    return 1 if run.wrong else 0


def _unwritten(run: Run, path: Path) -> str | None:
    """Why a run could not be stored. None if it is stored."""
    try:
        run.write(path)
    except OSError as error:
        return f"bench: --json {path}: {error.strerror}; the run is not stored"
    return None


def _plots(folder: Path) -> ModuleType:
    """The module that draws. Raises first if it cannot be imported, or cannot write into the folder."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"bench: --plot {folder}: this is a file; needs a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        from mxspec.bench import plots
    except (ImportError, OSError) as error:
        raise ValueError(f"bench: --plot {folder}: {error}") from error
    if not os.access(folder, os.W_OK):
        raise ValueError(f"bench: --plot {folder}: needs a folder that may be written to")
    return plots


def shapes_of(names: list[str] | None, default: Iterable[str]) -> Shapes:
    """The union of named sets and files."""
    named = names or default
    return reduce(Shapes.__or__, (SETS[name] if name in SETS else Shapes.read(Path(name)) for name in named))


def show_model(options: argparse.Namespace) -> int:
    ops, shapes = ops_of(options), shapes_of(options.shapes, ("torchao",))
    layers = () if options.op else (shapes.grouped if options.shapes else moe.LAYERS)
    for sheet in tables.model_sheets(shapes, ops, layers):
        if options.markdown:
            print(sheet.markdown())
        else:
            tables.print_sheet(sheet, console)
    return 0


def asked(options: argparse.Namespace) -> list[str]:
    """The options that decide what is timed, as they are typed."""
    words = [f"--{name} {value}" for name in ("op", "backend") if (value := getattr(options, name))]
    words += [f"--shapes {' '.join(options.shapes)}"] if options.shapes else []
    words += [f"--{name}" for name in ("peers", "moe") if getattr(options, name)]
    return words + ([f"--complete {options.complete}".removesuffix(" everything")] if options.complete else [])


def ops_of(options: argparse.Namespace) -> list[str]:
    """The ops to time: the op of --op, the ops of a part, or all ops."""
    if options.op not in (None, *dispatch.ops()):
        raise ValueError(f"bench: unknown op {options.op!r}; needs one of {', '.join(dispatch.ops())}")
    of_part = (op for op in dispatch.ops() if options.complete in (None, "everything", _part_of(op)))
    return [options.op] if options.op else list(of_part)


def _part_of(op: str) -> str:
    kind = "quantizers" if dispatch.reference(op).spec.min_sqnr_db == math.inf else "matmuls"
    return f"nvfp4_{kind}" if op.startswith("nvfp4_") else kind


def run_all(options: argparse.Namespace) -> Run:
    """Time what the options ask for."""
    began = time.perf_counter()
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    for option in ("moe", "peers", "complete"):
        if getattr(options, option) and not gpu:
            raise ValueError(f"bench: --{option} needs a GPU, and this machine has none")
    if not gpu and options.backend not in (None, "reference"):
        raise ValueError(f"bench: {options.backend} needs a GPU; without one, only the references are timed")
    shapes = shapes_of(options.shapes, SETS if gpu else ("small",))
    peers = load_peers() if options.peers or options.complete else None
    work, not_timed = ([], {}) if options.moe else cases_of(options, shapes, gpu, peers)
    with_layers = options.moe or options.complete in ("everything", "quantizers")
    layers = (shapes.grouped if options.shapes else moe.LAYERS) if with_layers else ()

    rates = machine(device)
    races, untimed, lost = races_of(work, device, peers)
    not_timed |= untimed
    if lost:
        not_timed |= {f"MoE, {moe.label(layer)}": lost for layer in layers}
        layers = ()
    steps: list[Step] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `auto` warns if it has no kernel for a step, and the table says it too
        for layer in progress(layers, "MoE", moe.label):
            steps += moe.measure_layer(layer, device)
    return Run(
        device=name_of(device),
        date=time.strftime("%Y-%m-%d"),
        command=" ".join(["python -m mxspec bench", *asked(options)]),
        versions=versions(gpu),
        peers=versions_of(peers) if peers else {},
        machine=rates,
        races=tuple(races),
        not_timed=not_timed,
        overhead_us=overheads_of(options) if gpu and not (lost or options.shapes or options.moe) else {},
        moe=tuple(steps),
        seconds=time.perf_counter() - began,
    )


def races_of(
    work: list[tuple[Reference[..., Any], Case, list[str]]], device: torch.device, peers: ModuleType | None
) -> tuple[list[Race], dict[str, str], str]:
    """The races, the reason for each case without a race, and why the GPU was lost, or "".

    After an illegal access, CUDA answers every later call of the process with the same error. So the cases after it are
    not timed, and the races before it are kept.
    """
    races: list[Race] = []
    not_timed: dict[str, str] = {}
    lost = ""
    for reference, case, names in progress(work, "bench", lambda item: f"{item[0].__name__}: {item[1].name}"):
        where, race = f"{reference.__name__}, {case.name}", None
        if lost:
            not_timed[where] = lost
            continue
        try:
            race = measure(reference, case, names, device, peers)
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:  # too little memory for the tensors
            not_timed[where] = str(error).partition("\n")[0]
        if problem := _end_of_gpu(device):
            told = {**race.wrong, **race.absent} if race else {}  # in the order of the calls: our backends, then peers
            first = next((name for name, text in told.items() if problem in text), "a contender")
            race = Race(reference.__name__, case.name, (), {}, {first: problem})
            lost = f"the GPU was lost before, in {where}: {problem}"
        races += [race] if race else []
    return races, not_timed, lost


def _end_of_gpu(device: torch.device) -> str:
    """The error with which CUDA answers every call of this process from now on, or ""."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
        except RuntimeError as error:
            return str(error).partition("\n")[0]
    return ""


def cases_of(
    options: argparse.Namespace, shapes: Shapes, gpu: bool, peers: ModuleType | None
) -> tuple[list[tuple[Reference[..., Any], Case, list[str]]], dict[str, str]]:
    """The cases of the chosen ops with the backends to time, and the reason for each op or case that is left out."""
    work: list[tuple[Reference[..., Any], Case, list[str]]] = []
    not_timed: dict[str, str] = {}
    for name in ops_of(options):
        reference = dispatch.reference(name)
        known = [b for b in dispatch.backends() if b != "reference" and dispatch.has_kernel(name, b)]
        if peers:  # a backend that calls another library is timed once, as that library
            known = [b for b in known if not any(label.lower().startswith(b) for label in peers.ADAPTERS.get(name, ()))]
        names = [options.backend] if options.backend else known if gpu else ["reference"]
        cases = list(reference.spec.bench_cases(shapes))
        if not cases:
            not_timed[name] = "none of these shapes is of its kind"
        elif not names and not (peers and peers.ADAPTERS.get(name)):
            not_timed[name] = "no kernel yet"
            continue
        for case in cases:
            try:
                model.cost(reference, case)
            except (ValueError, RuntimeError, OverflowError) as error:
                not_timed[f"{name}, {case.name}"] = str(error).partition("\n")[0]
            else:
                work.append((reference, case, names))
    return work, not_timed


def overheads_of(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """The host's time for a call of each op that has kernels, on cases so small that the host never waits."""
    found = {}
    for op in ops_of(options):
        for name in [options.backend] if options.backend else dispatch.backends():
            if name != "reference" and dispatch.has_kernel(op, name):
                found[f"{op}, {name}"] = overhead_us(op, name)
    return {name: parts for name, parts in found.items() if parts}
