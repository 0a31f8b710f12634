"""Try configurations of the mx_quantize kernels, each first proven right: `python benchmarks/tune.py [MxK ...]`.

The winners are written into the kernels' CONFIGS by hand, with the run that chose them in the commit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from itertools import product

import torch

import mxspec
from mxspec import dispatch
from mxspec.bench.timing import Contender, baselines, bytes_of_call, input_sets, race
from mxspec.helion_kernels import mx_quantize as helion_mx_quantize
from mxspec.helion_kernels._launch import config
from mxspec.spec import Case, given, outputs_of
from mxspec.triton_kernels import mx_quantize as triton_mx_quantize

BLOCKS_AND_WARPS = [(32, 1), (32, 2), (64, 2), (64, 4), (128, 4), (128, 8), (256, 8), (512, 16)]


def set_triton(layout: str, blocks: int, warps: int) -> None:
    triton_mx_quantize.CONFIGS[9, 0][layout] = {"BLOCKS": blocks, "num_warps": warps}


def set_helion(layout: str, blocks: int, warps: int) -> None:
    chosen = config([blocks], warps) if layout == "flat" else config([1, 1, blocks], warps, pid_type="xyz")
    helion_mx_quantize.CONFIGS[layout][9, 0] = chosen


BACKENDS: dict[str, Callable[[str, int, int], None]] = {"triton": set_triton, "helion": set_helion}


def main(shapes: list[str]) -> None:
    reference = dispatch.reference("mx_quantize")
    for shape, layout in product(shapes or ["4096x2048", "32768x7168", "131072x7168"], ("flat", "blocked")):
        M, K = map(int, shape.split("x"))
        kwargs = {"scale_layout": "plain" if layout == "flat" else layout}
        case = Case(shape, given(torch.randn, M, K, dtype=torch.bfloat16), kwargs)
        inputs = input_sets(reference, case, torch.device("cuda"))
        expected = [outputs_of(reference(*args, **kwargs)) for args in inputs]
        contenders = baselines(inputs)
        cast = contenders[0]
        for (backend, configure), (blocks, warps) in product(BACKENDS.items(), BLOCKS_AND_WARPS):
            configure(layout, blocks, warps)
            call = partial(mxspec.mx_quantize, backend=backend, **kwargs)
            contender = Contender(f"{backend}, {blocks} blocks, {warps} warps", call, inputs)
            if problem := contender.prove(expected):
                raise AssertionError(f"{contender.name}: {problem}")
            contenders.append(contender)
        race(contenders)
        print(f"\n{shape}, {layout}: us, GB/s, of the bare cast")
        found = sorted(((bytes_of_call(c) / c.us / 1e3, c.us, c.name) for c in contenders), reverse=True)
        cast_gbps = bytes_of_call(cast) / cast.us / 1e3
        for gbps, us, name in found:
            print(f"  {name:<32}{us:9.2f}{gbps:8.0f}{gbps / cast_gbps:8.3f}", flush=True)
        del contenders, contender, inputs, cast
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main(sys.argv[1:])
