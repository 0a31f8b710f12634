"""The speed of the functions of a lesson."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# The stored runs of `benchmarks/lessons.py`. An installed package has no such folder.
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "lessons"


def race(
    contenders: Mapping[str, Callable[[Tensor], Any]], x: Tensor, *, flops: int = 0
) -> dict[str, tuple[float, float]]:
    """Time functions of one tensor in turn, and print how fast they are.

    Each call is a CUDA graph over inputs that are larger than the L2, as `python -m mxspec bench` times a kernel.
    Before a function is timed, it must leave the same bytes in its outputs over two poisons. The verdict says whether
    these bytes are right.

    Args:
        contenders: the functions, by the names that are printed.
        x: their argument.
        flops: the operations of a matmul, to print TFLOP/s. By default GB/s of bytes read and written are printed,
            beside the rates of a copy of x and, for bfloat16, of a bare cast to FP8.

    Returns:
        Microseconds of a call and the printed rate, by name.

    Raises:
        AssertionError: a function leaves bytes of its outputs unwritten, or changes its input.
    """
    from mxspec.bench.timing import MATMUL, MAX_SETS, MEMORY, Contender, baselines, bytes_of_call
    from mxspec.bench.timing import race as take_turns

    sets = 1
    if x.is_cuda:
        l2_bytes = torch.cuda.get_device_properties(x.device).L2_cache_size
        sets = min(MAX_SETS, 1 + 4 * l2_bytes // x.nbytes)
    inputs = [(x.clone(),) for _ in range(sets)]
    racers = [Contender(name, fn, inputs) for name, fn in contenders.items()]
    for racer in racers:
        if problem := racer.prove(None):
            raise AssertionError(f"{racer.name}: {problem}")
    racers += [] if flops else baselines(inputs)
    take_turns(racers, MATMUL if flops else MEMORY)
    figures, unit = dict[str, tuple[float, float]](), "TFLOP/s" if flops else "GB/s"
    for racer in racers:
        rate = flops / racer.us / 1e6 if flops else bytes_of_call(racer) / racer.us / 1e3
        print(f"{racer.name:<24}{racer.us:>10.1f} us {f'{rate:.0f} {unit}':>14}")
        figures[racer.name] = racer.us, rate
    return figures


def stored(lesson: str, folder: Path = RESULTS) -> None:
    """Print what a lesson's kernels reached in the newest stored run of `benchmarks/lessons.py`.

    Args:
        lesson: the number of the notebook, such as "10".
        folder: where the runs are stored, as `lessons-*.json`.
    """
    runs = sorted(folder.glob("lessons-*.json"))
    if not runs:
        print("no run is stored yet; `python benchmarks/lessons.py` on a GPU stores one")
        return
    run = json.loads(runs[-1].read_text())
    print(f"{run['device']}, {run['date']}, " + ", ".join(f"{k} {v}" for k, v in run["versions"].items()))
    for entry in run["entries"]:
        if entry["lesson"] == lesson:
            rate = f"{entry['rate']:.0f} {entry['unit']}"
            print(f"{entry['shape']:<20}{entry['name']:<24}{entry['us']:>10.1f} us {rate:>14}")
