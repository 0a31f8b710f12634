"""The cases of mx_grouped_gemm_wgrad: calls written by hand, calls worth timing, and the dimensions of a call."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from mxspec.cases.common.groups import OF_EXPERTS, arranged_groups, groups_fit, nothing_in_groups, offsets
from mxspec.cases.common.matmuls import (
    MX_SIZES,
    PADDING_ALONE,
    SIZES,
    affordable,
    costly,
    hides,
    impossible,
    lay,
    mx_operands,
    operand,
    operand_fits,
    poison,
)
from mxspec.cases.common.mx_operands import (
    E4M3FN,
    E5M2,
    Operands,
    bench_sizes,
    codes,
    every_byte_of,
    every_scale,
    laid_out,
    pair,
    scales,
    special,
)
from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.space import Space, given
from mxspec.cases.common.token_groups import offs_of
from mxspec.formats import FP8_DTYPES, MX_BLOCK_SIZE
from mxspec.reference.common.groups import round_up
from mxspec.reference.mx_dequantize import OUT_DTYPES
from mxspec.reference.mx_quantize import SCALE_LAYOUTS
from mxspec.reference.mx_quantize_groups import mx_quantize_groups
from mxspec.reference.to_blocked_k_groups import to_blocked_k_groups
from mxspec.spec import Case, Shapes, random_normal, these

Arguments = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def arguments(operands: Operands, offs: Tensor, layout: str = "blocked") -> Arguments:
    """The arguments of a call, from codes `(N, M)`, `(K, M)` and plain scales. Tokens of no group hold only NaN."""
    dy, dy_scale, x, x_scale = operands
    tokens = int(offs[-1]) if offs.numel() else 0
    for qdata, scale in ((dy, dy_scale), (x, x_scale)):
        qdata[:, tokens:], scale.view(torch.uint8)[:, tokens // MX_BLOCK_SIZE :] = torch.nan, 255

    def rearrange(scale: Tensor) -> Tensor:
        return to_blocked_k_groups(scale, offs // MX_BLOCK_SIZE)[0]

    return dy.mT, laid_out(dy_scale, layout, rearrange), x.mT, laid_out(x_scale, layout, rearrange), offs


def made(
    sizes: list[int], rest: int, N: int, K: int, layout: str = "blocked", dtypes: Any = (E4M3FN, E4M3FN)
) -> Arguments:
    """Operands with the tokens of each group, then tokens that belong to no group; all sizes are multiples of 32."""
    M = sum(sizes) + rest
    return arguments(pair((N, M), (K, M), dtypes), offs_of(sizes), layout)


def quantized(sizes: list[int], N: int, K: int, layout: str) -> Arguments:
    """Operands that the quantizer made from groups of any sizes."""
    dy, x = random_normal(sum(sizes), N), random_normal(sum(sizes), K, seed=1)
    quantize = partial(mx_quantize_groups, offs=offs_of(sizes), axis=-2, scale_layout=layout)
    of_dy, of_x = quantize(dy, elem_dtype=E5M2), quantize(x)
    return *of_dy[:2], *of_x[:2], of_x[3]


def every_scale_pair(sizes: list[int], N: int, K: int, layout: str) -> Arguments:
    M = sum(sizes)
    first, second = (
        every_scale(N, M // MX_BLOCK_SIZE, down=False),
        every_scale(K, M // MX_BLOCK_SIZE, down=True, seed=2),
    )
    return arguments((codes(N, M), first, codes(K, M, seed=3), second), offs_of(sizes), layout)


def every_byte(dtype: torch.dtype, of_dy: bool, layout: str) -> Arguments:
    """Every byte of an FP8 format in dy or in x, by the unit matrix. Two groups have the same codes."""
    unit, found = (t.view(torch.uint8).repeat(1, 2).view(dtype) for t in every_byte_of(dtype))
    of_unit, of_found = scales(len(unit), 2, seed=4), scales(len(found), 2, seed=5)
    operands = (found, of_found, unit, of_unit) if of_dy else (unit, of_unit, found, of_found)
    return arguments(operands, offs_of([MX_BLOCK_SIZE, MX_BLOCK_SIZE]), layout)


def refused() -> Iterator[Case]:
    dy, dy_scale, x, x_scale, offs = made([64, 0, 32], 32, 40, 72)

    def case(name, error, match, dy=dy, dy_scale=dy_scale, x=x, x_scale=x_scale, offs=offs, **kwargs):
        return Case(name, these(dy, dy_scale, x, x_scale, offs), kwargs, raises=error, match=match)

    yield case("bf16 codes", TypeError, "x has dtype torch.bfloat16; needs torch.float8_e4m3fn or", x=x.bfloat16())
    yield case("a uint8 scale", TypeError, "x_scale has dtype torch.uint8", x_scale=x_scale.view(torch.uint8))
    yield case("int64 offs", TypeError, "offs has dtype torch.int64; needs torch.int32", offs=offs.long())
    yield case("fp16 out", TypeError, "out_dtype = torch.float16", out_dtype=torch.float16)
    yield case("3-D dy", ValueError, "dy has shape (1, 128, 40); needs a 2-D tensor", dy[None])
    yield case("2-D offs", ValueError, "offs has shape (1, 3); needs a 1-D tensor", offs=offs[None])
    yield case("fewer tokens of x", ValueError, "needs (128, 72) for dy (128, 40)", x=x[:96])
    yield case("M = 80", ValueError, "M = 80 is not a multiple of 32, the block size", dy[:80], x=x[:80])
    yield case("dy row-major", ValueError, "dy has strides (40, 1); needs column-major", dy.contiguous())
    yield case("x row-major", ValueError, "x has strides (72, 1); needs column-major", x=x.contiguous())
    yield case("scales of too many groups", ValueError, "needs (128, 12) (blocked) for", offs=offs[:2])
    yield case("blocked scales called plain", ValueError, "needs (40, 4) (plain) for codes", scale_layout="plain")
    wide = x_scale.view(torch.uint8).repeat(1, 2).view(x_scale.dtype)[:, :16]
    yield case(
        "a blocked scale with gaps", ValueError, "x_scale has strides (32, 1); needs contiguous blocked", x_scale=wide
    )
    yield case("offs elsewhere", ValueError, "needs one device", offs=offs.to("meta"))
    yield case("offs that decrease", ValueError, "offs[1] = 64 after 96", offs=offs.flip(0), check_offs=True)
    yield case("offs of 56", ValueError, "offs[0] = 56; needs multiples of 32", offs=offs - 8, check_offs=True)
    yield case("offs past M", ValueError, "offs[-1] = 160 is past M = 128", offs=offs + 64, check_offs=True)


def cases() -> Iterator[Case]:
    for layout, out_dtype in product(SCALE_LAYOUTS, OUT_DTYPES):
        kwargs, end = {"out_dtype": out_dtype, "scale_layout": layout}, f"{layout}, {str(out_dtype)[6:]}"
        yield Case(f"three groups, {end}", partial(made, [32, 160, 64], 32, 72, 136, layout), kwargs)
        yield Case(f"as quantized, {end}", partial(quantized, [40, 0, 130], 72, 136, layout), kwargs)
    for dtypes in ((E4M3FN, E5M2), (E5M2, E5M2)):
        name = " by ".join(str(dtype).removeprefix("torch.float8_") for dtype in dtypes)
        yield Case(name, partial(made, [64, 96], 0, 40, 72, dtypes=dtypes))
    yield Case("many tokens", partial(made, [32, 1056], 0, 40, 72))
    yield Case("300 groups", partial(made, [32] * 300, 0, 8, 16))
    yield Case("checked", partial(made, [64, 0, 96], 32, 40, 72), {"check_offs": True})
    sizes: dict[str, tuple[list[int], int]] = {
        "one group": ([256], 0),
        "empty groups": ([0, 32, 0, 0, 128, 32, 0], 0),
        "all in one of eight": ([0, 0, 0, 96, 0, 0, 0, 0], 0),
        "tokens past the last group": ([32, 0, 64], 96),
        "no token in a group": ([0, 0], 64),
        "no tokens": ([0, 0, 0], 0),
        "no group": ([], 32),
    }
    for layout in SCALE_LAYOUTS:
        kw = {"scale_layout": layout}
        for name, (tokens, rest) in sizes.items():
            yield Case(f"{name}, {layout}", partial(made, tokens, rest, 40, 72, layout), kw, flags={"edge"})
        for name, (N, K) in {
            "one row": (1, 72),
            "one column": (72, 1),
            "no rows": (0, 40),
            "no columns": (40, 0),
            "ragged against every tile": (131, 257),
        }.items():
            yield Case(f"{name}, {layout}", partial(made, [32, 64], 0, N, K, layout), kw, flags={"edge"})
        far = partial(every_scale_pair, [256, 32, 224], 40, 72, layout)
        yield Case(f"scales from 2^-127 to 2^127, {layout}", far, kw, flags={"edge"})
        for dtype, of_dy in product((E4M3FN, E5M2), (True, False)):
            name = f"every byte of {str(dtype).removeprefix('torch.float8_')} in {'dy' if of_dy else 'x'}, {layout}"
            yield Case(name, partial(every_byte, dtype, of_dy, layout), kw, flags={"edge"})
        for name, operands in special((40, 160), (72, 160)):
            args = these(*arguments(operands, offs_of([32, 64, 32]), layout))
            yield Case(f"{name}, {layout}", args, kw, flags={"edge"})
    yield from refused()


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    def args(M: int, N: int, K: int, E: int, ragged: bool) -> Arguments:
        sizes, rows = bench_sizes(M, E, ragged)

        def quantized(features: int) -> tuple[Tensor, Tensor, Tensor]:
            t = torch.randn(M, features, dtype=torch.bfloat16)
            qdata, scale, _, end = mx_quantize_groups(t, offs_of(sizes), axis=-2)
            Rp, cols = scale.shape[0], rows // MX_BLOCK_SIZE + 4 * E
            return qdata[:rows].mT.contiguous().mT, scale.flatten()[: Rp * cols].view(Rp, cols), end

        dy, dy_scale, end = quantized(N)
        return dy, dy_scale, *quantized(K)[:2], end

    for M, N, K, E in shapes.grouped:
        for ragged, out_dtype in product((False, True) if E > 1 else (False,), (torch.bfloat16, torch.float32)):
            if ragged and out_dtype == torch.float32:
                continue
            name = f"{M}x{N}x{K}, E {E}, {'ragged' if ragged else 'even'}, padded, {str(out_dtype)[6:]}"
            yield Case(name, partial(args, M, N, K, E, ragged), {"out_dtype": out_dtype})


def _sizes(choice: Choice) -> tuple[int | None, ...]:
    """N, K, the number of tokens, of groups and of blocks of tokens; None for a number that is still open."""
    N, K, M = (choice.get(name) for name in ("N", "K", "M"))
    return N, K, M, arranged_groups(choice), None if M is None else M // MX_BLOCK_SIZE


def _unit(choice: Choice) -> int:
    """The number that all group sizes are multiples of."""
    return 1 if choice.get("groups", "").startswith("of 128") else MX_BLOCK_SIZE


def _possible(choice: Choice) -> bool:
    N, K, M, E, C = _sizes(choice)
    if not affordable(N, K, M, E, tensors=[(N, M), (K, M), (E, N, K)]):
        return False
    if not affordable(E, max(N or 1, K or 1), M, tensors=[]):  # the reference masks each operand for each group
        return False
    blocked = given(choice, "scale_layout", "blocked") == "blocked"

    def fits(name: str, rows: int | None) -> bool:
        cols = None if C is None or E is None else C + 4 * E
        tiles = (None if rows is None else round_up(rows, 128), cols) if blocked else None
        return operand_fits(choice, name, (rows, M), (rows, C), tiles)

    return groups_fit(choice, M, _unit(choice)) and fits("dy", N) and fits("x", K)


def _blind(choice: Choice) -> bool:
    N, K, M, E, C = _sizes(choice)
    return costly(N, K, M, E) or nothing_in_groups(choice) or hides(choice, "dy", N, C) or hides(choice, "x", K, C)


def _make(choice: Choice) -> tuple[Tensor, ...]:
    N, K, M, E, C = (size or 0 for size in _sizes(choice))
    offs, layout = offsets(choice, M, _unit(choice)), given(choice, "scale_layout", "blocked")
    made = mx_operands(choice, ("dy", "x"), [(N, M), (K, M)])
    laid: list[Tensor] = []
    for name, of_name in zip(("dy", "x"), made, strict=True):
        if E:
            # If no token is in a group, the first half of the tokens keep other values, which must not count either.
            blocks = int(offs[-1]) // MX_BLOCK_SIZE or C // 2
            poison(choice, name, of_name, MX_BLOCK_SIZE * blocks, blocks)
        codes, scale = lay(
            choice, name, of_name, layout, lambda scale: to_blocked_k_groups(scale, offs // MX_BLOCK_SIZE)[0]
        )
        laid += codes.mT, scale
    return *laid, offs


DIMENSIONS: dict[str, Any] = {
    "N": SIZES,
    "K": SIZES,
    "M": MX_SIZES,
    **OF_EXPERTS,
    **operand("dy", FP8_DTYPES),
    **operand("x", FP8_DTYPES),
}
OPTIONS = {"out_dtype": OUT_DTYPES, "scale_layout": SCALE_LAYOUTS, "check_offs": (False, True)}
_PLAIN: Choice = {
    **{"offs": "dense", "offs begin": "at 0", "rest": False, "groups": "one"},
    **{f"{name} dtype": FP8_DTYPES[1] for name in ("dy", "x")},
    **{f"{name} values": "finite" for name in ("dy", "x")},
    **{f"{name}_scale values": "near 1" for name in ("dy", "x")},
    **{f"{name} strides": "row-major" for name in ("dy", "x", "dy_scale", "x_scale")},
    **{f"{name} begins": "at 0" for name in ("dy", "x", "dy_scale", "x_scale")},
}
BEYOND: list[Choice] = [
    {**_PLAIN, "dy values": "Inf", "N": 48, "K": 4128, "M": 32},
    {**_PLAIN, "dy values": "Inf", "N": 48, "K": 48, "M": 384, "groups": "last empty"},
    {**_PLAIN, "x_scale values": "extreme", "N": 48, "K": 48, "M": 384, "groups": "no group", "rest": True},
    {**_PLAIN, "N": 1, "K": 48, "M": 32, "groups": "no group", "rest": True},
    {**_PLAIN, "N": 1, "K": 0, "M": 32},
]
SPACE = Space(
    DIMENSIONS, _make, OPTIONS, _possible, blind=_blind, implied=("none",), decisive=("scale_layout",), beyond=BEYOND
)
TOKENS = "dy.rows"
TOLD_BEFORE = ("x.rows",)
IMPOSSIBLE = (
    (r"offs\.groups = 0 \| x_scale\.byte 254 somewhere", "without a group every case has other scales"),
    *impossible("dy", "x", "cols", "rows", padded=("dy.rows",)),
    (r"dy\.rows = 0 \| (?:dy|x)_scale\." + PADDING_ALONE[0], PADDING_ALONE[1]),
    (r"((?:dy|x)\.)strides row-major \| \1cols (?!= 1|odd).*", "a single column alone is row-major as well"),
    (
        r"((?:dy|x))\.strides row-major \| \1_scale\.strides (?:column-major|one row repeated|rows apart)",
        "the scale has one row, which has no stride",
    ),
    (
        r"scale_layout (?:= blocked|not given) \| (?:dy|x)_scale\.strides (?!row-major).*",
        "blocked scales are one run of bytes",
    ),
)
ACROSS = True
