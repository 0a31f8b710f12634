"""Time the solutions of the course on a GPU, and store the run where the notebooks look for it.

python benchmarks/lessons.py        # writes benchmarks/results/lessons/lessons-<device>-<date>.json

`mxspec.course.stored` prints the newest stored run in each notebook; `make notebooks` puts it into the stored outputs.
Before a kernel is timed, `course.race` checks that it writes all of its outputs: over two different poisons, the bytes
must be the same.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import re
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mxspec
from mxspec import course

Call = Callable[[Tensor], Any]
NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"


def races(of: dict[str, dict[str, Any]], small: bool) -> Iterator[tuple[str, dict[str, Call], tuple[int, int], int]]:
    """Lesson, contenders, shape of their argument, and for a matmul its flops."""
    tokens = 256 if small else 32768

    def copied(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        of["10"]["copy"](x.view(-1), out.view(-1))
        return out

    def line_by_line(x: Tensor) -> Any:
        return of["11"]["quantizer"](of["11"]["scale_byte"])(x)

    def blocked_in_two(x: Tensor) -> Any:
        codes, scale = of["12"]["triton_quantize"](x)
        return codes, of["14"]["to_blocked"](scale)

    wide = tokens, 256 if small else 7168
    yield "10", {"this lesson": copied, "torch clone": torch.clone}, wide, 0
    yield "11", {"line by line": line_by_line, "mx_quantize": mxspec.mx_quantize}, wide, 0
    rows = {"Triton": of["12"]["triton_quantize"], "Helion": of["12"]["helion_quantize"]}
    yield "12", {**rows, "mx_quantize": mxspec.mx_quantize}, wide, 0
    columns = {"this lesson": of["13"]["columns"], "mx_quantize": mxspec.mx_quantize}
    yield "13", {name: functools.partial(fn, axis=-2) for name, fn in columns.items()}, wide, 0
    blocked = {"fused": of["14"]["quantize"], "mx_quantize": mxspec.mx_quantize}
    for shape in ((256, 256),) if small else ((512, 7168), wide):
        fused = {name: functools.partial(fn, scale_layout="blocked") for name, fn in blocked.items()}
        yield "14", {**fused, "in two kernels": blocked_in_two}, shape, 0
    n = 128 if small else 8192
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, w = (torch.randn(n, n, device=device).bfloat16() for _ in range(2))
    (_, a_scale), (b, b_scale) = mxspec.mx_quantize(x), mxspec.mx_quantize(w)

    # The argument is the codes of x, so the lesson's kernel and mx_gemm are timed without the quantization.
    matmuls: dict[str, Call] = {
        "this lesson": lambda a: of["15"]["triton_matmul"](a, a_scale, b, b_scale),
        "mx_gemm": lambda a: mxspec.mx_gemm(a, a_scale, b, b_scale),
    }
    yield "15", {**matmuls, "bf16": lambda a: x @ w.T}, (n, n), 2 * n**3


def run(small: bool) -> dict[str, Any]:
    """Race everything; `small` takes the sizes of a test."""
    device = course.start()
    if device.type == "cpu" and not small:
        raise SystemExit("lessons: needs a GPU; --small runs the sizes of a test on any machine, and stores nothing")
    of = {path.name[:2]: course.definitions(path) for path in sorted(NOTEBOOKS.glob("1[0-5]_*.ipynb"))}
    entries: list[dict[str, Any]] = []
    for lesson, contenders, shape, flops in races(of, small):
        x = torch.randn(shape, device=device).bfloat16()
        if flops:
            x = mxspec.mx_quantize(x)[0]
        print(f"lesson {lesson}, {shape[0]} x {shape[1]}")
        figures = course.race(contenders, x, flops=flops)
        unit = "TFLOP/s" if flops else "GB/s"
        entries += [
            {"lesson": lesson, "shape": f"{shape[0]} x {shape[1]}", "name": name, "us": us, "rate": rate, "unit": unit}
            for name, (us, rate) in figures.items()
        ]
    versions = {name: metadata.version(name) for name in ("torch", "triton", "helion")}
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU, interpreted"
    return {"device": name, "date": datetime.date.today().isoformat(), "versions": versions, "entries": entries}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="the sizes of a test, on any machine; stores nothing")
    result = run(small := parser.parse_args().small)
    if not small:
        device = re.sub(r"\W+", "-", result["device"].removeprefix("NVIDIA ")).lower()
        path = course.RESULTS / f"lessons-{device}-{result['date']}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(f"stored in {path}; `make notebooks` puts it into the notebooks")


if __name__ == "__main__":
    main()
