"""Times `Float8BlockwiseLinear` and `nn.Linear` in bfloat16: `python benchmarks/linear.py [TxKxN ...]`.

T is the number of tokens, K is in_features and N is out_features. First, the outputs and gradients are compared with
bfloat16's. Then the whole step (forward and backward) is timed as a program runs it, with quantizing. Then each kernel
of the step is timed alone, to get its share.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

import mxspec
from mxspec.bench.timing import MATMUL, Contender, Pace, race
from mxspec.check import sqnr_db
from mxspec.console import console
from mxspec.nn import Float8BlockwiseLinear

SHAPES = ["16384x4096x14336", "16384x7168x2048"]
MIN_SQNR_DB = 25  # of FP8's results against bfloat16's
Part = tuple[str, partial[Any], int]  # the name, the call, and its number of multiplications and additions


def step(module: nn.Module, x: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    """The output and the gradients of one forward and backward."""
    x.grad = None
    module.zero_grad()
    out = module(x)
    out.backward(dy)
    return out.detach(), *(t.grad for t in (x, *module.parameters()) if t.grad is not None)


def parts(x: Tensor, w: Tensor, dy: Tensor) -> Iterator[Part]:
    """The kernels of a step, in their order."""
    rows = partial(mxspec.fp8_quantize_1x128, scale_major="mn")
    columns = partial(rows, axis=-2)
    gemm = partial(mxspec.fp8_gemm, out_dtype=torch.bfloat16)
    flops = 2 * x.shape[0] * w.numel()
    codes = mxspec.fp8_quantize_128x128(w, with_transpose=True)
    yield "quantize x along K", partial(rows, x), 0
    yield "quantize w, and its transpose", partial(mxspec.fp8_quantize_128x128, w, with_transpose=True), 0
    yield "forward", partial(gemm, *rows(x), *codes[:2]), flops
    yield "quantize dy along N", partial(rows, dy), 0
    yield "dgrad", partial(gemm, *rows(dy), *codes[2:]), flops
    yield "quantize dy along the tokens", partial(columns, dy), 0
    yield "quantize x along the tokens", partial(columns, x), 0
    (a, a_scale), (b, b_scale) = columns(dy), columns(x)
    wgrad = partial(mxspec.fp8_gemm, a.mT, a_scale, b.mT, b_scale, out_dtype=torch.float32)
    yield "wgrad", wgrad, flops
    yield "its cast to bfloat16", partial(Tensor.to, wgrad(), torch.bfloat16), 0


def measure(T: int, K: int, N: int, device: torch.device, pace: Pace = MATMUL) -> float:
    """Time one shape and print the figures. Returns how many times as fast as bfloat16 the step is."""
    torch.manual_seed(0)
    linear = nn.Linear(K, N, bias=False, device=device, dtype=torch.bfloat16)
    fp8 = Float8BlockwiseLinear.from_linear(linear)
    x = torch.randn(T, K, device=device, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(T, N, device=device, dtype=torch.bfloat16)
    for what, got, expected in zip(("y", "dx", "dw"), step(fp8, x, dy), step(linear, x, dy), strict=True):
        if (measured := sqnr_db(got, expected)) < MIN_SQNR_DB:
            raise AssertionError(f"{what}: {measured:.1f} dB against bfloat16; needs {MIN_SQNR_DB} dB of SQNR or more")

    steps = [Contender(name, partial(step, m), [(x, dy)], waits=True) for name, m in (("bf16", linear), ("fp8", fp8))]
    race(steps, pace)
    bf16_us, fp8_us = (c.us for c in steps)
    found = []
    for what, call, flops in parts(x.detach(), linear.weight.detach(), dy):
        contender = Contender(what, lambda _, call=call: call(), [(x.detach(),)])
        race([contender], pace)
        found.append((what, contender.us, flops))
    table = Table("part", "us", "share", "TFLOP/s", title=f"{T} tokens, {K} -> {N}, forward and backward")
    for column in table.columns[1:]:
        column.justify = "right"
    for what, us, flops in found:
        table.add_row(what, f"{us:.1f}", f"{us / fp8_us:.1%}", f"{flops / us / 1e6:.0f}" if flops else "")
    rest = fp8_us - sum(us for _, us, _ in found)
    table.add_row("between them", f"{rest:.1f}", f"{rest / fp8_us:.1%}", "")
    flops = 6 * T * K * N
    table.add_section()
    table.add_row("FP8 with 128-blocks", f"{fp8_us:.1f}", "100%", f"{flops / fp8_us / 1e6:.0f}")
    table.add_row("nn.Linear, bfloat16", f"{bf16_us:.1f}", f"{bf16_us / fp8_us:.1%}", f"{flops / bf16_us / 1e6:.0f}")
    console.print(table)
    return bf16_us / fp8_us


def main(shapes: list[str]) -> None:
    for shape in shapes or SHAPES:
        T, K, N = map(int, shape.split("x"))
        ratio = measure(T, K, N, torch.device("cuda"))
        console.print(f"{ratio:.2f} times as fast as bfloat16\n")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main(sys.argv[1:])
