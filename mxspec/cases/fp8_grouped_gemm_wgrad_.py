"""The cases of fp8_grouped_gemm_wgrad_: calls written by hand, calls worth timing, and the dimensions of a call."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mxspec.cases import fp8_grouped_gemm_wgrad as wgrad
from mxspec.cases.common.matmuls import sum_of, summed, tensor_fits
from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.space import Space
from mxspec.cases.fp8_grouped_gemm_wgrad import FEATURES, GROUP_SIZES, bench_args, made, refused, special
from mxspec.spec import Case, Shapes, normal, these


def onto(*args: Any, row: int = 0, **options: Any) -> Any:
    """The six operands of a call: acc and the operands of `made`.

    acc has values as large as the products, and its rows lie `row` elements apart.
    """
    operands = made(*args, **options)
    E, N, K = operands[4].shape[0], operands[0].shape[0], operands[2].shape[0]
    acc = torch.full((E, N, row or K), torch.nan)[..., :K]
    acc.copy_(normal(E, N, K, seed=4) * 2**18)
    return acc, *operands


def with_nan() -> Any:
    """Special values in acc: in the matrix of a group with tokens and of a group without tokens."""
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
    for name, (sizes, rest) in GROUP_SIZES.items():
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
        ("acc a negated view", torch._neg_view(acc), ValueError, "acc is a negated view; needs a tensor whose memory"),
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


def _possible(choice: Choice) -> bool:
    N, K, _, E, _ = wgrad.sizes(choice)
    return wgrad.possible(choice) and tensor_fits(choice, "acc", (E, N, K))


def _make(choice: Choice) -> tuple[Tensor, ...]:
    N, K, _, E, _ = wgrad.sizes(choice)
    return summed(choice, "acc", E or 0, N or 0, K or 0), *wgrad.make(choice)


DIMENSIONS: dict[str, Any] = {**wgrad.DIMENSIONS, **sum_of("acc", ("row-major", "rows apart", "experts apart"))}
ALSO = [*wgrad.ALSO, {"K": 4128, "N": 48, "R": 384, "groups": "one", "dy_scale values": "extreme"}]
SPACE = Space(DIMENSIONS, _make, {"check_offs": (False, True)}, _possible, ALSO, blind=wgrad.blind, implied=("none",))
TOKENS = "dy.cols"
TOLD_BEFORE = ("x.cols",)
IMPOSSIBLE = (
    *wgrad.IMPOSSIBLE,
    (r"(?:(?:dy|x)\.rows|offs\.groups) = 0 \| acc\.(?!dtype).*", "acc has no element"),
    (r"(?:dy|x)\.rows = 1 \| acc\.strides rows apart", "one row, or rows of one element, have no stride"),
    (r"x\.rows = 1 \| acc\.strides experts apart", "matrices of one column count as columns"),
    (r"offs\.groups = 1 \| acc\.strides experts apart", "there is no other matrix"),
)
