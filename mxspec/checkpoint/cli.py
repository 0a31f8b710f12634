"""`python -m mxspec checkpoint inspect | convert | verify`."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape

from mxspec.checkpoint.convert import convert
from mxspec.checkpoint.inspect import inspect
from mxspec.checkpoint.report import tables
from mxspec.checkpoint.sides import LOADERS
from mxspec.checkpoint.targets import TARGETS
from mxspec.checkpoint.verify import EQUAL, verify
from mxspec.console import console, progress

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
KEPT_BYTES = 1 << 25
SHOWN = 20  # tensors that differ; --json has all


def run_inspect(options: argparse.Namespace) -> int:
    """Say what a checkpoint holds, what is wrong with it, and which loaders read it as it is meant.

    The exit code is 0 if there is no problem, 1 if there is one, and 2 if the checkpoint cannot be read. A trap of a
    loader is not a problem of the checkpoint.
    """
    path, colon, name = options.path.rpartition(":")
    include = [name] if colon and not Path(options.path).exists() else []
    found = inspect(
        path if include else options.path,
        include=include,
        progress=lambda weights: progress(weights, "inspect", lambda weight: weight.codes),
    )
    if options.json:
        print(json.dumps(found.to_json(), indent=1))
    else:
        console.print(tables(found))
    return found.exit_code


def run_convert(options: argparse.Namespace) -> int:
    """Write a checkpoint in another family. The source is only read; an interrupted run goes on when it is repeated."""
    _keep_freed_memory()
    manifest = convert(
        options.src,
        options.dst,
        to=options.to,
        scales=options.scales,
        rule=options.rule,
        include=options.include,
        exclude=options.exclude,
        allow_lossy=options.allow_lossy,
        workers=options.workers,
        progress=lambda shards: progress(shards, "convert", str),
    )
    how = [entry["how"] for entry in manifest["tensors"].values()]
    counts = ", ".join(f"{how.count(kind)} {kind}" for kind in dict.fromkeys(how))
    console.print(escape(f"{options.dst}: {len(how)} tensors: {counts}"), highlight=False, soft_wrap=True)
    for warning in manifest["warnings"]:
        console.print(f"[yellow]warning[/yellow] {escape(warning)}", highlight=False, soft_wrap=True)
    return 0


def run_verify(options: argparse.Namespace) -> int:
    """Compare two checkpoints: are the values equal, or did a rule make A from B?

    The exit code is 0 if all values are equal or made by one rule, 1 if a tensor differs, and 2 if the command cannot
    be carried out.
    """
    verdict = verify(
        options.a, options.b, as_loaded=options.as_loaded, progress=lambda names: progress(names, "verify", str)
    )
    if options.json:
        findings = [dataclasses.asdict(finding) for finding in verdict.findings]
        print(json.dumps({"ok": verdict.ok, "rules": verdict.rules, "tensors": findings}, indent=1))
        return 0 if verdict.ok else 1
    wrong = [f for f in verdict.findings if f.status != EQUAL and (f.detail or not verdict.ok)]
    for finding in wrong[:SHOWN]:
        said = f"{finding.name}: {finding.status} {finding.detail or ', '.join(finding.rules)}"
        console.print(escape(said), highlight=False, soft_wrap=True)
    if len(wrong) > SHOWN:
        console.print(f"and {len(wrong) - SHOWN} more", highlight=False)
    console.print(escape(str(verdict)), highlight=False, soft_wrap=True)
    return 0 if verdict.ok else 1


def parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    root = argparse.ArgumentParser(prog="python -m mxspec checkpoint", description=__doc__)
    commands = root.add_subparsers(dest="command", required=True)
    sub = commands.add_parser("inspect", help=run_inspect.__doc__, description=run_inspect.__doc__)
    sub.set_defaults(run=run_inspect)
    helped = "a directory, a safetensors file, or one of them with the name of a tensor, as in DIR:model.norm.weight"
    sub.add_argument("path", metavar="DIR|FILE|TENSOR", help=helped)
    sub.add_argument("--json", action="store_true", help="print the result as JSON")
    sub = commands.add_parser("convert", help=run_convert.__doc__, description=run_convert.__doc__)
    sub.set_defaults(run=run_convert)
    sub.add_argument("src", metavar="SRC", help="a directory of safetensors files with config.json")
    sub.add_argument("dst", metavar="DST", help="a new directory")
    sub.add_argument("--to", required=True, choices=tuple(TARGETS), help="the family to write")
    scales_help = "fp32 or ue8m0 (powers of two) for FP8 blocks; ue8m0 for MX families; e4m3 for NVFP4"
    sub.add_argument("--scales", choices=("fp32", "ue8m0", "e4m3"), help=scales_help)
    rule_help = (
        "the rule that quantizes plain weights: contract (the default), mxspec's own, or a peer of mxspec.rules that "
        "quantizes to the family's format. For another name, the error lists these rules"
    )
    sub.add_argument("--rule", default="contract", help=rule_help)
    sub.add_argument("--include", action="append", default=[], metavar="GLOB", help="quantize only these tensors")
    sub.add_argument("--exclude", action="append", default=[], metavar="GLOB", help="do not quantize these tensors")
    sub.add_argument("--allow-lossy", action="store_true", help="quantize a weight again if it cannot keep its values")
    sub.add_argument("--workers", type=_count, default=2, help="the number of threads; default: 2")
    sub = commands.add_parser("verify", help=run_verify.__doc__, description=run_verify.__doc__)
    sub.set_defaults(run=run_verify)
    sub.add_argument("a", metavar="A", help="a directory or a safetensors file; the quantized one, if B is plain")
    sub.add_argument("b", metavar="B", help="a directory or a safetensors file")
    sub.add_argument("--as-loaded", choices=LOADERS, help="compare A as this loader changes it")
    sub.add_argument("--json", action="store_true", help="print the result as JSON")
    return root


def _keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next strip. Returned pages would be cleared before their next use."""
    with contextlib.suppress(OSError, AttributeError):  # another libc
        libc = ctypes.CDLL(None)
        for parameter in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
            libc.mallopt(parameter, KEPT_BYTES)


def _count(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of threads")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. It raises ValueError or OSError if the command cannot be carried out."""
    options = parser().parse_args(argv)
    return int(options.run(options))
