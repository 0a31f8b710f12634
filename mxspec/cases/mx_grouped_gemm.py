"""The cases of mx_grouped_gemm: calls written by hand, calls worth timing, and the dimensions of a call."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from mxspec.cases.common import taken_rows
from mxspec.cases.common.groups import OF_EXPERTS, arranged_groups, groups_fit, nothing_in_groups, offsets
from mxspec.cases.common.matmuls import (
    EXPERTS,
    MX_SIZES,
    OF_E2M1,
    PADDING_ALONE,
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
    poison,
)
from mxspec.cases.common.mx_operands import (
    BY_E2M1,
    E2M1,
    E4M3FN,
    E5M2,
    Operands,
    bench_sizes,
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
from mxspec.cases.common.token_groups import grouped, offs_of
from mxspec.formats import FP8_DTYPES, MX_BLOCK_SIZE
from mxspec.reference.common.groups import round_up
from mxspec.reference.common.matmul import A_DTYPES, B_DTYPES
from mxspec.reference.mx_dequantize import OUT_DTYPES
from mxspec.reference.mx_quantize import SCALE_LAYOUTS, mx_quantize
from mxspec.reference.mx_quantize_groups import mx_quantize_groups
from mxspec.reference.to_blocked import blocked_bytes, to_blocked
from mxspec.reference.to_blocked_m_groups import to_blocked_m_groups
from mxspec.spec import Case, Shapes, normal, random_normal, these

Arguments = tuple[Any, ...]


def arguments(operands: Operands, offs: Tensor, layout: str = "blocked") -> Arguments:
    """The arguments of a call, from codes and plain scales. Rows that belong to no group hold only NaN.

    If a is bfloat16, it has no scales.
    """
    a, a_scale, b, b_scale = operands
    if offs.numel():
        if a.dtype != E2M1:  # e2m1 has no NaN; the scales do
            a[offs[-1] :] = torch.nan
        a_scale.view(torch.uint8)[offs[-1] :] = 255
    of_a = None
    if a.dtype != torch.bfloat16:
        of_a = laid_out(a_scale, layout, lambda scale: to_blocked_m_groups(scale, offs)[0])
    return a, of_a, b, laid_out(b_scale, layout, to_blocked), offs


def made(
    sizes: list[int], rest: int, N: int, K: int, layout: str = "blocked", dtypes: Any = (E4M3FN, E4M3FN)
) -> Arguments:
    """Operands with the tokens of each group, then rows that belong to no group."""
    M, E = sum(sizes) + rest, len(sizes)
    return arguments(pair((M, K), (E, N, K), dtypes), offs_of(sizes), layout)


def quantized(sizes: list[int], N: int, K: int, layout: str) -> Arguments:
    x, w = random_normal(sum(sizes), K), random_normal(len(sizes), N, K, seed=1)
    a, a_scale, _, end = mx_quantize_groups(x, offs_of(sizes), scale_layout=layout)
    return a, a_scale, *mx_quantize(w, scale_layout=layout), end


def of_dgrad(sizes: list[int], N: int, K: int, layout: str) -> Arguments:
    """The operands of dgrad: dy and w quantized along N."""
    dy, w = random_normal(sum(sizes), N), random_normal(len(sizes), N, K, seed=1)
    a, a_scale, _, end = mx_quantize_groups(dy, offs_of(sizes), elem_dtype=E5M2, scale_layout=layout)
    qdata, scale = mx_quantize(w, axis=-2, scale_layout=layout)
    return a, a_scale, qdata.mT, scale, end


def every_scale_pair(sizes: list[int], N: int, K: int, layout: str) -> Arguments:
    M, E, C = sum(sizes), len(sizes), K // MX_BLOCK_SIZE
    b_scale = every_scale(E * N, C, down=True, seed=2).view(E, N, C)
    first, second = codes(M, K), codes(E, N, K, seed=3)
    return arguments((first, every_scale(M, C, down=False), second, b_scale), offs_of(sizes), layout)


def every_byte_of_fp4(layout: str) -> Arguments:
    """Two experts with the same codes. The scales of the second are those of the first in reverse order."""
    a, b, scale = every_byte_of_e2m1()
    scales = torch.stack([scale.view(torch.uint8), scale.view(torch.uint8).flip(0)]).view(scale.dtype)
    codes = b.view(torch.uint8).repeat(2, 1, 1).view(E2M1)
    return a, None, codes, laid_out(scales, layout, to_blocked), offs_of([13, 19])


def every_byte(dtype: torch.dtype, of_a: bool, layout: str) -> Arguments:
    """Every byte of an FP8 format in a or in b, by the unit matrix. There are two experts, whose scales differ."""
    unit, found = every_byte_of(dtype)
    if of_a:
        a, b, sizes = found, unit.view(torch.uint8).repeat(2, 1, 1).view(dtype), [100, len(found) - 100]
    else:
        a, b, sizes = unit, found.view(torch.uint8).repeat(2, 1, 1).view(dtype), [13, 19]
    operands = a, scales(len(a), 1, seed=4), b, scales(*b.shape[:2], 1, seed=5)
    return arguments(operands, offs_of(sizes), layout)


def every_scale_of_fp4(sizes: list[int], N: int, K: int, layout: str) -> Arguments:
    """Scales of b from 2^-127 to 2^127; tokens in bfloat16 that bring the products near 1."""
    E, C = len(sizes), K // MX_BLOCK_SIZE
    scale = every_scale(E * N, C, down=True, seed=2).view(E, N, C)
    largest = 2.0 ** (127 - scale[0, 0].view(torch.uint8).double())
    a = (normal(sum(sizes), K).double() * largest.repeat_interleave(MX_BLOCK_SIZE)).to(torch.bfloat16)
    b = codes(E, N, K, dtype=E2M1, seed=3)
    return a, None, b, laid_out(scale, layout, to_blocked), offs_of(sizes)


def special_fp4() -> Iterator[tuple[str, Operands]]:
    """Operands by e2m1 codes, with special values in a few rows."""
    for dtype in (torch.bfloat16, E4M3FN):
        name = BY_E2M1[dtype]
        operands = pair((50, 96), (3, 40, 96), (dtype, E2M1))
        operands[3].view(torch.uint8)[1, 5, 1] = 255
        operands[0][41, 37] = torch.nan
        operands[2].view(torch.uint8)[2, 2, :16] &= 0x88
        operands[3].view(torch.uint8)[2, 2, 0], operands[3].view(torch.uint8)[0, 3, 2] = 254, 0
        yield f"NaN and blocks of zeros, {name}", operands
    operands = pair((50, 96), (3, 40, 96), (torch.bfloat16, E2M1))
    operands[0][1, 33], operands[0][9, 2] = torch.inf, -torch.inf
    yield "Inf in bfloat16", operands
    operands = pair((50, 96), (3, 40, 96), (E5M2, E2M1))
    operands[0][1, 33], operands[0][9, 2], operands[0][11, 40] = torch.inf, -torch.inf, torch.nan
    yield "Inf and NaN in e5m2", operands
    operands = pair((50, 96), (3, 40, 96), (E4M3FN, E2M1))
    operands[1].view(torch.uint8)[8, 1], operands[1].view(torch.uint8)[30, 0] = 4, 2
    operands[3].view(torch.uint8)[:, :, 1] = 240
    yield "scale bytes of a at which no bfloat16 has its values", operands


def refused() -> Iterator[Case]:
    plain = made([5, 0, 40], 5, 40, 64, "plain")
    a, a_scale, b, b_scale, offs = made([5, 0, 40], 5, 40, 64)

    def case(name, error, match, a=a, a_scale=a_scale, b=b, b_scale=b_scale, offs=offs, **kwargs):
        return Case(name, these(a, a_scale, b, b_scale, offs), kwargs, raises=error, match=match)

    yield case("bf16 codes", TypeError, "b has dtype torch.bfloat16; needs torch.float8_e4m3fn or", b=b.bfloat16())
    yield case("fp16 tokens", TypeError, "a has dtype torch.float16; needs torch.float8_e4m3fn or", a.half())
    by_4 = torch.zeros(3, 40, 32, dtype=torch.uint8).view(E2M1)
    raw = by_4.view(torch.uint8)
    yield case("bytes of a checkpoint", TypeError, "b has dtype torch.uint8; needs torch.float8_e4m3fn or", b=raw)
    bf16 = a.bfloat16()
    yield case("bfloat16 by fp8 codes", TypeError, "a has dtype torch.bfloat16 and b has dtype torch.float8", bf16)
    yield case("bfloat16 with a scale", TypeError, "a is bfloat16 and a_scale is a tensor; needs None", bf16, b=by_4)
    yield case("codes without a scale", TypeError, "torch.float8_e4m3fn and a_scale is None; needs its", a_scale=None)
    yield case("half of fp4 codes", ValueError, "b has shape (3, 40, 16); needs (3, 40, 32)", b=by_4[..., :16])
    yield case("a uint8 scale", TypeError, "b_scale has dtype torch.uint8", b_scale=b_scale.view(torch.uint8))
    yield case("int64 offs", TypeError, "offs has dtype torch.int64; needs torch.int32", offs=offs.long())
    yield case("fp64 out", TypeError, "out_dtype = torch.float64", out_dtype=torch.float64)
    yield case("2-D b", ValueError, "b has shape (40, 64); needs a 3-D tensor", b=b[0])
    yield case("3-D a", ValueError, "a has shape (1, 50, 64); needs a 2-D tensor", a[None])
    yield case("2-D offs", ValueError, "offs has shape (1, 3); needs a 1-D tensor", offs=offs[None])
    yield case("an offs too few", ValueError, "offs has shape (2,); needs (3,) for 3 experts", offs=offs[:2])
    yield case("another K", ValueError, "needs (3, 40, 32) for a (50, 32)", a[:, :32])
    yield case("K = 48", ValueError, "K = 48 is not a multiple of 32, the block size", a[:, :48], b=b[..., :48])
    yield case("b not K-major", ValueError, "b has strides (2560, 1, 40); needs K-major", b=b.mT.contiguous().mT)
    yield case(
        "a scale of too few rows", ValueError, "needs (434, 4) (blocked) for codes (50, 64)", a_scale=a_scale[9:]
    )
    yield case("a plain b_scale", ValueError, "b_scale has shape (3, 40, 2); needs (3, 512)", b_scale=plain[3])
    yield case("blocked scales called plain", ValueError, "needs (50, 2) (plain)", scale_layout="plain")
    wide = a_scale.view(torch.uint8).repeat(1, 2).view(a_scale.dtype)[:, :4]
    yield case(
        "a blocked scale with gaps", ValueError, "a_scale has strides (8, 1); needs contiguous blocked", a_scale=wide
    )
    yield case("offs elsewhere", ValueError, "needs one device", offs=offs.to("meta"))
    yield case("offs that decrease", ValueError, "offs[1] = 5 after 45", offs=offs.flip(0), check_offs=True)
    yield case("offs past M", ValueError, "offs[-1] = 51 is past M = 50", offs=offs + 6, check_offs=True)


def cases() -> Iterator[Case]:
    for layout, out_dtype in product(SCALE_LAYOUTS, OUT_DTYPES):
        kwargs, end = {"out_dtype": out_dtype, "scale_layout": layout}, f"{layout}, {str(out_dtype)[6:]}"
        yield Case(f"three groups, {end}", partial(made, [5, 33, 64], 10, 72, 160, layout), kwargs)
        yield Case(f"large groups, {end}", partial(made, [150, 129], 0, 136, 64, layout), kwargs)
        yield Case(f"as quantized, {end}", partial(quantized, [40, 0, 70], 72, 96, layout), kwargs)
        yield Case(f"dgrad, {end}", partial(of_dgrad, [33, 90], 96, 72, layout), kwargs)
    for dtypes in ((E4M3FN, E5M2), (E5M2, E5M2)):
        name = " by ".join(str(dtype).removeprefix("torch.float8_") for dtype in dtypes)
        yield Case(name, partial(made, [30, 20], 0, 40, 128, dtypes=dtypes))
    for dtype, layout in product(BY_E2M1, SCALE_LAYOUTS):
        name = f"{BY_E2M1[dtype]} by e2m1, {layout}"
        kw = {"scale_layout": layout}
        fp32 = {"out_dtype": torch.float32, **kw}
        yield Case(name, partial(made, [40, 0, 70], 3, 72, 160, layout, (dtype, E2M1)), fp32)
        for sizes, rest, N, K in [([1], 0, 72, 32), ([3, 1, 8], 0, 72, 1056), ([20, 12], 0, 1, 96), ([4, 3], 2, 40, 0)]:
            args = partial(made, sizes, rest, N, K, layout, (dtype, E2M1))
            yield Case(f"{sizes}, {N}x{K}, {name}", args, kw, flags={"edge"})
    tokens, _, b, b_scale, offs = made([20, 0, 30], 5, 72, 160, "plain", (torch.bfloat16, E2M1))
    given = these(tokens, None, rows_apart(b), b_scale, offs)
    yield Case("bfloat16 by e2m1, rows apart", given, {"scale_layout": "plain"})
    yield Case("few tokens and a long K", partial(made, [3, 1, 8], 0, 72, 1056))
    yield Case("checked", partial(made, [30, 0, 10], 3, 40, 64), {"check_offs": True})
    for layout in SCALE_LAYOUTS:
        kw = {"scale_layout": layout}
        for name, sizes, M, _, _ in grouped():
            if len(sizes) < 300 and name != "three groups":
                args = partial(made, sizes, M - sum(sizes), 40, 64, layout)
                yield Case(f"{name}, {layout}", args, kw, flags={"edge"})
        yield Case(f"K = 32, {layout}", partial(made, [20, 12], 0, 136, 32, layout), kw, flags={"edge"})
        yield Case(f"one column, {layout}", partial(made, [20, 12], 0, 1, 64, layout), kw, flags={"edge"})
        yield Case(f"no columns, {layout}", partial(made, [20, 12], 0, 0, 64, layout), kw, flags={"edge"})
        yield Case(f"K = 0: sums of nothing, {layout}", partial(made, [4, 3], 2, 40, 0, layout), kw, flags={"edge"})
        far = partial(every_scale_pair, [30, 10], 72, 512, layout)
        yield Case(f"scales from 2^-127 to 2^127, {layout}", far, {"out_dtype": torch.float32, **kw}, flags={"edge"})
        far = partial(every_scale_of_fp4, [30, 10], 72, 512, layout)
        name = f"scales from 2^-127 to 2^127, bfloat16 by e2m1, {layout}"
        yield Case(name, far, {"out_dtype": torch.float32, **kw}, flags={"edge"})
        for dtype, of_a in product((E4M3FN, E5M2), (True, False)):
            name = f"every byte of {BY_E2M1[dtype]} in {'a' if of_a else 'b'}, {layout}"
            given = partial(every_byte, dtype, of_a, layout)
            yield Case(name, given, {"out_dtype": torch.float32, **kw}, flags={"edge"})
        for name, operands in special((50, 96), (3, 40, 96)):
            given = these(*arguments(operands, offs_of([7, 11, 20]), layout))
            yield Case(f"{name}, {layout}", given, kw, flags={"edge"})
        for name, operands in special_fp4():
            given = these(*arguments(operands, offs_of([7, 11, 20]), layout))
            yield Case(f"{name}, by e2m1, {layout}", given, kw, flags={"edge"})
        every = partial(every_byte_of_fp4, layout)
        yield Case(f"every byte of e2m1, {layout}", every, {"out_dtype": torch.float32, **kw}, flags={"edge"})
    yield from refused()


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    def weights(N: int, K: int, E: int) -> tuple[Tensor, Tensor]:
        return mx_quantize(torch.randn(E, N, K, dtype=torch.bfloat16), scale_layout="blocked")

    def even(M: int, N: int, K: int, E: int) -> Arguments:
        a, a_scale = mx_quantize(torch.randn(M, K, dtype=torch.bfloat16))
        offs = offs_of(bench_sizes(M, E, ragged=False)[0])
        return a, to_blocked_m_groups(a_scale, offs)[0], *weights(N, K, E), offs

    def ragged(M: int, N: int, K: int, E: int) -> Arguments:
        sizes, rows = bench_sizes(M, E, ragged=True)
        a, a_scale, _, end = mx_quantize_groups(torch.randn(M, K, dtype=torch.bfloat16), offs_of(sizes))
        return a[:rows], a_scale[: rows + 128 * E], *weights(N, K, E), end

    def few_tokens(T: int, N: int, K: int, E: int) -> Arguments:
        b = mx_quantize(torch.randn(E, N, K, dtype=torch.bfloat16), elem_dtype=E2M1)
        return torch.randn(T, K, dtype=torch.bfloat16), None, *b, offs_of(bench_sizes(T, E, ragged=True)[0])

    for N, K, E in dict.fromkeys((N, K, E) for _, N, K, E in shapes.grouped):
        args = partial(few_tokens, 4 * E, N, K, E)
        yield Case(f"{4 * E}x{N}x{K}, E {E}, bfloat16 by e2m1", args, {"scale_layout": "plain"})
    for M, N, K, E in shapes.grouped:
        yield Case(f"{M}x{N}x{K}, E {E}, even", partial(even, M, N, K, E))
        if E > 1:
            yield Case(f"{M}x{N}x{K}, E {E}, ragged, padded", partial(ragged, M, N, K, E))


def _sizes(choice: Choice) -> tuple[int | None, ...]:
    M, N, K = (choice.get(name) for name in ("M", "N", "K"))
    return M, N, K, arranged_groups(choice), None if K is None else K // MX_BLOCK_SIZE


def _possible(choice: Choice) -> bool:
    M, N, K, E, C = _sizes(choice)
    if not affordable(M, N, K, E, tensors=[(M, K), (E, N, K), (M, N)]) or not groups_fit(choice, M):
        return False
    a_tiles, b_tiles = None, None
    if given(choice, "scale_layout", "blocked") == "blocked":
        a_tiles = (None if M is None or E is None else M + 128 * E, None if C is None else round_up(C, 4))
        b_tiles = (E, None if N is None or C is None else blocked_bytes(N, C))
    if not dtypes_meet(choice):
        return False
    unscaled = choice.get("b dtype") in (None, E2M1)
    return operand_fits(choice, "a", (M, K), (M, C), a_tiles, unscaled) and operand_fits(
        choice, "b", (E, N, K), (E, N, C), b_tiles
    )


def _blind(choice: Choice) -> bool:
    M, N, K, E, C = _sizes(choice)
    return costly(M, N, K, E) or nothing_in_groups(choice) or hides(choice, "a", M, C) or hides(choice, "b", N, C)


def _make(choice: Choice) -> Arguments:
    M, N, K, E, _ = _sizes(choice)
    assert M is not None
    assert N is not None
    assert K is not None
    assert E is not None
    offs, layout = offsets(choice, M), given(choice, "scale_layout", "blocked")
    a, b = mx_operands(choice, ("a", "b"), [(M, K), (E, N, K)])
    if E:
        # Rows in no group hold NaN. If no row is in a group, the first half keep other values, which must not count
        # either.
        poison(choice, "a", a, int(offs[-1]) or M // 2)
    of_a: Arguments = lay(choice, "a", a, layout, lambda scale: to_blocked_m_groups(scale, offs)[0])
    if a[0].dtype == torch.bfloat16:
        of_a = of_a[0], None
    return *of_a, *lay(choice, "b", b, layout, to_blocked), offs


DIMENSIONS: dict[str, Any] = {
    "M": SIZES,
    "N": SIZES,
    "K": (*MX_SIZES, 8448),  # so many elements of e2m1 are more than 4096 bytes
    **OF_EXPERTS,
    **operand("a", A_DTYPES),
    **operand("b", B_DTYPES, experts=True),
}
OPTIONS = {"out_dtype": OUT_DTYPES, "scale_layout": SCALE_LAYOUTS, "check_offs": (False, True)}
ALSO: list[Choice] = [
    {"M": 1041, "groups": "of 128", "rest": True},
    {"M": 1, "groups": "forty", "a values": "Inf"},
    {"M": 1, "groups": "one", "rest": False, "a values": "NaN", "a dtype": E4M3FN},
    {"M": 384, "groups": "one offset repeated", "rest": False},
    {"groups": "all empty", "K": 384, "a_scale values": "extreme", "a_scale strides": "one row repeated"},
    {"a dtype": E4M3FN, "a_scale values": "extreme", "M": 1, "groups": "one", "rest": False},
    {"a dtype": E4M3FN, "a_scale values": "extreme", "groups": "no group", "scale_layout": "plain"},
    {"a dtype": E4M3FN, "a_scale values": "extreme", "b_scale strides": "rows apart"},
    {"b dtype": E5M2, "b values": "Inf", "M": 4128},
    {"b_scale strides": "one row repeated", "offs": "dense"},
]
_PLAIN: Choice = {
    **{name: "dense" if name == "offs" else "at 0" for name in ("offs", "offs begin")},
    **{f"{name} dtype": FP8_DTYPES[0] for name in "ab"},
    **{f"{name} values": "finite" for name in "ab"},
    **{f"{name}_scale values": "near 1" for name in "ab"},
    **{f"{name} strides": "row-major" for name in ("a", "b", "a_scale", "b_scale")},
    **{f"{name} begins": "at 0" for name in ("a", "b", "a_scale", "b_scale")},
    "rest": False,
}
# Sizes between the sizes of the dimensions, for facts that need smaller tensors.
BEYOND: list[Choice] = [
    {**_PLAIN, "M": 384, "N": 40, "K": 64, "groups": groups, "scale_layout": "plain", "b_scale strides": strides}
    for groups in ("three hundred", "one offset repeated")
    for strides in ("column-major", "rows apart")
]
BEYOND += [{**_PLAIN, "M": 384, "N": 40, "K": 64, "groups": "one"}]
SPACE = Space(
    DIMENSIONS, _make, OPTIONS, _possible, ALSO, _blind, implied=("none",), decisive=("scale_layout",), beyond=BEYOND
)
TOKENS = "a.rows"
ROWS_TAKEN = partial(taken_rows.of_groups, scale_layout="blocked")
TOLD_BEFORE = ("b.cols", "b.experts")
IMPOSSIBLE = (
    *impossible("a", "b", padded=("a.rows",)),
    (r"a\.rows = 0 \| a_scale\." + PADDING_ALONE[0], PADDING_ALONE[1]),
    *EXPERTS,
    *OF_E2M1,
    (
        r"scale_layout (?:= blocked|not given) \| [ab]_scale\.strides (?!row-major).*",
        "blocked scales are one run of bytes",
    ),
)
