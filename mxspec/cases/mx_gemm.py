"""The cases of mx_gemm: calls written by hand, calls worth timing, and the dimensions of a call."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from mxspec.cases.common import taken_rows
from mxspec.cases.common.matmuls import (
    MX_SIZES,
    SIZES,
    affordable,
    costly,
    hides,
    impossible,
    lay,
    mx_operands,
    operand,
    operand_fits,
)
from mxspec.cases.common.mx_operands import E4M3FN, E5M2, Operands, codes, every_scale, laid_out, pair, special
from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.space import Space, given
from mxspec.formats import FP8_DTYPES, MX_BLOCK_SIZE
from mxspec.reference.mx_dequantize import OUT_DTYPES
from mxspec.reference.mx_quantize import SCALE_LAYOUTS, mx_quantize
from mxspec.reference.to_blocked import blocked_bytes, to_blocked
from mxspec.spec import Case, Shapes, random_normal, these


def arguments(operands: Operands, layout: str = "plain") -> Operands:
    """The arguments of a call, from codes and plain scales."""
    a, a_scale, b, b_scale = operands
    return a, laid_out(a_scale, layout, to_blocked), b, laid_out(b_scale, layout, to_blocked)


def made(M: int, N: int, K: int, layout: str = "plain", dtypes: Any = (E4M3FN, E4M3FN)) -> Operands:
    return arguments(pair((M, K), (N, K), dtypes), layout)


def quantized(M: int, N: int, K: int, layout: str) -> Operands:
    a, b = random_normal(M, K), random_normal(N, K, seed=1)
    return *mx_quantize(a, scale_layout=layout), *mx_quantize(b, elem_dtype=E5M2, scale_layout=layout)


def every_scale_pair(M: int, N: int, K: int, layout: str) -> Operands:
    C = K // MX_BLOCK_SIZE
    first, second = every_scale(M, C, down=False), every_scale(N, C, down=True, seed=2)
    return arguments((codes(M, K), first, codes(N, K, seed=3), second), layout)


def refused() -> Iterator[Case]:
    a, a_scale, b, b_scale = made(6, 200, 64)

    def case(name, error, match, a=a, a_scale=a_scale, b=b, b_scale=b_scale, **kwargs):
        return Case(name, these(a, a_scale, b, b_scale), kwargs, raises=error, match=match)

    uint8 = a_scale.view(torch.uint8)
    yield case("fp16 codes", TypeError, "a has dtype torch.float16; needs torch.float8_e4m3fn or", a.half())
    fp4 = a.view(torch.float4_e2m1fn_x2)
    yield case("fp4 codes", TypeError, "a has dtype torch.float4_e2m1fn_x2; needs torch.float8_e4m3fn or", fp4)
    yield case("a uint8 scale", TypeError, "a_scale has dtype torch.uint8; needs torch.float8_e8m0fnu", a_scale=uint8)
    yield case("fp16 out", TypeError, "out_dtype = torch.float16", out_dtype=torch.float16)
    yield case("3-D b", ValueError, "b has shape (1, 200, 64); needs a 2-D tensor", b=b[None])
    yield case("K = 48", ValueError, "K = 48 is not a multiple of block_size 32", a[:, :48], b=b[:, :48])
    yield case("another K", ValueError, "b has shape (200, 32); needs (200, 64) for a (6, 64)", b=b[:, :32])
    yield case("a not K-major", ValueError, "a has strides (1, 6); needs K-major", a.t().contiguous().t())
    yield case("b not K-major", ValueError, "b has strides (1, 200); needs K-major", b=b.t().contiguous().t())
    yield case("a scale of another shape", ValueError, "needs (200, 2) (plain) for codes (200, 64)", b_scale=a_scale)
    yield case("plain scales called blocked", ValueError, "needs (512,) (blocked) for", scale_layout="blocked")
    yield case("an unknown layout", ValueError, "'swizzled'", scale_layout="swizzled")
    yield case("mixed devices", ValueError, "needs one device", b_scale=b_scale.to("meta"))
    every_other = made(6, 200, 64, "blocked")[3].view(torch.uint8).repeat_interleave(2).view(torch.float8_e8m0fnu)[::2]
    blocked = to_blocked(a_scale)
    yield case(
        "a blocked scale with gaps", ValueError, "b_scale has strides (2,); needs contiguous blocked scales",
        a_scale=blocked, b_scale=every_other, scale_layout="blocked",
    )  # fmt: skip


def cases() -> Iterator[Case]:
    for layout, out_dtype in product(SCALE_LAYOUTS, OUT_DTYPES):
        kwargs, end = {"out_dtype": out_dtype, "scale_layout": layout}, f"{layout}, {str(out_dtype)[6:]}"
        for M, N, K in [(64, 128, 256), (150, 136, 160)]:
            yield Case(f"{M}x{N}x{K}, {end}", partial(made, M, N, K, layout), kwargs)
        yield Case(f"as quantized, {end}", partial(quantized, 132, 72, 192, layout), kwargs)
    for dtypes, layout in (((E4M3FN, E5M2), "plain"), ((E5M2, E4M3FN), "blocked"), ((E5M2, E5M2), "plain")):
        name = " by ".join(str(dtype).removeprefix("torch.float8_") for dtype in dtypes)
        fp32 = {"out_dtype": torch.float32, "scale_layout": layout}
        yield Case(f"{name}, {layout}", partial(made, 64, 72, 128, layout, dtypes), fp32)
    yield Case("few rows and a long K", partial(made, 16, 136, 1024))
    yield Case("few rows and a long K, blocked", partial(made, 5, 72, 1056, "blocked"), {"scale_layout": "blocked"})
    a, a_scale, b, b_scale = made(70, 40, 128)
    turned = a_scale.t().contiguous().t(), b_scale.t().contiguous().t()
    yield Case("MN-major scales", these(a, turned[0], b, turned[1]))
    for layout in SCALE_LAYOUTS:
        kw = {"scale_layout": layout}
        for name, (M, N, K) in {
            "K = 32": (40, 136, 32),
            "one row": (1, 72, 160),
            "one column": (72, 1, 64),
            "ragged against every tile": (131, 257, 96),
            "no rows": (0, 40, 64),
            "no columns": (40, 0, 64),
            "K = 0: sums of nothing": (6, 40, 0),
        }.items():
            yield Case(f"{name}, {layout}", partial(made, M, N, K, layout), kw, flags={"edge"})
        fp32 = {"out_dtype": torch.float32, **kw}
        far = partial(every_scale_pair, 40, 72, 512, layout)
        yield Case(f"scales from 2^-127 to 2^127, {layout}", far, fp32, flags={"edge"})
        for name, operands in special((40, 96), (72, 96)):
            yield Case(f"{name}, {layout}", these(*arguments(operands, layout)), kw, flags={"edge"})
    huge, tiny = (torch.full((2, 1), byte, dtype=torch.uint8).view(torch.float8_e8m0fnu) for byte in (254, 0))
    ones = torch.ones(2, 32).to(E4M3FN)
    yield Case("448 * 2^127 by 2^-127", these((448 * ones.float()).to(E4M3FN), huge, ones, tiny), flags={"edge"})
    yield Case("past the range: Inf", these(ones, huge, ones, huge), flags={"edge"})
    yield from refused()


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    def args(M: int, N: int, K: int) -> tuple[Tensor, ...]:
        a, b = (torch.randn(rows, K, dtype=torch.bfloat16) for rows in (M, N))
        return *mx_quantize(a), *mx_quantize(b)

    for M, N, K in shapes.linear:
        yield Case(f"{M}x{N}x{K}", partial(args, M, N, K))


_NAMES = ("a", "b")


def _possible(choice: Choice) -> bool:
    M, N, K = (choice.get(name) for name in ("M", "N", "K"))
    if not affordable(M, N, K, tensors=[(M, K), (N, K), (M, N)]):
        return False
    C = None if K is None else K // MX_BLOCK_SIZE
    blocked = given(choice, "scale_layout", "plain") == "blocked"

    def fits(name: str, rows: int | None) -> bool:
        tiles = None if rows is None or C is None else blocked_bytes(rows, C)
        return operand_fits(choice, name, (rows, K), (rows, C), (tiles,) if blocked else None)

    return fits("a", M) and fits("b", N)


def _blind(choice: Choice) -> bool:
    M, N, K = (choice.get(name) for name in ("M", "N", "K"))
    C = None if K is None else K // MX_BLOCK_SIZE
    return costly(M, N, K) or hides(choice, "a", M, C) or hides(choice, "b", N, C)


def _make(choice: Choice) -> tuple[Tensor, ...]:
    M, N, K = (choice[name] for name in ("M", "N", "K"))
    made = mx_operands(choice, _NAMES, [(M, K), (N, K)])
    layout = given(choice, "scale_layout", "plain")
    a, b = (lay(choice, name, of_name, layout, to_blocked) for name, of_name in zip(_NAMES, made, strict=True))
    return *a, *b


DIMENSIONS: dict[str, Any] = {
    "M": SIZES,
    "N": SIZES,
    "K": MX_SIZES,
    **operand("a", FP8_DTYPES),
    **operand("b", FP8_DTYPES),
}
OPTIONS = {"out_dtype": OUT_DTYPES, "scale_layout": SCALE_LAYOUTS}
SPACE = Space(DIMENSIONS, _make, OPTIONS, _possible, blind=_blind, implied=("none",), decisive=("scale_layout",))
ROWS_TAKEN = taken_rows.of_matmul
TOLD_BEFORE = ("b.cols",)
IMPOSSIBLE = (
    *impossible("a", "b"),
    (r"scale_layout = blocked \| [ab]_scale\.strides (?!row-major).*", "blocked scales are one run of bytes"),
)
