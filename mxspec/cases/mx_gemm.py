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
    OF_E2M1,
    SIZES,
    affordable,
    costly,
    dtypes_meet,
    hides,
    impossible,
    lay,
    mx_operands,
    operand,
    operand_fits,
)
from mxspec.cases.common.mx_operands import (
    BY_E2M1,
    E2M1,
    E4M3FN,
    E5M2,
    Operands,
    codes,
    every_byte_of,
    every_byte_of_e2m1,
    every_scale,
    laid_out,
    pair,
    rows_apart,
    scales,
    special,
)
from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.space import Space, given
from mxspec.formats import MX_BLOCK_SIZE
from mxspec.reference.common.matmul import A_DTYPES, B_DTYPES
from mxspec.reference.mx_dequantize import OUT_DTYPES
from mxspec.reference.mx_quantize import SCALE_LAYOUTS, mx_quantize
from mxspec.reference.to_blocked import blocked_bytes, to_blocked
from mxspec.spec import Case, Shapes, normal, random_normal, these

Arguments = tuple[Any, ...]


def arguments(operands: Operands, layout: str = "plain") -> Arguments:
    """The arguments of a call, from codes and plain scales. If a is bfloat16, it has no scales."""
    a, a_scale, b, b_scale = operands
    of_a = None if a.dtype == torch.bfloat16 else laid_out(a_scale, layout, to_blocked)
    return a, of_a, b, laid_out(b_scale, layout, to_blocked)


def made(M: int, N: int, K: int, layout: str = "plain", dtypes: Any = (E4M3FN, E4M3FN)) -> Arguments:
    return arguments(pair((M, K), (N, K), dtypes), layout)


def quantized(M: int, N: int, K: int, layout: str) -> Arguments:
    a, b = random_normal(M, K), random_normal(N, K, seed=1)
    return *mx_quantize(a, scale_layout=layout), *mx_quantize(b, elem_dtype=E5M2, scale_layout=layout)


def every_scale_of_fp4(M: int, N: int, K: int, layout: str) -> Arguments:
    """Scales of b from 2^-127 to 2^127; elements of a, in bfloat16, that bring the products near 1."""
    scale = every_scale(N, K // MX_BLOCK_SIZE, down=True, seed=2)
    largest = 2.0 ** (127 - scale[0].view(torch.uint8).double())
    a = (normal(M, K).double() * largest.repeat_interleave(MX_BLOCK_SIZE)).to(torch.bfloat16)
    return a, None, codes(N, K, dtype=E2M1, seed=3), laid_out(scale, layout, to_blocked)


def every_byte_of_fp4(layout: str) -> Arguments:
    a, b, scale = every_byte_of_e2m1()
    return a, None, b, laid_out(scale, layout, to_blocked)


def every_byte(dtype: torch.dtype, of_a: bool, by_e2m1: bool, layout: str) -> Arguments:
    """Every byte of an FP8 format in a or in b. The other operand is the unit matrix."""
    unit, found = every_byte_of(dtype)
    if by_e2m1:  # the code 2 is 1, and a byte holds two codes
        unit = ((unit[:, ::2] == 1) * 2 + (unit[:, 1::2] == 1) * 32).to(torch.uint8).view(E2M1)
    of_unit, of_found = scales(32, 1, seed=4), scales(len(found), 1, seed=5)
    operands = (found, of_found, unit, of_unit) if of_a else (unit, of_unit, found, of_found)
    return arguments(operands, layout)


def every_scale_pair(M: int, N: int, K: int, layout: str) -> Arguments:
    C = K // MX_BLOCK_SIZE
    first, second = every_scale(M, C, down=False), every_scale(N, C, down=True, seed=2)
    return arguments((codes(M, K), first, codes(N, K, seed=3), second), layout)


def special_fp4(M: int, N: int, K: int) -> Iterator[tuple[str, Operands]]:
    """Operands by e2m1 codes, with a special value in one row."""
    for dtype in (torch.bfloat16, E4M3FN):
        name = BY_E2M1[dtype]
        operands = pair((M, K), (N, K), (dtype, E2M1))
        operands[3].view(torch.uint8)[5, 1] = 255
        yield f"a scale of 255 in the second, {name}", operands
        operands = pair((M, K), (N, K), (dtype, E2M1))
        operands[0][3, 37] = torch.nan
        yield f"a NaN in the first, {name}", operands
        operands = pair((M, K), (N, K), (dtype, E2M1))
        operands[2].view(torch.uint8)[2, :16] &= 0x88
        operands[3].view(torch.uint8)[2, 0] = 0
        operands[3].view(torch.uint8)[4, 2] = 254
        operands[2].view(torch.uint8)[4, 32:] &= 0x88
        yield f"blocks of zeros with the bytes 0 and 254, {name}", operands
    operands = pair((M, K), (N, K), (torch.bfloat16, E2M1))
    operands[0][1, 33], operands[0][7, 2] = torch.inf, -torch.inf
    yield "Inf in bfloat16", operands
    operands = pair((M, K), (N, K), (E5M2, E2M1))
    operands[0][1, 33], operands[0][7, 2], operands[0][9, 40] = torch.inf, -torch.inf, torch.nan
    yield "Inf and NaN in e5m2", operands


def refused() -> Iterator[Case]:
    a, a_scale, b, b_scale = made(6, 200, 64)

    def case(name, error, match, a=a, a_scale=a_scale, b=b, b_scale=b_scale, **kwargs):
        return Case(name, these(a, a_scale, b, b_scale), kwargs, raises=error, match=match)

    uint8 = a_scale.view(torch.uint8)
    yield case("fp16 codes", TypeError, "a has dtype torch.float16; needs torch.float8_e4m3fn or", a.half())
    fp4 = a.view(E2M1)
    yield case(
        "fp4 codes by fp8 codes", TypeError, "a has dtype torch.float4_e2m1fn_x2 and b has dtype torch.float8", fp4
    )
    bf16 = a.to(torch.bfloat16)
    yield case(
        "bfloat16 by fp8 codes", TypeError, "a has dtype torch.bfloat16 and b has dtype torch.float8_e4m3fn", bf16
    )
    by_4: dict[str, Any] = {"b": torch.zeros(200, 32, dtype=torch.uint8).view(E2M1)}
    no_scale = "a is bfloat16 and a_scale is a tensor; needs None"
    yield case("bfloat16 with a scale", TypeError, no_scale, bf16, **by_4)
    yield case("codes without a scale", TypeError, "torch.float8_e4m3fn and a_scale is None; needs its", a_scale=None)
    yield case(
        "fp16 by fp4 codes", TypeError, "a has dtype torch.float16; needs torch.float8_e4m3fn or", a.half(), **by_4
    )
    yield case("half of fp4 codes", ValueError, "b has shape (200, 16); needs (200, 32)", b=by_4["b"][:, :16])
    yield case(
        "b in bfloat16", TypeError, "b has dtype torch.bfloat16; needs torch.float8_e4m3fn or", b=b.to(bf16.dtype)
    )
    yield case("a uint8 scale", TypeError, "a_scale has dtype torch.uint8; needs torch.float8_e8m0fnu", a_scale=uint8)
    yield case("fp16 out", TypeError, "out_dtype = torch.float16", out_dtype=torch.float16)
    yield case("3-D b", ValueError, "b has shape (1, 200, 64); needs a 2-D tensor", b=b[None])
    yield case("K = 48", ValueError, "K = 48 is not a multiple of 32, the block size", a[:, :48], b=b[:, :48])
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
    for dtype, layout in product(BY_E2M1, SCALE_LAYOUTS):
        name = f"{BY_E2M1[dtype]} by e2m1, {layout}"
        fp32 = {"out_dtype": torch.float32, "scale_layout": layout}
        yield Case(name, partial(made, 70, 136, 160, layout, (dtype, E2M1)), fp32)
        for M, N, K in [(1, 72, 32), (16, 200, 1056), (131, 257, 96), (6, 40, 0), (0, 40, 64), (40, 0, 64)]:
            kw = {"scale_layout": layout}
            yield Case(f"{M}x{N}x{K}, {name}", partial(made, M, N, K, layout, (dtype, E2M1)), kw, flags={"edge"})
    for layout in SCALE_LAYOUTS:
        fp32, kw = {"out_dtype": torch.float32, "scale_layout": layout}, {"scale_layout": layout}
        far = partial(every_scale_of_fp4, 24, 72, 512, layout)
        yield Case(f"scales from 2^-127 to 2^127, bfloat16 by e2m1, {layout}", far, fp32, flags={"edge"})
        for out_dtype in OUT_DTYPES:
            every = partial(every_byte_of_fp4, layout)
            name = f"every byte of e2m1, {layout}, {str(out_dtype)[6:]}"
            yield Case(name, every, {"out_dtype": out_dtype, "scale_layout": layout}, flags={"edge"})
        for dtype, (of_a, by_e2m1) in product((E4M3FN, E5M2), ((True, False), (False, False), (True, True))):
            name = f"every byte of {BY_E2M1[dtype]} in {'a' if of_a else 'b'}{', by e2m1' * by_e2m1}, {layout}"
            yield Case(name, partial(every_byte, dtype, of_a, by_e2m1, layout), fp32, flags={"edge"})
        for name, operands in special_fp4(40, 72, 96):
            yield Case(f"{name}, by e2m1, {layout}", these(*arguments(operands, layout)), kw, flags={"edge"})
    a, a_scale, b, b_scale = made(20, 72, 160, dtypes=(torch.bfloat16, E2M1))
    yield Case("bfloat16 by e2m1, rows apart", these(a, a_scale, rows_apart(b), b_scale))
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
    none = torch.zeros(0, 32).to(E4M3FN), torch.zeros(0, 1).to(torch.float8_e8m0fnu)
    yield Case("no columns, a scale byte of 0", these(ones, tiny, *none), flags={"edge"})
    yield Case("448 * 2^127 by 2^-127", these((448 * ones.float()).to(E4M3FN), huge, ones, tiny), flags={"edge"})
    yield Case("past the range: Inf", these(ones, huge, ones, huge), flags={"edge"})
    yield from refused()


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    def args(M: int, N: int, K: int) -> tuple[Tensor, ...]:
        a, b = (torch.randn(rows, K, dtype=torch.bfloat16) for rows in (M, N))
        return *mx_quantize(a), *mx_quantize(b)

    def few_rows(M: int, N: int, K: int) -> Arguments:
        b = torch.randn(N, K, dtype=torch.bfloat16)
        return torch.randn(M, K, dtype=torch.bfloat16), None, *mx_quantize(b, elem_dtype=E2M1)

    for M, N, K in shapes.linear:
        yield Case(f"{M}x{N}x{K}", partial(args, M, N, K))
    for N, K in dict.fromkeys((N, K) for _, N, K in shapes.linear):
        yield Case(f"16x{N}x{K}, bfloat16 by e2m1", partial(few_rows, 16, N, K))


_NAMES = ("a", "b")


def _possible(choice: Choice) -> bool:
    M, N, K = (choice.get(name) for name in ("M", "N", "K"))
    if not affordable(M, N, K, tensors=[(M, K), (N, K), (M, N)]):
        return False
    C = None if K is None else K // MX_BLOCK_SIZE
    blocked = given(choice, "scale_layout", "plain") == "blocked"

    def fits(name: str, rows: int | None) -> bool:
        tiles = None if rows is None or C is None else blocked_bytes(rows, C)
        unscaled = name == "a" and choice.get("b dtype") in (None, E2M1)
        return operand_fits(choice, name, (rows, K), (rows, C), (tiles,) if blocked else None, unscaled)

    return dtypes_meet(choice) and fits("a", M) and fits("b", N)


def _blind(choice: Choice) -> bool:
    M, N, K = (choice.get(name) for name in ("M", "N", "K"))
    C = None if K is None else K // MX_BLOCK_SIZE
    return costly(M, N, K) or hides(choice, "a", M, C) or hides(choice, "b", N, C)


def _make(choice: Choice) -> Arguments:
    M, N, K = (choice[name] for name in ("M", "N", "K"))
    made = mx_operands(choice, _NAMES, [(M, K), (N, K)])
    layout = given(choice, "scale_layout", "plain")
    a, b = (lay(choice, name, of_name, layout, to_blocked) for name, of_name in zip(_NAMES, made, strict=True))
    return (a[0], None, *b) if a[0].dtype == torch.bfloat16 else (*a, *b)


DIMENSIONS: dict[str, Any] = {
    "M": SIZES,
    "N": SIZES,
    "K": (*MX_SIZES, 8448),  # so many elements of e2m1 are more than 4096 bytes
    **operand("a", A_DTYPES),
    **operand("b", B_DTYPES),
}
OPTIONS = {"out_dtype": OUT_DTYPES, "scale_layout": SCALE_LAYOUTS}
SPACE = Space(DIMENSIONS, _make, OPTIONS, _possible, blind=_blind, implied=("none",), decisive=("scale_layout",))
ROWS_TAKEN = taken_rows.of_matmul
TOLD_BEFORE = ("b.cols",)
IMPOSSIBLE = (
    *impossible("a", "b"),
    *OF_E2M1,
    (r"scale_layout = blocked \| [ab]_scale\.strides (?!row-major).*", "blocked scales are one run of bytes"),
)
