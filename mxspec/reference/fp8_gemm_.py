"""fp8_gemm_: a matmul of FP8 operands that is added to a matrix in place."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mxspec.reference import _checks
from mxspec.reference.fp8_gemm import MIN_SQNR_DB, check_operands, operands, product, refused
from mxspec.reference.fp8_quantize_1x128 import fp8_quantize_1x128
from mxspec.spec import Case, Shapes, normal, spec


def check_args(acc: Tensor, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> None:
    op = "fp8_gemm_"
    _checks.tensor_dtype(op, "acc", acc, (torch.float32,))
    check_operands(op, a, a_scale, b, b_scale)
    _checks.same_device(op, ("acc", acc), ("a", a))
    M, N = a.shape[0], b.shape[0]
    _checks.shape(op, "acc", acc, (M, N), f"for a {tuple(a.shape)} and b {tuple(b.shape)}")
    if N > 1 and acc.stride(1) != 1:
        raise ValueError(f"{op}: acc has strides {acc.stride()}; needs row-major rows, that is stride(1) = 1")
    if M > 1 and acc.stride(0) < N:
        raise ValueError(f"{op}: acc has strides {acc.stride()}; needs rows that do not overlap, stride(0) >= {N}")


def onto(M: int, N: int, *args: Any, row: int = 0, **options: Any) -> Any:
    """The five of a call: acc, its rows `row` elements apart and as large as the products, and four operands.

    Scales within a factor of two of 1 keep every element in sight of the SQNR.
    """
    acc = torch.full((M, row or N), torch.nan)[:, :N]
    acc.copy_(normal(M, N, seed=4) * 2**18)
    return acc, *operands(M, N, *args, **{"spread": 1, **options})


def with_nan() -> Any:
    """A NaN in acc, and one in a code of another row."""
    acc, a, *rest = onto(64, 256, 384)
    acc[3, 200], acc[5, 7], a[9, 300] = torch.nan, torch.inf, torch.nan
    return acc, a, *rest


def with_zeros() -> Any:
    acc, a, *rest = onto(64, 256, 256)
    return acc, torch.zeros_like(a), *rest


def without_k() -> Any:
    acc, a, a_scale, b, b_scale = onto(64, 256, 128)
    acc[0, 0], acc[1, 1] = -0.0, torch.nan
    return acc, a[:, :0], a_scale[:, :0], b[:, :0], b_scale[:, :0]


def cases() -> Iterator[Case]:
    for rows, name in ((1, "1x128 by 1x128"), (128, "1x128 by 128x128")):
        for major in ("k", "mn"):
            for M, N, K in [(64, 128, 256), (300, 264, 384)]:
                yield Case(f"{M}x{N}x{K}, {name}, {major}-major scales", partial(onto, M, N, K, rows, major=major))
    yield Case("rows of acc far apart", partial(onto, 132, 272, 384, 1, major="mn", row=288))
    yield Case("rows of acc at odd places", partial(onto, 64, 256, 256, row=259), flags={"edge"})
    yield Case("few rows and a long K", partial(onto, 16, 136, 4096, 1, major="mn"))
    yield Case("few rows, far apart, and a long K", partial(onto, 64, 128, 4096, row=136))
    yield Case("ragged against every tile", partial(onto, 257, 131, 256, 1))
    yield Case("K = 128", partial(onto, 128, 256, 128, 1), flags={"edge"})
    yield Case("one row", partial(onto, 1, 256, 640, 1, major="mn"), flags={"edge"})
    yield Case("one column", partial(onto, 64, 1, 256, 1), flags={"edge"})
    yield Case("a NaN in acc, its element; in a, its row", with_nan, flags={"edge"})
    yield Case("a of zeros", with_zeros, flags={"edge"})
    yield Case("no rows", partial(onto, 0, 256, 128), flags={"edge"})
    yield Case("no columns", partial(onto, 64, 0, 128, 1), flags={"edge"})
    yield Case("K = 0 changes nothing", without_k, flags={"edge"})

    acc, *made = onto(6, 200, 256)
    of_acc: tuple[tuple[str, Tensor, type[Exception], str], ...] = (
        ("bf16 acc", acc.bfloat16(), TypeError, "acc has dtype torch.bfloat16; needs torch.float32"),
        ("acc of another shape", acc[:, :128], ValueError, "acc has shape (6, 128); needs (6, 200) for a (6, 256)"),
        ("1-D acc", acc[0], ValueError, "acc has shape (200,); needs (6, 200)"),
        ("column-major acc", acc.t().contiguous().t(), ValueError, "acc has strides (1, 6); needs row-major"),
        ("acc of one row seen often", acc[:1].expand(6, 200), ValueError, "acc has strides (0, 1); needs rows that do"),
        ("rows of acc that overlap", acc.as_strided((6, 200), (199, 1)), ValueError, "acc has strides (199, 1); needs"),
        ("acc on another device", acc.to("meta"), ValueError, "acc is on meta and a on"),
    )
    for name, wrong, error, match in of_acc:
        yield Case(name, partial(tuple, [wrong, *made]), raises=error, match=match)
    for name, args, error, match in refused():
        yield Case(name, partial(tuple, [acc, *args]), raises=error, match=match)


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    def wgrad(M: int, N: int, K: int) -> tuple[Tensor, ...]:
        a, b = (torch.randn(rows, K, dtype=torch.bfloat16) for rows in (M, N))
        quantize = partial(fp8_quantize_1x128, scale_major="mn")
        return torch.randn(M, N), *quantize(a), *quantize(b)

    for M, N, K in shapes.wgrad:
        yield Case(f"{M}x{N}x{K}, 1x128 by 1x128", partial(wgrad, M, N, K))


@spec(
    cases=cases,
    check_args=check_args,
    min_sqnr_db=MIN_SQNR_DB[torch.float32],
    inf_is_free=True,
    flops=lambda args, outputs: 2 * args[0].numel() * args[1].shape[1],
    bench_cases=bench_cases,
)
def fp8_gemm_(acc: Tensor, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> None:
    """Multiply FP8 matrices with scales in blocks of 128 and add the product to a matrix, in place.

    `acc[m, n] += sum_k a[m, k] * a_scale[m, k // 128] * b[n, k] * b_scale[n', k // 128]`, where n' is n for 1x128
    blocks of b and `n // 128` for 128x128 blocks, as in `fp8_gemm`. With 1x128 by 1x128 it adds up the gradient of a
    weight over micro-batches, without a matrix for each one's share.

    Args:
        acc: `(M, N)` float32, row-major: `stride(1) = 1`, rows any distance apart that keeps them from overlapping. It
            is changed, and shares no memory with an operand. Kernels are fastest where it begins, and its rows lie, at
            multiples of 16 bytes.
        a, a_scale, b, b_scale: the operands, as `fp8_gemm` takes them.

    Returns:
        None. Products, sums and acc are added in fp64 and rounded once, to acc's fp32. A kernel sums in fp32 and is
        judged by its SQNR, 70 dB.

    Special values: a NaN in acc stays in its element; a NaN code or scale makes its whole row or column NaN, or for a
        128x128 scale 128 columns; Inf and sums past fp32 are as for `fp8_gemm`; with K = 0 acc stays as it is. On
        Hopper, acc is flushed to 0 where it is subnormal.

    Raises:
        TypeError: the dtype of acc, of an operand or of a scale.
        ValueError: acc's shape or layout, or what `fp8_gemm` refuses in operands.
        RuntimeError: a tensor that requires a gradient where gradients are enabled; this op has none.

    Example:
        >>> a = torch.full((1, 256), 1.5).to(torch.float8_e4m3fn)
        >>> b = torch.full((2, 256), 2.0).to(torch.float8_e4m3fn)
        >>> acc = torch.tensor([[1.0, -1000.0]])
        >>> for _ in range(2):  # micro-batches of 256 tokens: 256 * 3 each
        ...     fp8_gemm_(acc, a, torch.ones(1, 2), b, torch.ones(2, 2))
        >>> acc.tolist()
        [[1537.0, 536.0]]

    Source: DeepSeek-V3 technical report, section 3.3.2; DeepGEMM's `fp8_gemm_nt(..., c=d)`.
    """
    check_args(acc, a, a_scale, b, b_scale)
    if a.shape[1]:  # a sum of nothing is +0, which would turn a -0 into +0
        acc.copy_(acc.double() + product(a, a_scale, b, b_scale))
