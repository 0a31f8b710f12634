"""The calls of mx_gemm."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mxspec.cases.common.matmuls import (
    MX_SIZES,
    SIZES,
    affordable,
    costly,
    hides,
    impossible,
    lay,
    mx_operands,
    operand,
    operand_fits,
)
from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.space import Space, given
from mxspec.formats import FP8_DTYPES, MX_BLOCK_SIZE
from mxspec.reference.mx_dequantize import OUT_DTYPES
from mxspec.reference.mx_quantize import SCALE_LAYOUTS
from mxspec.reference.to_blocked import blocked_bytes, to_blocked

_NAMES = ("a", "b")


def _possible(choice: Choice) -> bool:
    M, N, K = (choice.get(name) for name in ("M", "N", "K"))
    if not affordable(M, N, K, tensors=[(M, K), (N, K), (M, N)]):
        return False
    C = None if K is None else K // MX_BLOCK_SIZE
    blocked = given(choice, "scale_layout", "plain") == "blocked"

    def fits(name: str, rows: int | None) -> bool:
        tiles = None if rows is None or C is None else blocked_bytes(rows, C)
        return operand_fits(choice, name, (rows, K), (rows, C), (tiles,) if blocked else None)

    return fits("a", M) and fits("b", N)


def _blind(choice: Choice) -> bool:
    M, N, K = (choice.get(name) for name in ("M", "N", "K"))
    C = None if K is None else K // MX_BLOCK_SIZE
    return costly(M, N, K) or hides(choice, "a", M, C) or hides(choice, "b", N, C)


def _make(choice: Choice) -> tuple[Tensor, ...]:
    M, N, K = (choice[name] for name in ("M", "N", "K"))
    made = mx_operands(choice, _NAMES, [(M, K), (N, K)])
    layout = given(choice, "scale_layout", "plain")
    a, b = (lay(choice, name, of_name, layout, to_blocked) for name, of_name in zip(_NAMES, made, strict=True))
    return *a, *b


DIMENSIONS: dict[str, Any] = {
    "M": SIZES,
    "N": SIZES,
    "K": MX_SIZES,
    **operand("a", FP8_DTYPES),
    **operand("b", FP8_DTYPES),
}
OPTIONS = {"out_dtype": OUT_DTYPES, "scale_layout": SCALE_LAYOUTS}
SPACE = Space(DIMENSIONS, _make, OPTIONS, _possible, blind=_blind, implied=("none",), decisive=("scale_layout",))
TOLD_BEFORE = ("b.cols",)
IMPOSSIBLE = (
    *impossible("a", "b"),
    (r"scale_layout = blocked \| [ab]_scale\.strides (?!row-major).*", "blocked scales are one run of bytes"),
)
