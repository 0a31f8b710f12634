"""The calls of fp8_grouped_gemm_wgrad_."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mxspec.cases import fp8_grouped_gemm_wgrad as wgrad
from mxspec.cases.common.matmuls import sum_of, summed, tensor_fits
from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.space import Space


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
    (r"(?:(?:dy|x)\.rows|offs\.groups) = 0 \| acc\.(?!dtype).*", "there is no element"),
    (r"(?:dy|x)\.rows = 1 \| acc\.strides rows apart", "one row, or rows of one element, have no stride"),
    (r"x\.rows = 1 \| acc\.strides experts apart", "matrices of one column count as columns"),
    (r"offs\.groups = 1 \| acc\.strides experts apart", "there is no other matrix"),
)
