"""fp8_grouped_gemm_wgrad: the gradient of each expert's weights, from FP8 operands with blocks along the tokens."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mxspec.formats import FP8_BLOCK_SIZE
from mxspec.reference import _checks
from mxspec.reference._fp8_numerics import values
from mxspec.reference._groups import each_group, flat_places, group_of_tokens
from mxspec.reference._groups_cases import offs_of
from mxspec.reference._mx_gemm_cases import bench_sizes
from mxspec.reference._numerics import round_once
from mxspec.reference.fp8_gemm import MIN_SQNR_DB, codes, scales
from mxspec.reference.fp8_grouped_gemm import Arguments, check_operands
from mxspec.reference.fp8_quantize_k_groups import fp8_quantize_k_groups
from mxspec.reference.mx_dequantize import OUT_DTYPES
from mxspec.spec import Case, Shapes, normal, spec, these


def check_groups(
    op: str, dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, offs: Tensor, check_offs: bool
) -> None:
    check_operands(op, ("dy", dy, dy_scale, 2), ("x", x, x_scale, 2))
    _checks.offsets(op, "offs", offs, ("dy", dy))
    (N, R), K = dy.shape, x.shape[0]
    _checks.shape(op, "x", x, (K, R), f"for dy {(N, R)}")
    _checks.multiple(op, "R", R, FP8_BLOCK_SIZE)
    C = R // FP8_BLOCK_SIZE
    _checks.shape(op, "dy_scale", dy_scale, (N, C), f"(128 tokens a block) for dy {(N, R)}")
    _checks.shape(op, "x_scale", x_scale, (K, C), f"(128 tokens a block) for x {(K, R)}")
    for name, flat in (("dy", dy), ("x", x)):
        if not flat.is_contiguous():
            raise ValueError(f"{op}: {name} has strides {flat.stride()}; needs it contiguous, for it is read as flat")
    _checks.fits_int32(op, f"the padded rows of {offs.shape[0]} groups", R)
    if _checks.flag(op, "check_offs", check_offs):
        _checks.offs_in_order(op, offs, "R", R, FP8_BLOCK_SIZE)


def check_args(
    dy: Tensor,
    dy_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    offs: Tensor,
    *,
    out_dtype: torch.dtype = torch.float32,
    check_offs: bool = False,
) -> None:
    op = "fp8_grouped_gemm_wgrad"
    check_groups(op, dy, dy_scale, x, x_scale, offs, check_offs)
    _checks.choice(op, "out_dtype", out_dtype, OUT_DTYPES, TypeError)


def made(sizes: list[int], rest: int, N: int, K: int, spread: int = 1, major: str = "mn") -> Arguments:
    """Tokens of each group, and what follows the last group, all of it NaN, in multiples of 128."""
    tokens, R = sum(sizes), sum(sizes) + rest
    operands: list[Tensor] = []
    for D, seed in ((N, 0), (K, 2)):
        q, scale = codes(D, R, seed), scales(D, R // FP8_BLOCK_SIZE, spread, major, seed + 1)
        if sizes:
            q.view(-1)[D * tokens :], scale[:, tokens // FP8_BLOCK_SIZE :] = torch.nan, torch.nan
        operands += [q, scale]
    dy, dy_scale, x, x_scale = operands
    return dy, dy_scale, x, x_scale, offs_of(sizes)


def quantized(sizes: list[int], N: int, K: int) -> Arguments:
    """Sizes are any."""
    dy, x = normal(sum(sizes), N).bfloat16(), normal(sum(sizes), K, seed=1).bfloat16()
    of_dy, of_x = (fp8_quantize_k_groups(t, offs_of(sizes)) for t in (dy, x))
    return *of_dy[:2], *of_x[:2], of_x[3]


SIZES: dict[str, tuple[list[int], int]] = {
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
    """Special values in the second of three groups, of which the first has 128 tokens and it has 256."""
    for operand, D, name in ((0, 40, "dy"), (2, 72, "x")):
        args = made([128, 256, 128], 0, 40, 72)
        args[operand].view(-1)[D * 128 + 3 * 256 + 200] = torch.nan  # feature 3, token 200
        yield f"a NaN code in {name}", args
        args = made([128, 256, 128], 0, 40, 72)
        args[operand + 1][5, 2] = torch.nan  # feature 5, tokens 128 to 255
        yield f"a NaN scale in {name}", args
        args = made([128, 256, 128], 0, 40, 72)
        args[operand].view(-1)[D * 128 : D * 384] = -0.0
        args[operand + 1][:, 3] = 0
        yield f"zeros in {name}", args


def refused() -> Iterator[tuple[str, Arguments, type[Exception], str, dict[str, Any]]]:
    """What none of the ops on these operands takes."""
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
    yield case("R = 400", ValueError, "R = 400 is not a multiple of block_size 128", next(short), x=next(short))
    yield case("a scale of too few", ValueError, "dy_scale has shape (40, 3); needs (40, 4)", dy_scale=dy_scale[:, :3])
    turned = {"match": "dy has strides (1, 40); needs it contiguous", "dy": dy.t().contiguous().t()}
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
    for name, (sizes, rest) in SIZES.items():
        yield Case(name, partial(made, sizes, rest, 40, 72), flags={"edge"})
    for name, (N, K) in FEATURES.items():
        yield Case(name, partial(made, [128, 256], 0, N, K), flags={"edge"})
    yield Case("scales of 2^-40 to 2^40", partial(made, [256, 128], 0, 40, 72, 40), flags={"edge"})
    for name, args in special():
        yield Case(name, these(*args), flags={"edge"})
    for name, args, error, match, kwargs in refused():
        yield Case(name, these(*args), kwargs, raises=error, match=match)
    fp16 = {"out_dtype": torch.float16}
    yield Case("fp16 out", partial(made, [128], 0, 40, 72), fp16, raises=TypeError, match="out_dtype = torch.float16")


def bench_args(M: int, N: int, K: int, E: int, ragged: bool) -> Arguments:
    """Operands cut to the rows that belong to a group."""
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


def group_values(flat: Tensor, scale: Tensor, offs: Tensor) -> Tensor:
    """`(D, R)` in fp64, every feature of every token, from the flat codes of groups."""
    D, R = flat.shape
    tokens = flat.view(torch.uint8).flatten()[flat_places(offs, D, R)].view(flat.dtype)
    return values(tokens, scale)


def products(dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, offs: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each group which tokens are its own, and the product in fp64."""
    left, right = group_values(dy, dy_scale, offs), group_values(x, x_scale, offs)  # (N, R), (K, R)
    group = group_of_tokens(offs, dy.shape[1])
    for e in each_group(offs):  # operands are masked, not products: 0 * NaN is NaN
        own_dy, own_x = (torch.where(group == e, t, 0.0) for t in (left, right))
        yield group == e, own_dy @ own_x.t()


@spec(
    cases=cases,
    check_args=check_args,
    min_sqnr_db=MIN_SQNR_DB,
    inf_is_free=True,
    flops=lambda args, outputs: 2 * args[0].numel() * args[2].shape[0],  # all R: offs is not read
    bench_cases=bench_cases,
)
def fp8_grouped_gemm_wgrad(
    dy: Tensor,
    dy_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    offs: Tensor,
    *,
    out_dtype: torch.dtype = torch.float32,
    check_offs: bool = False,
) -> Tensor:
    """Sum `dy^T x` over the tokens of each group: the gradient of each expert's weights, from FP8 operands.

    `out[e, n, k] = out_dtype(sum of dy[n, t] * dy_scale[n, t // 128] * x[k, t] * x_scale[k, t // 128] over offs[e-1] <=
    t < offs[e])`, where the codes `[n, t]` and `[k, t]` lie as `fp8_quantize_k_groups` places them: those of a group
    are a row-major matrix of its own.

    Args:
        dy: `(N, R)` float8_e4m3fn, contiguous, as `fp8_quantize_k_groups` gives it, read as flat: its shape says N and
            how many codes there are, and offs says where each lies. R is a multiple of 128, the same for x. N and K
            are free.
        dy_scale: `(N, R/128)` float32, any strides.
        x: `(K, R)` float8_e4m3fn, contiguous, read as flat.
        x_scale: `(K, R/128)` float32, any strides.
        offs: `(E,)` int32 on dy's device, the exclusive end of each group, multiples of 128: the quantizer's `end`.
            Never decreasing, the last at most R.
        out_dtype: torch.float32 or torch.bfloat16.
        check_offs: read offs on the host, which waits for the device, and raise if it is not in order or not of
            multiples of 128. Without it nothing waits; such an offs gives values that mean nothing, and no access
            outside the operands and the result.

    Returns:
        `(E, N, K)` of out_dtype, contiguous; zeros for a group without tokens. What lies past the last group never
        counts. Rounding and how a kernel is judged: as for `fp8_gemm`.

    Special values: as for `fp8_gemm`, within a group: a NaN reaches the gradient of its own expert only.

    Raises:
        TypeError: the dtype of an operand, of a scale or of offs; out_dtype.
        ValueError: a rank, R, an operand that is not contiguous, a scale of another shape, two devices, 2^31 rows or
            more; with check_offs, offs.

    Example:
        >>> dy = torch.full((1, 256), 2.0).to(torch.float8_e4m3fn)  # one feature
        >>> x = torch.tensor([1.0, -3.0, 0.5, 4.0]).repeat_interleave(128).view(2, 256).to(torch.float8_e4m3fn)  # two
        >>> offs = torch.tensor([128, 128, 256], dtype=torch.int32)
        >>> fp8_grouped_gemm_wgrad(dy, torch.tensor([[1.0, 2.0]]), x, torch.ones(2, 2), offs).tolist()
        [[[256.0, -768.0]], [[0.0, 0.0]], [[256.0, 2048.0]]]

    Source: DeepSeek-V3 technical report, section 3.3.2; DeepGEMM, `k_grouped_fp8_gemm_nt_contiguous`.
    """
    check_args(dy, dy_scale, x, x_scale, offs, out_dtype=out_dtype, check_offs=check_offs)
    out = torch.empty(offs.shape[0], dy.shape[0], x.shape[0], dtype=out_dtype, device=dy.device)
    for e, (_, product) in enumerate(products(dy, dy_scale, x, x_scale, offs)):
        out[e] = round_once(product, out_dtype)
    return out
