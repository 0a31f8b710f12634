"""How fast the FP8 matmuls are under each Triton release, in one race on one Hopper GPU.

    python benchmarks/releases.py compile DIR MxNxK|MxNxKxE ... [--set NAME=NUMBER ...]
    python benchmarks/releases.py race DIR

`compile` needs no GPU. It compiles the kernel that a shape runs, with the Triton that Python finds, and writes its
machine code to DIR. `MxNxK` is `fp8_gemm` and `MxNxKxE` is `fp8_grouped_gemm`, to bfloat16. Run it once for each
release, which may be a folder on PYTHONPATH: `make .venv/demo` installs three into `.venv`. `--set` changes fields of
the tile, such as REGISTERS.

`race` launches the machine code by the CUDA driver, so it needs no Triton but the installed one. The contenders are
these kernels, the op as it is called, and DeepGEMM if it can be imported. For token groups, DeepGEMM gets rows that
were padded beforehand. After the race, the timed launches must give the op's bytes over memory full of a poison.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mxspec
from mxspec.bench.measure import load_peers
from mxspec.bench.timing import MATMUL, Contender, Pace
from mxspec.bench.timing import race as take_turns
from mxspec.cases.common.mx_operands import bench_sizes
from mxspec.cases.common.token_groups import offs_of
from mxspec.formats import FP8_BLOCK_SIZE as BLOCK


def sizes_of(shape: str) -> tuple[int, int, int, int]:
    """M, N, K and the number of experts, or 0."""
    M, N, K, *E = map(int, shape.split("x"))
    return M, N, K, E[0] if E else 0


def compile_shape(shape: str, options: dict[str, Any], folder: Path) -> None:
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
        tile = {**launch.tile_for(M, N, launch.processors(a.device), max(E, 1), "M" if E else ""), **options}
        right, chunk = tile.get("RIGHT", 0), tile.get("chunk", tile["BLOCK_N"])
        if tile["BLOCK_M"] > M or chunk < 32:
            raise SystemExit(f"{shape} has few rows or a small tile, whose TMA boxes this script does not know")
        grouped: dict[str, Any] = {"offs": empty(E, dtype=torch.int32), "grouped": "M"} if E else {}
        launch.fp8_sm90(a, a_scale, b, b_scale, empty(M, N, dtype=torch.bfloat16), tile=tile, **grouped, **options)
        kernel = compiled[-1]
    ptx = kernel.asm["ptx"]
    head = ptx[: ptx.index(".reqntid")]
    sizes = [
        128 if kind == "b8" else int(kind[1:]) // 8 for kind in re.findall(r"\.param .*?\.([bu]\d+) .*_param_", head)
    ]
    entry, threads = re.search(r"\.entry (\w+)\(", ptx), re.search(r"\.reqntid (\d+)", ptx)
    assert entry is not None, "Triton's PTX names its kernel"
    assert threads is not None, "Triton's PTX gives the number of threads"
    boxes = tile["BLOCK_M"], launch.box_of_b(tile["BLOCK_N"], right), min(chunk, 64)
    name = "-".join([f"triton {triton.__version__}", shape, *(f"{key} {value}" for key, value in options.items())])
    about = {
        "shape": shape, "entry": entry[1], "threads": int(threads[1]), "sizes": sizes,
        "shared": kernel.metadata.shared, "boxes": boxes, "along_n": launch.tiles_along_n(N, tile["BLOCK_N"], right),
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
    boxes: tuple[int, int, int], n_tiles: int, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor,
    offs: Tensor | None, descriptor: Callable[[Tensor, int, int], bytes],
) -> list[bytes | int]:  # fmt: skip
    """What Triton passes: of a matrix a descriptor, its sizes and its strides; of a tensor its address.

    `boxes` holds what TMA moves at once: rows of a, rows of b, and columns of 64 rows of the output. The numbers 1 and
    None are constants of the machine code, but for those of a descriptor.
    """
    (M, K), N, E = a.shape, b.shape[-2], 1 if offs is None else len(offs)
    m_tiles = -(-M // boxes[0])
    tiles = (m_tiles + (0 if offs is None else E)) * n_tiles
    values: list[bytes | int] = []
    for matrix, rows, columns in ((a, boxes[0], 128), (b.view(-1, K), boxes[1], 128), (out, 64, boxes[2])):
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
        """A TMA descriptor of a row-major matrix, with boxes of 64 or 128 bytes a row, swizzled over all of the row."""
        kind = {torch.float8_e4m3fn: 0, torch.bfloat16: 9}[matrix.dtype]
        of_two, of_one = ctypes.c_uint64 * 2, ctypes.c_uint64 * 1
        swizzle = {64: 2, 128: 3}[columns * matrix.element_size()]
        buffer = aligned(bytes(128))
        self(
            "cuTensorMapEncodeTiled", buffer, kind, 2, ctypes.c_void_p(matrix.data_ptr()),
            of_two(matrix.shape[1], matrix.shape[0]), of_one(matrix.stride(0) * matrix.element_size()),
            (ctypes.c_uint32 * 2)(columns, rows), (ctypes.c_uint32 * 2)(1, 1), 0, swizzle, 2, 0,
        )  # fmt: skip
        return bytes(buffer)


class Kernel:
    """A compiled kernel, as a function of the op's operands."""

    def __init__(self, driver: Driver, path: Path) -> None:
        self.driver, self.about = driver, json.loads(path.read_text())
        self.module, self.function = ctypes.c_void_p(), ctypes.c_void_p()
        driver("cuModuleLoadData", ctypes.byref(self.module), path.with_suffix(".cubin").read_bytes())
        driver("cuModuleGetFunction", ctypes.byref(self.function), self.module, self.about["entry"].encode())
        driver("cuFuncSetAttribute", self.function, 8, self.about["shared"])  # the largest dynamic shared memory

    def __call__(self, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, offs: Tensor | None = None) -> Tensor:
        out = torch.empty(a.shape[0], b.shape[-2], dtype=torch.bfloat16, device=a.device)
        boxes, along_n, sizes = self.about["boxes"], self.about["along_n"], self.about["sizes"]
        values = parameters(boxes, along_n, a, a_scale, b, b_scale, out, offs, self.driver.descriptor)
        values += [0] * (len(sizes) - len(values))  # scratch memory, which these kernels do not use
        numbers = {4: ctypes.c_uint32, 8: ctypes.c_uint64}
        buffers = [
            aligned(value) if isinstance(value, bytes) else numbers[size](value)
            for value, size in zip(values, sizes, strict=True)
        ]
        pointers = (ctypes.c_void_p * len(buffers))(*map(ctypes.addressof, buffers))
        tiles = (-(-len(a) // boxes[0]) + (0 if offs is None else len(offs))) * along_n
        programs = min(tiles, torch.cuda.get_device_properties(a.device).multi_processor_count)
        config = LaunchConfig((programs, 1, 1), (self.about["threads"], 1, 1), self.about["shared"])
        config.stream = torch.cuda.current_stream().cuda_stream
        self.driver("cuLaunchKernelEx", ctypes.byref(config), self.function, pointers, None)
        return out


def operands(shape: str, device: torch.device) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The op's operands, and DeepGEMM's: for uneven token groups the same tokens, padded to blocks of 128 rows."""
    M, N, K, E = sizes_of(shape)
    torch.manual_seed(0)
    with device:
        x, w = (torch.randn(*size, dtype=torch.bfloat16) for size in ((M, K), (*([E] if E else []), N, K)))
        b, b_scale, *_ = mxspec.fp8_quantize_128x128(w)
        tokens = partial(mxspec.fp8_quantize_1x128, scale_major="mn")
        if not E:
            both = *tokens(x), b, b_scale
            return both, both
        sizes, rows = bench_sizes(M, E, True)
        padded, _, ends = mxspec.pad_token_groups(x, offs_of(sizes), BLOCK)
        return (*tokens(x), b, b_scale, offs_of(sizes)), (*tokens(padded[:rows]), b, b_scale, ends)


def race(shape: str, paths: Sequence[Path], device: torch.device, pace: Pace = MATMUL) -> None:
    grouped = sizes_of(shape)[3] > 0
    given, of_deepgemm = operands(shape, device)
    op = mxspec.fp8_grouped_gemm if grouped else mxspec.fp8_gemm
    expected = [(op(*given),)]
    racing = [Contender("the op", op, [given])]
    peer = load_peers().ADAPTERS["fp8_grouped_gemm" if grouped else "fp8_gemm"]["DeepGEMM"]
    aligned_to_blocks = {"alignment": BLOCK} if grouped else {}
    try:
        racing.insert(0, Contender("DeepGEMM", partial(peer, **aligned_to_blocks), [peer.prepare(*of_deepgemm)]))
    except Exception as error:  # the library is not installed, or does not support this call
        print(f"without DeepGEMM: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
    if paths:
        driver = Driver()
        names = [path.stem.replace(f"-{shape}", "") for path in paths]
        racing += [Contender(name, Kernel(driver, path), [given]) for name, path in zip(names, paths, strict=True)]
    take_turns(racing, pace)
    print(f"{shape}: us of the kernel and of a plain call, rate beside {racing[0].name}")
    for c in racing:
        problem = None if c.name == "DeepGEMM" and grouped else c.prove_again(expected)  # those rows are padded
        print(f"  {c.us:10.1f}{c.call_us:10.1f}{racing[0].us / c.us:8.3f}  {c.name}  {problem or ''}")


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
        race(shape, paths, torch.device("cuda"))


if __name__ == "__main__":
    main()
