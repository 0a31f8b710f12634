"""The cases of fp8_grouped_gemm: calls written by hand, calls worth timing, and the dimensions of a call."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mxspec.cases.common import taken_rows
from mxspec.cases.common.fp8_operands import codes, scales
from mxspec.cases.common.groups import OF_EXPERTS, arranged_groups, groups_fit, nothing_in_groups, offsets
from mxspec.cases.common.matmuls import (
    EXPERTS,
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
    poison,
    with_special_codes,
)
from mxspec.cases.common.mx_operands import bench_sizes, every_byte_of
from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.space import Space, given
from mxspec.cases.common.token_groups import grouped, offs_of
from mxspec.cases.fp8_quantize_1x128 import TAILS
from mxspec.formats import FP8_BLOCK_SIZE
from mxspec.reference.fp8_quantize_1x128 import fp8_quantize_1x128
from mxspec.reference.fp8_quantize_128x128 import fp8_quantize_128x128
from mxspec.reference.mx_dequantize import OUT_DTYPES
from mxspec.reference.pad_token_groups import pad_token_groups
from mxspec.spec import Case, Shapes, normal, these

Arguments = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def made(sizes: list[int], rest: int, N: int, K: int, spread: int = 1, major: str = "k") -> Arguments:
    """Operands with the tokens of each group, then rows that belong to no group and hold only NaN.

    Scales stay within a factor of two of 1, so that every wrong element shows in the SQNR.
    """
    M, E, C, blocks = sum(sizes) + rest, len(sizes), -(-K // FP8_BLOCK_SIZE), -(-N // FP8_BLOCK_SIZE)
    a, a_scale = codes(M, K), scales(M, C, spread, major)
    if E:
        a[sum(sizes) :], a_scale[sum(sizes) :] = torch.nan, torch.nan
    b, b_scale = codes(E * N, K, seed=2), scales(E * blocks, C, spread, seed=3)
    return a, a_scale, b.view(E, N, K), b_scale.view(E, blocks, C), offs_of(sizes)


def every_byte(of_a: bool) -> Arguments:
    """Every byte of e4m3 in a or in b, by the unit matrix. Two experts have the same codes."""
    unit, found = every_byte_of(torch.float8_e4m3fn, FP8_BLOCK_SIZE)
    a, of_each, sizes = (found, unit, [100, len(found) - 100]) if of_a else (unit, found, [50, 78])
    b = of_each.view(torch.uint8).repeat(2, 1, 1).view(found.dtype)
    blocks = -(-b.shape[1] // FP8_BLOCK_SIZE)
    return a, scales(len(a), 1), b, scales(2 * blocks, 1, seed=3).view(2, blocks, 1), offs_of(sizes)


def quantized(sizes: list[int], N: int, K: int) -> Arguments:
    x, w = normal(sum(sizes), K).bfloat16(), normal(len(sizes), N, K, seed=1).bfloat16()
    b, b_scale, *_ = fp8_quantize_128x128(w)
    return *fp8_quantize_1x128(x, scale_major="mn"), b, b_scale, offs_of(sizes)


def of_dgrad(sizes: list[int], N: int, K: int) -> Arguments:
    """The operands of dgrad: dy and the transposes of the weights."""
    dy, w = normal(sum(sizes), N).bfloat16(), normal(len(sizes), N, K, seed=1).bfloat16()
    *_, w_t, w_t_scale = fp8_quantize_128x128(w, with_transpose=True)
    return *fp8_quantize_1x128(dy, scale_major="mn"), w_t, w_t_scale, offs_of(sizes)


def special() -> Iterator[tuple[str, Arguments]]:
    """Operands with special values in one row of the tokens or in the weights of the last of three experts."""
    sizes, rest, N, K = [7, 11, 20], 12, 136, 256
    args = made(sizes, rest, N, K)
    args[0][3, 37] = torch.nan
    yield "a NaN code of a token: its row", args
    args = made(sizes, rest, N, K)
    args[1][9, 1] = torch.nan
    yield "a NaN scale of a token: its row", args
    args = made(sizes, rest, N, K)
    args[2][2, 5, 200] = torch.nan
    yield "a NaN code of a weight: its column of one group", args
    args = made(sizes, rest, N, K)
    args[3][2, 1, 0] = torch.nan
    yield "a NaN scale of weights: eight columns of one group", args
    args = made(sizes, rest, N, K)
    args[0][2, :128], args[1][4, 0], args[3][1] = 0, 0, 0
    yield "zeros", args
    args = made([1], 0, N, 144)
    args[0].view(torch.uint8)[0, 3], args[0].view(torch.uint8)[0, 140] = 0x7F, 0xFF
    yield "one token with NaN codes of both signs", args
    args = made([1, 20, 12], 0, N, K)
    yield "one row of scales for all tokens", (args[0], args[1][:1].expand(33, -1), *args[2:])
    args = made([20, 0, 18], rest, N, K)
    args[2][1], args[3][1] = torch.nan, torch.nan
    yield "an expert of NaN without tokens", args


def refused() -> Iterator[Case]:
    a, a_scale, b, b_scale, offs = made([5, 0, 40], 5, 200, 256)

    def case(name, error, match, a=a, a_scale=a_scale, b=b, b_scale=b_scale, offs=offs, **kwargs):
        return Case(name, these(a, a_scale, b, b_scale, offs), kwargs, raises=error, match=match)

    yield case("bf16 codes", TypeError, "b has dtype torch.bfloat16; needs torch.float8_e4m3fn", b=b.bfloat16())
    yield case("e5m2 codes", TypeError, "a has dtype torch.float8_e5m2; needs", a.view(torch.float8_e5m2))
    yield case("bf16 scale", TypeError, "a_scale has dtype torch.bfloat16", a_scale=a_scale.bfloat16())
    yield case("int64 offs", TypeError, "offs has dtype torch.int64; needs torch.int32", offs=offs.long())
    yield case("fp16 out", TypeError, "out_dtype = torch.float16", out_dtype=torch.float16)
    yield case("2-D b", ValueError, "b has shape (200, 256); needs a 3-D tensor", b=b[0])
    yield case("3-D a", ValueError, "a has shape (1, 50, 256); needs a 2-D tensor", a[None])
    yield case("an offs too few", ValueError, "offs has shape (2,); needs (3,) for 3 experts", offs=offs[:2])
    yield case("another K", ValueError, "needs (3, 200, 128) for a (50, 128)", a[:, :128])
    yield case("K = 200", ValueError, "K = 200 is not a multiple of 16; pad", a[:, :200], b=b[..., :200])
    yield case("K = 8", ValueError, "K = 8 is not a multiple of 16; pad", a[:, :8], b=b[..., :8])
    of_one = a_scale[:, :1]
    yield case("K = 144, one scale", ValueError, "needs (50, 2) (1x128", a[:, :144], of_one, b[..., :144])
    yield case("a not K-major", ValueError, "a has strides (1, 50); needs K-major", a.t().contiguous().t())
    yield case("b not K-major", ValueError, "b has strides (51200, 1, 200); needs", b=b.mT.contiguous().mT)
    yield case("a_scale of 128x128", ValueError, "needs (50, 2) (1x128 blocks)", a_scale=a_scale[:1])
    yield case("b_scale of 1x128", ValueError, "needs (3, 2, 2) (128x128", b_scale=b_scale.repeat(1, 100, 1))
    yield case("offs elsewhere", ValueError, "needs one device", offs=offs.to("meta"))
    yield case("alignment 0", ValueError, "alignment = 0; needs at least 1", alignment=0)
    unaligned = "offs[0] = 5; needs multiples of 128"
    yield case("offs of 5 where 128 is said", ValueError, unaligned, alignment=128, check_offs=True)
    yield case("offs that decrease", ValueError, "offs[1] = 5 after 45", offs=offs.flip(0), check_offs=True)
    yield case("offs past M", ValueError, "offs[-1] = 51 is past M = 50", offs=offs + 6, check_offs=True)


def cases() -> Iterator[Case]:
    for out_dtype in OUT_DTYPES:
        kwargs, end = {"out_dtype": out_dtype}, str(out_dtype)[6:]
        for major in ("k", "mn"):
            yield Case(
                f"three groups, {major}-major, {end}", partial(made, [5, 33, 64], 10, 136, 384, 1, major), kwargs
            )
        yield Case(f"large groups, {end}", partial(made, [150, 129], 0, 264, 256, 1, "mn"), kwargs)
        aligned = partial(made, [128, 0, 256], 128, 256, 256, 1, "mn")
        yield Case(f"aligned groups, {end}", aligned, kwargs | {"alignment": 128})
        yield Case(f"as quantized, {end}", partial(quantized, [40, 0, 72], 200, 256), kwargs)
        yield Case(f"dgrad, {end}", partial(of_dgrad, [33, 91], 256, 128), kwargs)
        yield Case(f"dgrad, N = 208, {end}", partial(of_dgrad, [33, 91], 208, 144), kwargs)
    for i, K in enumerate(TAILS):
        tail = partial(made, [40, 0, 33], 5, 144, K, 1, "mn" if i % 2 else "k")
        yield Case(f"K = {K}", tail, {"out_dtype": OUT_DTYPES[i % 2]})
    yield Case("as quantized, 208 columns", partial(quantized, [40, 0, 72], 144, 208))
    yield Case("few tokens and a long K", partial(made, [3, 1, 8], 0, 136, 2048, 1, "mn"))
    yield Case("checked", partial(made, [30, 0, 10], 3, 40, 128), {"check_offs": True})
    yield Case("checked, aligned", partial(made, [30, 0, 10], 3, 40, 128), {"alignment": 10, "check_offs": True})
    for name, sizes, M, _, _ in grouped():
        if len(sizes) < 300 and name not in ("three groups", "aligned groups"):
            yield Case(name, partial(made, sizes, M - sum(sizes), 40, 128), flags={"edge"})
    for of_a in (True, False):
        name = f"every byte of e4m3fn in {'a' if of_a else 'b'}"
        yield Case(name, partial(every_byte, of_a), {"out_dtype": torch.float32}, flags={"edge"})
    yield Case("one column", partial(made, [20, 12], 0, 1, 256), flags={"edge"})
    yield Case("no columns", partial(made, [20, 12], 0, 0, 256), flags={"edge"})
    yield Case("K = 0: sums of nothing", partial(made, [4, 3], 2, 40, 0), flags={"edge"})
    yield Case("ragged against every tile", partial(made, [129, 65, 63], 3, 131, 384), {"out_dtype": torch.float32})
    yield Case("scales of 2^-40 to 2^40", partial(made, [40, 24], 0, 256, 512, 40), flags={"edge"})
    for name, args in special():
        yield Case(name, these(*args), flags={"edge"})
    yield from refused()


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    def args(M: int, N: int, K: int, E: int, ragged: bool) -> Arguments:
        sizes, rows = bench_sizes(M, E, ragged)
        x, offs = torch.randn(M, K, dtype=torch.bfloat16), offs_of(sizes)
        if ragged:
            padded, _, offs = pad_token_groups(x, offs, FP8_BLOCK_SIZE)
            x = padded[:rows]
        b, b_scale, *_ = fp8_quantize_128x128(torch.randn(E, N, K, dtype=torch.bfloat16))
        return *fp8_quantize_1x128(x, scale_major="mn"), b, b_scale, offs

    for M, N, K, E in shapes.grouped:
        blocks = {"alignment": FP8_BLOCK_SIZE}
        even = {} if M % (FP8_BLOCK_SIZE * E) else blocks
        yield Case(f"{M}x{N}x{K}, E {E}, even", partial(args, M, N, K, E, False), even)
        if E > 1:
            yield Case(f"{M}x{N}x{K}, E {E}, ragged, padded", partial(args, M, N, K, E, True), blocks)


def _sizes(choice: Choice) -> tuple[int | None, ...]:
    """M, N, K, the number of experts, and the rows and columns of each expert's scales; None for a size still open."""
    M, N, K = (choice.get(name) for name in ("M", "N", "K"))
    blocks = [None if size is None else -(-size // FP8_BLOCK_SIZE) for size in (N, K)]
    return M, N, K, arranged_groups(choice), *blocks


def _unit(choice: Choice) -> int | None:
    """The number that all group sizes are multiples of."""
    return 1 if choice.get("groups", "").startswith("of 128") else given(choice, "alignment", 1)


def _possible(choice: Choice) -> bool:
    M, N, K, E, rows, C = _sizes(choice)
    unit = _unit(choice)
    if choice.get("groups", "").startswith("of 128") and choice.get("alignment") == 10:
        return False
    return (
        affordable(M, N, K, E, tensors=[(M, K), (E, N, K), (M, N)])
        and groups_fit(choice, M if unit else None, unit or 1)
        and operand_fits(choice, "a", (M, K), (M, C))
        and operand_fits(choice, "b", (E, N, K), (E, rows, C))
        and extremes_fit(choice, "a", (M, C))
        and extremes_fit(choice, "b", (E, rows, C))
    )


def _blind(choice: Choice) -> bool:
    M, N, K, E, rows, C = _sizes(choice)
    hidden = hides(choice, "a", M, C) or hides(choice, "b", N, C, rows)
    return costly(M, N, K, E) or nothing_in_groups(choice) or hidden


def _make(choice: Choice) -> tuple[Tensor, ...]:
    M, N, K, E, rows, C = (size or 0 for size in _sizes(choice))
    offs = offsets(choice, M, _unit(choice) or 1)
    a = fp8_operand(choice, "a", (M, K), (M, C))
    b = fp8_operand(choice, "b", (E, N, K), (E, rows, C), seed=2)
    for name, (qdata, _) in (("a", a), ("b", b)):
        with_special_codes(qdata, choice[f"{name} values"])
    if E:
        # Rows in no group hold NaN. If no row is in a group, the first half keep other values, which must not count
        # either.
        poison(choice, "a", a, int(offs[-1]) or M // 2)
    return *lay(choice, "a", a), *lay(choice, "b", b), offs


DIMENSIONS: dict[str, Any] = {
    "M": SIZES,
    "N": SIZES,
    "K": FP8_SIZES,
    **OF_EXPERTS,
    **operand("a"),
    **operand("b", experts=True),
}
OPTIONS = {"out_dtype": OUT_DTYPES, "alignment": (1, 10, 128), "check_offs": (False, True)}
ALSO: list[Choice] = [{"M": 1041, "groups": "of 128", "rest": True}]
_PLAIN: Choice = {
    **{name: "dense" if name == "offs" else "at 0" for name in ("offs", "offs begin")},
    **{f"{name} values": "finite" for name in "ab"},
    **{f"{name}_scale values": "near 1" for name in "ab"},
    **{f"{name} strides": "row-major" for name in ("a", "b", "a_scale", "b_scale")},
    **{f"{name} begins": "at 0" for name in ("a", "b", "a_scale", "b_scale")},
    "rest": False,
}
# Sizes between the sizes of the dimensions, for facts that need smaller tensors.
BEYOND: list[Choice] = [
    {**_PLAIN, "M": 384, "N": 8, "K": 128, "groups": "of 128, three hundred"},
    *(
        {**_PLAIN, "M": 48, "N": 130, "K": 256, "groups": "all to one", "b_scale strides": s}
        for s in ("one row repeated", "rows apart")
    ),
    *(
        {**_PLAIN, "M": 384, "N": 130, "K": 256, "groups": "forty", "b_scale strides": s}
        for s in ("column-major", "rows apart")
    ),
    *(
        {**_PLAIN, "M": 4128, "N": 130, "K": 256, "groups": "last empty", "b_scale strides": s}
        for s in ("column-major", "rows apart", "experts inside the rows")
    ),
    {**_PLAIN, "M": 4128, "N": 64, "K": 512, "groups": "last empty", "b_scale values": "extreme"},
    {**_PLAIN, "M": 48, "N": 130, "K": 4224, "groups": "last empty", "b_scale strides": "experts inside the rows"},
]
SPACE = Space(
    DIMENSIONS, _make, OPTIONS, _possible, ALSO, blind=_blind, implied=("none",), decisive=("alignment",), beyond=BEYOND
)
_OF_MANY = r"b_scale\.strides (?:column-major|experts inside the rows|one row repeated|rows apart)"
TOKENS = "a.rows"
ROWS_TAKEN = taken_rows.of_groups
TOLD_BEFORE = ("b.cols", "b.experts")
IMPOSSIBLE = (
    (r"(?:b\.experts|offs\.groups) > 256 \| " + _OF_MANY, "more than 2.2 million elements in a tensor"),
    *impossible("a", "b"),
    *EXPERTS,
    (r"alignment = 10 \| offs\.some group of one token", "sizes are multiples of the alignment"),
    (r"alignment = 128 \| offs\.(?:some group of one token|sizes ragged)", "sizes are multiples of the alignment"),
    (r"alignment = 10 \| offs\.sizes multiples of 128", "groups of 640 tokens would make the case too large"),
)
