"""The stored results: publish a run as the page that the README links to, and hold a new run against it.

python -m mxspec bench --complete --json new.json      # on the GPU; or a part of it, --complete matmuls
python benchmarks/results.py compare new.json          # what fell since the stored run?
python benchmarks/results.py publish new.json          # its page, pictures and the README's tables
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

from mxspec.bench import plots, tables
from mxspec.bench.cli import PARTS
from mxspec.bench.record import Race, Run, read
from mxspec.console import console

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
FALL = 0.05  # a ratio that falls by more than this is flagged; a ratio's own spread is under 0.01 at large sizes

COMPLETE = "python -m mxspec bench --complete"
# An op that every run of a part has timed.
QUANTIZERS, MATMULS = "mx_quantize", "fp8_gemm"
MATMUL_PEERS = ("DeepGEMM", "cuBLAS fp8", "FBGEMM", "torchao", "cuBLAS bf16")
_BEGIN, _END = "<!-- written by benchmarks/results.py publish -->", "<!-- end -->"


def name_of(run: Run) -> str:
    """What the files of a run are called: `h200-2026-11-21`, `h200-2026-11-22-matmuls`."""
    part = run.command.removeprefix(COMPLETE).split()
    return "-".join([*run.device.removeprefix("NVIDIA ").lower().split(), run.date, *part])


def stored(op: str) -> Path:
    """The newest stored run that timed an op."""
    runs = [(read(path), path) for path in RESULTS.glob("*.json")]
    dated = [(run.date, path) for run, path in runs if any(race.op == op for race in run.races)]
    if not dated:
        raise ValueError(f"results: no stored run of {op} in {RESULTS}")
    return max(dated)[1]


# --- publish ----------------------------------------------------------------------------------------------------


README_ROWS = {
    "along rows, plain scales": ("mx_quantize", "{}, rceil, plain"),
    "along rows, blocked": ("mx_quantize", "{}, rceil, blocked"),
    "along rows, floor": ("mx_quantize", "{}, floor, plain"),
    "along columns, plain scales": ("mx_quantize", "{}, rceil, plain, axis -2"),
    "along columns, blocked": ("mx_quantize", "{}, rceil, blocked, axis -2"),
    "both in one read, plain scales": ("mx_quantize_rowcol", "{}, rceil, plain"),
    "both in one read, blocked": ("mx_quantize_rowcol", "{}, rceil, blocked"),
    "8 token groups, padded, along rows": ("mx_quantize_groups", "{}, G 8, rceil, blocked"),
    "8 token groups, padded, along the tokens": ("mx_quantize_groups", "{}, G 8, rceil, blocked, axis -2"),
}


# The races of the quantizers that the README sums up: the op, and whether a case's name is of the kind.
README_KINDS: dict[str, tuple[str, Callable[[str], bool]]] = {
    "along rows": ("mx_quantize", lambda case: "axis -2" not in case),
    "along columns": ("mx_quantize", lambda case: "axis -2" in case),
    "for token groups": ("mx_quantize_groups", lambda case: True),
    "for both directions with plain scales": ("mx_quantize_rowcol", lambda case: "plain" in case),
    "for both with blocked ones": ("mx_quantize_rowcol", lambda case: "blocked" in case),
}
LARGE = 300e6  # bytes of a call from which on the memory alone decides


# Of token groups and MX, what the README shows; the op, its case, and the peer that multiplies in bfloat16.
README_MATMULS = {
    "FP8, 8 experts": ("fp8_grouped_gemm", "32768x2048x7168, E 8, even", "torch bf16"),
    "FP8, 8 experts, ragged": ("fp8_grouped_gemm", "32768x2048x7168, E 8, ragged, padded", "torch bf16"),
    "FP8, 64 experts": ("fp8_grouped_gemm", "32768x2048x7168, E 64, even", "torch bf16"),
    "FP8, 64 experts, ragged": ("fp8_grouped_gemm", "32768x2048x7168, E 64, ragged, padded", "torch bf16"),
    "FP8 wgrad, 8 experts": ("fp8_grouped_gemm_wgrad", "32768x2048x7168, E 8, even, padded, bfloat16", "torch bf16"),
    "MXFP8, dense": ("mx_gemm", "32768x2048x7168", "cuBLAS bf16"),
    "MXFP8, 8 experts": ("mx_grouped_gemm", "32768x2048x7168, E 8, even", "torch bf16"),
    "MXFP8, 64 experts": ("mx_grouped_gemm", "32768x2048x7168, E 64, even", "torch bf16"),
    "MXFP8 wgrad, 8 experts": ("mx_grouped_gemm_wgrad", "32768x2048x7168, E 8, even, padded, bfloat16", "torch bf16"),
}


def readme_tables(quantizers: Run, matmuls: Run) -> str:
    """The README's tables, each from the newest run of its part."""
    parts = [*quantizer_table(quantizers), "", *matmul_table(matmuls), "", *group_table(matmuls)]
    return "\n".join([*parts, *(f"\n{run.note}" for run in (quantizers, matmuls) if run.note)])


def quantizer_table(run: Run) -> Iterator[str]:
    """Our quantizers beside the machine's limits and the peers, at one large size."""
    races = {(race.op, race.case): race for race in run.races}
    chosen = {row: races[op, case.format("32768x7168")] for row, (op, case) in README_ROWS.items()}
    columns = {"Triton": "triton", "Helion": "helion", "bare cast": "bare cast", "copy": "copy"}
    columns |= {e.name: e.name for race in chosen.values() for e in race.entries if e.kind == "peer"}
    yield f"| 32768 x 7168 bfloat16 to MXFP8 | {' | '.join(columns)} |"
    yield "|---" * (1 + len(columns)) + "|"
    for row, race in chosen.items():
        yield f"| {row} | {' | '.join(_cells(race, columns))} |"
    host = run.overhead_us["mx_quantize, triton"]
    yield "\n" + _paragraph(f"""
        GB/s of bytes read and written on one {run.device}; in brackets the share of a bare bfloat16 -> e4m3 cast,
        which writes no scales. The `to_mx` of torchao has blocks along rows only: its figures along columns are of a
        transpose and that cast, compiled together. {_run_of(run)} A call of 64 x 128 takes that host
        {host["the op, auto"]:.0f} us, {host["bare launch"]:.0f} of them the bare Triton launch.
        """)
    kinds = ", ".join(f"{low:.2f} to {high:.2f} {kind}" for kind, (low, high) in shares(run).items())
    yield "\n" + _paragraph(f"""
        Triton's share of the cast, over every case of that run that moves more than {LARGE / 1e6:.0f} MB, is {kinds}.
        `MXLinear` takes both directions with plain scales.
        """)


def shares(run: Run) -> dict[str, tuple[float, float]]:
    """The lowest and the highest share of a bare cast's rate that our Triton quantizers reach, by kind."""
    found = {}
    for kind, (op, is_of_kind) in README_KINDS.items():
        races = [(race, race.entry("triton")) for race in run.races if race.op == op and is_of_kind(race.case)]
        ratios = [race.ratio(e, "bare cast") for race, e in races if e and e.bytes_moved > LARGE]
        found[kind] = min(filter(None, ratios)), max(filter(None, ratios))
    return found


def _paragraph(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False)


def _run_of(run: Run) -> str:
    """When a run was made, what it timed, and how long it took: later releases time other ops by the same command."""
    ops = len({race.op for race in run.races})
    when = f"The run of {run.date}, `{run.command}`, timed {ops} ops in {run.seconds / 60:.0f} minutes"
    return f"{when}; [all its figures](benchmarks/results/{name_of(run)}.md)."


def matmul_table(run: Run) -> Iterator[str]:
    """The FP8 matmuls of large layers beside the peers', as rates."""
    races = [race for race in run.races if race.op == "fp8_gemm" and race.is_matmul(run.device)]
    columns = {"Triton": "triton", "Helion": "helion"} | {name: name for name in MATMUL_PEERS}
    yield f"| FP8 with 128-blocks, M x N x K | {' | '.join(columns)} |"
    yield "|---" * (1 + len(columns)) + "|"
    for race in races:
        entries = [race.entry(name) for name in columns.values()]
        yield f"| {race.case.replace('x', ' x ', 2)} | {' | '.join(f'{e.tflops:.0f}' if e else '' for e in entries)} |"
    yield "\n" + _paragraph(f"""
        TFLOP/s, fp32 sums every 128 of K but for cuBLAS bf16, which has bfloat16 operands. {_run_of(run)}
        """)


def group_table(run: Run) -> Iterator[str]:
    """Token groups by experts, and MX: our matmuls beside DeepGEMM's and bfloat16's."""
    races = {(race.op, race.case): race for race in run.races}
    yield "| 32768 tokens x 2048 x 7168 | Triton | Helion | DeepGEMM | bf16 | Triton to bf16 |"
    yield "|---" * 6 + "|"
    for row, (op, case, bf16) in README_MATMULS.items():
        race = races[op, case]
        entries = [race.entry(name) for name in ("triton", "helion", "DeepGEMM", bf16)]
        ours, *_, theirs = entries
        share = f"{race.ratio(ours, bf16):.2f}" if ours and theirs else ""
        yield f"| {row} | {' | '.join(f'{e.tflops:.0f}' if e else '' for e in entries)} | {share} |"
    yield """
TFLOP/s in that run. Hopper has no instruction that multiplies MX codes: beside bfloat16 stands what their use costs.
DeepGEMM's groups are padded to 128 rows, and its padding is not in its time."""


def _cells(race: Race, columns: dict[str, str]) -> Iterator[str]:
    for name in columns.values():
        e = race.entry(name)
        ratio = e and race.ratio(e, "bare cast")
        shown = "" if e is None else f"{e.gbps:.0f}"
        yield f"{shown} ({ratio:.2f})" if e and ratio and e.kind != "baseline" else shown


def page(run: Run) -> str:
    """The results page in Markdown."""
    pictures = [f"![{name}]({name_of(run)}/{name}.png)\n" for name in plots.figures(run)]
    head = f"""# {run.device}, {run.date}

Written by `python benchmarks/results.py publish` from [{name_of(run)}.json]({name_of(run)}.json).

us: a CUDA graph's replay, so the kernels without their launches; buffers rotate over four times the L2, or 32 sets of
them. Plain call: as a program makes it, launches and allocations included, and a peer's adapter, some 5 us. Bytes:
inputs and outputs, each once. Every timed launch, the copy's and the cast's too, first wrote all of a poisoned output,
ours with the reference's bytes; of a peer the last column says whether its bytes are the reference's, or by how much
they differ. Contenders are timed in turn, round after round; us is the median of the rounds, spread their (max - min) /
median. Matmuls run at the card's power limit, so compare them inside one table only. Of torchao's autotuned Triton
kernels each chooses, after its first shape, among the four configurations that were best there.
"""
    note = [f"{run.note}\n"] if run.note else []
    return "\n".join([head, *note, tables.markdown(run), *pictures])


def in_readme(quantizers: Run, matmuls: Run, text: str) -> str:
    """The README with these runs' tables in their place."""
    found = re.compile(f"{re.escape(_BEGIN)}.*?{re.escape(_END)}", re.DOTALL)
    if len(found.findall(text)) != 1:
        raise ValueError(f"results: the README needs one place between {_BEGIN!r} and {_END!r}")
    return found.sub(lambda _: f"{_BEGIN}\n{readme_tables(quantizers, matmuls)}\n{_END}", text)


def publish(path: Path) -> None:
    """Write a run's files and the README's tables."""
    run = read(path)
    if run.command.removeprefix(COMPLETE).strip() not in ("", *PARTS):
        raise ValueError(f"results: {path} is of `{run.command}`; only one of `{COMPLETE}` or a part is published")
    if run.wrong:
        raise ValueError(f"results: {path} found something wrong, so it is not published: {'; '.join(run.wrong)}")
    timed = {race.op for race in run.races}
    if not timed & {QUANTIZERS, MATMULS}:
        raise ValueError(f"results: {path} has timed neither {QUANTIZERS} nor {MATMULS}, so it is no complete part")
    try:  # everything is rendered before anything is written
        quantizers, matmuls = (run if op in timed else read(stored(op)) for op in (QUANTIZERS, MATMULS))
        readme, text = in_readme(quantizers, matmuls, README.read_text()), page(run)
    except KeyError as error:
        raise ValueError(f"results: {path} has no figure for {error}") from error
    plots.draw(run, RESULTS / name_of(run))
    run.write(RESULTS / f"{name_of(run)}.json")
    (RESULTS / f"{name_of(run)}.md").write_text(text)
    README.write_text(readme)
    console.print(f"published: benchmarks/results/{name_of(run)}.md, .json and pictures; the README's tables")


def newest(run: Run) -> Run:
    """What is stored of a run's device: the races of each op in the newest run that timed it."""
    runs = [other for path in RESULTS.glob("*.json") if (other := read(path)).device == run.device]
    if not runs:
        raise ValueError(f"results: no stored run of {run.device} in {RESULTS}")
    races: dict[tuple[str, str], Race] = {}
    for other in sorted(runs, key=lambda other: other.date):
        ops = {race.op for race in other.races}
        races = {key: race for key, race in races.items() if race.op not in ops}
        races |= {(race.op, race.case): race for race in other.races}
    return dataclasses.replace(max(runs, key=lambda other: other.date), races=tuple(races.values()))


# --- compare ----------------------------------------------------------------------------------------------------


def falls(new: Run, old: Run) -> Iterator[str]:
    """Every ratio of ours to a limit or a peer that fell by more than FALL, or that is gone; a part's, of its ops."""
    now = {(race.op, race.case): race for race in new.races}
    ops = {race.op for race in new.races}
    for race in old.races:
        if new.command != COMPLETE and race.op not in ops:
            continue
        other = now.get((race.op, race.case))
        for e in (e for e in race.entries if e.kind == "backend"):
            what = f"{race.op}, {race.case}, {e.name}"
            mine = other.entry(e.name) if other else None
            if other is None or mine is None:
                yield f"{what}: no figure any more"
                continue
            for beside in (b.name for b in race.entries if b.kind != "backend"):
                before, after = race.ratio(e, beside), other.ratio(mine, beside)
                if after is None:
                    yield f"{what}: no {beside} beside it any more"
                elif before and after < (1 - FALL) * before:
                    yield f"{what}: {before:.3f} -> {after:.3f} of {beside}"


def compare(new: Path, old: Path | None) -> int:
    """Print what fell or is gone; 1 if anything did."""
    run = read(new)
    before = read(old) if old else newest(run)
    if run.device != before.device:
        raise ValueError(f"results: {new} is of {run.device} and {old} of {before.device}; needs one device")
    found = [*run.wrong, *falls(run, before)]
    for line in found:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    beside = old or f"the newest stored runs, {before.date}"
    console.print(f"{len(found)} figures wrong, gone or fallen by more than {FALL:.0%} since {beside}", highlight=False)
    return 1 if found else 0


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("publish", help=publish.__doc__).add_argument("run", type=Path)
    sub = commands.add_parser("compare", help=compare.__doc__)
    sub.add_argument("run", type=Path)
    sub.add_argument("old", type=Path, nargs="?", help="default: the newest stored run of the same device")
    options = parser.parse_args(argv)
    try:
        if options.command == "compare":
            return compare(options.run, options.old)
        publish(options.run)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
