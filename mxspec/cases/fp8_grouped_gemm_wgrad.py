"""The cases of fp8_grouped_gemm_wgrad: calls written by hand, calls worth timing, and the dimensions of a call."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from mxspec.cases.common.fp8_operands import codes, scales
from mxspec.cases.common.groups import OF_EXPERTS, arranged_groups, groups_fit, nothing_in_groups, offsets
from mxspec.cases.common.matmuls import (
    FP8_TOKENS,
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
from mxspec.cases.common.mx_operands import bench_sizes, every_byte_of
from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.space import Space
from mxspec.cases.common.token_groups import offs_of
from mxspec.cases.fp8_grouped_gemm import Arguments
from mxspec.formats import FP8_BLOCK_SIZE
from mxspec.reference.fp8_quantize_k_groups import fp8_quantize_k_groups
from mxspec.reference.mx_dequantize import OUT_DTYPES
from mxspec.spec import Case, Shapes, normal, these


def made(sizes: list[int], rest: int, N: int, K: int, spread: int = 1, major: str = "mn") -> Arguments:
    """Operands with the tokens of each group, then NaN after the last group; all sizes are multiples of 128."""
    tokens, R = sum(sizes), sum(sizes) + rest
    operands: list[Tensor] = []
    for D, seed in ((N, 0), (K, 2)):
        q, scale = codes(D, R, seed), scales(D, R // FP8_BLOCK_SIZE, spread, major, seed + 1)
        if sizes:
            q.view(-1)[D * tokens :], scale[:, tokens // FP8_BLOCK_SIZE :] = torch.nan, torch.nan
        operands += [q, scale]
    dy, dy_scale, x, x_scale = operands
    return dy, dy_scale, x, x_scale, offs_of(sizes)


def every_byte(of_dy: bool) -> Arguments:
    """Every byte of e4m3 in dy or in x, by the unit matrix, in one group."""
    unit, found = every_byte_of(torch.float8_e4m3fn, FP8_BLOCK_SIZE)
    dy, x = (found, unit) if of_dy else (unit, found)
    return dy, scales(len(dy), 1, major="mn"), x, scales(len(x), 1, major="mn", seed=3), offs_of([FP8_BLOCK_SIZE])


def quantized(sizes: list[int], N: int, K: int) -> Arguments:
    """Operands that the quantizer made from groups of any sizes."""
    dy, x = normal(sum(sizes), N).bfloat16(), normal(sum(sizes), K, seed=1).bfloat16()
    of_dy, of_x = (fp8_quantize_k_groups(t, offs_of(sizes)) for t in (dy, x))
    return *of_dy[:2], *of_x[:2], of_x[3]


GROUP_SIZES: dict[str, tuple[list[int], int]] = {
    "one group": ([256], 0),
    "empty groups": ([0, 128, 0, 0, 256, 128, 0], 0),
    "all in one of eight": ([0, 0, 0, 128, 0, 0, 0, 0], 0),
    "tokens past the last group": ([128, 0, 128], 256),
    "no token in a group": ([0, 0], 128),
    "no tokens": ([0, 0, 0], 0),
    "no group": ([], 128),
}


FEATURES = {  # N, K
    "one row": (1, 72),
    "one column": (72, 1),
    "no rows": (0, 40),
    "no columns": (40, 0),
    "ragged against every tile": (131, 257),
}


def special() -> Iterator[tuple[str, Arguments]]:
    """Operands with special values in the second of three groups; the first has 128 tokens, the second 256."""
    for which, D, name in ((0, 40, "dy"), (2, 72, "x")):
        args = made([128, 256, 128], 0, 40, 72)
        args[which].view(-1)[D * 128 + 3 * 256 + 200] = torch.nan  # feature 3, token 200
        yield f"a NaN code in {name}", args
        args = made([128, 256, 128], 0, 40, 72)
        args[which + 1][5, 2] = torch.nan  # feature 5, tokens 128 to 255
        yield f"a NaN scale in {name}", args
        args = made([128, 256, 128], 0, 40, 72)
        args[which].view(-1)[D * 128 : D * 384] = -0.0
        args[which + 1][:, 3] = 0
        yield f"zeros in {name}", args


def refused() -> Iterator[tuple[str, Arguments, type[Exception], str, dict[str, Any]]]:
    """Operands that all ops on these operands refuse."""
    dy, dy_scale, x, x_scale, offs = made([128, 0, 256], 128, 40, 72)

    def case(name, error, match, dy=dy, dy_scale=dy_scale, x=x, x_scale=x_scale, offs=offs, **kwargs):
        return name, (dy, dy_scale, x, x_scale, offs), error, match, kwargs

    yield case("bf16 codes", TypeError, "x has dtype torch.bfloat16; needs torch.float8_e4m3fn", x=x.bfloat16())
    yield case("e5m2 codes", TypeError, "dy has dtype torch.float8_e5m2; needs", dy.view(torch.float8_e5m2))
    yield case("bf16 scale", TypeError, "x_scale has dtype torch.bfloat16", x_scale=x_scale.bfloat16())
    yield case("int64 offs", TypeError, "offs has dtype torch.int64; needs torch.int32", offs=offs.long())
    yield case("1-D dy", ValueError, "dy has shape (20480,); needs a 2-D tensor", dy.flatten())
    yield case("2-D offs", ValueError, "offs has shape (1, 3); needs a 1-D tensor", offs=offs[None])
    yield case("fewer tokens of x", ValueError, "needs (72, 512) for dy (40, 512)", x=x[:, :384].contiguous())
    short = (t[:, :400].contiguous() for t in (dy, x))
    yield case("R = 400", ValueError, "R = 400 is not a multiple of 128, the block size", next(short), x=next(short))
    yield case("a scale of too few", ValueError, "dy_scale has shape (40, 3); needs (40, 4)", dy_scale=dy_scale[:, :3])
    turned = {"match": "dy has strides (1, 40); needs a contiguous tensor", "dy": dy.t().contiguous().t()}
    yield case("dy token-major", ValueError, **turned)
    yield case("offs elsewhere", ValueError, "needs one device", offs=offs.to("meta"))
    yield case("offs that decrease", ValueError, "offs[1] = 128 after 384", offs=offs.flip(0), check_offs=True)
    yield case("offs of 120", ValueError, "offs[0] = 120; needs multiples of 128", offs=offs - 8, check_offs=True)
    yield case("offs past R", ValueError, "offs[-1] = 640 is past R = 512", offs=offs + 256, check_offs=True)


def cases() -> Iterator[Case]:
    for out_dtype in OUT_DTYPES:
        kwargs, end = {"out_dtype": out_dtype}, str(out_dtype)[6:]
        for major in ("k", "mn"):
            of_three = partial(made, [128, 384, 256], 128, 72, 136, 1, major)
            yield Case(f"three groups, {major}-major, {end}", of_three, kwargs)
        yield Case(f"large matrices, {end}", partial(made, [256, 128], 0, 264, 144), kwargs)
        yield Case(f"as quantized, {end}", partial(quantized, [40, 0, 130], 72, 136), kwargs)
    yield Case("many tokens", partial(made, [128, 1280], 0, 40, 72))
    yield Case("checked", partial(made, [128, 0, 256], 128, 40, 72), {"check_offs": True})
    for name, (sizes, rest) in GROUP_SIZES.items():
        yield Case(name, partial(made, sizes, rest, 40, 72), flags={"edge"})
    for name, (N, K) in FEATURES.items():
        yield Case(name, partial(made, [128, 256], 0, N, K), flags={"edge"})
    for of_dy in (True, False):
        yield Case(f"every byte of e4m3fn in {'dy' if of_dy else 'x'}", partial(every_byte, of_dy), flags={"edge"})
    yield Case("scales of 2^-40 to 2^40", partial(made, [256, 128], 0, 40, 72, 40), flags={"edge"})
    for name, args in special():
        yield Case(name, these(*args), flags={"edge"})
    for name, args, error, match, kwargs in refused():
        yield Case(name, these(*args), kwargs, raises=error, match=match)
    fp16 = {"out_dtype": torch.float16}
    yield Case("fp16 out", partial(made, [128], 0, 40, 72), fp16, raises=TypeError, match="out_dtype = torch.float16")


def bench_args(M: int, N: int, K: int, E: int, ragged: bool) -> Arguments:
    """Operands that are cut to the rows that belong to a group."""
    sizes, rows = bench_sizes(M, E, ragged)

    def quantized(D: int) -> tuple[Tensor, Tensor, Tensor]:
        t = torch.randn(M, D, dtype=torch.bfloat16)
        qdata, scale, _, end = fp8_quantize_k_groups(t, offs_of(sizes))
        return qdata.view(-1)[: D * rows].view(D, rows), scale[:, : rows // FP8_BLOCK_SIZE], end

    dy, dy_scale, end = quantized(N)
    return dy, dy_scale, *quantized(K)[:2], end


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    for M, N, K, E in shapes.grouped:
        even, ragged = (partial(bench_args, M, N, K, E, ragged) for ragged in (False, True))
        bf16 = {"out_dtype": torch.bfloat16}
        yield Case(f"{M}x{N}x{K}, E {E}, even, padded, float32", even)
        yield Case(f"{M}x{N}x{K}, E {E}, even, padded, bfloat16", even, bf16)
        if E > 1:
            yield Case(f"{M}x{N}x{K}, E {E}, ragged, padded, bfloat16", ragged, bf16)


def sizes(choice: Choice) -> tuple[int | None, ...]:
    """N, K, the number of tokens, of groups and of blocks of tokens; None for a number that is still open."""
    N, K, R = (choice.get(name) for name in ("N", "K", "R"))
    return N, K, R, arranged_groups(choice), None if R is None else R // FP8_BLOCK_SIZE


def possible(choice: Choice) -> bool:
    N, K, R, E, C = sizes(choice)
    return (
        affordable(N, K, R, E, tensors=[(N, R), (K, R), (E, N, K)])
        and affordable(E, max(N or 1, K or 1), R, tensors=[])  # the reference masks each operand for each group
        and groups_fit(choice, R, FP8_BLOCK_SIZE)
        and operand_fits(choice, "dy", (N, R), (N, C))
        and operand_fits(choice, "x", (K, R), (K, C))
        and extremes_fit(choice, "dy", (N, C))
        and extremes_fit(choice, "x", (K, C))
    )


def blind(choice: Choice) -> bool:
    N, K, R, E, C = sizes(choice)
    hidden = hides(choice, "dy", N, C) or hides(choice, "x", K, C)
    return costly(N, K, R, E) or nothing_in_groups(choice) or hidden


def make(choice: Choice) -> tuple[Tensor, ...]:
    N, K, R, E, C = (size or 0 for size in sizes(choice))
    offs = offsets(choice, R, FP8_BLOCK_SIZE)
    ends = [0, *offs.tolist()]
    groups = [(begin, end) for begin, end in pairwise(ends) if end > begin]
    laid: list[Tensor] = []
    for name, D, seed in (("dy", N, 0), ("x", K, 2)):
        codes, scale = fp8_operand(choice, name, (D, R), (D, C), seed)
        flat = codes.view(-1)
        for begin, end in (
            {*groups[:1], *groups[-1:]} or {(0, R)} if D * R and choice[f"{name} values"] != "zeros" else ()
        ):
            with_special_codes(flat[D * begin : D * end].view(D, -1), choice[f"{name} values"])
        # Tokens in no group are NaN. If no token is in a group, the first half keep other values, which must not count
        # either.
        if E:
            tokens = ends[-1] or C // 2 * FP8_BLOCK_SIZE
            flat[D * tokens :], scale[:, tokens // FP8_BLOCK_SIZE :] = torch.nan, torch.nan
        if choice[f"{name} values"] == "zeros":
            with_special_codes(codes, "zeros")
        laid += lay(choice, name, (codes, scale))
    return *laid, offs


GROUPS = {**OF_EXPERTS, "groups": tuple(name for name in OF_EXPERTS["groups"] if name != "of 128")}
DIMENSIONS: dict[str, Any] = {
    "N": SIZES,
    "K": SIZES,
    "R": FP8_TOKENS,
    **GROUPS,
    **operand("dy", codes_apart=False),
    **operand("x", codes_apart=False),
}
OPTIONS = {"out_dtype": OUT_DTYPES, "check_offs": (False, True)}
ALSO: list[Choice] = [
    {"N": 0, "R": 384, "K": 48, "x_scale strides": "row-major"},
    {"groups": "no group", "R": 384, "N": 48, "K": 48, "dy values": "NaN", "x values": "NaN"},
    {"groups": "all empty", "R": 384, "N": 48, "K": 48, "dy values": "NaN", "x values": "NaN"},
]
SPACE = Space(DIMENSIONS, make, OPTIONS, possible, ALSO, blind, implied=("none",))
TOKENS = "dy.cols"
TOLD_BEFORE = ("x.cols",)
IMPOSSIBLE = impossible("dy", "x")
