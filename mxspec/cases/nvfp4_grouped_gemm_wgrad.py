"""The cases of nvfp4_grouped_gemm_wgrad: calls written by hand, calls worth timing, and the dimensions of a call."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from mxspec.cases.common import matmuls
from mxspec.cases.common.groups import OF_EXPERTS, arranged_groups, groups_fit, nothing_in_groups, offsets
from mxspec.cases.common.matmuls import PADDING_ALONE, affordable, costly
from mxspec.cases.common.mx_operands import bench_sizes
from mxspec.cases.common.nvfp4_operands import (
    KINDS,
    SIZES,
    SUMS,
    Operand,
    Pair,
    far_values,
    hides,
    impossible,
    impossible_groups,
    lay,
    made,
    numbers,
    numbers_fit,
    operand,
    operand_fits,
    pair,
    poison,
    scales_laid_out,
    special,
)
from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.space import Space, given
from mxspec.cases.common.token_groups import offs_of
from mxspec.cases.nvfp4_grouped_gemm import of_groups
from mxspec.cases.nvfp4_quantize import laid_of_matrices
from mxspec.formats import NVFP4_BLOCK_SIZE
from mxspec.reference.common.groups import round_up
from mxspec.reference.mx_dequantize import OUT_DTYPES
from mxspec.reference.mx_quantize import SCALE_LAYOUTS
from mxspec.reference.nvfp4_dequantize import nvfp4_dequantize
from mxspec.reference.nvfp4_quantize import nvfp4_quantize
from mxspec.reference.to_blocked_k_groups import to_blocked_k_groups
from mxspec.spec import Case, Shapes, random_normal, these

Arguments = tuple[Any, ...]
EDGE = {"edge"}


def _tiled(offs: Tensor) -> Any:
    return lambda scale: to_blocked_k_groups(scale, offs // NVFP4_BLOCK_SIZE)[0]


def arguments(operands: Pair, offs: Tensor, layout: str = "blocked") -> Arguments:
    """The arguments of a call, from operands `(N, M)` and `(K, M)`. Tokens of no group hold only NaN."""
    end, E = int(offs[-1]) if offs.numel() else 0, offs.shape[0]
    found: list[Any] = []
    for i, (t, scale) in enumerate(operands):
        if scale is None:  # values are row-major
            t = t.mT.contiguous().mT
            t[:, end:] = torch.nan
        else:
            scale.view(torch.uint8)[:, end // NVFP4_BLOCK_SIZE :] = 0xFF
        found += t.mT, scales_laid_out(scale, layout, _tiled(offs)), numbers(E, 5 + i)
    return *found, offs


def sized(
    sizes: list[int], rest: int, N: int, K: int, layout: str = "blocked", kinds: tuple[str, str] = ("codes", "codes")
) -> Arguments:
    """Operands with the tokens of each group, then tokens that belong to no group."""
    M = sum(sizes) + rest
    return arguments(pair((N, M), (K, M), kinds), offs_of(sizes), layout)


def quantized(sizes: list[int], N: int, K: int) -> Arguments:
    """Operands that the quantizer made, group by group, with plain scales; all sizes are multiples of 16."""
    found: list[Any] = []
    for seed, features in enumerate((N, K)):
        of_each = [nvfp4_quantize(t, axis=-2) for t in random_normal(sum(sizes), features, seed=seed).split(sizes)]
        q, s = (torch.cat([one[i].mT.contiguous().view(torch.uint8) if i == 0 else one[i].view(torch.uint8)
                           for one in of_each], -1) for i in (0, 1))  # fmt: skip
        T = torch.stack([one[2] for one in of_each])
        found += q.view(torch.float4_e2m1fn_x2).mT, s.view(torch.float8_e4m3fn), T
    return *found, offs_of(sizes)


def refused() -> Iterator[Case]:
    dy, dy_scale, Td, x, x_scale, Tx, offs = sized([64, 0, 32], 32, 40, 72)
    values = sized([64, 0, 32], 32, 40, 72, kinds=("values", "values"))

    def case(
        name, error, match, dy=dy, dy_scale=dy_scale, Td=Td, x=x, x_scale=x_scale, Tx=Tx, offs=offs, **kwargs
    ):  # fmt: skip
        return Case(name, these(dy, dy_scale, Td, x, x_scale, Tx, offs), kwargs, raises=error, match=match)

    yield case("fp8 codes", TypeError, "x has dtype torch.float8_e4m3fn; needs", x=x.view(torch.float8_e4m3fn))
    yield case("a uint8 scale", TypeError, "x_scale has dtype torch.uint8", x_scale=x_scale.view(torch.uint8))
    yield case("codes without scales", TypeError, "x_scale is None; needs a tensor", x_scale=None)
    yield case("values with scales", TypeError, "dy_scale is a Tensor; needs None", values[0])
    yield case("int64 offs", TypeError, "offs has dtype torch.int64; needs torch.int32", offs=offs.long())
    yield case("fp16 out", TypeError, "out_dtype = torch.float16", out_dtype=torch.float16)
    yield case("3-D dy", ValueError, "dy has shape (1, 64, 40); needs a 2-D tensor", dy[None])
    yield case("2-D offs", ValueError, "offs has shape (1, 3); needs a 1-D tensor", offs=offs[None])
    yield case("fewer tokens of x", ValueError, "needs (64, 72) for dy (64, 40) and M = 128", x=x[:48])
    yield case("M = 72", ValueError, "M = 72 is not a multiple of 16, the block size", dy[:36], x=x[:36])
    rows = dy.view(torch.uint8).contiguous().view(dy.dtype)
    yield case("dy row-major", ValueError, "dy has strides (40, 1); needs column-major", rows)
    yield case("a tensor scale too few", ValueError, "x_tensor_scale has shape (2,); needs (3,)", Tx=Tx[:2])
    yield case("blocked scales called plain", ValueError, "needs (40, 8) (plain) for codes", scale_layout="plain")
    wide = x_scale.view(torch.uint8).repeat(1, 2).view(x_scale.dtype)[:, :20]
    yield case(
        "a blocked scale with gaps", ValueError, "x_scale has strides (40, 1); needs contiguous blocked", x_scale=wide
    )
    yield case("offs elsewhere", ValueError, "needs one device", offs=offs.to("meta"))
    yield case("offs that decrease", ValueError, "offs[1] = 64 after 96", offs=offs.flip(0), check_offs=True)
    yield case("offs of 56", ValueError, "offs[0] = 56; needs multiples of 16", offs=offs - 8, check_offs=True)
    yield case("offs past M", ValueError, "offs[-1] = 160 is past M = 128", offs=offs + 64, check_offs=True)


def cases() -> Iterator[Case]:
    for layout, out_dtype in product(SCALE_LAYOUTS, OUT_DTYPES):
        kwargs, end = {"out_dtype": out_dtype, "scale_layout": layout}, f"{layout}, {str(out_dtype)[6:]}"
        yield Case(f"three groups, {end}", partial(sized, [48, 160, 64], 32, 72, 136, layout), kwargs)
        for kinds in (("codes", "values"), ("values", "codes")):
            name = f"{kinds[0]} by {kinds[1]}, {end}"
            yield Case(name, partial(sized, [48, 0, 112], 16, 72, 136, layout, kinds), kwargs)
    values = ("values", "values")
    for out_dtype in OUT_DTYPES:
        kwargs, end = {"out_dtype": out_dtype}, str(out_dtype)[6:]
        yield Case(f"values of ragged groups, {end}", partial(sized, [5, 150, 33], 10, 72, 136, kinds=values), kwargs)
        plain = {"scale_layout": "plain", **kwargs}
        yield Case(f"as quantized, {end}", partial(quantized, [48, 16, 128], 72, 136), plain)
    args = sized([7, 70], 3, 40, 72, kinds=values)
    across = (args[0].mT.contiguous().mT, *args[1:3], args[3].mT.contiguous().mT, *args[4:])
    yield Case("column-major values", these(*across))
    yield Case("many tokens", partial(sized, [32, 1056], 0, 40, 72))
    yield Case("many tokens of values", partial(sized, [33, 1050], 0, 40, 72, kinds=values))
    yield Case("checked", partial(sized, [64, 0, 96], 32, 40, 72), {"check_offs": True})
    yield Case("values, checked", partial(sized, [5, 0, 17], 2, 40, 72, kinds=values), {"check_offs": True})
    sizes: dict[str, tuple[list[int], int]] = {
        "one group": ([256], 0),
        "groups of 16": ([16, 16, 48, 16], 0),
        "empty groups": ([0, 32, 0, 0, 128, 16, 0], 0),
        "all in one of eight": ([0, 0, 0, 96, 0, 0, 0, 0], 0),
        "tokens past the last group": ([32, 0, 64], 96),
        "no token in a group": ([0, 0], 64),
        "no tokens": ([0, 0, 0], 0),
        "no group": ([], 32),
    }
    for layout in SCALE_LAYOUTS:
        kw = {"scale_layout": layout}
        for name, (tokens, rest) in sizes.items():
            yield Case(f"{name}, {layout}", partial(sized, tokens, rest, 40, 72, layout), kw, flags=EDGE)
        for name, (N, K) in {
            "one row": (1, 72),
            "one column": (72, 1),
            "no rows": (0, 40),
            "no columns": (40, 0),
            "ragged against every tile": (131, 257),
        }.items():
            yield Case(f"{name}, {layout}", partial(sized, [48, 64], 0, N, K, layout), kw, flags=EDGE)
        for name, operands in special((40, 160), (72, 160)):
            args = arguments(operands, offs_of([32, 64, 32]), layout)
            yield Case(f"{name}, {layout}", these(*args), kw, flags=EDGE)
    for name, (tokens, rest) in sizes.items():
        singles = [size - size // 3 for size in tokens]
        yield Case(f"{name}, values", partial(sized, singles, rest, 40, 72, kinds=values), flags=EDGE)
    dy, dy_scale, Td, x, x_scale, Tx, offs = sized([32, 0, 16, 64], 16, 40, 72)
    Td[:3], Tx[:4] = torch.tensor([0.0, torch.nan, -3e38]), torch.tensor([1.0, torch.inf, 1e-38, torch.nan])
    given = these(dy, dy_scale, Td, x, x_scale, Tx, offs)
    yield Case("tensor scales of 0, NaN and Inf", given, flags=EDGE)
    far = these(*arguments(far_values((40, 200), (72, 200)), offs_of([100, 0, 100])))
    yield Case("values from 2^-100 to 2^100", far, {"out_dtype": torch.float32}, flags=EDGE)
    for kinds in (("codes", "codes"), values):
        for tokens, rest in (([0, 16, 0, 64], 16), ([0, 0, 0, 0], 0)):
            dy, dy_scale, Td, x, x_scale, Tx, offs = sized(tokens, rest, 40, 72, kinds=kinds)
            Td[:] = torch.tensor([torch.nan, 3e38, 1.0, 2.0**-100])
            Tx[:] = torch.tensor([1.0, 3e38, -torch.inf, 2.0**-30])
            given = these(dy, dy_scale, Td, x, x_scale, Tx, offs)
            name = f"products of tensor scales: NaN, Inf and 2^-130, {sum(tokens)} tokens, {kinds[0]}"
            yield Case(name, given, flags=EDGE)
    yield from refused()


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    def operand(features: int, M: int, values: bool) -> tuple[Tensor, Tensor | None]:
        q, s, _ = nvfp4_quantize(torch.randn(M, features, dtype=torch.bfloat16), torch.tensor(4.0), axis=-2)
        return (nvfp4_dequantize(q, s, torch.tensor(1.0), axis=-2), None) if values else (q, s)

    def args(M: int, N: int, K: int, E: int, values: bool) -> Arguments:
        sizes, T = bench_sizes(M, E, ragged=False)[0], torch.full((E,), 0.01)
        whole = [size // NVFP4_BLOCK_SIZE * NVFP4_BLOCK_SIZE for size in sizes]
        of = offs_of(sizes if values else whole)
        return *operand(N, M, values), T, *operand(K, M, values), T, of

    for M, N, K, E in shapes.grouped:
        for values, out_dtype in product((False, True), (torch.bfloat16, torch.float32)):
            kw: dict[str, Any] = {"out_dtype": out_dtype, **({} if values else {"scale_layout": "plain"})}
            name = f"{M}x{N}x{K}, E {E}, {'values' if values else 'codes, plain'}, {str(out_dtype)[6:]}"
            yield Case(name, partial(args, M, N, K, E, values), kw)


def _sizes(choice: Choice) -> tuple[int | None, ...]:
    N, K, M = (choice.get(name) for name in ("N", "K", "M"))
    return N, K, M, arranged_groups(choice)


def _codes(choice: Choice) -> bool:
    return "codes" in (choice.get("dy kind"), choice.get("x kind"))


def _unit(choice: Choice) -> int:
    """The number that all group sizes are multiples of."""
    return 1 if choice.get("groups", "").startswith("of 128") or not _codes(choice) else NVFP4_BLOCK_SIZE


def _possible(choice: Choice) -> bool:
    N, K, M, E = _sizes(choice)
    if not affordable(N, K, M, E, tensors=[(N, M), (K, M), (E, N, K)]):
        return False
    if not affordable(E, max(N or 1, K or 1), M, tensors=[]):  # the reference masks each operand for each group
        return False
    if M is not None and M % NVFP4_BLOCK_SIZE and _codes(choice):
        return False
    if not (numbers_fit(choice, "dy", E) and numbers_fit(choice, "x", E)):
        return False
    C, blocked = None if M is None else M // NVFP4_BLOCK_SIZE, given(choice, "scale_layout", "blocked") == "blocked"

    def fits(name: str, rows: int | None) -> bool:
        cols = None if C is None or E is None else C + 4 * E
        tiles = (None if rows is None else round_up(rows, 128), cols) if blocked else None
        return operand_fits(choice, name, (rows, M), tiles)

    return groups_fit(choice, M, _unit(choice)) and fits("dy", N) and fits("x", K)


def _blind(choice: Choice) -> bool:
    N, K, M, E = _sizes(choice)
    return costly(N, K, M, E) or nothing_in_groups(choice) or hides(choice, "dy", N, M) or hides(choice, "x", K, M)


def _make(choice: Choice) -> tuple[Any, ...]:
    N, K, M, E = (size or 0 for size in _sizes(choice))
    offs, layout = offsets(choice, M, _unit(choice)), given(choice, "scale_layout", "blocked")
    found: list[Any] = []
    for i, (name, rows) in enumerate((("dy", N), ("x", K))):
        one: Operand = made(choice, name, (rows, M), i)
        if E:  # if no token is in a group, more than half keep other values, which must not count either
            poison(choice, name, one, int(offs[-1]) or round_up(M // 2 + 1, NVFP4_BLOCK_SIZE), across=True)
        t, scale = lay(choice, name, one, layout, _tiled(offs))
        begins = choice[f"{name}_tensor_scale begins"]
        found += (
            t.mT,
            scale,
            laid_of_matrices(of_groups(choice, E, 5 + i), choice[f"{name}_tensor_scale strides"], begins),
        )
    return *found, offs


DIMENSIONS: dict[str, Any] = {
    "dy kind": KINDS,
    "x kind": KINDS,
    "N": SIZES,
    "K": SIZES,
    "M": SUMS,
    **OF_EXPERTS,
    **operand("dy", groups=True),
    **operand("x", groups=True),
    "tensor scales": ("ordinary", "special"),
}
OPTIONS = {"out_dtype": OUT_DTYPES, "scale_layout": SCALE_LAYOUTS, "check_offs": (False, True)}
_VALUES = {"dy kind": "values", "x kind": "values"}
ALSO: list[Choice] = [
    {**_VALUES, "dy values": "Inf", "M": 1, "N": 48, "groups": "one", "rest": False},
    {**_VALUES, "dy values": "finite", "N": 384},
    {**_VALUES, "x values": "Inf", "N": 384},
    {**_VALUES, "dy values": "Inf", "groups": "all empty", "M": 48},
    {**_VALUES, "dy values": "finite", "groups": "all empty", "M": 48},
    {**_VALUES, "dy values": "finite", "rest": True, "offs begin": "later", "groups": "inner empty"},
    {**_VALUES, "dy values": "finite", "dy strides": "row-major", "M": 161},
    {**_VALUES, "dy values": "finite", "K": 0},
    {**_VALUES, "M": 4128, "K": 384},
    {**_VALUES, "dy values": "Inf", "M": 48, "N": 48, "K": 4128, "groups": "one", "rest": False},
    {**_VALUES, "x values": "Inf", "M": 48, "K": 48, "groups": "all empty"},
    {**_VALUES, "x values": "Inf", "M": 384, "N": 48, "K": 1, "groups": "forty", "rest": False},
    {**_VALUES, "M": 1056, "N": 1041, "K": 48, "groups": "one"},
    {**_VALUES, "dy strides": "one row repeated", "groups": "singles"},
    {**_VALUES, "x strides": "row-major", "M": 161, "N": 48, "K": 48, "groups": "singles"},
    {**_VALUES, "M": 1, "N": 48, "K": 48, "groups": "forty", "offs": "dense", "rest": False},
    {**_VALUES, "x values": "Inf", "M": 48, "N": 48, "K": 48, "groups": "no group", "rest": True},
    {"dy kind": "codes", "dy_scale values": "extreme", "M": 384, "N": 1, "K": 48, "groups": "inner empty"},
    {"x kind": "codes", "x_scale values": "extreme", "M": 384, "N": 48, "K": 1, "groups": "inner empty"},
    {"dy kind": "codes", "dy_scale strides": "rows apart", "offs": "dense", "groups": "inner empty"},
    {**_VALUES, "N": 0, "groups": "singles"},
    {**_VALUES, "M": 48, "N": 1, "K": 4128, "groups": "singles"},
    {**_VALUES, "M": 48, "N": 384, "K": 48, "groups": "singles"},
    {**_VALUES, "M": 1056, "N": 48, "K": 1041, "groups": "one"},
    {**_VALUES, "M": 384, "N": 48, "K": 48, "groups": "one offset repeated", "rest": False},
    {"dy kind": "codes", "dy_scale values": "extreme", "M": 384, "N": 48, "groups": "inner empty", "rest": True},
    {"dy kind": "codes", "dy_scale values": "extreme", "M": 384, "N": 48, "groups": "all empty", "rest": True},
    {"dy kind": "codes", "dy_scale strides": "column-major", "offs": "dense", "groups": "inner empty"},
    {"dy kind": "values", "dy values": "Inf", "x kind": "codes", "x values": "zeros"},
    {"dy kind": "values", "dy values": "finite", "x kind": "codes", "x_scale strides": "one row repeated"},
    {"dy kind": "codes", "dy_scale strides": "one row repeated", "x kind": "values", "x values": "finite"},
]
SPACE = Space(DIMENSIONS, _make, OPTIONS, _possible, ALSO, _blind, implied=("none",), decisive=("scale_layout",))
TOKENS = "dy.rows"
TOLD_BEFORE = ("x.rows",)
IMPOSSIBLE = (
    *matmuls.impossible("dy", "x", "cols", "rows", padded=("dy.rows",)),
    *impossible_groups("dy", "x", "dy|x"),
    *impossible("dy", "x", "cols", "rows"),
    (r"dy\.rows = 0 \| (?:dy|x)_scale\." + PADDING_ALONE[0], PADDING_ALONE[1]),
    (
        r"scale_layout (?:= blocked|not given) \| (?:dy|x)_scale\.strides (?!row-major).*",
        "blocked scales are one run of bytes",
    ),
)
ACROSS = True
