"""The cases of nvfp4_grouped_gemm: calls written by hand, calls worth timing, and the dimensions of a call."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from mxspec.cases.common import matmuls, taken_rows
from mxspec.cases.common.groups import OF_EXPERTS, arranged_groups, groups_fit, nothing_in_groups, offsets
from mxspec.cases.common.matmuls import EXPERTS, PADDING_ALONE, affordable, costly
from mxspec.cases.common.mx_operands import bench_sizes
from mxspec.cases.common.nvfp4_operands import (
    KINDS,
    SIZES,
    SUMS,
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
from mxspec.cases.common.token_groups import grouped, offs_of
from mxspec.cases.nvfp4_quantize import laid_of_matrices
from mxspec.formats import NVFP4_BLOCK_SIZE
from mxspec.reference.common.groups import round_up
from mxspec.reference.mx_dequantize import OUT_DTYPES
from mxspec.reference.mx_quantize import SCALE_LAYOUTS
from mxspec.reference.nvfp4_dequantize import nvfp4_dequantize
from mxspec.reference.nvfp4_quantize import nvfp4_quantize
from mxspec.reference.to_blocked import blocked_bytes, to_blocked
from mxspec.reference.to_blocked_m_groups import to_blocked_m_groups
from mxspec.spec import Case, Shapes, normal, random_normal, these

Arguments = tuple[Any, ...]
EDGE = {"edge"}


def arguments(operands: Pair, offs: Tensor, layout: str = "blocked") -> Arguments:
    """The arguments of a call, from operands with plain scales. Rows that belong to no group hold only NaN."""
    (a, a_scale), (b, b_scale) = operands
    end, E = int(offs[-1]) if offs.numel() else 0, offs.shape[0]
    if a_scale is None:
        a[end:] = torch.nan
    else:
        a_scale.view(torch.uint8)[end:] = 0xFF
    a_scale = scales_laid_out(a_scale, layout, lambda scale: to_blocked_m_groups(scale, offs)[0])
    return a, a_scale, numbers(E), b, scales_laid_out(b_scale, layout, to_blocked), numbers(E, 6), offs


def sized(
    sizes: list[int], rest: int, N: int, K: int, layout: str = "blocked", kinds: tuple[str, str] = ("codes", "codes")
) -> Arguments:
    """Operands with the tokens of each group, then rows that belong to no group."""
    M, E = sum(sizes) + rest, len(sizes)
    return arguments(pair((M, K), (E, N, K), kinds), offs_of(sizes), layout)


def quantized(sizes: list[int], N: int, K: int) -> Arguments:
    """Operands that the quantizer made, group by group, with plain scales."""
    x, w = random_normal(sum(sizes), K), nvfp4_quantize(random_normal(len(sizes), N, K, seed=1))
    of_groups = [nvfp4_quantize(t) for t in x.split(sizes)]
    q, s = (torch.cat([found[i].view(torch.uint8) for found in of_groups]) for i in (0, 1))
    numbers = torch.stack([found[2] for found in of_groups])
    return q.view(w[0].dtype), s.view(w[1].dtype), numbers, *w, offs_of(sizes)


def of_dgrad(sizes: list[int], N: int, K: int) -> Arguments:
    """The operands of dgrad as values: dy by the transpose of weights in 16x16 blocks."""
    dy, w = random_normal(sum(sizes), N), nvfp4_quantize(random_normal(len(sizes), N, K, seed=1), block="16x16")
    q, s, T = nvfp4_quantize(dy)
    one = torch.tensor(1.0)
    weights = nvfp4_dequantize(*w[:2], one.expand(len(sizes))).mT
    return nvfp4_dequantize(q, s, one), None, T.expand(len(sizes)), weights, None, w[2], offs_of(sizes)


def far_by_codes(sizes: list[int], N: int, K: int) -> Arguments:
    """Values of 8 bits by codes: near 2^90 and 2^-90 in turns. The tensor scales of a bring the products near 1."""
    far = 2.0 ** torch.tensor([90.0, -90.0]).repeat(len(sizes))[: len(sizes)]
    _, codes = pair((1, K), (len(sizes), N, K), ("values", "codes"))
    values = (normal(sum(sizes), K) * far.repeat_interleave(torch.tensor(sizes))[:, None]).bfloat16()
    a, a_scale, _, *rest = arguments(((values, None), codes), offs_of(sizes))
    return a, a_scale, 1 / far, *rest


def refused() -> Iterator[Case]:
    a, a_scale, Ta, b, b_scale, Tb, offs = sized([5, 0, 40], 5, 40, 64)
    values = sized([5, 0, 40], 5, 40, 64, kinds=("values", "values"))

    def case(name, error, match, a=a, a_scale=a_scale, Ta=Ta, b=b, b_scale=b_scale, Tb=Tb, offs=offs, **kwargs):
        return Case(name, these(a, a_scale, Ta, b, b_scale, Tb, offs), kwargs, raises=error, match=match)

    yield case("uint8 codes", TypeError, "b has dtype torch.uint8; needs", b=b.view(torch.uint8))
    yield case("a uint8 scale", TypeError, "b_scale has dtype torch.uint8", b_scale=b_scale.view(torch.uint8))
    yield case("codes without scales", TypeError, "a_scale is None; needs a tensor", a_scale=None)
    yield case("values with scales", TypeError, "b_scale is a Tensor; needs None", b=values[3])
    yield case("int64 offs", TypeError, "offs has dtype torch.int64; needs torch.int32", offs=offs.long())
    yield case("fp64 out", TypeError, "out_dtype = torch.float64", out_dtype=torch.float64)
    yield case("2-D b", ValueError, "b has shape (40, 32); needs a 3-D tensor", b=b[0])
    yield case("3-D a", ValueError, "a has shape (1, 50, 32); needs a 2-D tensor", a[None])
    yield case("2-D offs", ValueError, "offs has shape (1, 3); needs a 1-D tensor", offs=offs[None])
    yield case("an offs too few", ValueError, "offs has shape (2,); needs (3,) for 3 experts of b", offs=offs[:2])
    yield case("one tensor scale", ValueError, "a_tensor_scale has shape (); needs (3,)", Ta=Ta[0])
    yield case("another K", ValueError, "needs (3, 40, 16) for a (50, 16), 3 groups and K = 32", a[:, :16])
    yield case(
        "K = 24", ValueError, "24 is not a multiple of 16, the block size; pad the values", a[:, :12], b=b[..., :12]
    )
    turned = b.view(torch.uint8).mT.contiguous().mT.view(b.dtype)
    yield case("b not K-major", ValueError, "b has strides (1280, 1, 40); needs K-major", b=turned)
    yield case(
        "a scale of too few rows", ValueError, "needs (434, 4) (blocked) for codes (50, 32)", a_scale=a_scale[9:]
    )
    yield case("blocked scales called plain", ValueError, "needs (50, 4) (plain)", scale_layout="plain")
    yield case("offs elsewhere", ValueError, "needs one device", offs=offs.to("meta"))
    yield case("offs that decrease", ValueError, "offs[1] = 5 after 45", offs=offs.flip(0), check_offs=True)
    yield case("offs past M", ValueError, "offs[-1] = 51 is past M = 50", offs=offs + 6, check_offs=True)


def cases() -> Iterator[Case]:
    for layout, out_dtype in product(SCALE_LAYOUTS, OUT_DTYPES):
        kwargs, end = {"out_dtype": out_dtype, "scale_layout": layout}, f"{layout}, {str(out_dtype)[6:]}"
        yield Case(f"three groups, {end}", partial(sized, [5, 33, 64], 10, 72, 176, layout), kwargs)
        yield Case(f"large groups, {end}", partial(sized, [150, 129], 0, 136, 64, layout), kwargs)
        for kinds in (("codes", "values"), ("values", "codes")):
            name = f"{kinds[0]} by {kinds[1]}, {end}"
            yield Case(name, partial(sized, [40, 0, 70], 3, 72, 96, layout, kinds), kwargs)
    for out_dtype in OUT_DTYPES:
        kwargs, end = {"out_dtype": out_dtype}, str(out_dtype)[6:]
        args = partial(sized, [5, 150, 33], 10, 136, 200, kinds=("values", "values"))
        yield Case(f"values by values, {end}", args, kwargs)
        yield Case(f"dgrad of 16x16 blocks, {end}", partial(of_dgrad, [33, 90], 96, 80), kwargs)
        plain = {"scale_layout": "plain", **kwargs}
        yield Case(f"as quantized, {end}", partial(quantized, [40, 20, 70], 72, 96), plain)
    a, _, Ta, b, _, Tb, offs = sized([7, 30], 3, 40, 104, kinds=("values", "values"))
    across = a.t().contiguous().t(), b.mT.contiguous().mT
    for name, (left, right) in {"a": (across[0], b), "b": (a, across[1]), "a and b": across}.items():
        call = these(left, None, Ta, right, None, Tb, offs)
        yield Case(f"values of {name} with rows along the other axis", call)
    column = these(a[:, :1], None, Ta, b[:, :, :1], None, Tb, offs)
    yield Case("values of one column, rows apart", column, flags=EDGE)
    yield Case("one weight for all", these(a, None, Ta, b[:1].expand(2, -1, -1), None, Tb[:1].expand(2), offs))
    fp32 = {"out_dtype": torch.float32}
    far = these(*arguments(far_values((40, 200), (3, 72, 200)), offs_of([7, 20, 10])))
    yield Case("values from 2^-100 to 2^100", far, fp32, flags=EDGE)
    yield Case("values near 2^90 and 2^-90 by codes", partial(far_by_codes, [7, 20, 10], 72, 160), fp32, flags=EDGE)
    yield Case("few tokens and a long K", partial(sized, [3, 1, 8], 0, 72, 1040))
    yield Case("checked", partial(sized, [30, 0, 10], 3, 40, 64), {"check_offs": True})
    for layout in SCALE_LAYOUTS:
        kw = {"scale_layout": layout}
        for name, sizes, M, _, _ in grouped():
            if len(sizes) < 300 and name != "three groups":
                args = partial(sized, sizes, M - sum(sizes), 40, 64, layout)
                yield Case(f"{name}, {layout}", args, kw, flags=EDGE)
        for name, (N, K) in {
            "K = 16": (136, 16),
            "K = 48": (136, 48),
            "one column": (1, 64),
            "no columns": (0, 64),
        }.items():
            yield Case(f"{name}, {layout}", partial(sized, [20, 12], 0, N, K, layout), kw, flags=EDGE)
        yield Case(f"K = 0: sums of nothing, {layout}", partial(sized, [4, 3], 2, 40, 0, layout), kw, flags=EDGE)
        for name, operands in special((50, 96), (3, 40, 96)):
            given = these(*arguments(operands, offs_of([7, 11, 20]), layout))
            yield Case(f"{name}, {layout}", given, kw, flags=EDGE)
    for kinds in (("codes", "codes"), ("values", "values")):
        a, a_scale, Ta, b, b_scale, Tb, offs = sized([20, 0, 12, 30], 5, 40, 64, kinds=kinds)
        Ta[:3], Tb[:4] = torch.tensor([0.0, torch.nan, -3e38]), torch.tensor([1.0, torch.inf, 1e-38, torch.nan])
        call = these(a, a_scale, Ta, b, b_scale, Tb, offs)
        yield Case(f"tensor scales of 0, NaN and Inf, {kinds[0]}", call, flags=EDGE)
        a, a_scale, Ta, b, b_scale, Tb, offs = sized([20, 12, 30, 9], 5, 40, 64, kinds=kinds)
        Ta[:], Tb[:] = torch.tensor([3e38, torch.nan, 2.0**-100, -3e38]), torch.tensor([3e38, 1.0, 2.0**-30, 3e38])
        call = these(a, a_scale, Ta, b, b_scale, Tb, offs)
        yield Case(f"products of tensor scales: Inf, NaN and 2^-130, {kinds[0]}", call, flags=EDGE)
        a, a_scale, Ta, b, b_scale, Tb, offs = sized([4, 3], 2, 40, 0, kinds=kinds)
        Ta[0], Tb[1] = torch.nan, torch.inf
        call = these(a, a_scale, Ta, b, b_scale, Tb, offs)
        yield Case(f"K = 0, and tensor scales of NaN and Inf, {kinds[0]}", call, flags=EDGE)
    yield from refused()


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    def operand(*shape: int, values: bool) -> tuple[Tensor, Tensor | None]:
        q, s, _ = nvfp4_quantize(torch.randn(*shape, dtype=torch.bfloat16), torch.full(shape[:-2], 4.0))
        return (nvfp4_dequantize(q, s, torch.ones(shape[:-2])), None) if values else (q, s)

    def args(M: int, N: int, K: int, E: int, values: bool, ragged: bool) -> Arguments:
        offs, T = offs_of(bench_sizes(M, E, ragged)[0]), torch.full((E,), 0.01)
        (a, a_scale), (b, b_scale) = operand(M, K, values=values), operand(E, N, K, values=values)
        return a, a_scale, T, b, b_scale, T, offs

    for M, N, K, E in shapes.grouped:
        for values, ragged in product((False, True), (False, True) if E > 1 else (False,)):
            name = f"{M}x{N}x{K}, E {E}, {'ragged' if ragged else 'even'}, {'values' if values else 'codes, plain'}"
            yield Case(name, partial(args, M, N, K, E, values, ragged), {} if values else {"scale_layout": "plain"})


def _sizes(choice: Choice) -> tuple[int | None, ...]:
    M, N, K = (choice.get(name) for name in ("M", "N", "K"))
    return M, N, K, arranged_groups(choice)


def _possible(choice: Choice) -> bool:
    M, N, K, E = _sizes(choice)
    if not affordable(M, N, K, E, tensors=[(M, K), (E, N, K), (M, N)]) or not groups_fit(choice, M):
        return False
    if K is not None and K % NVFP4_BLOCK_SIZE and "codes" in (choice.get("a kind"), choice.get("b kind")):
        return False
    if not (numbers_fit(choice, "a", E) and numbers_fit(choice, "b", E)):
        return False
    C, a_tiles, b_tiles = None if K is None else K // NVFP4_BLOCK_SIZE, None, None
    if given(choice, "scale_layout", "blocked") == "blocked":
        a_tiles = (None if M is None or E is None else M + 128 * E, None if C is None else round_up(C, 4))
        b_tiles = (E, None if N is None or C is None else blocked_bytes(N, C))
    return operand_fits(choice, "a", (M, K), a_tiles) and operand_fits(choice, "b", (E, N, K), b_tiles)


def _blind(choice: Choice) -> bool:
    M, N, K, E = _sizes(choice)
    return costly(M, N, K, E) or nothing_in_groups(choice) or hides(choice, "a", M, K) or hides(choice, "b", N, K)


def _make(choice: Choice) -> tuple[Any, ...]:
    M, N, K, E = (size or 0 for size in _sizes(choice))
    offs, layout = offsets(choice, M), given(choice, "scale_layout", "blocked")
    a, b = made(choice, "a", (M, K)), made(choice, "b", (E, N, K), 1)
    if E:  # if no row is in a group, the first half keep other values, which must not count either
        poison(choice, "a", a, int(offs[-1]) or M // 2)
    found: list[Any] = [*lay(choice, "a", a, layout, lambda scale: to_blocked_m_groups(scale, offs)[0])]
    of_each = [
        laid_of_matrices(
            of_groups(choice, E, 5 + i), choice[f"{name}_tensor_scale strides"], choice[f"{name}_tensor_scale begins"]
        )
        for i, name in enumerate("ab")
    ]
    return *found, of_each[0], *lay(choice, "b", b, layout, to_blocked), of_each[1], offs


def of_groups(choice: Choice, E: int, seed: int) -> Tensor:
    """A tensor scale for each group."""
    found = numbers(E, seed)
    if choice["tensor scales"] == "special" and E:
        found[0], found[-1] = 0.0, -1.5
    return found


DIMENSIONS: dict[str, Any] = {
    "a kind": KINDS,
    "b kind": KINDS,
    "M": SIZES,
    "N": SIZES,
    "K": SUMS,
    **OF_EXPERTS,
    **operand("a", groups=True),
    **operand("b", experts=True, groups=True),
    "tensor scales": ("ordinary", "special"),
}
OPTIONS = {"out_dtype": OUT_DTYPES, "scale_layout": SCALE_LAYOUTS, "check_offs": (False, True)}
ALSO: list[Choice] = [
    {f"{one} kind": "codes", f"{one} values": "zeros", **other}
    for one, size, two in (("a", "M", "b"), ("b", "N", "a"))
    for other in ({size: 1}, {f"{two} values": "NaN"}, {f"{two} values": "Inf"})
] + [
    {"a kind": "values", "a values": "Inf", "M": 1, "K": 48},
    {"a kind": "values", "b kind": "values", "N": 4128, "K": 384},
    {"a kind": "values", "b kind": "values", "K": 4128, "groups": "of 128", "M": 384},
    {"a kind": "values", "a values": "finite", "b kind": "codes", "b_scale strides": "one row repeated"},
    {"a kind": "values", "a values": "finite", "b kind": "codes", "b_scale strides": "experts inside the rows"},
    {"a kind": "values", "a values": "finite", "N": 0},
    {"b kind": "codes", "b_scale strides": "rows apart", "groups": "all to one"},
    {"b kind": "codes", "b_scale strides": "columns apart", "offs": "dense", "groups": "inner empty"},
    {"b kind": "codes", "b_scale strides": "column-major", "groups": "all to one"},
    {"a kind": "codes", "a_scale strides": "row-major", "b kind": "codes", "b_scale strides": "one row repeated"},
    {"a kind": "codes", "a_scale values": "extreme", "M": 1, "groups": "one", "rest": False},
    {"a kind": "values", "b kind": "values", "M": 1041, "N": 48, "K": 1056, "groups": "one"},
    {"a kind": "values", "b kind": "values", "M": 48, "N": 384, "K": 4128, "groups": "one"},
    {"a kind": "values", "b kind": "values", "M": 48, "N": 1, "K": 4128, "groups": "three hundred"},
]
SPACE = Space(DIMENSIONS, _make, OPTIONS, _possible, ALSO, _blind, implied=("none",), decisive=("scale_layout",))
TOKENS = "a.rows"
ROWS_TAKEN = partial(taken_rows.of_groups, scale_layout="blocked")
TOLD_BEFORE = ("b.cols", "b.experts")
IMPOSSIBLE = (
    *matmuls.impossible("a", "b", padded=("a.rows",)),
    *impossible_groups("a", "b"),
    *impossible("a", "b"),
    (r"a\.rows = 0 \| a_scale\." + PADDING_ALONE[0], PADDING_ALONE[1]),
    *EXPERTS,
    (
        r"scale_layout (?:= blocked|not given) \| [ab]_scale\.strides (?!row-major).*",
        "blocked scales are one run of bytes",
    ),
)
