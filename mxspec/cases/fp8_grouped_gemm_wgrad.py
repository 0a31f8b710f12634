"""The calls of fp8_grouped_gemm_wgrad."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from mxspec.cases.common.groups import OF_EXPERTS, arranged_groups, groups_fit, nothing_in_groups, offsets
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


def sizes(choice: Choice) -> tuple[int | None, ...]:
    """N, K, the tokens, how many groups there are and how many blocks of tokens; None for what is still open."""
    N, K, R = (choice.get(name) for name in ("N", "K", "R"))
    return N, K, R, arranged_groups(choice), None if R is None else R // FP8_BLOCK_SIZE


def possible(choice: Choice) -> bool:
    N, K, R, E, C = sizes(choice)
    return (
        affordable(N, K, R, E, tensors=[(N, R), (K, R), (E, N, K)])
        and affordable(E, max(N or 1, K or 1), R, tensors=[])  # the reference masks each operand for each group
        and groups_fit(choice, R, FP8_BLOCK_SIZE)
        and operand_fits(choice, "dy", (N, R), (N, C))
        and operand_fits(choice, "x", (K, R), (K, C))
        and extremes_fit(choice, "dy", (N, C))
        and extremes_fit(choice, "x", (K, C))
    )


def blind(choice: Choice) -> bool:
    N, K, R, E, C = sizes(choice)
    hidden = hides(choice, "dy", N, C) or hides(choice, "x", K, C)
    return costly(N, K, R, E) or nothing_in_groups(choice) or hidden


def make(choice: Choice) -> tuple[Tensor, ...]:
    N, K, R, E, C = (size or 0 for size in sizes(choice))
    offs = offsets(choice, R, FP8_BLOCK_SIZE)
    ends = [0, *offs.tolist()]
    groups = [(begin, end) for begin, end in pairwise(ends) if end > begin]
    laid: list[Tensor] = []
    for name, D, seed in (("dy", N, 0), ("x", K, 2)):
        codes, scale = fp8_operand(choice, name, (D, R), (D, C), seed)
        flat = codes.view(-1)
        for begin, end in (
            {*groups[:1], *groups[-1:]} or {(0, R)} if D * R and choice[f"{name} values"] != "zeros" else ()
        ):
            with_special_codes(flat[D * begin : D * end].view(D, -1), choice[f"{name} values"])
        if E:  # what belongs to no group is NaN
            tokens = ends[-1] or C // 2 * FP8_BLOCK_SIZE  # other values there count as little
            flat[D * tokens :], scale[:, tokens // FP8_BLOCK_SIZE :] = torch.nan, torch.nan
        if choice[f"{name} values"] == "zeros":
            with_special_codes(codes, "zeros")
        laid += lay(choice, name, (codes, scale))
    return *laid, offs


GROUPS = {**OF_EXPERTS, "groups": tuple(name for name in OF_EXPERTS["groups"] if name != "of 128")}
DIMENSIONS: dict[str, Any] = {
    "N": SIZES,
    "K": SIZES,
    "R": FP8_SIZES,
    **GROUPS,
    **operand("dy", codes_apart=False),
    **operand("x", codes_apart=False),
}
OPTIONS = {"out_dtype": OUT_DTYPES, "check_offs": (False, True)}
ALSO: list[Choice] = [
    {"N": 0, "R": 384, "K": 48, "x_scale strides": "row-major"},
    {"groups": "no group", "R": 384, "N": 48, "K": 48, "dy values": "NaN", "x values": "NaN"},
    {"groups": "all empty", "R": 384, "N": 48, "K": 48, "dy values": "NaN", "x values": "NaN"},
]
SPACE = Space(DIMENSIONS, make, OPTIONS, possible, ALSO, blind, implied=("none",))
TOKENS = "dy.cols"
TOLD_BEFORE = ("x.cols",)
IMPOSSIBLE = impossible("dy", "x")
