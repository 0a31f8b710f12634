"""Race configurations of a kernel: `python benchmarks/tune.py OP [MxK | MxKxG ...]`.

Each configuration is first checked against the reference. Write the winners into the kernels' CONFIGS by hand, and put
the output of the run into the commit. The race also has a copy and a bare cast. For `mx_quantize_groups` it also has
`mx_quantize` on tokens that are already padded, which shows the cost of the padding in the fused kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch

import mxspec
from mxspec import dispatch, plans
from mxspec.bench.timing import Contender, baselines, bytes_of_call, input_sets, race
from mxspec.check import default_device
from mxspec.helion_kernels import fp8_dequantize as helion_fp8_dequantize
from mxspec.helion_kernels import fp8_quantize_1x128 as helion_1x128
from mxspec.helion_kernels import fp8_quantize_128x128 as helion_128x128
from mxspec.helion_kernels import fp8_quantize_k_groups as helion_fp8_k_groups
from mxspec.helion_kernels import mx_quantize as helion_mx_quantize
from mxspec.helion_kernels import mx_quantize_groups as helion_quantize_groups
from mxspec.helion_kernels import to_blocked_k_groups as helion_k_groups
from mxspec.helion_kernels.common.launch import config
from mxspec.helion_kernels.tiles import mx_columns as helion_mx_columns
from mxspec.helion_kernels.tiles import token_rows as helion_token_rows
from mxspec.shapes import Shapes
from mxspec.spec import Case, outputs_of
from mxspec.triton_kernels import (
    fp8_dequantize,
    fp8_quantize_1x128,
    fp8_quantize_128x128,
    fp8_quantize_k_groups,
    mx_quantize_groups,
    to_blocked_k_groups,
)
from mxspec.triton_kernels import mx_quantize as triton_mx_quantize
from mxspec.triton_kernels.tiles import mx_columns as triton_mx_columns
from mxspec.triton_kernels.tiles import token_rows as triton_token_rows

GPU = (9, 0)
Choice = tuple[str, str, Callable[[], None]]  # the backend, the configuration's name, and a function that sets it
BLOCKS_AND_WARPS = [(32, 1), (32, 2), (64, 2), (64, 4), (128, 4), (128, 8), (256, 8), (512, 16)]
QUANTIZER_SHAPES = ["4096x2048", "32768x7168", "131072x7168"]
GROUP_SHAPES = [f"{size}x{G}" for size in ("16384x2048", "16384x7168", "131072x7168") for G in (1, 8, 64, 256)]


def _set(table: dict[Any, Any], key: Any, value: Any) -> Callable[[], None]:
    return lambda: table.__setitem__(key, value)


def quantizer(layout: str) -> Iterator[Choice]:
    for blocks, warps in BLOCKS_AND_WARPS:
        what = f"{blocks} blocks, {warps} warps"
        triton = {"BLOCKS": blocks, "num_warps": warps}
        helion = config([blocks], warps) if layout == "flat" else config([1, 1, blocks], warps, pid_type="xyz")
        yield "triton", what, _set(triton_mx_quantize.CONFIGS[GPU], layout, triton)
        yield "helion", what, _set(helion_mx_quantize.CONFIGS[layout], GPU, helion)


def token_rows() -> Iterator[Choice]:
    for rows, width, warps in product((2, 4, 8, 16), (2048, 4096), (4, 8)):
        what = f"{rows} rows, {width} bytes, {warps} warps"
        yield "triton", what, _set(triton_token_rows.CONFIGS, GPU, {"ROWS": rows, "BYTES": width, "num_warps": warps})
        yield "helion", what, _set(helion_token_rows.CONFIGS, GPU, helion_token_rows.Part(rows, width, warps))


def k_groups() -> Iterator[Choice]:
    for tiles, warps in [(8, 2), (16, 4), (32, 4), (32, 8)]:
        what = f"{tiles} tiles, {warps} warps"
        chosen = {"TILES": tiles, "num_warps": warps}
        yield "triton", what, _set(to_blocked_k_groups.CONFIGS, GPU, {32: chosen, 256: chosen})
        yield "helion", what, _set(helion_k_groups.CONFIGS, GPU, helion_k_groups.Tiles(tiles, warps))


def quantize_rows() -> Iterator[Choice]:
    for blocks, warps in BLOCKS_AND_WARPS:
        chosen = {"BLOCKS": blocks, "num_warps": warps}
        what = f"{blocks} blocks, {warps} warps"
        yield "triton", what, _set(mx_quantize_groups.CONFIGS, GPU, chosen)
        yield "helion", what, _set(helion_quantize_groups.CONFIGS, GPU, helion_quantize_groups.Part(blocks, warps))


def quantize_columns(rows: Collection[int] = (128, 256)) -> Iterator[Choice]:
    for runs, warps in [(n // 16, warps) for n in rows for warps in (2, 4, 8)]:
        tile = {"RUN": 16, "RUNS": runs, "COLS": 128, "PART": 128, "num_warps": warps}
        table = {**triton_mx_columns.CONFIGS[GPU], "col, small": tile, "col, large": tile}
        what = f"{16 * runs} x 128, {warps} warps"
        yield "triton", what, _set(triton_mx_columns.CONFIGS, GPU, table)
        shape = helion_mx_columns.Tile(16 * runs, 128, 128, 16, warps)
        tiles = {**helion_mx_columns.TILES[GPU], "col, small": shape, "col, large": shape}
        yield "helion", what, _set(helion_mx_columns.TILES, GPU, tiles)


def fp8_rows(triton: Any, helion: Any, which: str, dims: int) -> Iterator[Choice]:
    """For blocks that lie along memory: the number of blocks of 128 in a program, and the number of its warps.

    A Helion program has `dims` dimensions of rows and blocks.
    """
    for rows, warps in [(8, 1), (16, 1), (16, 2), (32, 2), (32, 4), (64, 4), (64, 8), (128, 8)]:
        what = f"{which}, {rows} rows, {warps} warps"
        yield "triton", what, _set(triton.CONFIGS[GPU], which, {"ROWS": rows, "num_warps": warps})
        sizes = {1: [rows], 2: [rows, 1], 3: [1, rows, 1]}[dims]
        yield "helion", what, _set(helion.CONFIGS[which], GPU, config(sizes, warps))


def fp8_columns(which: str, tiles: Collection[tuple[int, int, int]]) -> Iterator[Choice]:
    for blocks, cols, warps in tiles:
        what = f"{blocks} blocks x {cols}, {warps} warps"
        tile = {"BLOCKS": blocks, "COLS": cols, "num_warps": warps}
        yield "triton", what, _set(fp8_quantize_1x128.CONFIGS[GPU], which, tile)
        yield "helion", what, _set(helion_1x128.TILES[GPU], which, helion_1x128.Tile(blocks, cols, warps))


def fp8_groups() -> Iterator[Choice]:
    for cols, warps in [(32, 1), (64, 2), (128, 4), (256, 8)]:
        what = f"128 x {cols}, {warps} warps"
        yield "triton", what, _set(fp8_quantize_k_groups.CONFIGS, GPU, {"COLS": cols, "num_warps": warps})
        yield "helion", what, _set(helion_fp8_k_groups.TILES, GPU, helion_fp8_k_groups.Tile(cols, warps))


MN_TILES = [(1, 32, 1), (1, 64, 2), (1, 128, 4), (1, 256, 8), (2, 64, 4), (2, 128, 8)]
K_TILES = [(1, 128, 4), (2, 64, 4), (4, 32, 4), (4, 64, 8), (8, 32, 8)]


def fp8_squares() -> Iterator[Choice]:
    for warps in (4, 8, 16):
        yield "triton", f"{warps} warps", _set(fp8_quantize_128x128.CONFIGS[GPU], "plain", {"num_warps": warps})
        yield "helion", f"{warps} warps", _set(helion_128x128.TILES[GPU], "plain", helion_128x128.Tile(0, warps))


def fp8_squares_and_transposes() -> Iterator[Choice]:
    for lanes in (2, 4, 8):
        tile = {"LANES": lanes, "num_warps": 4}
        what = f"{16 * lanes} rows a warp"
        yield "triton", what, _set(fp8_quantize_128x128.CONFIGS[GPU], "with transpose", tile)
        yield "helion", what, _set(helion_128x128.TILES[GPU], "with transpose", helion_128x128.Tile(lanes, 4))


def fp8_turned() -> Iterator[Choice]:
    for cols, warps in [(32, 1), (64, 2), (128, 4), (256, 8)]:
        what = f"128 x {cols}, {warps} warps"
        yield "triton", what, _set(fp8_dequantize.CONFIGS[GPU], "turned", {"COLS": cols, "num_warps": warps})
        yield "helion", what, _set(helion_fp8_dequantize.TILES[GPU], "turned", helion_fp8_dequantize.Tile(cols, warps))


# For each op: the default shapes, and pairs of the options of a call and the configurations to try for it.
SPACES: dict[str, tuple[list[str], list[tuple[dict[str, Any], Callable[[], Iterator[Choice]]]]]] = {
    "mx_quantize": (
        QUANTIZER_SHAPES,
        [
            ({"scale_layout": "plain"}, partial(quantizer, "flat")),
            ({"scale_layout": "blocked"}, partial(quantizer, "blocked")),
            ({"axis": -2, "scale_layout": "plain"}, quantize_columns),
            ({"axis": -2, "scale_layout": "blocked"}, quantize_columns),
        ],
    ),
    "pad_token_groups": (GROUP_SHAPES, [({}, token_rows)]),
    "unpad_token_groups": (GROUP_SHAPES, [({}, token_rows)]),
    "place_token_groups": (GROUP_SHAPES, [({}, token_rows)]),
    "to_blocked_k_groups": (GROUP_SHAPES, [({}, k_groups)]),
    "mx_quantize_groups": (
        ["8192x2048", "32768x2048", "32768x7168", "131072x7168"],
        [({"axis": -1}, quantize_rows), ({"axis": -2}, partial(quantize_columns, (128,)))],
    ),
    "fp8_quantize_1x128": (
        QUANTIZER_SHAPES,
        [
            ({}, partial(fp8_rows, fp8_quantize_1x128, helion_1x128, "flat", 1)),
            ({"scale_major": "mn"}, partial(fp8_rows, fp8_quantize_1x128, helion_1x128, "along", 2)),
            ({"axis": -2, "scale_major": "mn"}, partial(fp8_columns, "across, mn", MN_TILES)),
            ({"axis": -2, "scale_major": "k"}, partial(fp8_columns, "across, k", K_TILES)),
        ],
    ),
    "fp8_quantize_k_groups": (["8192x2048", "32768x2048", "32768x7168", "131072x7168"], [({}, fp8_groups)]),
    "fp8_quantize_128x128": (
        ["4096x2048", "32768x7168", "8x7168x2048"],
        [({}, fp8_squares), ({"with_transpose": True}, fp8_squares_and_transposes)],
    ),
    "fp8_dequantize": (
        QUANTIZER_SHAPES,
        [
            ({}, partial(fp8_rows, fp8_dequantize, helion_fp8_dequantize, "flat", 1)),
            ({"axis": -2}, fp8_turned),
        ],
    ),
}


def case_of(op: str, shape: str, options: dict[str, Any]) -> Case:
    """The op's own benchmark case for a shape, with these options."""
    sizes: Any = tuple(map(int, shape.split("x")))
    of_kinds = {2: {"matrices": (sizes,), "linear": ((1, *sizes),)}, 3: {"padding": (sizes,), "experts": (sizes,)}}
    cases = list(dispatch.reference(op).spec.bench_cases(Shapes(**of_kinds[len(sizes)])))
    # The arguments may depend on an option, so a case that already has all these options comes first.
    for case in [c for c in cases if options.items() <= c.kwargs.items()] + [c for c in cases if not c.kwargs]:
        return Case(f"{case.name} {options}" if options else case.name, case.args, {**case.kwargs, **options})
    raise ValueError(f"tune: {op} has no benchmark case for the shape {shape}")


def beside(op: str, inputs: list[Any], kwargs: dict[str, Any]) -> list[Contender]:
    """The contender that shows the cost of fused padding: `mx_quantize` on tokens that are already padded."""
    if op != "mx_quantize_groups":
        return []
    padded = [mxspec.pad_token_groups(x, offs, 128, backend="reference")[:1] for x, offs in inputs]
    options = {"axis": -1, "scaling": "rceil", "scale_layout": "blocked", **kwargs}
    return [Contender("mx_quantize, padded before", partial(mxspec.mx_quantize, **options), padded)]


def tune(op: str, case: Case, choices: Iterator[Choice], device: torch.device) -> None:
    """Race all configurations for one case, and print them, the fastest first."""
    reference = dispatch.reference(op)
    inputs = input_sets(reference, case, device)
    expected = [outputs_of(reference(*args, **case.kwargs)) for args in inputs]
    contenders = [*baselines(inputs), *beside(op, inputs, dict(case.kwargs))]
    kernels = set()
    for backend, what, configure in choices:
        configure()
        call = partial(dispatch.public(op), backend=backend, **case.kwargs)
        contender = Contender(f"{backend}, {what}", call, inputs)
        if problem := contender.prove(expected):
            raise AssertionError(f"{contender.name}: {problem}")
        contenders.append(contender)
        kernels.add(contender)
    race(contenders)
    moved = reference.spec.bytes_moved(inputs[0], expected[0])
    gbps = {c: (moved if c in kernels else bytes_of_call(c)) / c.us / 1e3 for c in contenders}
    yardstick = contenders[0]
    print(f"\n{op}, {case.name}: us, GB/s, of the {yardstick.name}")
    for c in sorted(contenders, key=lambda c: c.us):
        print(f"  {c.name:<40}{c.us:9.2f}{gbps[c]:8.0f}{gbps[c] / gbps[yardstick]:8.3f}", flush=True)


def main(op: str, shapes: list[str]) -> None:
    defaults, spaces = SPACES[op]
    for shape, (options, choices) in product(shapes or defaults, spaces):
        with plans.turned_off():  # a launch plan keeps the configuration with which it was recorded
            tune(op, case_of(op, shape, options), choices(), default_device())
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    if sys.argv[1:2] == [] or sys.argv[1] not in SPACES:
        sys.exit(f"tune: needs an op, one of {', '.join(SPACES)}")
    main(sys.argv[1], sys.argv[2:])
