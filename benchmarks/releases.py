"""How fast the FP8 matmuls are under each Triton release, in one race on one Hopper GPU.

    python benchmarks/releases.py compile DIR MxNxK|MxNxKxE ... [--set NAME=NUMBER ...]
    python benchmarks/releases.py race DIR

`compile` needs no GPU. It compiles the kernel that a shape runs, with the Triton that Python finds, and writes its
machine code to DIR. `MxNxK` is `fp8_gemm` and `MxNxKxE` is `fp8_grouped_gemm`, to bfloat16. Run it once for each
release, which may be a folder on PYTHONPATH: `make .venv/demo` installs three into `.venv`. `--set` changes fields of
the tile, such as REGISTERS.

`race` launches the machine code by the CUDA driver, so it needs no Triton but the installed one. Before the race, a
launch of each kernel must give the bytes of the installed Triton's kernel in an output full of a poison. DeepGEMM takes
part if it can be imported; for token groups it gets rows that were padded beforehand. The kernels take turns in random
order, so that no kernel always follows the same one.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

Launch = Callable[[], Any]
BLOCK, POISON, ROUNDS = 128, 0x7FC1, 24


def sizes_of(shape: str) -> tuple[int, int, int, int]:
    """M, N, K and the number of experts, or 0."""
    M, N, K, *E = map(int, shape.split("x"))
    return M, N, K, E[0] if E else 0


def compile_shape(shape: str, options: dict[str, int], folder: Path) -> None:
    import triton

    from mxspec.machine_code.fake_gpu import fake_gpu
    from mxspec.triton_kernels.hopper.fp8 import launch

    M, N, K, E = sizes_of(shape)
    lead = (E,) if E else ()
    with fake_gpu("sm90") as compiled:

        def empty(*of: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(*of, dtype=dtype, device="meta")

        a, b = empty(M, K, dtype=torch.float8_e4m3fn), empty(*lead, N, K, dtype=torch.float8_e4m3fn)
        a_scale, b_scale = empty(-(-K // BLOCK), M).t(), empty(*lead, -(-N // BLOCK), -(-K // BLOCK))
        tile = {**launch.tile_for(M, N, 132, max(E, 1), "M" if E else ""), **options}
        if M <= 32 or tile.get("chunk", tile["BLOCK_N"]) < 64:
            raise SystemExit(f"{shape} runs a small tile, whose TMA boxes this script does not know")
        grouped: dict[str, Any] = {"offs": empty(E, dtype=torch.int32), "grouped": "M"} if E else {}
        launch.fp8_sm90(a, a_scale, b, b_scale, empty(M, N, dtype=torch.bfloat16), tile=tile, **grouped)
        kernel = compiled[-1]
    ptx = kernel.asm["ptx"]
    head = ptx[: ptx.index(".reqntid")]
    sizes = [
        128 if kind == "b8" else int(kind[1:]) // 8 for kind in re.findall(r"\.param .*?\.([bu]\d+) .*_param_", head)
    ]
    entry, threads = re.search(r"\.entry (\w+)\(", ptx), re.search(r"\.reqntid (\d+)", ptx)
    assert entry is not None, "Triton's PTX names its kernel"
    assert threads is not None, "Triton's PTX gives the number of threads"
    name = "-".join([f"triton {triton.__version__}", shape, *(f"{key} {value}" for key, value in options.items())])
    about = {
        "shape": shape, "entry": entry[1], "threads": int(threads[1]), "sizes": sizes,
        "shared": kernel.metadata.shared, "tile": [tile["BLOCK_M"], tile["BLOCK_N"]],
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.cubin").write_bytes(kernel.asm["cubin"])
    (folder / f"{name}.json").write_text(json.dumps(about))
    print(name)


class LaunchConfig(ctypes.Structure):
    """CUDA's CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("num_attributes", ctypes.c_uint),
    )  # fmt: skip


def aligned(content: bytes) -> Any:
    """A buffer that starts at a multiple of 64 bytes, as a TMA descriptor must."""
    raw = (ctypes.c_ubyte * (len(content) + 63))()
    at = (ctypes.addressof(raw) + 63) // 64 * 64 - ctypes.addressof(raw)
    buffer = (ctypes.c_ubyte * len(content)).from_buffer(raw, at)
    ctypes.memmove(buffer, content, len(content))
    return buffer


def parameters(
    tile: tuple[int, int], a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, offs: Tensor | None,
    descriptor: Callable[[Tensor, int, int], bytes],
) -> list[bytes | int]:  # fmt: skip
    """What Triton passes: of a matrix a descriptor, its sizes and its strides; of a tensor its address.

    The numbers 1 and None are constants of the machine code, but for those of a descriptor.
    """
    (M, K), N, E = a.shape, b.shape[-2], 1 if offs is None else len(offs)
    m_tiles, n_tiles = -(-M // tile[0]), -(-N // tile[1])
    tiles = (m_tiles + (0 if offs is None else E)) * n_tiles
    values: list[bytes | int] = []
    for matrix, rows, columns in ((a, tile[0], 128), (b.view(-1, K), tile[1], 128), (out, 64, 64)):
        values += [descriptor(matrix, rows, columns), *matrix.shape, *matrix.stride()]
    b_strides = ((0,) if offs is None else ()) + b_scale.stride()
    rest = [out.data_ptr(), N, a_scale.data_ptr(), *a_scale.stride(), b_scale.data_ptr(), *b_strides]
    rest += [0] if offs is None else [offs.data_ptr(), 1]
    return values + [n for n in (*rest, E, tiles, M, N, -(-K // BLOCK), m_tiles, n_tiles) if n != 1]


class Driver:
    """The few calls of the CUDA driver that a launch needs."""

    def __init__(self) -> None:
        torch.zeros(1, device="cuda")  # makes the context
        self.library = ctypes.CDLL("libcuda.so.1")

    def __call__(self, function: str, *args: Any) -> None:
        if error := getattr(self.library, function)(*args):
            text = ctypes.c_char_p()
            self.library.cuGetErrorString(error, ctypes.byref(text))
            raise RuntimeError(f"{function}: {(text.value or b'').decode()}")

    def descriptor(self, matrix: Tensor, rows: int, columns: int) -> bytes:
        """A TMA descriptor of a row-major matrix, with boxes of 128 bytes a row, swizzled."""
        kind = {torch.float8_e4m3fn: 0, torch.bfloat16: 9}[matrix.dtype]
        of_two, of_one = ctypes.c_uint64 * 2, ctypes.c_uint64 * 1
        buffer = aligned(bytes(128))
        self(
            "cuTensorMapEncodeTiled", buffer, kind, 2, ctypes.c_void_p(matrix.data_ptr()),
            of_two(matrix.shape[1], matrix.shape[0]), of_one(matrix.stride(0) * matrix.element_size()),
            (ctypes.c_uint32 * 2)(columns, rows), (ctypes.c_uint32 * 2)(1, 1), 0, 3, 2, 0,
        )  # fmt: skip
        return bytes(buffer)

    def prepare(
        self, path: Path, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, offs: Any
    ) -> Launch:
        """A function that launches a compiled kernel on these tensors."""
        about = json.loads(path.read_text())
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self("cuModuleLoadData", ctypes.byref(module), path.with_suffix(".cubin").read_bytes())
        self("cuModuleGetFunction", ctypes.byref(function), module, about["entry"].encode())
        self("cuFuncSetAttribute", function, 8, about["shared"])  # the largest dynamic shared memory
        tile = about["tile"]
        values = parameters(tile, a, a_scale, b, b_scale, out, offs, self.descriptor)
        values += [0] * (len(about["sizes"]) - len(values))  # scratch memory, which these kernels do not use
        numbers = {4: ctypes.c_uint32, 8: ctypes.c_uint64}
        buffers = [
            aligned(value) if isinstance(value, bytes) else numbers[size](value)
            for value, size in zip(values, about["sizes"], strict=True)
        ]
        pointers = (ctypes.c_void_p * len(buffers))(*map(ctypes.addressof, buffers))
        tiles = (-(-len(a) // tile[0]) + (0 if offs is None else len(offs))) * -(-b.shape[-2] // tile[1])
        programs = min(tiles, torch.cuda.get_device_properties(0).multi_processor_count)
        config = LaunchConfig((programs, 1, 1), (about["threads"], 1, 1), about["shared"])

        def launch(alive: Any = (module, buffers)) -> None:
            config.stream = torch.cuda.current_stream().cuda_stream
            self("cuLaunchKernelEx", ctypes.byref(config), function, pointers, None)

        return launch


def group_ends(M: int, E: int) -> Tensor:
    """Uneven groups. The largest has about six times as many tokens as the smallest."""
    shares = torch.rand(E, generator=torch.Generator().manual_seed(3)) + 0.2
    rows = (shares / shares.sum() * M).long()
    rows[-1] += M - rows.sum()
    return rows.cumsum(0).to(torch.int32)


def operands(M: int, N: int, K: int, E: int) -> list[Any]:
    import mxspec

    generator = torch.Generator(device="cuda").manual_seed(1)
    x, w = (
        torch.randn(rows, K, device="cuda", dtype=torch.bfloat16, generator=generator) for rows in (M, max(E, 1) * N)
    )
    a, a_scale = mxspec.fp8_quantize_1x128(x, scale_major="mn", backend="triton")
    b, b_scale = mxspec.fp8_quantize_128x128(w, backend="triton")
    if not E:
        return [a, a_scale, b, b_scale, None]
    return [a, a_scale, b.view(E, N, K), b_scale.view(E, N // BLOCK, -1), group_ends(M, E).cuda()]


def deepgemm(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, offs: Any) -> Launch | None:
    """DeepGEMM's call, or None without the package."""
    try:
        library = importlib.import_module("deep_gemm")
    except ImportError as error:
        print(f"without DeepGEMM: {error}")
        return None
    recipe = (1, BLOCK, BLOCK)
    if offs is None:
        out = torch.empty(len(a), b.shape[0], dtype=torch.bfloat16, device="cuda")
        return lambda: library.fp8_gemm_nt((a, a_scale), (b, b_scale), out, recipe=recipe)
    ends = offs.tolist()
    rows = torch.tensor(ends) - torch.tensor([0, *ends[:-1]])
    padded = (rows + BLOCK - 1) // BLOCK * BLOCK
    first = padded.cumsum(0) - padded
    at = torch.cat([torch.arange(int(n)) + int(f) for n, f in zip(rows, first, strict=True)]).cuda()
    codes = torch.zeros(int(padded.sum()), a.shape[1], dtype=torch.uint8, device="cuda")
    codes[at] = a.view(torch.uint8)
    scales = torch.zeros(a_scale.shape[1], len(codes), device="cuda").t()
    scales[at] = a_scale
    expert = torch.arange(len(rows)).repeat_interleave(padded).to(torch.int32).cuda()
    out = torch.empty(len(codes), b.shape[1], dtype=torch.bfloat16, device="cuda")
    pair = codes.view(torch.float8_e4m3fn), scales
    return lambda: library.m_grouped_fp8_gemm_nt_contiguous(pair, (b, b_scale), out, expert, recipe=recipe)


def graph(launch: Launch, calls: int) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            launch()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for _ in range(calls):
            launch()
    return captured


def race(shape: str, paths: Sequence[Path]) -> None:
    from mxspec.triton_kernels.hopper.fp8 import launch

    M, N, K, E = sizes_of(shape)
    a, a_scale, b, b_scale, offs = operands(M, N, K, E)
    expected, out = (torch.empty(M, N, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    grouped = "M" if E else ""
    contenders: dict[str, Launch] = {
        "installed": lambda: launch.fp8_sm90(a, a_scale, b, b_scale, expected, offs=offs, grouped=grouped)
    }
    if peer := deepgemm(a, a_scale, b, b_scale, offs):
        contenders["DeepGEMM"] = peer
    contenders["installed"]()
    driver = Driver()
    for path in paths:
        contenders[path.stem.replace(f"-{shape}", "")] = run = driver.prepare(path, a, a_scale, b, b_scale, out, offs)
        out.view(torch.int16).fill_(POISON)
        run()
        torch.cuda.synchronize()
        if not torch.equal(out.view(torch.int16), expected.view(torch.int16)):
            raise AssertionError(f"{path.stem} gives other bytes than the installed Triton's kernel")
    calls = max(1, round(4e-3 * 1.2e15 / (2 * M * N * K)))
    graphs = {name: graph(run, calls) for name, run in contenders.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name in random.sample(list(graphs), len(graphs)):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graphs[name].replay()  # the clock settles
            begin.record()
            graphs[name].replay()
            end.record()
            torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(end) / calls * 1e3)
    first = "DeepGEMM" if peer else "installed"
    print(f"{shape}: {first} {median(times[first]):.1f} us; of its rate:")
    for name, values in times.items():
        print(f"  {median(times[first]) / median(values):.3f}  {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    compiling = commands.add_parser("compile", help="write the machine code of the installed Triton")
    compiling.add_argument("folder", type=Path)
    compiling.add_argument("shapes", nargs="+", metavar="MxNxK|MxNxKxE")
    compiling.add_argument("--set", nargs="*", default=[], metavar="NAME=NUMBER", help="fields of the tile to change")
    racing = commands.add_parser("race", help="race what the folder holds")
    racing.add_argument("folder", type=Path)
    args = parser.parse_args()
    if args.command == "compile":
        options = {name: int(value) for name, value in (pair.split("=") for pair in args.set)}
        for shape in args.shapes:
            compile_shape(shape, options, args.folder)
        return
    found: dict[str, list[Path]] = {}
    for path in sorted(args.folder.glob("*.json")):
        found.setdefault(json.loads(path.read_text())["shape"], []).append(path)
    if not found:
        parser.error(f"no compiled kernels in {args.folder}")
    for shape, paths in found.items():
        race(shape, paths)


if __name__ == "__main__":
    main()
