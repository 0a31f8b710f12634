"""Codes and their scales."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.tensors import BEGINS, EXPERT_STRIDES, STRIDES, laid, plant, scale_bytes, strides_fit
from mxspec.reference.to_blocked import to_blocked
from mxspec.spec import random_normal

_SPECIAL = (torch.nan, torch.inf, 0.0, -0.0, -torch.inf, -1.5, 2.0**-140, torch.finfo().max)
SPECIALS = len(_SPECIAL)  # the number of special scales in a row or a column
SCALE_STRIDES = (*STRIDES, *EXPERT_STRIDES)
SCALES = {
    "scale values": ("none", "near 1", "special"),
    "scale strides": SCALE_STRIDES,
    "scale begins": BEGINS,
}


def scale_fits(
    choice: Choice, plain: tuple[int, ...] | None, layout: str | None = "plain", name: str = "scale"
) -> bool:
    """Whether scales of the shape `plain` can have the values, strides and place in memory of a choice.

    `plain` is None while the shape is not chosen yet. Blocked scales are one run of bytes. Empty scales have neither
    values nor strides nor a place.
    """
    values, strides, begins = (choice.get(f"{name} {what}") for what in ("values", "strides", "begins"))
    told = [word for word in (values, strides) if word is not None]
    if "none" in told and (set(told) != {"none"} or begins not in (None, "at 0")):
        return False
    if layout == "blocked" and strides not in (None, "none", "row-major"):
        return False
    if plain is None:
        return True
    if 0 in plain:
        return set(told) <= {"none"} and begins in (None, "at 0")
    return "none" not in told and (strides is None or strides_fit(strides, plain))


def mx_scale(
    plain: tuple[int, ...], choice: Choice, layout: str = "plain", name: str = "scale", seed: int = 1
) -> Tensor:
    """E8M0 scales of a plain shape, in either layout."""
    scale = scale_bytes(plain, choice[f"{name} values"], seed)
    if layout == "blocked":
        return laid_flat(to_blocked(scale), choice[f"{name} begins"])
    return laid(scale, choice[f"{name} strides"], choice[f"{name} begins"])


def fp32_scale(shape: tuple[int, ...], choice: Choice) -> Tensor:
    """fp32 scales: near 1, or with every special value."""
    scale = random_normal(*shape, dtype=torch.float32, seed=1).abs()
    if choice["scale values"] == "special":
        plant(scale, torch.tensor(_SPECIAL))
    return laid(scale, choice["scale strides"], choice["scale begins"])


def laid_flat(t: Tensor, begins: str) -> Tensor:
    """A copy of a dense tensor that begins at another place in its memory."""
    return laid(t[None], "row-major", begins)[0]
