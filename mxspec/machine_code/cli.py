"""Compile the kernels of one op, or of all ops, for Hopper and Blackwell, and check the machine code. Needs no GPU."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import signal
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from mxspec.dispatch import backends, ops
from mxspec.machine_code import bound
from mxspec.machine_code.compile import Result, compile_op, kernels
from mxspec.machine_code.fake_gpu import TARGETS, unavailable
from mxspec.machine_code.planner import plan


def compile_all(jobs: Sequence[tuple[str, str, str, Collection[str] | None]]) -> list[Result]:
    """Run `compile_op` on each `(op, backend, target, names)`, in as many processes as there are cores."""
    spawn, handler = multiprocessing.get_context("spawn"), (signal.SIGINT, signal.SIG_DFL)
    # Ctrl-C also reaches the workers. The default handler ends them without a traceback.
    with ProcessPoolExecutor(mp_context=spawn, initializer=signal.signal, initargs=handler) as pool:
        return [result for results in pool.map(compile_op, *zip(*jobs, strict=True)) for result in results]


def _table(results: Sequence[Result]) -> Any:
    from rich.table import Table

    table = Table("kernel", "case", "target", title="machine code (bytes for each thread; shared: for each program)")
    for column in ("registers", "local", "shared", "load", "store"):
        table.add_column(column, justify="right")
    cases: dict[tuple[str, ...], list[str]] = {}
    for result in results:
        for c in result.code:
            numbers = (c.registers, c.local_bytes, c.shared_bytes, c.load_bytes, c.store_bytes)
            cases.setdefault((f"{result.backend} {c.kernel}", c.target, *map(str, numbers)), []).append(result.case)
    for (kernel, target, *cells), names in cases.items():
        table.add_row(kernel, names[0] + (f" (+{len(names) - 1})" if names[1:] else ""), target, *cells)
    return table


def _print_bounds(calls: Sequence[tuple[str, str, str]], as_json: bool, named: bool) -> int:
    from rich.console import Console

    found = [b for call in calls for b in bound.bounds(*call)]
    for op in dict.fromkeys(op for op, *_ in calls):
        if named and not any(b.op == op for b in found):
            print(f"mxspec: compile --bound: {op} has no bound: it is no quantizer", file=sys.stderr)
    if as_json:
        print(json.dumps([dataclasses.asdict(b) | {"an_element": b.an_element, "binds": b.binds} for b in found]))
    elif found:
        Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 160).print(bound.table(found))
    if not found:
        print("mxspec: compile --bound: no quantizer is of that op and that backend", file=sys.stderr)
    return 0 if found else 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m mxspec compile", description=(__doc__ or "").splitlines()[0])
    op_help = "compile only these ops; default: all ops"
    parser.add_argument("--op", nargs="+", action="extend", choices=ops(), metavar="OP", help=op_help)
    parser.add_argument(
        "--backend", choices=[b for b in backends() if b != "reference"], help="default: every backend with a kernel"
    )
    parser.add_argument("--target", choices=TARGETS, help="sm90 is Hopper, sm100 is Blackwell; default: both")
    cover_help = (
        "compile fewer cases: enough to have each kernel (0), each option (1) or each pair of options (2); default: all"
    )
    parser.add_argument("--cover", type=int, choices=(0, 1, 2), help=cover_help)
    parser.add_argument("--json", action="store_true", help="print all results as JSON, without the PTX")
    bound_help = "print what bounds each quantizer: the GPU's memory, or the instructions of its machine code"
    parser.add_argument("--bound", action="store_true", help=bound_help)
    asked = parser.parse_args(argv)
    if reason := unavailable():
        parser.error(reason)
    targets = [target for target in TARGETS if asked.target in (None, target)]
    having: dict[str, list[str]] = {}
    for op, backend in kernels():
        if (asked.op is None or op in asked.op) and asked.backend in (None, backend):
            having.setdefault(backend, []).append(op)
    if not having:
        parser.error("no kernel is of that op and that backend")
    if asked.bound and asked.cover is not None:
        parser.error("got --bound and --cover; --bound has cases of its own")
    for op in asked.op or ():
        if not any(op in names for names in having.values()):
            print(f"mxspec: compile: {op} was not compiled: it has no kernel in {asked.backend}", file=sys.stderr)
    if asked.bound:
        return _print_bounds(
            [(op, b, target) for b in having for op in having[b] for target in targets], asked.json, bool(asked.op)
        )
    jobs: list[tuple[str, str, str, Collection[str] | None]] = []
    for backend, target in itertools.product(having, targets):
        planned = {} if asked.cover is None else plan(tuple(having[backend]), backend, target, asked.cover)
        jobs += [(op, backend, target, planned.get(op)) for op in having[backend]]
    results = compile_all(jobs)
    failed = [result for result in results if result.problems]
    if asked.json:
        import triton

        rows = [dataclasses.asdict(result) for result in results]
        for row in rows:
            for code in row["code"]:
                del code["ptx"]
        print(json.dumps({"triton": triton.__version__, "results": rows}))
    else:
        from rich.console import Console

        console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 120)
        console.print(_table(results))
        cases: dict[str, list[str]] = {}
        for r in failed:
            cases.setdefault(f"{r.op}, {r.backend}, {r.target}: " + "\n".join(r.problems), []).append(r.case)
        for problem, names in cases.items():
            console.print(f"{problem}\n  in: {'; '.join(names)}")
        skipped = Counter(r.skipped for r in results if r.skipped)
        right = len(results) - skipped.total() - len(failed)
        console.print(f"{right} cases are right, {len(failed)} wrong, {skipped.total()} skipped")
        for why, count in skipped.most_common():
            console.print(f"  {count} skipped: {why}")
    if all(r.skipped for r in results):
        print("mxspec: compile: nothing was compiled: every case is skipped", file=sys.stderr)
        return 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
