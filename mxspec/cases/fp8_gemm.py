"""The calls of fp8_gemm."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mxspec.cases.common.matmuls import (
    FP8_SIZES,
    SIZES,
    affordable,
    costly,
    extremes_fit,
    fp8_operand,
    hides,
    impossible,
    lay,
    operand,
    operand_fits,
    with_special_codes,
)
from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.space import Space
from mxspec.formats import FP8_BLOCK_SIZE
from mxspec.reference.mx_dequantize import OUT_DTYPES

Sizes = tuple[int | None, ...]


def sizes(choice: Choice) -> Sizes:
    """M, N and K, and the rows and columns of b's scales; None for what is still open."""
    M, N, K = (choice.get(name) for name in ("M", "N", "K"))
    rows = None if N is None or "b blocks" not in choice else N
    if rows is not None and choice["b blocks"] == "128x128":
        rows = -(-rows // FP8_BLOCK_SIZE)
    return M, N, K, rows, None if K is None else K // FP8_BLOCK_SIZE


def possible(choice: Choice) -> bool:
    M, N, K, rows, C = sizes(choice)
    return (
        affordable(M, N, K, tensors=[(M, K), (N, K), (M, N)])
        and operand_fits(choice, "a", (M, K), (M, C))
        and operand_fits(choice, "b", (N, K), (rows, C))
        and extremes_fit(choice, "a", (M, C))
        and extremes_fit(choice, "b", (rows, C))
    )


def blind(choice: Choice) -> bool:
    M, N, K, rows, C = sizes(choice)
    return costly(M, N, K) or hides(choice, "a", M, C) or hides(choice, "b", N, C, rows)


def make(choice: Choice) -> tuple[Tensor, ...]:
    M, N, K = (choice[name] for name in ("M", "N", "K"))
    *_, rows, C = sizes(choice)
    assert rows is not None
    assert C is not None
    a = fp8_operand(choice, "a", (M, K), (M, C))
    b = fp8_operand(choice, "b", (N, K), (rows, C), seed=2)
    for name, (codes, _) in (("a", a), ("b", b)):
        with_special_codes(codes, choice[f"{name} values"])
    return *lay(choice, "a", a), *lay(choice, "b", b)


DIMENSIONS: dict[str, Any] = {
    "M": SIZES,
    "N": SIZES,
    "K": FP8_SIZES,
    "b blocks": ("128x128", "1x128"),
    **operand("a"),
    **operand("b"),
}
SPACE = Space(DIMENSIONS, make, {"out_dtype": OUT_DTYPES}, possible, blind=blind, implied=("none",))
TOLD_BEFORE = ("b.cols",)
IMPOSSIBLE = impossible("a", "b")
