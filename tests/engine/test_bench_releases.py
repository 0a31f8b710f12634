"""benchmarks/releases.py: what it passes to a compiled kernel, and the race around the launches, which need a GPU."""

import json
from pathlib import Path

import pytest
import torch

from mxspec.bench.timing import Pace
from mxspec.machine_code.fake_gpu import unavailable
from tests.helpers import ROOT, module_of

releases = module_of(ROOT / "benchmarks" / "releases.py")
pytestmark = pytest.mark.skipif(unavailable() is not None, reason="nothing can be compiled in this process")


def empty(*sizes, dtype=torch.float32):
    return torch.empty(*sizes, dtype=dtype, device="meta")


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    ("shape", "boxes", "width"),
    [
        ("1024x768x384", (64, 128, 64), 128),
        ("1024x5120x384", (128, 32, 32), 160),
        ("1536x4096x384", (128, 64, 64), 192),
        ("4096x4096x384", (128, 256, 64), 256),
        ("1000x512x640x5", (64, 128, 64), 128),
        ("1000x512x640x1", (64, 64, 64), 64),
    ],
)
def test_the_parameters_are_those_of_the_compiled_kernel(shape, boxes, width, tmp_path):
    releases.compile_shape(shape, {}, tmp_path)
    (path,) = tmp_path.glob("*.json")
    about = json.loads(path.read_text())
    assert path.with_suffix(".cubin").read_bytes().startswith(b"\x7fELF")
    M, N, K, E = releases.sizes_of(shape)
    lead = (E,) if E else ()
    codes = [empty(*size, dtype=torch.float8_e4m3fn) for size in ((M, K), (*lead, N, K))]
    scales = empty(K // 128, M).t(), empty(*lead, N // 128, K // 128)
    offs = empty(E, dtype=torch.int32) if E else None
    out = empty(M, N, dtype=torch.bfloat16)
    values = releases.parameters(
        about["boxes"],
        about["along_n"],
        codes[0],
        scales[0],
        codes[1],
        scales[1],
        out,
        offs,
        lambda matrix, rows, columns: bytes(128),
    )
    sizes, scratch = about["sizes"][: len(values)], about["sizes"][len(values) :]
    assert scratch == [8, 8], "Triton's two scratch pointers come last"
    assert [size == 128 for size in sizes] == [isinstance(value, bytes) for value in values]
    where = [i for i, size in enumerate(sizes) if size == 8 and i > 14]
    pointers = [15, 17, 19] if offs is None else [15, 17, 19, where[-1]]
    assert where == pointers
    assert tuple(about["boxes"]) == boxes
    assert values[-5:] == [M, N, K // 128, -(-M // boxes[0]), -(-N // width)]


def test_a_small_tile_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="16x512x512 has few rows or a small tile"):
        releases.compile_shape("16x512x512", {}, tmp_path)


@pytest.mark.parametrize("shape", ["256x128x384", "300x128x256x3"])
@pytest.mark.parametrize("wrong", [False, True])
def test_the_race_says_which_kernel_gives_other_bytes(shape, wrong, monkeypatch, capsys):
    """On a CPU. In the place of a compiled kernel stands the op, with a wrong row or without."""
    op = releases.mxspec.fp8_grouped_gemm if shape.count("x") == 3 else releases.mxspec.fp8_gemm

    def kernel(*args):
        out = op(*args)
        out[-1] += wrong
        return out

    monkeypatch.setattr(releases, "Driver", lambda: None)
    monkeypatch.setattr(releases, "Kernel", lambda driver, path: kernel)
    paths = [Path(f"triton 3.9.0-{shape}-REGISTERS 216.json")]
    releases.race(shape, paths, torch.device("cpu"), Pace(0, 1, 1, rounds=1))
    lines = capsys.readouterr().out.splitlines()
    (of_op,) = (line for line in lines if "  the op  " in line)
    (of_kernel,) = (line for line in lines if "  triton 3.9.0-REGISTERS 216  " in line)
    assert of_op.endswith("  the op  ")
    assert of_kernel.endswith("  triton 3.9.0-REGISTERS 216  ") != wrong
    assert all(float(figure) > 0 for figure in of_kernel.split("  triton")[0].split())
