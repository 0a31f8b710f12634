"""The cases of fp8_gemm: calls written by hand, calls worth timing, and the dimensions of a call."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mxspec.cases.common import taken_rows
from mxspec.cases.common.fp8_operands import codes, scales
from mxspec.cases.common.matmuls import (
    FP8_SIZES,
    SIZES,
    affordable,
    costly,
    extremes_fit,
    fp8_operand,
    hides,
    impossible,
    lay,
    operand,
    operand_fits,
    with_special_codes,
)
from mxspec.cases.common.mx_operands import every_byte_of
from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.space import Space
from mxspec.cases.fp8_quantize_1x128 import TAILS
from mxspec.formats import FP8_BLOCK_SIZE
from mxspec.reference.fp8_quantize_1x128 import fp8_quantize_1x128
from mxspec.reference.fp8_quantize_128x128 import fp8_quantize_128x128
from mxspec.reference.mx_dequantize import OUT_DTYPES
from mxspec.spec import Case, Shapes, these


def operands(M: int, N: int, K: int, rows: int = FP8_BLOCK_SIZE, spread: int = 3, major: str = "k") -> Any:
    """The four operands of a call; `rows` is the number of rows of b that share a scale: 128 or 1."""
    C = -(-K // FP8_BLOCK_SIZE)
    a_scale = scales(M, C, spread, major)
    return codes(M, K), a_scale, codes(N, K, seed=2), scales(-(-N // rows), C, spread, major, seed=3)


# Scales that leave fp32's range, or lead past it; each is put into one block of an operand.
OUT_OF_RANGE = {
    "an Inf scale": torch.inf,
    "a scale of -Inf": -torch.inf,
    "the largest scale": torch.finfo().max,
    "a product of scales past fp32": 2.0**70,
}


def as_quantized() -> Any:
    a, a_scale, b, _ = operands(132, 272, 1024, major="mn")
    return a, a_scale, b, scales(3, 8, seed=3)


def every_byte(of_a: bool) -> Any:
    """Every byte of e4m3 in a or in b. The other operand is the unit matrix."""
    unit, found = every_byte_of(torch.float8_e4m3fn, FP8_BLOCK_SIZE)
    a, b = (found, unit) if of_a else (unit, found)
    return a, scales(len(a), 1), b, scales(-(-len(b) // FP8_BLOCK_SIZE), 1, seed=3)


def past_rows(M: int, N: int, K: int, rows: int = FP8_BLOCK_SIZE) -> Any:
    """The memory after each row of a and b, past K, holds NaN codes."""
    a, a_scale, b, b_scale = operands(M, N, K, rows)
    a, b = (torch.cat([t, torch.full((len(t), 112), torch.nan).to(t.dtype)], 1)[:, :K] for t in (a, b))
    return a, a_scale, b, b_scale


def with_nan_in_the_tail(of_scale: bool) -> Any:
    """A NaN code, or a NaN scale, in the last block of a row of a. The block is shorter."""
    a, a_scale, b, b_scale = operands(64, 136, 272)
    (a_scale if of_scale else a)[5, -1] = torch.nan
    return a, a_scale, b, b_scale


def refused() -> Iterator[tuple[str, tuple[Tensor, ...], type[Exception], str]]:
    """Operands that all FP8 matmuls of matrices refuse."""
    a, a_scale, b, b_scale = operands(6, 200, 256)
    yield "fp16 codes", (a.half(), a_scale, b, b_scale), TypeError, "a has dtype torch.float16; needs torch.float8"
    yield "e5m2 codes", (a, a_scale, b.view(torch.float8_e5m2), b_scale), TypeError, "b has dtype torch.float8_e5m2"
    yield "bf16 scale", (a, a_scale.bfloat16(), b, b_scale), TypeError, "a_scale has dtype torch.bfloat16"
    yield "b not K-major", (a, a_scale, b.t().contiguous().t(), b_scale), ValueError, "b has strides (1, 200); needs"
    yield "a not K-major", (a.t().contiguous().t(), a_scale, b, b_scale), ValueError, "a has strides (1, 6); needs"
    yield "K = 200", (a[:, :200], a_scale, b[:, :200], b_scale), ValueError, "K = 200"
    yield (
        "K = 8",
        (a[:, :8], a_scale[:, :1], b[:, :8], b_scale[:, :1]),
        ValueError,
        "K = 8 is not a multiple of 16; pad",
    )
    a_long, _, b_long, _ = operands(1, 1, 2888)
    yield "K = 2888", (a_long, a_scale, b_long, b_scale), ValueError, "K = 2888 is not a multiple of 16; pad"
    yield "K = 144, one scale", (a[:, :144], a_scale[:, :1], b[:, :144], b_scale), ValueError, "needs (6, 2) (1x128"
    yield "another K", (a, a_scale, b[:, :128], b_scale), ValueError, "b has shape (200, 128); needs (200, 256)"
    yield "a_scale of 128x128", (a, a_scale[:1], b, b_scale), ValueError, "needs (6, 2) (1x128 blocks)"
    yield "b_scale of neither", (a, a_scale, b, b_scale[:1]), ValueError, "needs (200, 2) (1x128 blocks) or (2, 2)"
    yield "mixed devices", (a, a_scale, b, b_scale.to("meta")), ValueError, "needs one device"


def cases() -> Iterator[Case]:
    for out_dtype in OUT_DTYPES:
        for rows, name in ((128, "1x128 by 128x128"), (1, "1x128 by 1x128")):
            for major in ("k", "mn"):
                for M, N, K in [(64, 128, 256), (300, 264, 384)]:
                    made = partial(operands, M, N, K, rows, major=major)
                    named = f"{M}x{N}x{K}, {name}, {major}-major scales, {str(out_dtype)[6:]}"
                    yield Case(named, made, {"out_dtype": out_dtype})
    for i, K in enumerate(TAILS):
        made = partial(operands, 130, 264, K, 1 if i % 2 else 128, 1, major="mn" if i % 3 else "k")
        yield Case(f"130x264x{K}", made, {"out_dtype": OUT_DTYPES[i % 2]})
    yield Case("130x131x208, NaN past the rows", partial(past_rows, 130, 131, 208))
    yield Case("130x131x400, 1x128 by 1x128, NaN past the rows", partial(past_rows, 130, 131, 400, 1))
    yield Case("a NaN code in a shorter block: its row", partial(with_nan_in_the_tail, False), flags={"edge"})
    yield Case("a NaN scale of a shorter block: its row", partial(with_nan_in_the_tail, True), flags={"edge"})
    # Scales as `fp8_quantize_1x128(..., scale_major="mn")` and `fp8_quantize_128x128` give them.
    for out_dtype in OUT_DTYPES:
        yield Case(f"as quantized, {str(out_dtype)[6:]}", as_quantized, {"out_dtype": out_dtype})
    for of_a in (True, False):
        name = f"every byte of e4m3fn in {'a' if of_a else 'b'}"
        yield Case(name, partial(every_byte, of_a), {"out_dtype": torch.float32}, flags={"edge"})
    yield Case("K = 128", partial(operands, 128, 256, 128), flags={"edge"})
    yield Case("one row", partial(operands, 1, 256, 640), flags={"edge"})
    yield Case("one row, MN-major", partial(operands, 1, 256, 640, 1, major="mn"), flags={"edge"})
    yield Case("one column", partial(operands, 64, 1, 256), flags={"edge"})
    yield Case("few rows and a long K", partial(operands, 16, 136, 4096, major="mn"))
    yield Case("64 rows and a long K", partial(operands, 64, 128, 4096), {"out_dtype": torch.float32})
    yield Case("100 rows and a long K", partial(operands, 100, 128, 4096, 1))
    yield Case("ragged against every tile", partial(operands, 257, 131, 256), {"out_dtype": torch.float32})
    yield Case("scales of 2^-40 to 2^40", partial(operands, 64, 256, 512, spread=40), flags={"edge"})
    yield Case("scales of 2^-40 to 2^40, 1x128", partial(operands, 64, 256, 512, 1, spread=40), flags={"edge"})
    a, a_scale, b, b_scale = operands(64, 256, 384)
    zero, nan = a.clone(), a_scale.clone()
    zero[3, 128:256], nan[5, 1] = 0, torch.nan
    yield Case("a block of zeros", these(zero, a_scale, b, b_scale), flags={"edge"})
    yield Case("a scale of 0", these(a, 0 * a_scale, b, b_scale), flags={"edge"})
    yield Case("a NaN scale: its row", these(a, nan, b, b_scale), flags={"edge"})
    nan = b_scale.clone()
    nan[1, 2] = torch.nan
    yield Case("a NaN scale: its 128 columns", these(a, a_scale, b, nan), flags={"edge"})
    for name, value in OUT_OF_RANGE.items():
        for of_b in (False, True):
            given = [a, a_scale.clone(), b, b_scale.clone()]
            given[3 if of_b else 1][1, 2] = value
            if name == "a product of scales past fp32":
                given[1 if of_b else 3][:, 2] = value
            yield Case(f"{name}, in {'b' if of_b else 'a'}_scale", these(*given), flags={"edge"})
    yield Case("sums past fp32", these(a, a_scale * 2.0**100, b, b_scale * 2.0**24), flags={"edge"})
    yield Case("no rows", these(a[:0], a_scale[:0], b, b_scale), flags={"edge"})
    yield Case("no columns", these(a, a_scale, b[:0], b_scale[:0]), flags={"edge"})
    yield Case("K = 0: sums of nothing", these(a[:, :0], a_scale[:, :0], b[:, :0], b_scale[:, :0]), flags={"edge"})
    for name, args, error, match in refused():
        yield Case(name, these(*args), raises=error, match=match)
    fp16 = {"out_dtype": torch.float16}
    yield Case("fp16 out", these(a, a_scale, b, b_scale), fp16, raises=TypeError, match="out_dtype = torch.float16")


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    def bf16(rows: int, K: int) -> Tensor:
        return torch.randn(rows, K, dtype=torch.bfloat16)

    def forward(M: int, N: int, K: int) -> tuple[Tensor, ...]:
        return *fp8_quantize_1x128(bf16(M, K), scale_major="mn"), *fp8_quantize_128x128(bf16(N, K))

    def wgrad(M: int, N: int, K: int) -> tuple[Tensor, ...]:
        quantize = partial(fp8_quantize_1x128, scale_major="mn")
        return *quantize(bf16(M, K)), *quantize(bf16(N, K))

    for M, N, K in shapes.linear:
        yield Case(f"{M}x{N}x{K}", partial(forward, M, N, K))
    for M, N, K in shapes.wgrad:
        yield Case(f"{M}x{N}x{K}, 1x128 by 1x128, fp32", partial(wgrad, M, N, K), {"out_dtype": torch.float32})


Sizes = tuple[int | None, ...]


def sizes(choice: Choice) -> Sizes:
    """M, N and K, and the rows and columns of b's scales; None for a size that is still open."""
    M, N, K = (choice.get(name) for name in ("M", "N", "K"))
    rows = None if N is None or "b blocks" not in choice else N
    if rows is not None and choice["b blocks"] == "128x128":
        rows = -(-rows // FP8_BLOCK_SIZE)
    return M, N, K, rows, None if K is None else -(-K // FP8_BLOCK_SIZE)


def possible(choice: Choice) -> bool:
    M, N, K, rows, C = sizes(choice)
    return (
        affordable(M, N, K, tensors=[(M, K), (N, K), (M, N)])
        and operand_fits(choice, "a", (M, K), (M, C))
        and operand_fits(choice, "b", (N, K), (rows, C))
        and extremes_fit(choice, "a", (M, C))
        and extremes_fit(choice, "b", (rows, C))
    )


def blind(choice: Choice) -> bool:
    M, N, K, rows, C = sizes(choice)
    return costly(M, N, K) or hides(choice, "a", M, C) or hides(choice, "b", N, C, rows)


def make(choice: Choice) -> tuple[Tensor, ...]:
    M, N, K = (choice[name] for name in ("M", "N", "K"))
    *_, rows, C = sizes(choice)
    assert rows is not None
    assert C is not None
    a = fp8_operand(choice, "a", (M, K), (M, C))
    b = fp8_operand(choice, "b", (N, K), (rows, C), seed=2)
    for name, (qdata, _) in (("a", a), ("b", b)):
        with_special_codes(qdata, choice[f"{name} values"])
    return *lay(choice, "a", a), *lay(choice, "b", b)


DIMENSIONS: dict[str, Any] = {
    "M": SIZES,
    "N": SIZES,
    "K": FP8_SIZES,
    "b blocks": ("128x128", "1x128"),
    **operand("a"),
    **operand("b"),
}
SPACE = Space(DIMENSIONS, make, {"out_dtype": OUT_DTYPES}, possible, blind=blind, implied=("none",))
ROWS_TAKEN = taken_rows.of_matmul
TOLD_BEFORE = ("b.cols",)
IMPOSSIBLE = impossible("a", "b")
