"""The command line: `python -m mxspec list | check | vectors | explain | compile | bench | demo | checkpoint`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape
from rich.table import Column, Table

from mxspec import check, dispatch
from mxspec.console import console, progress
from mxspec.spec import Case


def run_list(options: argparse.Namespace) -> int:
    """List every op, the backends that have a kernel for it, and the number of its cases."""
    rows: list[dict[str, Any]] = []
    for op in dispatch.ops():
        cases = list(dispatch.reference(op).spec.cases())
        having = [b for b in dispatch.backends() if b == "reference" or dispatch.has_kernel(op, b)]
        flagged = sum(bool(case.flags) for case in cases)
        doc = (dispatch.reference(op).__doc__ or "").splitlines()[0]
        rows.append({"op": op, "backends": having, "cases": len(cases), "edge_or_invalid": flagged, "doc": doc})
    if options.json:
        print(json.dumps(rows, indent=1))
        return 0
    table = Table(Column("op", no_wrap=True), "backends", "cases", "edge or invalid", "meaning")
    for row in rows:
        cells = (row["op"], ", ".join(row["backends"]), row["cases"], row["edge_or_invalid"], row["doc"])
        table.add_row(*(escape(str(cell)) for cell in cells))
    console.print(table)
    return 0


def run_check(options: argparse.Namespace) -> int:
    """Compare backends, or one function of yours, with the references. The exit code is 1 if one differs."""
    if options.list:
        return _list_cases(options)
    if options.facts:
        return _print_facts(options)
    if options.function and not options.op:
        raise ValueError("check: a module:function needs --op, the op that it implements")
    if options.function and options.backend:
        raise ValueError("check: got --backend and a module:function; needs only one of them")
    candidates: Iterable[check.Candidate]
    if options.function:
        candidates = [check.load(options.function)]
    else:
        candidates = [options.backend] if options.backend else dispatch.backends()
    device = _device(options.device)
    work = [
        (op, candidate, case)
        for op in ([options.op] if options.op else dispatch.ops())
        for candidate in candidates
        for case in _judged(op, device)
        if options.case in (None, _name(case))
    ]
    if not work and options.op:
        check.cases_of(options.op, options.case)  # raises an error that names the nearest cases
    if not work:
        raise ValueError(f"check: no op has a case named {options.case!r}")
    results = []
    for op, candidate, case in progress(work, "check", lambda item: f"{item[0]}: {_name(item[2])}"):
        judge: Callable[..., check.Result] = check.check_behaviour if isinstance(case, str) else check.check_case
        results.append(result := judge(op, case, candidate, device, options.function))
        if result.status == "failed" and not options.json:
            finding = escape(f"{op}, {result.backend}, case {_name(case)!r}: {result.message}")
            console.print(f"[red]FAILED[/red] {finding}", soft_wrap=True)
    if options.json:
        print(json.dumps([dataclasses.asdict(r) for r in results], indent=1))
    else:
        console.print(_check_table(results, f"conformance on {device}"))
        _print_skips(results)
    asked = options.backend or options.function
    if asked and not any(
        r.status != "skipped" and (isinstance(case, str) or not case.raises)
        for r, (*_, case) in zip(results, work, strict=True)
    ):
        print(
            f"mxspec: check: {asked} ran on no valid case: every case was skipped or must be refused", file=sys.stderr
        )
        return 1
    return 1 if any(r.status == "failed" for r in results) else 0


def _judged(op: str, device: torch.device) -> list[Case | str]:
    """The cases of an op, and the names of the behaviours that it promises."""
    return [*dispatch.reference(op).spec.cases(), *check.behaviours(op, device)]


def _name(case: Case | str) -> str:
    """The name of a case or of a behaviour. A behaviour is its name."""
    return case if isinstance(case, str) else case.name


def _print_facts(options: argparse.Namespace) -> int:
    """The pairs of facts that no valid case of an op shows, and why. The exit code is 1 if a pair is missing."""
    if not options.op:
        raise ValueError("check: --facts needs --op, the op whose facts it lists")
    if options.function or options.backend or options.case or options.device:
        raise ValueError("check: --facts runs no case; needs --op, takes --json, and nothing else")
    found = check.coverage(options.op)
    if options.json:
        said: dict[str, Any] = {
            "facts": [str(fact) for fact in found.facts],
            "pairs": len(found.shown),
            "missing": [sorted(map(str, pair)) for pair in found.missing],
            "impossible": [{"pair": sorted(map(str, pair)), "why": why} for pair, why in found.impossible.items()],
        }
        print(json.dumps(said, indent=1))
        return 1 if found.missing else 0
    for pair in found.missing:
        console.print(f"[red]no case[/red]  {escape(' and '.join(sorted(map(str, pair))))}")
    reasons: dict[str, int] = {}
    for why in found.impossible.values():
        reasons[why] = reasons.get(why, 0) + 1
    for why, count in reasons.items():
        console.print(f"{count} pairs are impossible: {escape(why)}", highlight=False)
    counts = f"{len(found.shown)} pairs in a case, {len(found.impossible)} impossible, {len(found.missing)} in no case"
    console.print(f"{options.op}: {len(found.facts)} facts; {counts}", highlight=False)
    return 1 if found.missing else 0


def _list_cases(options: argparse.Namespace) -> int:
    """The names of the cases of an op, and the error of each case that must be refused."""
    if not options.op:
        raise ValueError("check: --list needs --op, the op whose cases it lists")
    if options.function or options.backend or options.case or options.device:
        raise ValueError("check: --list runs no case; needs --op, takes --json, and nothing else")
    rows: list[dict[str, Any]] = [
        {"case": case.name, "flags": sorted(case.flags), "raises": case.raises.__name__ if case.raises else None}
        for case in check.cases_of(options.op)
    ]
    if options.json:
        print(json.dumps(rows, indent=1))
        return 0
    table = Table("case", "flags", "must be refused with")
    for row in rows:
        table.add_row(escape(row["case"]), ", ".join(row["flags"]), row["raises"])
    console.print(table)
    return 0


def _device(name: str | None) -> torch.device:
    try:
        device = torch.device(name) if name is not None else check.default_device()
    except RuntimeError as error:
        raise ValueError(f"--device {name}: {error}") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device {name}: mxspec runs only on cpu and cuda devices")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {name}: there is no GPU here")
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        raise ValueError(f"--device {name}: the GPUs here are cuda:0 to cuda:{count - 1}")
    return device


def _check_table(
    results: list[check.Result], title: str, statuses: Sequence[str] = ("passed", "failed", "skipped")
) -> Table:
    table = Table("op", "backend", *statuses, title=title)
    for op, backend in dict.fromkeys((r.op, r.backend) for r in results):
        mine = [r.status for r in results if (r.op, r.backend) == (op, backend)]
        counts = [str(sum(status == s for status in mine)) for s in statuses]
        table.add_row(op, escape(backend), *counts, style="red" if mine.count("failed") else None)
    return table


def _print_skips(results: list[check.Result]) -> None:
    for reason in dict.fromkeys(r.message for r in results if r.status == "skipped"):
        count = sum(r.status == "skipped" and r.message == reason for r in results)
        console.print(f"{count} skipped: {escape(reason)}", highlight=False, soft_wrap=True)


def run_vectors(options: argparse.Namespace) -> int:
    """Write the cases to files for programs in other languages, or judge the results of such a program."""
    from mxspec import vectors

    only = [options.op] if options.op else None
    if options.action == "export":
        manifests = vectors.export(options.directory, only)
        console.print(_vectors_table(manifests, Path(options.directory)))
        return 0
    results = list(vectors.check(options.directory, only))
    for op in dict.fromkeys(r.op for r in results):
        failed = [r for r in results if r.op == op and r.status == "failed"]
        for r in failed[:3]:
            finding = escape(f"{op}, test {r.number}, {r.case!r}: {r.message}")
            console.print(f"[red]FAILED[/red] {finding}", soft_wrap=True)
        if len(failed) > 3:
            console.print(f"and {len(failed) - 3} more of {op}")
    console.print(_check_table(results, f"results in {options.directory}", ("passed", "failed", "missing", "skipped")))
    _print_skips(results)
    if unanswered := [op for op in only or vectors.exported(options.directory) if op not in {r.op for r in results}]:
        print(f"no results of {', '.join(unanswered)}")
    if all(r.status in ("skipped", "missing") for r in results):
        print(f"mxspec: vectors: {options.directory}/results has no result of any test", file=sys.stderr)
        return 1
    return 1 if any(r.status in ("failed", "missing") for r in results) else 0


def _vectors_table(manifests: dict[str, dict[str, Any]], directory: Path) -> Table:
    table = Table("op", "tests", "edge", "invalid", "left out", "MB", title=f"vectors in {directory}")
    rows = []
    for op, manifest in manifests.items():
        flags = [flag for test in manifest["tests"] for flag in test["flags"]]
        size = sum((directory / f"{op}.{end}").stat().st_size for end in ("json", "safetensors"))
        left_out = len(manifest["left_out"])
        rows.append((len(manifest["tests"]), flags.count("edge"), flags.count("invalid"), left_out, size / 1e6))
        table.add_row(op, *map(str, rows[-1][:4]), f"{rows[-1][4]:.1f}")
    sums = [sum(column) for column in zip(*rows, strict=True)]
    table.add_section()
    table.add_row("all", *map(str, sums[:4]), f"{sums[4]:.1f}")
    return table


def run_explain(options: argparse.Namespace) -> int:
    """Say which backend would run one case of an op, and why the other backends would not run it."""
    cases = [c for c in dispatch.reference(options.op).spec.cases() if not c.raises]
    case = next((c for c in cases if options.case in (None, c.name)), None)
    if case is None:
        check.cases_of(options.op, options.case)  # raises if there is no such case; else the case must be refused
        raise ValueError(f"explain: the case {options.case!r} must be refused by every backend; needs a case that runs")
    device = _device(options.device)
    args = check.on_device(device, case.args())
    print(f"case {case.name!r} on {device}")
    print(dispatch.explain(options.op, *args, backend=options.backend, **case.kwargs))
    return 0


def run_compile(options: argparse.Namespace) -> int:
    """Compile kernels to machine code for sm_90 and sm_100, with or without a GPU."""
    from mxspec.machine_code.cli import main

    return main(options.rest)


def run_bench(options: argparse.Namespace) -> int:
    """Time the ops, and compare the times with the machine's limits and with other libraries.

    An op is timed only after it has given the right results.
    """
    from mxspec.bench.cli import main

    return main(options.rest)


def run_demo(options: argparse.Namespace) -> int:
    """Quantize the weights of a real model with every backend that runs on this machine."""
    from mxspec.demo import main

    return main(options.rest)


def run_checkpoint(options: argparse.Namespace) -> int:
    """Inspect checkpoints, convert them from one family to another, and verify their values bit by bit."""
    from mxspec.checkpoint.cli import main

    return main(options.rest)


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog="python -m mxspec", description=__doc__)
    commands = root.add_subparsers(dest="command", required=True)

    def command(run: Callable[[argparse.Namespace], int], *flags: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(run.__name__.removeprefix("run_"), help=run.__doc__, description=run.__doc__)
        sub.set_defaults(run=run)
        choices = {"--op": dispatch.ops(), "--backend": dispatch.backends()}
        metavars = {"--op": "OP"}  # the names of all ops would fill the page
        helps = {
            "--op": "the op, as `list` names it; default: all ops",
            "--backend": "the backend; default: all backends",
            "--case": "run only the case with this name; check --list and the reports show the names",
            "--device": "the device of the tensors, such as cpu or cuda:0; default: the GPU if there is one",
        }
        for flag in flags:
            sub.add_argument(flag, choices=choices.get(flag), metavar=metavars.get(flag), help=helps[flag])
        return sub

    as_json = "print the results as JSON"
    command(run_list).add_argument("--json", action="store_true", help=as_json)
    sub = command(run_check, "--op", "--backend", "--case", "--device")
    sub.add_argument(
        "function", nargs="?", help="your own function, as module:function; needs --op, and has its signature"
    )
    sub.add_argument(
        "--facts",
        action="store_true",
        help="list the pairs of facts (sizes, strides, options) that no case of --op has, and why",
    )
    sub.add_argument("--list", action="store_true", help="list the cases of --op and run none of them")
    sub.add_argument("--json", action="store_true", help=as_json)
    sub = command(run_vectors, "--op")
    sub.add_argument(
        "action", choices=("export", "check"), help="write the vectors to DIR, or judge the results in DIR/results"
    )
    sub.add_argument("directory", metavar="DIR", help="the folder of the vectors; your program writes to DIR/results")
    sub = command(run_explain, "--case", "--device", "--backend")
    sub.add_argument("op", choices=dispatch.ops(), metavar="OP", help="the op, as `list` names it")
    for run in (run_compile, run_bench, run_demo, run_checkpoint):  # each of these commands has its own parser
        sub = commands.add_parser(run.__name__.removeprefix("run_"), help=run.__doc__, add_help=False)
        sub.set_defaults(run=run, rest=[])
    return root


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. The exit code is 2 if the command cannot be carried out, and 130 after Ctrl-C."""
    try:
        options, rest = parser().parse_known_args(argv)
        if rest and not hasattr(options, "rest"):
            parser().error(f"unrecognized arguments: {' '.join(rest)}")
        options.rest = rest
        code = options.run(options)
        sys.stdout.flush()  # so that an error of the last write is handled here
        return code
    except KeyboardInterrupt:
        print("mxspec: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of the output, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more as it ends
        return 1  # the same code that rich gives for a table
    except (ValueError, OSError) as error:
        print(f"mxspec: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
