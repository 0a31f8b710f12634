"""mx_grouped_gemm_wgrad: the gradient of each expert's weights, from MX operands with blocks along the tokens."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from mxspec.formats import MX_BLOCK_SIZE
from mxspec.reference import _checks
from mxspec.reference._groups import each_group, group_of_tokens, round_up
from mxspec.reference._groups_cases import offs_of
from mxspec.reference._mx_gemm import (
    MIN_SQNR_DB,
    check_dtypes,
    check_layout,
    check_scale,
    check_unit_stride,
    from_blocked_k_groups,
    values,
)
from mxspec.reference._mx_gemm_cases import (
    E4M3FN,
    E5M2,
    Operands,
    bench_sizes,
    codes,
    every_scale,
    laid_out,
    pair,
    special,
)
from mxspec.reference._numerics import round_once
from mxspec.reference.mx_dequantize import OUT_DTYPES
from mxspec.reference.mx_quantize import SCALE_LAYOUTS
from mxspec.reference.mx_quantize_groups import mx_quantize_groups
from mxspec.reference.to_blocked_k_groups import to_blocked_k_groups
from mxspec.spec import Case, Shapes, random_normal, spec, these


def check_args(
    dy: Tensor,
    dy_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    offs: Tensor,
    *,
    out_dtype: torch.dtype = torch.float32,
    scale_layout: str = "blocked",
    check_offs: bool = False,
) -> None:
    op = "mx_grouped_gemm_wgrad"
    check_dtypes(op, ("dy", dy, dy_scale, 2), ("x", x, x_scale, 2))
    _checks.offsets(op, "offs", offs, ("dy", dy))
    (M, _), K, E = dy.shape, x.shape[1], offs.shape[0]
    _checks.shape(op, "x", x, (M, K), f"for dy {tuple(dy.shape)}")
    _checks.multiple(op, "M", M, MX_BLOCK_SIZE)
    _checks.choice(op, "out_dtype", out_dtype, OUT_DTYPES, TypeError)
    check_layout(op, scale_layout)
    C = M // MX_BLOCK_SIZE
    for name, operand, scale in (("dy", dy, dy_scale), ("x", x, x_scale)):
        check_unit_stride(op, name, operand, 0, "column-major")
        rows = operand.shape[1]
        blocked = round_up(rows, 128), C + 4 * E
        check_scale(op, f"{name}_scale", scale, (rows, C), blocked, scale_layout, operand)
    _checks.fits_int32(op, f"the padded rows of {E} groups", M + 128 * E)
    if _checks.flag(op, "check_offs", check_offs):
        _checks.offs_in_order(op, offs, "M", M, MX_BLOCK_SIZE)


Arguments = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def arguments(operands: Operands, offs: Tensor, layout: str = "blocked") -> Arguments:
    """A call's arguments from codes `(N, M)`, `(K, M)` and plain scales; tokens of no group have nothing but NaN."""
    dy, dy_scale, x, x_scale = operands
    tokens = int(offs[-1]) if offs.numel() else 0
    for operand, scale in ((dy, dy_scale), (x, x_scale)):
        operand[:, tokens:], scale.view(torch.uint8)[:, tokens // MX_BLOCK_SIZE :] = torch.nan, 255

    def rearrange(scale: Tensor) -> Tensor:
        return to_blocked_k_groups(scale, offs // MX_BLOCK_SIZE)[0]

    return dy.mT, laid_out(dy_scale, layout, rearrange), x.mT, laid_out(x_scale, layout, rearrange), offs


def made(
    sizes: list[int], rest: int, N: int, K: int, layout: str = "blocked", dtypes: Any = (E4M3FN, E4M3FN)
) -> Arguments:
    """Tokens of each group, and tokens that belong to none, in multiples of 32."""
    M = sum(sizes) + rest
    return arguments(pair((N, M), (K, M), dtypes), offs_of(sizes), layout)


def quantized(sizes: list[int], N: int, K: int, layout: str) -> Arguments:
    """Sizes are any."""
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
    yield case("M = 80", ValueError, "M = 80 is not a multiple of block_size 32", dy[:80], x=x[:80])
    yield case("dy row-major", ValueError, "dy has strides (40, 1); needs column-major", dy.contiguous())
    yield case("x row-major", ValueError, "x has strides (72, 1); needs column-major", x=x.contiguous())
    yield case("scales of too many groups", ValueError, "needs (128, 12) (blocked) for", offs=offs[:2])
    yield case("blocked scales called plain", ValueError, "needs (40, 4) (plain) for codes", scale_layout="plain")
    wide = x_scale.view(torch.uint8).repeat(1, 2).view(x_scale.dtype)[:, :16]
    yield case("a blocked scale with gaps", ValueError, "x_scale has strides (32, 1); needs blocked", x_scale=wide)
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


@spec(
    cases=cases,
    check_args=check_args,
    min_sqnr_db=MIN_SQNR_DB,
    flops=lambda args, outputs: 2 * args[0].numel() * args[2].shape[1],  # all M: offs is not read
    bench_cases=bench_cases,
)
def mx_grouped_gemm_wgrad(
    dy: Tensor,
    dy_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    offs: Tensor,
    *,
    out_dtype: torch.dtype = torch.float32,
    scale_layout: str = "blocked",
    check_offs: bool = False,
) -> Tensor:
    """Sum `dy^T x` over the tokens of each group: the gradient of each expert's weights, from MXFP8 operands.

    `out[e, n, k] = out_dtype(sum of dy[m, n] * 2^(dy_scale[n, m // 32] - 127) * x[m, k] * 2^(x_scale[k, m // 32] -
    127) over offs[e-1] <= m < offs[e])`, scales as bytes.

    Args:
        dy: `(M, N)` float8_e4m3fn or float8_e5m2, the tokens of each group together, column-major: `stride(0) = 1`, as
            `mx_quantize_groups(..., axis=-2)` gives it; M a multiple of 32. N and K are free.
        dy_scale: float8_e8m0fnu, blocks of 32 tokens; plain, `(N, M/32)`, any strides; blocked, `(Np, M/32 + 4*E)` with
            `Np = 128*ceil(N/128)`, contiguous, as `to_blocked_k_groups` gives it under `offs / 32`, and
            `mx_quantize_groups` for `offs = end`.
        x: `(M, K)` float8_e4m3fn or float8_e5m2, of dy's dtype or of the other, column-major.
        x_scale: as dy_scale, of K.
        offs: `(E,)` int32 on dy's device, the exclusive end of each group, multiples of 32. Never decreasing, the last
            at most M.
        out_dtype: torch.float32 or torch.bfloat16.
        scale_layout: `blocked` or `plain`, for both scales.
        check_offs: read offs on the host, which waits for the device, and raise if it is not in order or not of
            multiples of 32. Without it nothing waits; such an offs gives values that mean nothing, and no access
            outside the operands and the result.

    Returns:
        `(E, N, K)` of out_dtype, contiguous; zeros for a group without tokens. Tokens from `offs[-1]` on never count,
        whatever codes and scales hold there. Rounding and how a kernel is judged: as for `mx_gemm`.

    Special values: as for `mx_gemm`, within a group: a NaN reaches the gradient of its own expert only.

    Raises:
        TypeError: the dtype of an operand, of a scale or of offs; out_dtype.
        ValueError: a rank, M, an operand that is not column-major, scale_layout, a scale of another shape, a blocked
            scale that is not contiguous, two devices, 2^31 padded rows or more; with check_offs, offs.

    Example:
        >>> dy = torch.full((1, 64), 2.0).to(torch.float8_e4m3fn).mT
        >>> x = torch.tensor([[1.0] * 64, [-3.0] * 64]).to(torch.float8_e4m3fn).mT
        >>> dy_scale = torch.tensor([[127, 128]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
        >>> x_scale = torch.full((2, 2), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        >>> offs = torch.tensor([32, 32, 64], dtype=torch.int32)
        >>> mx_grouped_gemm_wgrad(dy, dy_scale, x, x_scale, offs, scale_layout="plain").tolist()
        [[[64.0, -192.0]], [[0.0, 0.0]], [[128.0, -384.0]]]

    Source: OCP MX v1.0, section 6.2; PyTorch, `torch.nn.functional.scaled_grouped_mm` with 2-D operands.
    """
    check_args(
        dy, dy_scale, x, x_scale, offs, out_dtype=out_dtype, scale_layout=scale_layout, check_offs=check_offs
    )  # fmt: skip
    (M, N), K, E = dy.shape, x.shape[1], offs.shape[0]
    if scale_layout == "blocked":
        blocks = offs // MX_BLOCK_SIZE, M // MX_BLOCK_SIZE
        dy_scale, x_scale = (
            from_blocked_k_groups(s, blocks[0], rows, blocks[1]) for s, rows in ((dy_scale, N), (x_scale, K))
        )
    left, right = values(dy.mT, dy_scale), values(x.mT, x_scale)  # (N, M), (K, M)
    group = group_of_tokens(offs, M)
    out = torch.empty(E, N, K, dtype=out_dtype, device=dy.device)
    for e in each_group(offs):  # operands are masked, not products: 0 * NaN is NaN
        own_dy, own_x = (torch.where(group == e, t, 0.0) for t in (left, right))
        out[e] = round_once(own_dy @ own_x.t(), out_dtype)
    return out
