"""The calls of fp8_gemm_."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mxspec.cases import fp8_gemm
from mxspec.cases.common.matmuls import sum_of, summed, tensor_fits
from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.space import Space


def _possible(choice: Choice) -> bool:
    M, N, *_ = fp8_gemm.sizes(choice)
    return fp8_gemm.possible(choice) and tensor_fits(choice, "acc", (M, N))


def _make(choice: Choice) -> tuple[Tensor, ...]:
    return summed(choice, "acc", choice["M"], choice["N"]), *fp8_gemm.make(choice)


DIMENSIONS: dict[str, Any] = {**fp8_gemm.DIMENSIONS, **sum_of("acc")}
SPACE = Space(DIMENSIONS, _make, {}, _possible, blind=fp8_gemm.blind, implied=("none",))
TOLD_BEFORE = fp8_gemm.TOLD_BEFORE
IMPOSSIBLE = (
    *fp8_gemm.IMPOSSIBLE,
    (r"[ab]\.rows = 0 \| acc\.(?!dtype).*", "there is no element"),
    (r"a\.rows = 1 \| acc\.strides rows apart", "one row has no stride"),
    (r"b\.rows = 1 \| acc\.strides rows apart", "rows of one element have no stride of their own"),
)
