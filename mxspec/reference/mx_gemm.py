"""mx_gemm: a matmul of MX operands, FP8 codes that carry one power-of-two scale in blocks of 32."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from mxspec.formats import MX_BLOCK_SIZE
from mxspec.reference import _checks
from mxspec.reference._mx_gemm import MIN_SQNR_DB, check_dtypes, check_layout, check_scale, check_unit_stride, values
from mxspec.reference._mx_gemm_cases import E4M3FN, E5M2, Operands, codes, every_scale, laid_out, pair, special
from mxspec.reference._numerics import round_once
from mxspec.reference.from_blocked import from_blocked
from mxspec.reference.mx_dequantize import OUT_DTYPES
from mxspec.reference.mx_quantize import SCALE_LAYOUTS, mx_quantize
from mxspec.reference.to_blocked import blocked_bytes, to_blocked
from mxspec.spec import Case, Shapes, random_normal, spec, these


def check_args(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    scale_layout: str = "plain",
) -> None:
    op = "mx_gemm"
    check_dtypes(op, ("a", a, a_scale, 2), ("b", b, b_scale, 2))
    (M, K), N = a.shape, b.shape[0]
    _checks.shape(op, "b", b, (N, K), f"for a {(M, K)}")
    _checks.multiple(op, "K", K, MX_BLOCK_SIZE)
    _checks.choice(op, "out_dtype", out_dtype, OUT_DTYPES, TypeError)
    check_layout(op, scale_layout)
    C = K // MX_BLOCK_SIZE
    for name, operand, scale, rows in (("a", a, a_scale, M), ("b", b, b_scale, N)):
        check_unit_stride(op, name, operand, 1, "K-major rows")
        check_scale(op, f"{name}_scale", scale, (rows, C), (blocked_bytes(rows, C),), scale_layout, operand)


def arguments(operands: Operands, layout: str = "plain") -> Operands:
    """A call's arguments from codes and plain scales."""
    a, a_scale, b, b_scale = operands
    return a, laid_out(a_scale, layout, to_blocked), b, laid_out(b_scale, layout, to_blocked)


def made(M: int, N: int, K: int, layout: str = "plain", dtypes: Any = (E4M3FN, E4M3FN)) -> Operands:
    return arguments(pair((M, K), (N, K), dtypes), layout)


def quantized(M: int, N: int, K: int, layout: str) -> Operands:
    a, b = random_normal(M, K), random_normal(N, K, seed=1)
    return *mx_quantize(a, scale_layout=layout), *mx_quantize(b, elem_dtype=E5M2, scale_layout=layout)


def every_scale_pair(M: int, N: int, K: int, layout: str) -> Operands:
    C = K // MX_BLOCK_SIZE
    first, second = every_scale(M, C, down=False), every_scale(N, C, down=True, seed=2)
    return arguments((codes(M, K), first, codes(N, K, seed=3), second), layout)


def refused() -> Iterator[Case]:
    a, a_scale, b, b_scale = made(6, 200, 64)

    def case(name, error, match, a=a, a_scale=a_scale, b=b, b_scale=b_scale, **kwargs):
        return Case(name, these(a, a_scale, b, b_scale), kwargs, raises=error, match=match)

    uint8 = a_scale.view(torch.uint8)
    yield case("fp16 codes", TypeError, "a has dtype torch.float16; needs torch.float8_e4m3fn or", a.half())
    fp4 = a.view(torch.float4_e2m1fn_x2)
    yield case("fp4 codes", TypeError, "a has dtype torch.float4_e2m1fn_x2; needs torch.float8_e4m3fn or", fp4)
    yield case("a uint8 scale", TypeError, "a_scale has dtype torch.uint8; needs torch.float8_e8m0fnu", a_scale=uint8)
    yield case("fp16 out", TypeError, "out_dtype = torch.float16", out_dtype=torch.float16)
    yield case("3-D b", ValueError, "b has shape (1, 200, 64); needs a 2-D tensor", b=b[None])
    yield case("K = 48", ValueError, "K = 48 is not a multiple of block_size 32", a[:, :48], b=b[:, :48])
    yield case("another K", ValueError, "b has shape (200, 32); needs (200, 64) for a (6, 64)", b=b[:, :32])
    yield case("a not K-major", ValueError, "a has strides (1, 6); needs K-major", a.t().contiguous().t())
    yield case("b not K-major", ValueError, "b has strides (1, 200); needs K-major", b=b.t().contiguous().t())
    yield case("a scale of another shape", ValueError, "needs (200, 2) (plain) for codes (200, 64)", b_scale=a_scale)
    yield case("plain scales called blocked", ValueError, "needs (512,) (blocked) for", scale_layout="blocked")
    yield case("an unknown layout", ValueError, "'swizzled'", scale_layout="swizzled")
    yield case("mixed devices", ValueError, "needs one device", b_scale=b_scale.to("meta"))
    every_other = made(6, 200, 64, "blocked")[3].view(torch.uint8).repeat_interleave(2).view(torch.float8_e8m0fnu)[::2]
    blocked = to_blocked(a_scale)
    yield case(
        "a blocked scale with gaps", ValueError, "b_scale has strides (2,); needs blocked scales contiguous",
        a_scale=blocked, b_scale=every_other, scale_layout="blocked",
    )  # fmt: skip


def cases() -> Iterator[Case]:
    for layout, out_dtype in product(SCALE_LAYOUTS, OUT_DTYPES):
        kwargs, end = {"out_dtype": out_dtype, "scale_layout": layout}, f"{layout}, {str(out_dtype)[6:]}"
        for M, N, K in [(64, 128, 256), (150, 136, 160)]:
            yield Case(f"{M}x{N}x{K}, {end}", partial(made, M, N, K, layout), kwargs)
        yield Case(f"as quantized, {end}", partial(quantized, 132, 72, 192, layout), kwargs)
    for dtypes, layout in (((E4M3FN, E5M2), "plain"), ((E5M2, E4M3FN), "blocked"), ((E5M2, E5M2), "plain")):
        name = " by ".join(str(dtype).removeprefix("torch.float8_") for dtype in dtypes)
        fp32 = {"out_dtype": torch.float32, "scale_layout": layout}
        yield Case(f"{name}, {layout}", partial(made, 64, 72, 128, layout, dtypes), fp32)
    yield Case("few rows and a long K", partial(made, 16, 136, 1024))
    yield Case("few rows and a long K, blocked", partial(made, 5, 72, 1056, "blocked"), {"scale_layout": "blocked"})
    a, a_scale, b, b_scale = made(70, 40, 128)
    turned = a_scale.t().contiguous().t(), b_scale.t().contiguous().t()
    yield Case("MN-major scales", these(a, turned[0], b, turned[1]))
    for layout in SCALE_LAYOUTS:
        kw = {"scale_layout": layout}
        for name, (M, N, K) in {
            "K = 32": (40, 136, 32),
            "one row": (1, 72, 160),
            "one column": (72, 1, 64),
            "ragged against every tile": (131, 257, 96),
            "no rows": (0, 40, 64),
            "no columns": (40, 0, 64),
            "K = 0: sums of nothing": (6, 40, 0),
        }.items():
            yield Case(f"{name}, {layout}", partial(made, M, N, K, layout), kw, flags={"edge"})
        fp32 = {"out_dtype": torch.float32, **kw}
        far = partial(every_scale_pair, 40, 72, 512, layout)
        yield Case(f"scales from 2^-127 to 2^127, {layout}", far, fp32, flags={"edge"})
        for name, operands in special((40, 96), (72, 96)):
            yield Case(f"{name}, {layout}", these(*arguments(operands, layout)), kw, flags={"edge"})
    huge, tiny = (torch.full((2, 1), byte, dtype=torch.uint8).view(torch.float8_e8m0fnu) for byte in (254, 0))
    ones = torch.ones(2, 32).to(E4M3FN)
    yield Case("448 * 2^127 by 2^-127", these((448 * ones.float()).to(E4M3FN), huge, ones, tiny), flags={"edge"})
    yield Case("past the range: Inf", these(ones, huge, ones, huge), flags={"edge"})
    yield from refused()


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    def args(M: int, N: int, K: int) -> tuple[Tensor, ...]:
        a, b = (torch.randn(rows, K, dtype=torch.bfloat16) for rows in (M, N))
        return *mx_quantize(a), *mx_quantize(b)

    for M, N, K in shapes.linear:
        yield Case(f"{M}x{N}x{K}", partial(args, M, N, K))


@spec(
    cases=cases,
    check_args=check_args,
    min_sqnr_db=MIN_SQNR_DB,
    flops=lambda args, outputs: 2 * args[0].shape[0] * args[2].shape[0] * args[0].shape[1],
    bench_cases=bench_cases,
)
def mx_gemm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    scale_layout: str = "plain",
) -> Tensor:
    """Multiply MXFP8 matrices, blocks of 32 along K.

    `out[m, n] = out_dtype(sum_k a[m, k] * 2^(a_scale[m, k // 32] - 127) * b[n, k] * 2^(b_scale[n, k // 32] - 127))`,
    scales as bytes.

    Args:
        a: `(M, K)` float8_e4m3fn or float8_e5m2, K-major: `stride(1) = 1`; K a multiple of 32. M and N are free.
        a_scale: float8_e8m0fnu; plain, `(M, K/32)`, any strides; blocked, `to_blocked` of that, contiguous. The bytes
            of its padding are never read as numbers.
        b: `(N, K)` float8_e4m3fn or float8_e5m2, of a's dtype or of the other, K-major.
        b_scale: as a_scale, of `(N, K/32)`.
        out_dtype: torch.bfloat16 or torch.float32.
        scale_layout: `plain` or `blocked`, for both scales.

    Returns:
        `(M, N)` of out_dtype, contiguous. Products and sums are fp64 and are rounded once. A kernel sums in fp32 and is
        judged by its SQNR: 70 dB for fp32, 55 dB for bfloat16; it gives the same bits at every call.

    Special values: a NaN code or byte 255 makes its row (of a) or column (of b) of the output NaN. Byte 0 is 2^-127,
        and 448 * 2^127 by 2^-127 is 448: what is finite as a product stays so. An e5m2 code of Inf is Inf, and NaN by a
        zero. A sum past out_dtype's range is Inf. With K = 0 the output is 0.

    Raises:
        TypeError: the dtype of an operand or of a scale, or out_dtype.
        ValueError: rank, K, an operand that is not K-major, scale_layout, a scale of another shape, a blocked scale
            that is not contiguous, or two devices.

    Example:
        >>> a = torch.full((1, 64), 1.5).to(torch.float8_e4m3fn)
        >>> b = torch.full((2, 64), 2.0).to(torch.float8_e5m2)
        >>> a_scale = torch.tensor([[127, 128]], dtype=torch.uint8).view(torch.float8_e8m0fnu)  # 1 and 2
        >>> b_scale = torch.tensor([[127, 127], [126, 0]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
        >>> mx_gemm(a, a_scale, b, b_scale).tolist()  # 32 * 3 * (1 + 2), 32 * 3 / 2
        [[288.0, 48.0]]

    Source: OCP MX v1.0, section 6.2 (dot product of two MX vectors).
    """
    check_args(a, a_scale, b, b_scale, out_dtype=out_dtype, scale_layout=scale_layout)
    (M, K), N = a.shape, b.shape[0]
    if scale_layout == "blocked":
        a_scale, b_scale = (from_blocked(s, r, K // MX_BLOCK_SIZE) for s, r in ((a_scale, M), (b_scale, N)))
    return round_once(values(a, a_scale) @ values(b, b_scale).t(), out_dtype)
