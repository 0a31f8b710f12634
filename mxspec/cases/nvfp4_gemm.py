"""The cases of nvfp4_gemm: calls written by hand, calls worth timing, and the dimensions of a call."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from mxspec.cases.common import matmuls, taken_rows
from mxspec.cases.common.codes import laid_flat
from mxspec.cases.common.matmuls import affordable, costly
from mxspec.cases.common.nvfp4_operands import (
    KINDS,
    SIZES,
    SUMS,
    Pair,
    far_values,
    hides,
    impossible,
    lay,
    made,
    numbers,
    operand,
    operand_fits,
    pair,
    scales_laid_out,
    special,
)
from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.space import Space, given
from mxspec.formats import NVFP4_BLOCK_SIZE
from mxspec.reference.mx_dequantize import OUT_DTYPES
from mxspec.reference.mx_quantize import SCALE_LAYOUTS
from mxspec.reference.nvfp4_dequantize import nvfp4_dequantize
from mxspec.reference.nvfp4_quantize import nvfp4_quantize
from mxspec.reference.to_blocked import blocked_bytes, to_blocked
from mxspec.spec import Case, Shapes, normal, random_normal, these

Arguments = tuple[Any, ...]
EDGE = {"edge"}


def arguments(operands: Pair, layout: str = "plain", Ta: float = 0.7, Tb: float = 1.3) -> Arguments:
    """The arguments of a call, from operands with plain scales."""
    (a, a_scale), (b, b_scale) = operands
    of_a, of_b = (scales_laid_out(scale, layout, to_blocked) for scale in (a_scale, b_scale))
    return a, of_a, torch.tensor(Ta), b, of_b, torch.tensor(Tb)


def sized(M: int, N: int, K: int, layout: str = "plain", kinds: tuple[str, str] = ("codes", "codes")) -> Arguments:
    return arguments(pair((M, K), (N, K), kinds), layout)


def quantized(M: int, N: int, K: int, layout: str) -> Arguments:
    a, b = random_normal(M, K), random_normal(N, K, seed=1)
    return *nvfp4_quantize(a, scale_layout=layout), *nvfp4_quantize(b, scale_layout=layout)


def emulated(M: int, N: int, K: int) -> Arguments:
    """Values of a weight in 16x16 blocks, whose transpose is the second operand, as in dgrad."""
    dy, w = nvfp4_quantize(random_normal(M, N)), nvfp4_quantize(random_normal(N, K, seed=1), block="16x16")
    one = torch.tensor(1.0)
    return nvfp4_dequantize(*dy[:2], one), None, dy[2], nvfp4_dequantize(*w[:2], one).mT, None, w[2]


def far_by_codes(M: int, N: int, K: int, far: float) -> Arguments:
    """Values of 8 bits near `far` by codes. The tensor scale of a brings the products near 1."""
    (_, codes) = pair((M, K), (N, K), ("values", "codes"))
    return arguments((((normal(M, K) * far).bfloat16(), None), codes), Ta=1 / far)


def refused() -> Iterator[Case]:
    a, a_scale, Ta, b, b_scale, Tb = sized(6, 200, 64)
    values, of_values, *_ = sized(6, 200, 64, kinds=("values", "codes"))

    def case(name, error, match, a=a, a_scale=a_scale, Ta=Ta, b=b, b_scale=b_scale, Tb=Tb, **kwargs):
        return Case(name, these(a, a_scale, Ta, b, b_scale, Tb), kwargs, raises=error, match=match)

    needs = "or torch.bfloat16; view bytes of packed e2m1 codes as torch.float4_e2m1fn_x2"
    yield case("uint8 codes", TypeError, f"a has dtype torch.uint8; needs {a.dtype} {needs}", a.view(torch.uint8))
    e8m0 = a_scale.view(torch.float8_e8m0fnu)
    yield case("an E8M0 scale", TypeError, "a_scale has dtype torch.float8_e8m0fnu; needs", a_scale=e8m0)
    yield case("codes without scales", TypeError, "b_scale is None; needs a tensor", b_scale=None)
    yield case("values with scales", TypeError, "a_scale is a Tensor; needs None", values)
    yield case("a bf16 tensor scale", TypeError, "a_tensor_scale has dtype torch.bfloat16", Ta=Ta.bfloat16())
    yield case("fp16 out", TypeError, "out_dtype = torch.float16", out_dtype=torch.float16)
    yield case("3-D b", ValueError, "b has shape (1, 200, 32); needs a 2-D tensor", b=b[None])
    yield case("a tensor scale (1,)", ValueError, "b_tensor_scale has shape (1,); needs () for", Tb=Tb[None])
    yield case("K = 24", ValueError, "K = 24 is not a multiple of 16, the block size", a[:, :12], b=b[:, :12])
    yield case(
        "K = 40 of values", ValueError, "K = 40 is not a multiple of 16, the block size", values[:, :40], of_values,
        b=b[:, :20],
    )  # fmt: skip
    yield case("another K", ValueError, "b has shape (200, 16); needs (200, 32) for a (6, 32)", b=b[:, :16])
    turned = a.view(torch.uint8).t().contiguous().t().view(a.dtype)
    yield case("a not K-major", ValueError, "a has strides (1, 6); needs K-major", turned)
    every_other = values.repeat_interleave(2, 1)[:, ::2]
    yield case("values apart", ValueError, "a has strides (128, 2); needs values with a stride of 1", every_other, None)
    yield case("a scale of another shape", ValueError, "needs (200, 4) (plain) for codes", b_scale=a_scale)
    yield case("plain scales called blocked", ValueError, "needs (512,) (blocked) for", scale_layout="blocked")
    yield case("an unknown layout", ValueError, "'swizzled'", scale_layout="swizzled")
    yield case("mixed devices", ValueError, "needs one device", b_scale=b_scale.to("meta"))
    blocked = sized(6, 200, 64, "blocked")
    apart = blocked[4].view(torch.uint8).repeat_interleave(2).view(b_scale.dtype)[::2]
    yield case(
        "a blocked scale with gaps", ValueError, "b_scale has strides (2,); needs contiguous blocked scales",
        a_scale=blocked[1], b_scale=apart, scale_layout="blocked",
    )  # fmt: skip


def cases() -> Iterator[Case]:
    for layout, out_dtype in product(SCALE_LAYOUTS, OUT_DTYPES):
        kwargs, end = {"out_dtype": out_dtype, "scale_layout": layout}, f"{layout}, {str(out_dtype)[6:]}"
        for M, N, K in [(64, 128, 256), (150, 136, 208)]:
            yield Case(f"{M}x{N}x{K}, {end}", partial(sized, M, N, K, layout), kwargs)
        yield Case(f"as quantized, {end}", partial(quantized, 132, 72, 192, layout), kwargs)
        for kinds in (("codes", "values"), ("values", "codes")):
            name = f"{kinds[0]} by {kinds[1]}, {end}"
            yield Case(name, partial(sized, 72, 136, 176, layout, kinds), kwargs)
    values = ("values", "values")
    for out_dtype in OUT_DTYPES:
        kwargs, end = {"out_dtype": out_dtype}, str(out_dtype)[6:]
        yield Case(f"values by values, {end}", partial(sized, 150, 136, 200, kinds=values), kwargs)
        yield Case(f"dgrad of 16x16 blocks, {end}", partial(emulated, 80, 96, 128), kwargs)
    a, _, Ta, b, _, Tb = sized(70, 40, 104, kinds=values)
    across = a.t().contiguous().t(), b.t().contiguous().t()
    for name, (left, right) in {"a": (across[0], b), "b": (a, across[1]), "a and b": across}.items():
        yield Case(f"values of {name} with rows along the other axis", these(left, None, Ta, right, None, Tb))
    fp32 = {"out_dtype": torch.float32}
    yield Case("values from 2^-100 to 2^100", these(*arguments(far_values((40, 200), (72, 200)))), fp32, flags=EDGE)
    for power in (90, -90):
        yield Case(f"values near 2^{power} by codes", partial(far_by_codes, 24, 72, 160, 2.0**power), fp32, flags=EDGE)
    yield Case("few rows and a long K", partial(sized, 16, 136, 1024))
    yield Case("few rows and a long K, blocked", partial(sized, 5, 72, 1040, "blocked"), {"scale_layout": "blocked"})
    a, a_scale, Ta, b, b_scale, Tb = sized(70, 40, 128)
    turned = a_scale.t().contiguous().t(), b_scale.t().contiguous().t()
    yield Case("MN-major scales", these(a, turned[0], Ta, b, turned[1], Tb))
    for layout in SCALE_LAYOUTS:
        kw = {"scale_layout": layout}
        for name, (M, N, K) in {
            "K = 16": (40, 136, 16),
            "K = 48": (40, 136, 48),
            "one row": (1, 72, 160),
            "one column": (72, 1, 64),
            "ragged against every tile": (131, 257, 112),
            "no rows": (0, 40, 64),
            "no columns": (40, 0, 64),
            "K = 0: sums of nothing": (6, 40, 0),
        }.items():
            yield Case(f"{name}, {layout}", partial(sized, M, N, K, layout), kw, flags=EDGE)
        for name, operands in special((40, 96), (72, 96)):
            yield Case(f"{name}, {layout}", these(*arguments(operands, layout)), kw, flags=EDGE)
    a, _, Ta, b, _, Tb = sized(40, 72, 8, kinds=values)
    yield Case("values of one column, rows apart", these(a[:, :1], None, Ta, b[:, :1], None, Tb), flags=EDGE)
    for K in (0, 1, 7, 72, 129):
        yield Case(f"values, K = {K}", partial(sized, 40, 72, K, kinds=values), flags=EDGE)
    operands, nan, huge = pair((9, 64), (40, 64)), torch.nan, 3e38
    for out_dtype in OUT_DTYPES:
        for one, other in (
            (0.0, 1.0), (1.0, nan), (torch.inf, 0.0), (huge, 1 / huge), (2.0**-100, 2.0**-40), (-0.5, 3.0),
            (huge, -huge),
        ):  # fmt: skip
            args = these(*arguments(operands, "plain", one, other))
            yield Case(
                f"tensor scales {one} and {other}, {str(out_dtype)[6:]}", args, {"out_dtype": out_dtype}, flags=EDGE
            )
    ones = torch.ones(2, 16).bfloat16()
    unit, past = torch.tensor(1.0), torch.tensor(huge)
    yield Case("past the range: Inf", these(ones, None, past, -ones, None, unit), flags=EDGE)
    empty = these(ones[:, :0], None, unit, ones[:, :0], None, nan * unit)
    yield Case("no K, and a tensor scale of NaN", empty, flags=EDGE)
    yield from refused()


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    def of_codes(M: int, N: int, K: int) -> tuple[Tensor, ...]:
        a, b = (torch.randn(rows, K, dtype=torch.bfloat16) for rows in (M, N))
        return *nvfp4_quantize(a, scale_layout="blocked"), *nvfp4_quantize(b, scale_layout="blocked")

    def of_values(M: int, N: int, K: int) -> tuple[Tensor | None, ...]:
        T = torch.tensor(0.01)
        a, b = (nvfp4_quantize(torch.randn(rows, K, dtype=torch.bfloat16)) for rows in (M, N))
        return (
            nvfp4_dequantize(*a[:2], torch.ones_like(T)), None, T, nvfp4_dequantize(*b[:2], torch.ones_like(T)), None, T
        )  # fmt: skip

    for M, N, K in shapes.linear:
        yield Case(f"{M}x{N}x{K}", partial(of_codes, M, N, K), {"scale_layout": "blocked"})
        yield Case(f"{M}x{N}x{K}, values", partial(of_values, M, N, K))


def _possible(choice: Choice) -> bool:
    M, N, K = (choice.get(name) for name in ("M", "N", "K"))
    if not affordable(M, N, K, tensors=[(M, K), (N, K), (M, N)]):
        return False
    if K is not None and K % NVFP4_BLOCK_SIZE and "codes" in (choice.get("a kind"), choice.get("b kind")):
        return False
    C = None if K is None else K // NVFP4_BLOCK_SIZE
    blocked = given(choice, "scale_layout", "plain") == "blocked"

    def fits(name: str, rows: int | None) -> bool:
        tiles = None if rows is None or C is None else blocked_bytes(rows, C)
        return operand_fits(choice, name, (rows, K), (tiles,) if blocked else None)

    return fits("a", M) and fits("b", N)


def _blind(choice: Choice) -> bool:
    M, N, K = (choice.get(name) for name in ("M", "N", "K"))
    return costly(M, N, K) or hides(choice, "a", M, K) or hides(choice, "b", N, K)


def _make(choice: Choice) -> tuple[Any, ...]:
    layout = given(choice, "scale_layout", "plain")
    found: list[Any] = []
    for seed, (name, rows) in enumerate((("a", choice["M"]), ("b", choice["N"]))):
        of_name = made(choice, name, (rows, choice["K"]), seed)
        number = numbers(None, 5 + seed)
        if choice["tensor scales"] == "special":
            number = torch.tensor(0.0 if name == "a" else -2.0)
        found += (
            *lay(choice, name, of_name, layout, to_blocked),
            laid_flat(number[None], choice[f"{name}_tensor_scale begins"])[0],
        )
    return tuple(found)


DIMENSIONS: dict[str, Any] = {
    "a kind": KINDS,
    "b kind": KINDS,
    "M": SIZES,
    "N": SIZES,
    "K": SUMS,
    **operand("a"),
    **operand("b"),
    "tensor scales": ("ordinary", "special"),
}
OPTIONS = {"out_dtype": OUT_DTYPES, "scale_layout": SCALE_LAYOUTS}
ALSO: list[Choice] = [
    {f"{one} kind": "codes", f"{one} values": "zeros", **other}
    for one, size, two in (("a", "M", "b"), ("b", "N", "a"))
    for other in ({size: 1}, {f"{two} values": "NaN"}, {f"{two} values": "Inf"})
]
_CODES, _VALUES = ({f"{name} kind": kind for name in "ab"} for kind in KINDS)
ALSO += [
    {**_VALUES, "M": 384, "K": 4128},
    {**_VALUES, "b values": "finite", "b strides": "rows apart", "N": 48, "K": 48},
    {**_CODES, "a values": "zeros", "b_scale strides": "one column repeated"},
    {**_CODES, "a_scale strides": "one row repeated", "b_scale strides": "row-major", "M": 48, "N": 48, "K": 48},
    {"a kind": "values", "a values": "finite", "b kind": "codes", "b_scale strides": "rows apart"},
    {**_VALUES, "M": 1, "N": 384, "K": 4128},
    {**_VALUES, "b values": "Inf", "b strides": "one row repeated", "N": 48, "K": 48},
]
SPACE = Space(DIMENSIONS, _make, OPTIONS, _possible, ALSO, _blind, implied=("none",), decisive=("scale_layout",))
ROWS_TAKEN = taken_rows.of_matmul
TOLD_BEFORE = ("b.cols",)
IMPOSSIBLE = (
    *matmuls.impossible("a", "b"),
    *impossible("a", "b"),
    (r"scale_layout = blocked \| [ab]_scale\.strides (?!row-major).*", "blocked scales are one run of bytes"),
)
