"""mx_grouped_gemm: a matmul of MX operands, the tokens of each expert by the expert's own weights."""

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
from mxspec.reference._groups_cases import grouped, offs_of
from mxspec.reference._mx_gemm import (
    MIN_SQNR_DB,
    check_dtypes,
    check_layout,
    check_scale,
    check_unit_stride,
    from_blocked_m_groups,
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
from mxspec.reference.from_blocked import from_blocked
from mxspec.reference.mx_dequantize import OUT_DTYPES
from mxspec.reference.mx_quantize import SCALE_LAYOUTS, mx_quantize
from mxspec.reference.mx_quantize_groups import mx_quantize_groups
from mxspec.reference.to_blocked import blocked_bytes, to_blocked
from mxspec.reference.to_blocked_m_groups import to_blocked_m_groups
from mxspec.spec import Case, Shapes, random_normal, spec, these


def check_args(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    offs: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    scale_layout: str = "blocked",
    check_offs: bool = False,
) -> None:
    op = "mx_grouped_gemm"
    check_dtypes(op, ("a", a, a_scale, 2), ("b", b, b_scale, 3))
    _checks.offsets(op, "offs", offs, ("a", a))
    (M, K), (E, N, _) = a.shape, b.shape
    _checks.shape(op, "b", b, (E, N, K), f"for a {(M, K)}")
    _checks.shape(op, "offs", offs, (E,), f"for {E} experts of b")
    _checks.multiple(op, "K", K, MX_BLOCK_SIZE)
    _checks.choice(op, "out_dtype", out_dtype, OUT_DTYPES, TypeError)
    check_layout(op, scale_layout)
    check_unit_stride(op, "a", a, 1, "K-major rows")
    check_unit_stride(op, "b", b, 2, "K-major rows")
    C = K // MX_BLOCK_SIZE
    check_scale(op, "a_scale", a_scale, (M, C), (M + 128 * E, round_up(C, 4)), scale_layout, a)
    check_scale(op, "b_scale", b_scale, (E, N, C), (E, blocked_bytes(N, C)), scale_layout, b)
    _checks.fits_int32(op, f"the padded rows of {E} groups", M + 128 * E)
    if _checks.flag(op, "check_offs", check_offs):
        _checks.offs_in_order(op, offs, "M", M)


Arguments = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def arguments(operands: Operands, offs: Tensor, layout: str = "blocked") -> Arguments:
    """A call's arguments from codes and plain scales; rows that belong to no group have nothing but NaN."""
    a, a_scale, b, b_scale = operands
    if offs.numel():
        a[offs[-1] :], a_scale.view(torch.uint8)[offs[-1] :] = torch.nan, 255
    a_scale = laid_out(a_scale, layout, lambda scale: to_blocked_m_groups(scale, offs)[0])
    return a, a_scale, b, laid_out(b_scale, layout, to_blocked), offs


def made(
    sizes: list[int], rest: int, N: int, K: int, layout: str = "blocked", dtypes: Any = (E4M3FN, E4M3FN)
) -> Arguments:
    """Tokens of each group, and rows that belong to none."""
    M, E = sum(sizes) + rest, len(sizes)
    return arguments(pair((M, K), (E, N, K), dtypes), offs_of(sizes), layout)


def quantized(sizes: list[int], N: int, K: int, layout: str) -> Arguments:
    x, w = random_normal(sum(sizes), K), random_normal(len(sizes), N, K, seed=1)
    a, a_scale, _, end = mx_quantize_groups(x, offs_of(sizes), scale_layout=layout)
    return a, a_scale, *mx_quantize(w, scale_layout=layout), end


def of_dgrad(sizes: list[int], N: int, K: int, layout: str) -> Arguments:
    """dy by w quantized along N."""
    dy, w = random_normal(sum(sizes), N), random_normal(len(sizes), N, K, seed=1)
    a, a_scale, _, end = mx_quantize_groups(dy, offs_of(sizes), elem_dtype=E5M2, scale_layout=layout)
    qdata, scale = mx_quantize(w, axis=-2, scale_layout=layout)
    return a, a_scale, qdata.mT, scale, end


def every_scale_pair(sizes: list[int], N: int, K: int, layout: str) -> Arguments:
    M, E, C = sum(sizes), len(sizes), K // MX_BLOCK_SIZE
    b_scale = every_scale(E * N, C, down=True, seed=2).view(E, N, C)
    first, second = codes(M, K), codes(E, N, K, seed=3)
    return arguments((first, every_scale(M, C, down=False), second, b_scale), offs_of(sizes), layout)


def refused() -> Iterator[Case]:
    plain = made([5, 0, 40], 5, 40, 64, "plain")
    a, a_scale, b, b_scale, offs = made([5, 0, 40], 5, 40, 64)

    def case(name, error, match, a=a, a_scale=a_scale, b=b, b_scale=b_scale, offs=offs, **kwargs):
        return Case(name, these(a, a_scale, b, b_scale, offs), kwargs, raises=error, match=match)

    yield case("bf16 codes", TypeError, "b has dtype torch.bfloat16; needs torch.float8_e4m3fn or", b=b.bfloat16())
    yield case("a uint8 scale", TypeError, "b_scale has dtype torch.uint8", b_scale=b_scale.view(torch.uint8))
    yield case("int64 offs", TypeError, "offs has dtype torch.int64; needs torch.int32", offs=offs.long())
    yield case("fp64 out", TypeError, "out_dtype = torch.float64", out_dtype=torch.float64)
    yield case("2-D b", ValueError, "b has shape (40, 64); needs a 3-D tensor", b=b[0])
    yield case("3-D a", ValueError, "a has shape (1, 50, 64); needs a 2-D tensor", a[None])
    yield case("2-D offs", ValueError, "offs has shape (1, 3); needs a 1-D tensor", offs=offs[None])
    yield case("an offs too few", ValueError, "offs has shape (2,); needs (3,) for 3 experts", offs=offs[:2])
    yield case("another K", ValueError, "needs (3, 40, 32) for a (50, 32)", a[:, :32])
    yield case("K = 48", ValueError, "K = 48 is not a multiple of block_size 32", a[:, :48], b=b[..., :48])
    yield case("b not K-major", ValueError, "b has strides (2560, 1, 40); needs K-major", b=b.mT.contiguous().mT)
    yield case(
        "a scale of too few rows", ValueError, "needs (434, 4) (blocked) for codes (50, 64)", a_scale=a_scale[9:]
    )
    yield case("a plain b_scale", ValueError, "b_scale has shape (3, 40, 2); needs (3, 512)", b_scale=plain[3])
    yield case("blocked scales called plain", ValueError, "needs (50, 2) (plain)", scale_layout="plain")
    wide = a_scale.view(torch.uint8).repeat(1, 2).view(a_scale.dtype)[:, :4]
    yield case("a blocked scale with gaps", ValueError, "a_scale has strides (8, 1); needs blocked", a_scale=wide)
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
        for name, operands in special((50, 96), (3, 40, 96)):
            given = these(*arguments(operands, offs_of([7, 11, 20]), layout))
            yield Case(f"{name}, {layout}", given, kw, flags={"edge"})
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

    for M, N, K, E in shapes.grouped:
        yield Case(f"{M}x{N}x{K}, E {E}, even", partial(even, M, N, K, E))
        if E > 1:
            yield Case(f"{M}x{N}x{K}, E {E}, ragged, padded", partial(ragged, M, N, K, E))


@spec(
    cases=cases,
    check_args=check_args,
    min_sqnr_db=MIN_SQNR_DB,
    flops=lambda args, outputs: 2 * args[0].shape[0] * args[2].shape[1] * args[0].shape[1],  # all M: offs is not read
    bench_cases=bench_cases,
)
def mx_grouped_gemm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    offs: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    scale_layout: str = "blocked",
    check_offs: bool = False,
) -> Tensor:
    """Multiply the tokens of each group by the weights of its expert, MXFP8 with blocks of 32 along K.

    `out[m] = mx_gemm(a[m], b[g])` where g is the group of row m, that is `offs[g-1] <= m < offs[g]`; 0 where m is in
    none. dgrad is the same op: dy by w quantized along N, whose `qdata.mT` has K-major `(E, K, N)`.

    Args:
        a: `(M, K)` float8_e4m3fn or float8_e5m2, the tokens of each group together, K-major: `stride(1) = 1`; K a
            multiple of 32. M and N are free.
        a_scale: float8_e8m0fnu; plain, `(M, K/32)`, any strides; blocked, `(M + 128*E, Cp)` with `Cp = 4*ceil(K/128)`,
            contiguous, as `to_blocked_m_groups` gives it under offs, and `mx_quantize_groups` for `offs = end`.
        b: `(E, N, K)` float8_e4m3fn or float8_e5m2, of a's dtype or of the other, each matrix K-major: `stride(2) = 1`.
        b_scale: float8_e8m0fnu; plain, `(E, N, K/32)`, any strides; blocked, `to_blocked` of that, contiguous.
        offs: `(E,)` int32 on a's device, the exclusive end of each group, of any alignment. Never decreasing, the last
            at most M.
        out_dtype: torch.bfloat16 or torch.float32.
        scale_layout: `blocked` or `plain`, for both scales.
        check_offs: read offs on the host, which waits for the device, and raise if it is not in order. Without it
            nothing waits; an offs out of order gives values that mean nothing, and no access outside the operands and
            the result.

    Returns:
        `(M, N)` of out_dtype, contiguous. Rows from `offs[-1]` on are 0, whatever a and a_scale hold there. Rounding
        and how a kernel is judged: as for `mx_gemm`.

    Special values: as for `mx_gemm`, within a group: a NaN of an expert's weights reaches its own tokens only.

    Raises:
        TypeError: the dtype of an operand, of a scale or of offs; out_dtype.
        ValueError: a rank, K, E, an operand that is not K-major, scale_layout, a scale of another shape, a blocked
            scale that is not contiguous, two devices, 2^31 padded rows or more; with check_offs, offs.

    Example:
        >>> a = torch.tensor([1.0, 2.0, 4.0])[:, None].expand(3, 32).to(torch.float8_e4m3fn)
        >>> b = torch.tensor([1.0, 0.5])[:, None, None].expand(2, 1, 32).to(torch.float8_e4m3fn)
        >>> one = torch.tensor(127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        >>> offs = torch.tensor([1, 2], dtype=torch.int32)
        >>> mx_grouped_gemm(a, one.expand(3, 1), b, one.expand(2, 1, 1), offs, scale_layout="plain").tolist()
        [[32.0], [32.0], [0.0]]

    Source: OCP MX v1.0, section 6.2; PyTorch, `torch.nn.functional.scaled_grouped_mm`.
    """
    check_args(
        a, a_scale, b, b_scale, offs, out_dtype=out_dtype, scale_layout=scale_layout, check_offs=check_offs
    )  # fmt: skip
    (M, K), N = a.shape, b.shape[1]
    if scale_layout == "blocked":
        a_scale = from_blocked_m_groups(a_scale, offs, M, K // MX_BLOCK_SIZE)
        b_scale = from_blocked(b_scale, N, K // MX_BLOCK_SIZE)
    x, group = values(a, a_scale), group_of_tokens(offs, M)[:, None]
    product = torch.zeros(M, N, dtype=torch.float64, device=a.device)
    for e in each_group(offs):  # every token by every expert: how many are an expert's, the host does not know
        product = torch.where(group == e, x @ values(b[e], b_scale[e]).t(), product)
    return round_once(product, out_dtype)
