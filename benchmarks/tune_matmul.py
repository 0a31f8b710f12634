"""Race configurations of fp8_gemm's kernels, DeepGEMM and cuBLAS: `python benchmarks/tune_matmul.py [MxNxK ...]`.

`MxNxK` is a matmul of 1x128 by 128x128 blocks to bfloat16, and `wgrad:MxNxK` a matmul of 1x128 by 1x128 blocks to fp32.
Each configuration is first checked in another process with a time limit, because a kernel with wrong barriers never
ends. The right configurations then race in one interleaved loop. Write the winners into the kernel's TILES by hand.
`--only TEXT` tries only the configurations with the text in their names.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from mxspec import check, dispatch
from mxspec.bench.measure import load_peers
from mxspec.bench.timing import MATMUL, Contender, input_sets, race
from mxspec.shapes import Shapes
from mxspec.spec import Case
from mxspec.triton_kernels.hopper.fp8 import launch as kernel

SHAPES = ["4096x4096x7168", "8192x8192x8192", "4096x7168x2048", "32768x2048x7168", "wgrad:7168x4096x4096"]
LARGE, TURNED, *_ = (tile for _, tile in kernel.VECTOR_TILES)
WIDE, SQUARE, LOW, SMALL, *NARROW = (tile for _, tile in kernel.TILES)
SILENT_S = 45  # the time limit for a line of output: far more than a first compilation and a proof need
DEVICE = torch.device("cuda")
REFERENCE = dispatch.reference("fp8_gemm")

Options = dict[str, Any]
Launch = Callable[..., Any]  # takes a, a_scale, b, b_scale, out; returns the compiled kernel, or None
FOUR_STAGES: Options = {"NUM_STAGES": 4, "chunk": 64, "BUFFERS": 1}


def gluon(tile: Options, options: Options) -> Launch:
    def launch(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> Any:
        return kernel.fp8_sm90(a, a_scale, b, b_scale, out, tile=tile, **options)

    return launch


def helion(block_m: int, num_warps: int, **options: Any) -> Launch:
    from mxspec.helion_kernels.common import launch as helion_launch
    from mxspec.helion_kernels.fp8_gemm import INDEXING, tiles

    config = helion_launch.config([block_m], num_warps, **{"l2_groupings": [8], "indexing": INDEXING, **options})

    def launch(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
        by_row = b_scale.shape[0] == b.shape[0]
        helion_launch.launch(tiles, {(9, 0): config}, a, a_scale, b, b_scale, out, by_row, False)

    return launch


def helion_variants(M: int) -> dict[str, Launch]:
    host: Options = {"host_tensor_descriptors": True}
    if M <= 64:
        return {
            "Helion 64x128, 4 stages": helion(64, 4, num_stages=4),
            "Helion 64x128, 4 stages, host descriptors": helion(64, 4, num_stages=4, **host),
        }
    return {
        "Helion 128x128, 4 stages": helion(128, 8, num_stages=4),
        "Helion 128x128, 4 stages, host descriptors": helion(128, 8, num_stages=4, **host),
        "Helion 128x128, 3 stages, host descriptors": helion(128, 8, num_stages=3, **host),
        "Helion 128x128, 4 stages, pointers": helion(128, 8, num_stages=4, indexing="pointer"),
        "Helion 128x128, 4 stages, persistent": helion(128, 8, num_stages=4, pid_type="persistent_interleaved"),
    }


def variants(M: int, wgrad: bool) -> dict[str, Launch]:
    found = {name: gluon(*choice) for name, choice in gluon_variants(M, wgrad).items()}
    return found | (helion_variants(M) if importlib.util.find_spec("helion") else {})


def gluon_variants(M: int, wgrad: bool) -> dict[str, tuple[Options, Options]]:
    """The configurations to try: for each name a tile, and the options that are changed."""
    if wgrad:
        return {
            "256x128, turns": (LARGE, {"TURNS": 2}),
            "256x128": (LARGE, {"TURNS": 0}),
            "256x128, turns, output in halves": (LARGE, {"TURNS": 2, "chunk": 64, "BUFFERS": 2}),
            "256x128, output in halves": (LARGE, {"TURNS": 0, "chunk": 64, "BUFFERS": 2}),
            "256x128, turns, groups of 16": (LARGE, {"TURNS": 2, "SWIZZLE": 16}),
            "256x128, column scales read twice": (LARGE, {"TURNS": 0, "ONCE": False}),
            "128x128, turns": (TURNED, {"TURNS": 2}),
            "128x128": (TURNED, {"TURNS": 0}),
        }
    if M <= 128:
        low = {
            "128x64": (SMALL, {}),
            "128x64, 8 ahead": (SMALL, {"AHEAD": 8}),
            "128x64, 5 stages": (SMALL, {"NUM_STAGES": 5}),
        }
        other: dict[str, tuple[Options, Options]] = {
            "64x128": (LOW, {}),
            **{f"64x{tile['BLOCK_N']}": (tile, {}) for tile in NARROW},
            "128x128, turns": (SQUARE, {}),
        }
        return low | other
    return {
        "128x256": (WIDE, {}),
        "128x256, 3 stages, whole halves": (WIDE, {"NUM_STAGES": 3, "chunk": 128, "BUFFERS": 2}),
        "128x256, guarded": (WIDE, {"GUARDED": True}),
        "128x256, not guarded": (WIDE, {"GUARDED": False}),
        "128x256, 224 registers": (WIDE, {"REGISTERS": 224}),
        "128x256, groups of 8": (WIDE, {"SWIZZLE": 8}),
        "256x128, turns each half": (LARGE, {"TURNS": 2}),
        "256x128": (LARGE, {"TURNS": 0}),
        "256x128, 4 stages, turns each half": (LARGE, {**FOUR_STAGES, "TURNS": 2}),
        "128x128, turns": (SQUARE, {"TURNS": 2}),
    }


def case_of(shape: str) -> tuple[Case, int, bool]:
    kind, _, sizes = shape.rpartition(":")
    M, N, K = map(int, sizes.split("x"))
    shapes = Shapes(wgrad=((M, N, K),)) if kind else Shapes(linear=((M, N, K),))
    (case,) = REFERENCE.spec.bench_cases(shapes)
    return case, M, bool(kind)


def run(launch: Launch, *args: Tensor, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    out = torch.empty(args[0].shape[0], args[2].shape[0], dtype=out_dtype, device=args[0].device)
    launch(*args, out)
    return out


# --- proofs, in another process -----------------------------------------------------------------------------------


def prove(shape: str, names: list[str]) -> None:
    """Print one line for each configuration: `right` and its registers, or what is wrong."""
    case, M, wgrad = case_of(shape)
    args = input_sets(REFERENCE, case, DEVICE)[0]
    expected = REFERENCE(*args, **case.kwargs)
    for name in names:
        launch = variants(M, wgrad)[name]
        try:
            with check.poisoned(0xFF):
                got = [run(launch, *args, **case.kwargs) for _ in range(3)]
            torch.cuda.synchronize()
            used = ""
            if compiled := launch(*args, torch.empty_like(expected)):
                used = f"; {compiled.n_regs} registers, {compiled.n_spills} spilled, {compiled.metadata.shared} shared"
            problem = check.difference((got[0],), (expected,), REFERENCE.spec.min_sqnr_db)
            if not problem and not (torch.equal(got[0], got[1]) and torch.equal(got[0], got[2])):
                problem = "three calls gave different bits"
            said = problem or f"right ({check.sqnr_db(got[0], expected):.1f} dB{used})"
        except Exception as error:  # a compiler or a launch may raise any error; other configurations may be right
            said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        print(f"{name}\t{said}", flush=True)


def _lines(stream: Any, into: Queue[str | None]) -> None:
    for line in stream:
        into.put(line)
    into.put(None)


def proven(shape: str, names: list[str]) -> Iterator[str]:
    """The configurations that are right. A process without output for SILENT_S is killed; a new one goes on."""
    left = list(names)
    while left:
        command = [sys.executable, str(Path(__file__)), "--prove", shape, *left]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        lines: Queue[str | None] = Queue()
        Thread(target=_lines, args=(child.stdout, lines), daemon=True).start()
        other: list[str] = []
        while left:
            try:
                line = lines.get(timeout=SILENT_S)
            except Empty:
                print(f"  {left[0]:<46} never ended: stopped after {SILENT_S} s", flush=True)
                left.pop(0)
                break
            if line is None:  # the process died, or is done
                print(f"  {left[0]:<46} its process ended: {' '.join(other[-3:])[-400:]}", flush=True)
                left.pop(0)
                break
            name, tab, said = line.rstrip("\n").partition("\t")
            if not tab or name != left[0]:
                other.append(line.strip())
                continue
            print(f"  {name:<46} {said}", flush=True)
            if said.startswith("right"):
                yield name
            elif "CUDA error" in said or "AcceleratorError" in said:  # the process cannot use the GPU any more
                left.pop(0)
                break
            left.pop(0)
        child.kill()
        child.wait()


# --- the race -----------------------------------------------------------------------------------------------------


def contenders(case: Case, M: int, wgrad: bool, names: list[str], inputs: list[tuple[Any, ...]]) -> list[Contender]:
    found = []
    calls = {name: (partial(run, variants(M, wgrad)[name], **case.kwargs), inputs) for name in names}
    peers = load_peers()
    for label in ("DeepGEMM", "cuBLAS fp8"):
        adapter = peers.ADAPTERS["fp8_gemm"][label]
        calls[label] = (partial(adapter, **case.kwargs), [adapter.prepare(*args) for args in inputs])
    if wgrad:  # DeepGEMM's kernel alone, without zeroing the outputs first: a time to compare with, but never right
        calls["DeepGEMM without its zeros"] = (peers.deepgemm.onto_anything, calls["DeepGEMM"][1])
    for name, (call, sets) in calls.items():
        try:
            found.append(Contender(name, call, sets))
        except Exception as error:  # the library is not installed, or does not support this call
            print(f"  {name:<46} {type(error).__name__}: {' '.join(str(error).split())[:200]}", flush=True)
    return found


def tune(shape: str, only: str) -> None:
    case, M, wgrad = case_of(shape)
    print(f"\nfp8_gemm, {case.name}", flush=True)
    names = list(proven(shape, [name for name in variants(M, wgrad) if only in name]))
    inputs = input_sets(REFERENCE, case, DEVICE)
    racing = contenders(case, M, wgrad, names, inputs)
    race(racing, MATMUL)
    expected = [(REFERENCE(*args, **case.kwargs),) for args in inputs]
    flops = REFERENCE.spec.flops(inputs[0], expected[0])
    yardstick = next((c for c in racing if c.name == "DeepGEMM"), racing[-1])
    print(f"  us, TFLOP/s, against {yardstick.name}; spread over the rounds; after the race")
    for c in sorted(racing, key=lambda c: c.us):
        after = c.prove_again(expected, REFERENCE.spec.min_sqnr_db) or "right"
        figures = f"{c.us:10.2f}{flops / c.us / 1e6:9.0f}{yardstick.us / c.us:8.3f}{c.spread:8.3f}"
        print(f"  {c.name:<46}{figures}  {after}", flush=True)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("shapes", nargs="*", default=SHAPES)
    parser.add_argument("--only", default="", metavar="TEXT")
    asked = parser.parse_args(argv)
    began = time.perf_counter()
    for shape in asked.shapes:
        tune(shape, asked.only)
        torch.cuda.empty_cache()
    print(f"\n{torch.cuda.get_device_name()}, {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--prove"]:
        prove(sys.argv[2], sys.argv[3:])
    else:
        main(sys.argv[1:])
