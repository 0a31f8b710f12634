"""fp8_grouped_gemm_wgrad_: the gradient of each expert's weights, added in place to those of earlier micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mxspec.reference import _checks
from mxspec.reference._numerics import round_once
from mxspec.reference.fp8_gemm import MIN_SQNR_DB
from mxspec.reference.fp8_grouped_gemm_wgrad import (
    FEATURES,
    SIZES,
    bench_args,
    check_groups,
    made,
    products,
    refused,
    special,
)
from mxspec.spec import Case, Shapes, normal, spec, these


def check_args(
    acc: Tensor, dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, offs: Tensor, *, check_offs: bool = False
) -> None:
    op = "fp8_grouped_gemm_wgrad_"
    _checks.tensor_dtype(op, "acc", acc, (torch.float32,))
    check_groups(op, dy, dy_scale, x, x_scale, offs, check_offs)
    _checks.same_device(op, ("acc", acc), ("dy", dy))
    E, N, K = offs.shape[0], dy.shape[0], x.shape[0]
    because = f"for {E} groups, dy {tuple(dy.shape)} and x {tuple(x.shape)}"
    _checks.shape(op, "acc", acc, (E, N, K), because)
    if K > 1 and acc.stride(2) != 1:
        raise ValueError(f"{op}: acc has strides {acc.stride()}; needs row-major rows, that is stride(2) = 1")
    if N > 1 and acc.stride(1) < K:
        raise ValueError(f"{op}: acc has strides {acc.stride()}; needs rows that do not overlap, stride(1) >= {K}")
    matrix = (N - 1) * acc.stride(1) + K if N else 0  # its elements and what lies between its rows
    if E > 1 and acc.stride(0) < matrix:
        raise ValueError(
            f"{op}: acc has strides {acc.stride()}; needs matrices that do not overlap, stride(0) >= {matrix}"
        )


def onto(*args: Any, row: int = 0, **options: Any) -> Any:
    """The six of a call: acc, its rows `row` elements apart and as large as the products, and `made`'s operands."""
    operands = made(*args, **options)
    E, N, K = operands[4].shape[0], operands[0].shape[0], operands[2].shape[0]
    acc = torch.full((E, N, row or K), torch.nan)[..., :K]
    acc.copy_(normal(E, N, K, seed=4) * 2**18)
    return acc, *operands


def with_nan() -> Any:
    """Specials in acc, of a group with tokens and of one without."""
    acc, *operands = onto([128, 0, 256], 128, 40, 72)
    acc[0, 3, 50], acc[0, 5, 7], acc[1, 1, 1], acc[1, 1, 2] = torch.nan, torch.inf, torch.nan, -0.0
    return acc, *operands


def cases() -> Iterator[Case]:
    for major in ("k", "mn"):
        of_three = partial(onto, [128, 384, 256], 128, 72, 136, major=major)
        yield Case(f"three groups, {major}-major scales", of_three)
    yield Case("large matrices", partial(onto, [256, 128], 0, 264, 144))
    yield Case("many tokens", partial(onto, [128, 1280], 0, 40, 72))
    yield Case("rows of acc far apart", partial(onto, [128, 256], 0, 72, 136, row=160))
    yield Case("rows of acc at odd places", partial(onto, [128, 256], 0, 72, 136, row=139), flags={"edge"})
    yield Case("checked", partial(onto, [128, 0, 256], 128, 40, 72), {"check_offs": True})
    for name, (sizes, rest) in SIZES.items():
        yield Case(name, partial(onto, sizes, rest, 40, 72), flags={"edge"})
    for name, (N, K) in FEATURES.items():
        yield Case(name, partial(onto, [128, 256], 0, N, K), flags={"edge"})
    yield Case("NaN and Inf in acc: their elements", with_nan, flags={"edge"})
    acc, *_ = onto([128, 256, 128], 0, 40, 72)
    for name, operands in special():
        yield Case(name, these(acc, *operands), flags={"edge"})

    acc, *valid = onto([128, 0, 256], 128, 40, 72)
    of_acc: tuple[tuple[str, Tensor, type[Exception], str], ...] = (
        ("bf16 acc", acc.bfloat16(), TypeError, "acc has dtype torch.bfloat16; needs torch.float32"),
        ("acc of two groups", acc[:2], ValueError, "acc has shape (2, 40, 72); needs (3, 40, 72) for 3 groups, dy"),
        ("2-D acc", acc[0], ValueError, "acc has shape (40, 72); needs (3, 40, 72)"),
        ("column-major acc", acc.mT.contiguous().mT, ValueError, "acc has strides (2880, 1, 40); needs row-major"),
        ("acc of one row seen often", acc[:, :1].expand(3, 40, 72), ValueError, "needs rows that do not overlap"),
        ("acc of one matrix seen often", acc[:1].expand(3, 40, 72), ValueError, "needs matrices that do not overlap"),
        ("acc on another device", acc.to("meta"), ValueError, "acc is on meta and dy on"),
    )
    for name, wrong, error, match in of_acc:
        yield Case(name, these(wrong, *valid), raises=error, match=match)
    for name, args, error, match, kwargs in refused():
        yield Case(name, these(acc, *args), kwargs, raises=error, match=match)


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    def args(M: int, N: int, K: int, E: int) -> tuple[Tensor, ...]:
        return torch.randn(E, N, K), *bench_args(M, N, K, E, ragged=False)

    for sizes in shapes.grouped:
        yield Case("{}x{}x{}, E {}, even, padded".format(*sizes), partial(args, *sizes))


@spec(
    cases=cases,
    check_args=check_args,
    min_sqnr_db=MIN_SQNR_DB[torch.float32],
    inf_is_free=True,
    flops=lambda args, outputs: 2 * args[1].numel() * args[3].shape[0],  # all R: offs is not read
    bench_cases=bench_cases,
)
def fp8_grouped_gemm_wgrad_(
    acc: Tensor, dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, offs: Tensor, *, check_offs: bool = False
) -> None:
    """Sum `dy^T x` over the tokens of each group and add it to a matrix for each, in place.

    `acc[e] += fp8_grouped_gemm_wgrad(dy, dy_scale, x, x_scale, offs)[e]`: the gradient of each expert's weights over
    micro-batches, without matrices for each one's share.

    Args:
        acc: `(E, N, K)` float32, row-major: `stride(2) = 1`, rows and matrices any distance apart that keeps them from
            overlapping. It is changed, and shares no memory with an operand.
        dy, dy_scale, x, x_scale, offs, check_offs: as `fp8_grouped_gemm_wgrad` takes them.

    Returns:
        None. Products, sums and acc are added in fp64 and rounded once, to acc's fp32. A kernel sums in fp32 and is
        judged by its SQNR, 70 dB. The matrix of a group without tokens stays as it is.

    Special values: a NaN in acc stays in its element; a NaN code or scale makes its row or column of its own expert's
        matrix NaN. Inf and sums past fp32 are as for `fp8_gemm`. With no token of an expert, its matrix of acc stays.

    Raises:
        TypeError: the dtype of acc, of an operand, of a scale or of offs.
        ValueError: acc's shape or layout, or what `fp8_grouped_gemm_wgrad` refuses in operands.
        RuntimeError: a tensor that requires a gradient where gradients are enabled; this op has none.

    Example:
        >>> dy = torch.full((1, 256), 2.0).to(torch.float8_e4m3fn)
        >>> x = torch.tensor([1.0, -3.0, 0.5, 4.0]).repeat_interleave(128).view(2, 256).to(torch.float8_e4m3fn)
        >>> offs = torch.tensor([128, 128, 256], dtype=torch.int32)
        >>> acc = torch.ones(3, 1, 2)
        >>> for _ in range(2):  # micro-batches
        ...     fp8_grouped_gemm_wgrad_(acc, dy, torch.ones(1, 2), x, torch.ones(2, 2), offs)
        >>> acc.tolist()
        [[[513.0, -1535.0]], [[1.0, 1.0]], [[257.0, 2049.0]]]

    Source: DeepSeek-V3 technical report, section 3.3.2; DeepGEMM, `k_grouped_fp8_gemm_nt_contiguous(..., c=d)`.
    """
    check_args(acc, dy, dy_scale, x, x_scale, offs, check_offs=check_offs)
    for e, (own, product) in enumerate(products(dy, dy_scale, x, x_scale, offs)):
        added = round_once(acc[e].double() + product, acc.dtype)
        acc[e] = torch.where(own.any(), added, acc[e])  # a sum of nothing is +0, which would turn a -0 into +0
