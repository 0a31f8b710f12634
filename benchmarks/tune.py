"""Try configurations of the mx_quantize kernels, each first proven right: `python benchmarks/tune.py [MxK ...]`.

The winners are written into the kernels' CONFIGS by hand, with the run that chose them in the commit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from itertools import product

import torch

from mxspec import dispatch
from mxspec.bench import Contender, baselines, input_sets, race
from mxspec.helion_kernels import mx_quantize as helion_mx_quantize
from mxspec.helion_kernels._launch import config
from mxspec.spec import Case, given
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
        inputs = input_sets(reference, Case(shape, given(torch.randn, M, K, dtype=torch.bfloat16), kwargs))
        cast, copy = baselines(inputs)
        contenders = [cast, copy]
        for (backend, configure), (blocks, warps) in product(BACKENDS.items(), BLOCKS_AND_WARPS):
            configure(layout, blocks, warps)
            call = partial(dispatch.kernel_module("mx_quantize", backend).mx_quantize, **kwargs)
            contender = Contender(f"{backend}, {blocks} blocks, {warps} warps", call, inputs)
            contender.prove(inputs, partial(reference, **kwargs), reference.spec)
            contenders.append(contender)
        race(contenders)
        print(f"\n{shape}, {layout}: us, GB/s, of the bare cast")
        for c in sorted(contenders, key=lambda c: -c.gbps):
            print(f"  {c.name:<32}{c.us:9.2f}{c.gbps:8.0f}{c.gbps / cast.gbps:8.3f}", flush=True)
        del contenders, inputs, cast, copy
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main(sys.argv[1:])
