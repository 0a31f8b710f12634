"""The calls of fp8_grouped_gemm."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mxspec.cases.common.groups import OF_EXPERTS, arranged_groups, groups_fit, nothing_in_groups, offsets
from mxspec.cases.common.matmuls import (
    EXPERTS,
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
    poison,
    with_special_codes,
)
from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.space import Space, given
from mxspec.formats import FP8_BLOCK_SIZE
from mxspec.reference.mx_dequantize import OUT_DTYPES


def _sizes(choice: Choice) -> tuple[int | None, ...]:
    """M, N, K, how many experts there are, and the rows and columns of the scales of each; None for what is open."""
    M, N, K = (choice.get(name) for name in ("M", "N", "K"))
    blocks = [None if size is None else -(-size // FP8_BLOCK_SIZE) for size in (N, K)]
    return M, N, K, arranged_groups(choice), *blocks


def _unit(choice: Choice) -> int | None:
    """What all the sizes of groups are multiples of."""
    return 1 if choice.get("groups", "").startswith("of 128") else given(choice, "alignment", 1)


def _possible(choice: Choice) -> bool:
    M, N, K, E, rows, C = _sizes(choice)
    unit = _unit(choice)
    if choice.get("groups", "").startswith("of 128") and choice.get("alignment") == 10:
        return False
    return (
        affordable(M, N, K, E, tensors=[(M, K), (E, N, K), (M, N)])
        and groups_fit(choice, M if unit else None, unit or 1)
        and operand_fits(choice, "a", (M, K), (M, C))
        and operand_fits(choice, "b", (E, N, K), (E, rows, C))
        and extremes_fit(choice, "a", (M, C))
        and extremes_fit(choice, "b", (E, rows, C))
    )


def _blind(choice: Choice) -> bool:
    M, N, K, E, rows, C = _sizes(choice)
    hidden = hides(choice, "a", M, C) or hides(choice, "b", N, C, rows)
    return costly(M, N, K, E) or nothing_in_groups(choice) or hidden


def _make(choice: Choice) -> tuple[Tensor, ...]:
    M, N, K, E, rows, C = (size or 0 for size in _sizes(choice))
    offs = offsets(choice, M, _unit(choice) or 1)
    a = fp8_operand(choice, "a", (M, K), (M, C))
    b = fp8_operand(choice, "b", (E, N, K), (E, rows, C), seed=2)
    for name, (codes, _) in (("a", a), ("b", b)):
        with_special_codes(codes, choice[f"{name} values"])
    if E:
        poison(choice, "a", a, int(offs[-1]) or M // 2)  # in no group, other values count as little
    return *lay(choice, "a", a), *lay(choice, "b", b), offs


DIMENSIONS: dict[str, Any] = {
    "M": SIZES,
    "N": SIZES,
    "K": FP8_SIZES,
    **OF_EXPERTS,
    **operand("a"),
    **operand("b", experts=True),
}
OPTIONS = {"out_dtype": OUT_DTYPES, "alignment": (1, 10, 128), "check_offs": (False, True)}
ALSO: list[Choice] = [{"M": 1041, "groups": "of 128", "rest": True}]
_PLAIN: Choice = {
    **{name: "dense" if name == "offs" else "at 0" for name in ("offs", "offs begin")},
    **{f"{name} values": "finite" for name in "ab"},
    **{f"{name}_scale values": "near 1" for name in "ab"},
    **{f"{name} strides": "row-major" for name in ("a", "b", "a_scale", "b_scale")},
    **{f"{name} begins": "at 0" for name in ("a", "b", "a_scale", "b_scale")},
    "rest": False,
}
# Sizes between those of the dimensions, where only they are small enough.
BEYOND: list[Choice] = [
    {**_PLAIN, "M": 384, "N": 8, "K": 128, "groups": "of 128, three hundred"},
    *(
        {**_PLAIN, "M": 48, "N": 130, "K": 256, "groups": "all to one", "b_scale strides": s}
        for s in ("one row repeated", "rows apart")
    ),
    *(
        {**_PLAIN, "M": 384, "N": 130, "K": 256, "groups": "forty", "b_scale strides": s}
        for s in ("column-major", "rows apart")
    ),
    *(
        {**_PLAIN, "M": 4128, "N": 130, "K": 256, "groups": "last empty", "b_scale strides": s}
        for s in ("column-major", "rows apart", "experts inside the rows")
    ),
    {**_PLAIN, "M": 4128, "N": 64, "K": 512, "groups": "last empty", "b_scale values": "extreme"},
    {**_PLAIN, "M": 48, "N": 130, "K": 4224, "groups": "last empty", "b_scale strides": "experts inside the rows"},
]
SPACE = Space(
    DIMENSIONS, _make, OPTIONS, _possible, ALSO, blind=_blind, implied=("none",), decisive=("alignment",), beyond=BEYOND
)
_OF_MANY = r"b_scale\.strides (?:column-major|experts inside the rows|one row repeated|rows apart)"
TOKENS = "a.rows"
TOLD_BEFORE = ("b.cols", "b.experts")
IMPOSSIBLE = (
    (r"(?:b\.experts|offs\.groups) > 256 \| " + _OF_MANY, "more than 2.2 million elements in a tensor"),
    *impossible("a", "b"),
    *EXPERTS,
    (r"alignment = 10 \| offs\.some group of one token", "sizes are multiples of it"),
    (r"alignment = 128 \| offs\.(?:some group of one token|sizes ragged)", "sizes are multiples of it"),
    (r"alignment = 10 \| offs\.sizes multiples of 128", "no case has groups of 640 tokens: a limit on its size"),
)
