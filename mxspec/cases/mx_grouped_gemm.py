"""The calls of mx_grouped_gemm."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mxspec.cases.common.groups import OF_EXPERTS, arranged_groups, groups_fit, nothing_in_groups, offsets
from mxspec.cases.common.matmuls import (
    EXPERTS,
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
from mxspec.reference.to_blocked import blocked_bytes, to_blocked
from mxspec.reference.to_blocked_m_groups import to_blocked_m_groups


def _sizes(choice: Choice) -> tuple[int | None, ...]:
    M, N, K = (choice.get(name) for name in ("M", "N", "K"))
    return M, N, K, arranged_groups(choice), None if K is None else K // MX_BLOCK_SIZE


def _possible(choice: Choice) -> bool:
    M, N, K, E, C = _sizes(choice)
    if not affordable(M, N, K, E, tensors=[(M, K), (E, N, K), (M, N)]) or not groups_fit(choice, M):
        return False
    a_tiles, b_tiles = None, None
    if given(choice, "scale_layout", "blocked") == "blocked":
        a_tiles = (None if M is None or E is None else M + 128 * E, None if C is None else round_up(C, 4))
        b_tiles = (E, None if N is None or C is None else blocked_bytes(N, C))
    return operand_fits(choice, "a", (M, K), (M, C), a_tiles) and operand_fits(
        choice, "b", (E, N, K), (E, N, C), b_tiles
    )


def _blind(choice: Choice) -> bool:
    M, N, K, E, C = _sizes(choice)
    return costly(M, N, K, E) or nothing_in_groups(choice) or hides(choice, "a", M, C) or hides(choice, "b", N, C)


def _make(choice: Choice) -> tuple[Tensor, ...]:
    M, N, K, E, _ = _sizes(choice)
    assert M is not None
    assert N is not None
    assert K is not None
    assert E is not None
    offs, layout = offsets(choice, M), given(choice, "scale_layout", "blocked")
    a, b = mx_operands(choice, ("a", "b"), [(M, K), (E, N, K)])
    if E:
        poison(choice, "a", a, int(offs[-1]) or M // 2)  # in no group, other values count as little
    of_a = lay(choice, "a", a, layout, lambda scale: to_blocked_m_groups(scale, offs)[0])
    return *of_a, *lay(choice, "b", b, layout, to_blocked), offs


DIMENSIONS: dict[str, Any] = {
    "M": SIZES,
    "N": SIZES,
    "K": MX_SIZES,
    **OF_EXPERTS,
    **operand("a", FP8_DTYPES),
    **operand("b", FP8_DTYPES, experts=True),
}
OPTIONS = {"out_dtype": OUT_DTYPES, "scale_layout": SCALE_LAYOUTS, "check_offs": (False, True)}
ALSO: list[Choice] = [
    {"M": 1041, "groups": "of 128", "rest": True},
    {"M": 1, "groups": "forty", "a values": "Inf"},
    {"M": 1, "groups": "forty", "a values": "NaN"},
    {"M": 384, "groups": "one offset repeated", "rest": False},
    {"groups": "all empty", "K": 384, "a_scale values": "extreme", "a_scale strides": "one row repeated"},
]
_PLAIN: Choice = {
    **{name: "dense" if name == "offs" else "at 0" for name in ("offs", "offs begin")},
    **{f"{name} dtype": FP8_DTYPES[0] for name in "ab"},
    **{f"{name} values": "finite" for name in "ab"},
    **{f"{name}_scale values": "near 1" for name in "ab"},
    **{f"{name} strides": "row-major" for name in ("a", "b", "a_scale", "b_scale")},
    **{f"{name} begins": "at 0" for name in ("a", "b", "a_scale", "b_scale")},
    "rest": False,
}
# Sizes between those of the dimensions, where only they are small enough.
BEYOND: list[Choice] = [
    {**_PLAIN, "M": 384, "N": 40, "K": 64, "groups": groups, "scale_layout": "plain", "b_scale strides": strides}
    for groups in ("three hundred", "one offset repeated")
    for strides in ("column-major", "rows apart")
]
BEYOND += [{**_PLAIN, "M": 384, "N": 40, "K": 64, "groups": "one"}]
SPACE = Space(
    DIMENSIONS, _make, OPTIONS, _possible, ALSO, _blind, implied=("none",), decisive=("scale_layout",), beyond=BEYOND
)
TOKENS = "a.rows"
TOLD_BEFORE = ("b.cols", "b.experts")
IMPOSSIBLE = (
    (r"a\.-NaN somewhere \| a\.rows = 1", "one row has a NaN of one sign in every case"),
    *impossible("a", "b", padded=("a.rows",)),
    (r"a\.rows = 0 \| a_scale\." + PADDING_ALONE[0], PADDING_ALONE[1]),
    *EXPERTS,
    (
        r"scale_layout (?:= blocked|not given) \| [ab]_scale\.strides (?!row-major).*",
        "blocked scales are one run of bytes",
    ),
)
