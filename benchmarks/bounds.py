"""What bounds each quantizer in Triton, its GPU's memory or its instructions: writes `results/bounds.md`. Needs no GPU.

python benchmarks/bounds.py                  # compiles all quantizers for sm_90 and sm_100: some minutes
python benchmarks/bounds.py mx_quantize      # prints the rows of these ops, and writes nothing

A bound is the longer of two times: that of the bytes at the memory's rate, and that of the instructions at the rate at
which the processors issue them. `mxspec/machine_code/bound.py` says what it counts. The measured times are those of the
newest stored runs of an H200.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import triton

from mxspec import dispatch
from mxspec.bench.record import read
from mxspec.machine_code import bound
from mxspec.machine_code.fake_gpu import unavailable

RESULTS = Path(__file__).resolve().parent / "results"
PAGE = RESULTS / "bounds.md"

HEAD = """# What bounds the quantizers

Written by `python benchmarks/bounds.py` under Triton {version}. It compiles the Triton kernels of each op that is
judged byte for byte, and counts the instructions of their machine code. A bound is the longer of two times: that of the
bytes at the data sheet's rate, and that of the instructions at the data sheet's clock. The sm_100 code was compiled,
not run.

- **measured**: us of the newest stored run of an H200 with this case, under Triton {measured}.
- **share**: the bound as a fraction of the measured time. A copy has about 0.88. The share may be above 1, because each
  instruction of a kernel counts once, in both arms of a branch, and because the releases of Triton differ.
- **bold**: the instructions bind, not the memory. A B200's memory leaves time for about 13 instructions of an element
  that is read as 2 bytes and written as 1.
- \\*: the kernel has a loop that writes memory. Its instructions count once and run more often, so the bound may be too
  low.

| op, case | sm_90: instructions an element | H200: bound, us | measured, us | share | sm_100 | B200: bound, us |
|---|---:|---:|---:|---:|---:|---:|
"""


@functools.cache
def measured() -> dict[tuple[str, str], tuple[float, str]]:
    """The us of the kernels in Triton and the release, by op and case, from the newest run that has each."""
    runs = sorted((read(path) for path in sorted(RESULTS.glob("h200-*.json"))), key=lambda run: run.date)
    return {
        (race.op, race.case): (entry.us, run.versions["triton"])
        for run in runs
        for race in run.races
        for entry in race.entries
        if entry.name == "triton" and entry.us
    }


def head(version: str) -> str:
    """The page above its rows. `version` is the release of Triton that compiled the kernels."""
    return HEAD.format(version=version, measured=" and ".join(sorted({release for _, release in measured().values()})))


def found_of(op: str) -> list[tuple[bound.Bound, bound.Bound | None]]:
    """The bounds of an op's large calls, on both targets."""
    other = {each.case: each for each in bound.bounds(op, "triton", "sm100")}
    return [(each, other.get(each.case)) for each in bound.bounds(op, "triton", "sm90")]


def _cells(each: bound.Bound | None) -> tuple[str, str]:
    if each is None:
        return "", ""
    time = f"{each.us:.0f}"
    return f"{each.an_element:.1f}" + r"\*" * bool(each.loops), f"**{time}**" if each.binds == "instructions" else time


def rows(op: str) -> list[str]:
    us = measured()
    lines = []
    for hopper, blackwell in found_of(op):
        time, _ = us.get((op, hopper.case), (None, ""))
        share = f"{hopper.us / time:.2f}" if time else ""
        cells = *_cells(hopper), f"{time:.0f}" if time else "", share, *_cells(blackwell)
        lines.append(f"| {op}, {hopper.case} | " + " | ".join(cells) + " |")
    return lines


def all_rows(ops: Sequence[str]) -> Iterator[str]:
    with ProcessPoolExecutor() as pool:
        for lines in pool.map(rows, ops):
            yield from lines


def main(ops: list[str]) -> int:
    if reason := unavailable():
        print(reason, file=sys.stderr)
        return 2
    if ops:
        print("\n".join(all_rows(ops)))
    else:
        PAGE.write_text(head(triton.__version__) + "\n".join(all_rows(dispatch.ops())) + "\n")
        print(f"written: {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
