"""The calls of mx_grouped_gemm_wgrad."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mxspec.cases.common.groups import OF_EXPERTS, arranged_groups, groups_fit, nothing_in_groups, offsets
from mxspec.cases.common.matmuls import (
    MX_SIZES,
    PADDING_ALONE,
    SIZES,
    affordable,
    costly,
    hides,
    impossible,
    lay,
    mx_operands,
    operand,
    operand_fits,
    poison,
)
from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.space import Space, given
from mxspec.formats import FP8_DTYPES, MX_BLOCK_SIZE
from mxspec.reference._groups import round_up
from mxspec.reference.mx_dequantize import OUT_DTYPES
from mxspec.reference.mx_quantize import SCALE_LAYOUTS
from mxspec.reference.to_blocked_k_groups import to_blocked_k_groups


def _sizes(choice: Choice) -> tuple[int | None, ...]:
    """N, K, the tokens, how many groups there are and how many blocks of tokens; None for what is still open."""
    N, K, M = (choice.get(name) for name in ("N", "K", "M"))
    return N, K, M, arranged_groups(choice), None if M is None else M // MX_BLOCK_SIZE


def _unit(choice: Choice) -> int:
    """What all the sizes of groups are multiples of."""
    return 1 if choice.get("groups", "").startswith("of 128") else MX_BLOCK_SIZE


def _possible(choice: Choice) -> bool:
    N, K, M, E, C = _sizes(choice)
    if not affordable(N, K, M, E, tensors=[(N, M), (K, M), (E, N, K)]):
        return False
    if not affordable(E, max(N or 1, K or 1), M, tensors=[]):  # the reference masks each operand for each group
        return False
    blocked = given(choice, "scale_layout", "blocked") == "blocked"

    def fits(name: str, rows: int | None) -> bool:
        cols = None if C is None or E is None else C + 4 * E
        tiles = (None if rows is None else round_up(rows, 128), cols) if blocked else None
        return operand_fits(choice, name, (rows, M), (rows, C), tiles)

    return groups_fit(choice, M, _unit(choice)) and fits("dy", N) and fits("x", K)


def _blind(choice: Choice) -> bool:
    N, K, M, E, C = _sizes(choice)
    return costly(N, K, M, E) or nothing_in_groups(choice) or hides(choice, "dy", N, C) or hides(choice, "x", K, C)


def _make(choice: Choice) -> tuple[Tensor, ...]:
    N, K, M, E, C = (size or 0 for size in _sizes(choice))
    offs, layout = offsets(choice, M, _unit(choice)), given(choice, "scale_layout", "blocked")
    made = mx_operands(choice, ("dy", "x"), [(N, M), (K, M)])
    laid: list[Tensor] = []
    for name, of_name in zip(("dy", "x"), made, strict=True):
        if E:
            blocks = int(offs[-1]) // MX_BLOCK_SIZE or C // 2  # other values there count as little
            poison(choice, name, of_name, MX_BLOCK_SIZE * blocks, blocks)
        codes, scale = lay(
            choice, name, of_name, layout, lambda scale: to_blocked_k_groups(scale, offs // MX_BLOCK_SIZE)[0]
        )
        laid += codes.mT, scale
    return *laid, offs


DIMENSIONS: dict[str, Any] = {
    "N": SIZES,
    "K": SIZES,
    "M": MX_SIZES,
    **OF_EXPERTS,
    **operand("dy", FP8_DTYPES),
    **operand("x", FP8_DTYPES),
}
OPTIONS = {"out_dtype": OUT_DTYPES, "scale_layout": SCALE_LAYOUTS, "check_offs": (False, True)}
_PLAIN: Choice = {
    **{"offs": "dense", "offs begin": "at 0", "rest": False, "groups": "one"},
    **{f"{name} dtype": FP8_DTYPES[1] for name in ("dy", "x")},
    **{f"{name} values": "finite" for name in ("dy", "x")},
    **{f"{name}_scale values": "near 1" for name in ("dy", "x")},
    **{f"{name} strides": "row-major" for name in ("dy", "x", "dy_scale", "x_scale")},
    **{f"{name} begins": "at 0" for name in ("dy", "x", "dy_scale", "x_scale")},
}
BEYOND: list[Choice] = [
    {**_PLAIN, "dy values": "Inf", "N": 48, "K": 4128, "M": 32},
    {**_PLAIN, "dy values": "Inf", "N": 48, "K": 48, "M": 384, "groups": "last empty"},
    {**_PLAIN, "x_scale values": "extreme", "N": 48, "K": 48, "M": 384, "groups": "no group", "rest": True},
    {**_PLAIN, "N": 1, "K": 48, "M": 32, "groups": "no group", "rest": True},
    {**_PLAIN, "N": 1, "K": 0, "M": 32},
]
SPACE = Space(
    DIMENSIONS, _make, OPTIONS, _possible, blind=_blind, implied=("none",), decisive=("scale_layout",), beyond=BEYOND
)
TOKENS = "dy.rows"
TOLD_BEFORE = ("x.rows",)
IMPOSSIBLE = (
    (r"offs\.groups = 0 \| x_scale\.byte 254 somewhere", "without a group every case has other scales"),
    *impossible("dy", "x", "cols", "rows", padded=("dy.rows", "x.rows")),
    (r"dy\.rows = 0 \| (?:dy|x)_scale\." + PADDING_ALONE[0], PADDING_ALONE[1]),
    (r"((?:dy|x)\.)strides row-major \| \1cols (?!= 1|odd).*", "a single column alone is row-major as well"),
    (
        r"((?:dy|x))\.strides row-major \| \1_scale\.strides (?:column-major|one row repeated|rows apart)",
        "the scale has one row, which has no stride",
    ),
    (
        r"scale_layout (?:= blocked|not given) \| (?:dy|x)_scale\.strides (?!row-major).*",
        "blocked scales are one run of bytes",
    ),
)
ACROSS = True
