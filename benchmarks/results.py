"""The stored results: publish a run as a page, and compare a new run with the stored ones.

python -m mxspec bench --complete --json new.json      # on the GPU; or a part of it, --complete matmuls
python benchmarks/results.py compare new.json          # the ratios that fell since the stored run
python benchmarks/results.py publish new.json          # its page, its pictures, the summary and the README's table
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
SUMMARY = RESULTS / "summary.md"
README = ROOT / "README.md"
FALL = 0.05  # a ratio that falls by more than this is flagged; a ratio's own spread is under 0.01 at large sizes

COMPLETE = "python -m mxspec bench --complete"
# An op that every run of a part has timed. A page sums up the newest run of each.
QUANTIZERS, MATMULS, NVFP4 = SUMMED_UP = "mx_quantize", "fp8_gemm", "nvfp4_quantize"
MATMUL_PEERS = ("DeepGEMM", "cuBLAS fp8", "FBGEMM", "torchao", "cuBLAS bf16")
_BEGIN, _END = "<!-- written by benchmarks/results.py publish -->", "<!-- end -->"


def name_of(run: Run) -> str:
    """The name of a run's files, such as `h200-2026-11-21` or `h200-2026-11-27-matmuls`."""
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


# The README's table: the op, its case, and what it is compared with.
HEADLINES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "32768 x 7168 to MXFP8, along rows": (
        "mx_quantize",
        "32768x7168, rceil, blocked",
        ("bare cast", "torchao compiled"),
    ),
    "the same, along rows and columns": ("mx_quantize_rowcol", "32768x7168, rceil, blocked", ("bare cast",)),
    "32768 x 7168 to FP8 with 1x128 scales": ("fp8_quantize_1x128", "32768x7168, axis -1, mn-major", ("bare cast",)),
    "matmul, 4096 x 4096 x 7168": ("fp8_gemm", "4096x4096x7168", ("DeepGEMM", "cuBLAS bf16")),
    "matmul, 128 x 7168 x 7168": ("fp8_gemm", "128x7168x7168", ("DeepGEMM", "cuBLAS bf16")),
    "8 experts, 32768 tokens x 2048 x 7168": (
        "fp8_grouped_gemm",
        "32768x2048x7168, E 8, even",
        ("DeepGEMM", "torch bf16"),
    ),
    "the same, weight gradient": (
        "fp8_grouped_gemm_wgrad",
        "32768x2048x7168, E 8, even, padded, bfloat16",
        ("torch bf16",),
    ),
    "MXFP8 matmul, 32768 x 2048 x 7168": ("mx_gemm", "32768x2048x7168", ("cuBLAS bf16",)),
}
# The summary's quantizers.
ROWS = {
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
# The summary's NVFP4 quantizers.
NVFP4_ROWS = {
    "along rows, plain scales": (NVFP4, "{}, amax given, plain"),
    "along rows, blocked": (NVFP4, "{}, amax given, blocked"),
    "along columns, plain scales": (NVFP4, "{}, amax given, plain, axis -2"),
    "along columns, blocked": (NVFP4, "{}, amax given, blocked, axis -2"),
    "16x16 blocks, plain scales": (NVFP4, "{}, amax given, plain, 16x16"),
    "8 token groups, padded, along rows": ("nvfp4_quantize_groups", "{}, G 8, amax given, blocked"),
    "8 token groups, padded, along the tokens": ("nvfp4_quantize_groups", "{}, G 8, amax given, blocked, axis -2"),
    "stochastic, along rows": ("nvfp4_quantize_stochastic", "{}, seed, amax given, plain"),
    "along rows, which also reads for the amax": (NVFP4, "{}, plain"),
}
# The races of the quantizers that the summary sums up: the op, and a function that tells whether a case is of the kind.
KINDS: dict[str, tuple[str, Callable[[str], bool]]] = {
    "along rows": ("mx_quantize", lambda case: "axis -2" not in case and "e2m1" not in case),
    "along columns": ("mx_quantize", lambda case: "axis -2" in case and "e2m1" not in case),
    "token groups": ("mx_quantize_groups", lambda case: True),
    "both directions, plain scales": ("mx_quantize_rowcol", lambda case: "plain" in case),
    "both directions, blocked scales": ("mx_quantize_rowcol", lambda case: "blocked" in case),
}
LARGE = 300e6  # bytes; for calls that move more, only the memory limits the speed
# The summary's matmuls of token groups and of MX: the op, its case, and the peer that multiplies in bfloat16.
GROUPED = {
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


def headline_table(quantizers: Run, matmuls: Run) -> Iterator[str]:
    """The README's table, each row from the newest run of its part."""
    of = {(r.op, r.case): (r, run) for run in (quantizers, matmuls) for r in run.races}
    yield "| operation | op | kernel | plain call | rate | times as fast as |"
    yield "|---|---|---|---|---|---|"
    for row, (op, case, others) in HEADLINES.items():
        race, run = of[op, case]
        ours = race.entry("triton")
        if ours is None:
            raise KeyError(f"{op}, {case}, triton")
        rate = f"{ours.tflops:.0f} TFLOP/s" if race.is_matmul(run.device) else f"{ours.gbps:.0f} GB/s"
        ratios = ", ".join(f"{other} {race.ratio(ours, other):.2f}" for other in others)
        yield f"| {row} | `{op}` | {ours.us:.0f} us | {ours.call_us:.0f} us | {rate} | {ratios} |"
    host = quantizers.overhead_us["mx_quantize, triton"]
    launch, call = host["bare launch"], host["the op, auto"]
    yield f"| 64 x 128 to MXFP8: host time | `mx_quantize` | | {call:.0f} us | | bare launch {launch / call:.2f} |"
    dates = " and ".join(dict.fromkeys((quantizers.date, matmuls.date)))
    yield "\n" + _paragraph(f"""
        One {quantizers.device}, the Triton backend, stored runs of {dates}. "Kernel" is the GPU's time alone, "plain
        call" the time of a call in a program. A bare cast writes no scales, so its GB/s are the memory's limit.
        Matmuls slow the card down.
        """)


def summary(quantizers: Run, matmuls: Run, nvfp4: Run) -> str:
    """A page that sums up the newest run of each part."""
    parts = [*quantizer_table(quantizers), "", *nvfp4_table(nvfp4), "", *matmul_table(matmuls), ""]
    parts += group_table(matmuls)
    notes = [f"\n{run.note}" for run in (quantizers, matmuls, nvfp4) if run.note]
    head = f"# {quantizers.device}: the figures in short\n\nWritten by `python benchmarks/results.py publish`.\n"
    return "\n".join([head, *parts, *notes]) + "\n"


def quantizer_table(run: Run) -> Iterator[str]:
    """Our quantizers beside the machine's limits and the peers, at one large size."""
    races = {(race.op, race.case): race for race in run.races}
    chosen = {row: races[op, case.format("32768x7168")] for row, (op, case) in ROWS.items()}
    columns = {"Triton": "triton", "Helion": "helion", "bare cast": "bare cast", "copy": "copy"}
    columns |= {e.name: e.name for race in chosen.values() for e in race.entries if e.kind == "peer"}
    yield f"| 32768 x 7168 bfloat16 to MXFP8 | {' | '.join(columns)} |"
    yield "|---" * (1 + len(columns)) + "|"
    for row, race in chosen.items():
        yield f"| {row} | {' | '.join(_cells(race, columns))} |"
    host = run.overhead_us["mx_quantize, triton"]
    yield "\n" + _paragraph(f"""
        GB/s of bytes read and written on one {run.device}. The number in brackets is the share of the rate of a bare
        cast from bfloat16 to e4m3, which writes no scales. `to_mx` of torchao has blocks along rows only. Its figures
        along columns are a transpose and `to_mx`, compiled together. {_run_of(run)} On that host a call of 64 x 128
        takes {host["the op, auto"]:.0f} us, and the bare Triton launch in it takes {host["bare launch"]:.0f} us.
        """)
    yield f"\n| cases that move more than {LARGE / 1e6:.0f} MB | Triton's share of the bare cast's rate |\n|---|---|"
    for kind, (low, high) in shares(run).items():
        yield f"| {kind} | {low:.2f} to {high:.2f} |"
    yield "\n`MXLinear` uses both directions with plain scales."


def nvfp4_table(run: Run) -> Iterator[str]:
    """Our NVFP4 quantizers beside the machine's limits, at one large size."""
    races = {(race.op, race.case): race for race in run.races}
    columns = {"Triton": "triton", "Helion": "helion", "bare cast": "bare cast", "copy": "copy"}
    yield f"| 32768 x 7168 bfloat16 to NVFP4 | {' | '.join(columns)} |"
    yield "|---" * (1 + len(columns)) + "|"
    for row, (op, case) in NVFP4_ROWS.items():
        yield f"| {row} | {' | '.join(_cells(races[op, case.format('32768x7168')], columns))} |"
    yield "\n" + _paragraph(f"""
        GB/s, and the share of the bare cast's rate, as above. A cast writes twice the bytes of NVFP4's codes. All rows
        but the last are given the amax of the tensor. {_run_of(run)}
        """)


def shares(run: Run) -> dict[str, tuple[float, float]]:
    """The lowest and the highest share of a bare cast's rate that our Triton quantizers reach, by kind."""
    found = {}
    for kind, (op, is_of_kind) in KINDS.items():
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
    return f"{when}; [all its figures]({name_of(run)}.md)."


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
        TFLOP/s. The sums are promoted to fp32 after every 128 of K, except in cuBLAS bf16, whose operands are bfloat16.
        {_run_of(run)}
        """)


def group_table(run: Run) -> Iterator[str]:
    """Token groups by experts, and MX: our matmuls beside DeepGEMM's and bfloat16's."""
    races = {(race.op, race.case): race for race in run.races}
    yield "| 32768 tokens x 2048 x 7168 | Triton | Helion | DeepGEMM | bf16 | Triton to bf16 |"
    yield "|---" * 6 + "|"
    for row, (op, case, bf16) in GROUPED.items():
        race = races[op, case]
        entries = [race.entry(name) for name in ("triton", "helion", "DeepGEMM", bf16)]
        ours, *_, theirs = entries
        share = f"{race.ratio(ours, bf16):.2f}" if ours and theirs else ""
        yield f"| {row} | {' | '.join(f'{e.tflops:.0f}' if e else '' for e in entries)} | {share} |"
    yield """
TFLOP/s in that run. The bf16 column is PyTorch's matmul of the unquantized tensors. Hopper has no instruction that
multiplies MX codes, so for MXFP8 the ratio to bf16 shows the cost of emulating it. DeepGEMM needs groups padded to 128
rows; the time to pad them is not included."""


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

- **us**: the kernels alone, replayed from a CUDA graph. The buffers rotate over four times the size of the L2 cache, or
  over 32 sets of buffers. The figure is the median of the rounds. Contenders are timed in turn in each round.
- **plain call**: a call as a program makes it, with launches and allocations. A peer's call includes its adapter, about
  5 us.
- **bytes**: all inputs and outputs, each counted once.
- **spread**: (max - min) / median over the rounds.
- **last column**: whether a peer's bytes equal the reference's, or by how much they differ.

Every timed launch, also of the copy and of the cast, first wrote every byte of a poisoned output. Our kernels wrote the
bytes of the reference. Matmuls run at the power limit of the card, so compare them inside one table only. torchao's
autotuned Triton kernels tune on their first shape. On later shapes they choose among the four best configurations.
"""
    note = [f"{run.note}\n"] if run.note else []
    return "\n".join([head, *note, tables.markdown(run), *pictures])


def in_readme(quantizers: Run, matmuls: Run, text: str) -> str:
    """The README with the table of these runs in its place."""
    found = re.compile(f"{re.escape(_BEGIN)}.*?{re.escape(_END)}", re.DOTALL)
    if len(found.findall(text)) != 1:
        raise ValueError(f"results: the README needs one place between {_BEGIN!r} and {_END!r}")
    table = "\n".join(headline_table(quantizers, matmuls))
    return found.sub(lambda _: f"{_BEGIN}\n{table}\n{_END}", text)


def publish(path: Path) -> None:
    """Write a run's files, the summary and the README's table."""
    run = read(path)
    if run.command.removeprefix(COMPLETE).strip() not in ("", *PARTS):
        raise ValueError(f"results: {path} is a run of `{run.command}`; needs a run of `{COMPLETE}` or of a part of it")
    if run.wrong:
        raise ValueError(f"results: {path} found something wrong, so it is not published: {'; '.join(run.wrong)}")
    timed = {race.op for race in run.races}
    if not timed & {*SUMMED_UP}:
        raise ValueError(f"results: {path} has timed none of {', '.join(SUMMED_UP)}; needs at least one of them")
    try:  # everything is rendered before anything is written
        quantizers, matmuls, nvfp4 = (run if op in timed else read(stored(op)) for op in SUMMED_UP)
        readme, text = in_readme(quantizers, matmuls, README.read_text()), page(run)
        short = summary(quantizers, matmuls, nvfp4)
    except KeyError as error:
        raise ValueError(f"results: {path} has no figure for {error}") from error
    plots.draw(run, RESULTS / name_of(run))
    run.write(RESULTS / f"{name_of(run)}.json")
    (RESULTS / f"{name_of(run)}.md").write_text(text)
    SUMMARY.write_text(short)
    README.write_text(readme)
    console.print(
        f"published: benchmarks/results/{name_of(run)}.md, .json and pictures; summary.md; the README's table"
    )


def newest(run: Run) -> Run:
    """The stored results of a run's device: for each op, the races of the newest run that timed the op."""
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
    """Every ratio of our kernels to a limit or a peer that fell by more than FALL, or that is gone.

    If the new run is only a part, the ops that it did not time are left out.
    """
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
    """Print the figures that are wrong, gone or fallen. The exit code is 1 if there are any."""
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
