"""The cases of fp8_gemm_: calls written by hand, calls worth timing, and the dimensions of a call."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mxspec.cases import fp8_gemm
from mxspec.cases.common import taken_rows
from mxspec.cases.common.matmuls import sum_of, summed, tensor_fits
from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.space import Space
from mxspec.cases.fp8_gemm import operands, refused
from mxspec.cases.fp8_quantize_1x128 import TAILS
from mxspec.reference.fp8_quantize_1x128 import fp8_quantize_1x128
from mxspec.spec import Case, Shapes, normal


def onto(M: int, N: int, *args: Any, row: int = 0, **options: Any) -> Any:
    """The five operands of a call. The rows of acc lie `row` elements apart. Its values are as large as the products.

    Scales stay within a factor of two of 1, so that every wrong element shows in the SQNR.
    """
    acc = torch.full((M, row or N), torch.nan)[:, :N]
    acc.copy_(normal(M, N, seed=4) * 2**18)
    return acc, *operands(M, N, *args, **{"spread": 1, **options})


def with_nan() -> Any:
    """A NaN in acc, and a NaN code in another row."""
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
    for i, K in enumerate(TAILS):
        yield Case(f"130x264x{K}", partial(onto, 130, 264, K, 1 if i % 2 else 128, major="mn" if i % 3 else "k"))
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
        ("acc a negated view", torch._neg_view(acc), ValueError, "acc is a negated view; needs a tensor whose memory"),
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


def _is_one_sum(choice: Choice) -> bool:
    """Whether every element of acc is the same sum. The SQNR of one sum is chance: its terms may cancel."""
    repeated = choice.get("N") == 1 and choice.get("a strides") == "one row repeated"
    return repeated and choice.get("acc values") == "zeros"


def _possible(choice: Choice) -> bool:
    M, N, *_ = fp8_gemm.sizes(choice)
    return fp8_gemm.possible(choice) and tensor_fits(choice, "acc", (M, N)) and not _is_one_sum(choice)


def _make(choice: Choice) -> tuple[Tensor, ...]:
    return summed(choice, "acc", choice["M"], choice["N"]), *fp8_gemm.make(choice)


DIMENSIONS: dict[str, Any] = {**fp8_gemm.DIMENSIONS, **sum_of("acc")}
SPACE = Space(DIMENSIONS, _make, {}, _possible, blind=fp8_gemm.blind, implied=("none",))
ROWS_TAKEN = taken_rows.of_sum
TOLD_BEFORE = fp8_gemm.TOLD_BEFORE
IMPOSSIBLE = (
    *fp8_gemm.IMPOSSIBLE,
    (r"[ab]\.rows = 0 \| acc\.(?!dtype).*", "acc has no element"),
    (r"a\.rows = 1 \| acc\.strides rows apart", "one row has no stride"),
    (r"b\.rows = 1 \| acc\.strides rows apart", "rows of one element have no stride of their own"),
)
