"""Codes and the scales beside them."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.tensors import laid, scale_bytes, strides_fit
from mxspec.reference.to_blocked import to_blocked
from mxspec.spec import random_normal

SCALE_STRIDES = ("row-major", "column-major", "rows apart", "columns apart", "one row repeated", "one column repeated")
SCALES = {
    "scale values": ("near 1", "special"),
    "scale strides": SCALE_STRIDES,
    "scale begins": ("at 0", "at a later word", "between words"),
}


def scale_fits(choice: Choice, plain: tuple[int, ...], layout: str | None = "plain", name: str = "scale") -> bool:
    """Whether scales of a plain shape can lie so; blocked ones are one run of bytes, and an empty tensor has no strides."""
    strides = choice.get(f"{name} strides", "row-major")
    if layout == "blocked" or 0 in plain:
        return strides == "row-major"
    return strides_fit(strides, plain)


def mx_scale(
    plain: tuple[int, ...], choice: Choice, layout: str = "plain", name: str = "scale", seed: int = 1
) -> Tensor:
    """E8M0 scales of a plain shape, in either layout."""
    scale = scale_bytes(plain, choice["scale values"], seed)
    if layout == "blocked":
        return laid_flat(to_blocked(scale), choice[f"{name} begins"])
    return laid(scale, choice[f"{name} strides"], choice[f"{name} begins"])


def fp32_scale(shape: tuple[int, ...], choice: Choice) -> Tensor:
    """fp32 scales: near 1; or with every special value."""
    scale = random_normal(*shape, dtype=torch.float32, seed=1).abs()
    if choice["scale values"] == "special" and scale.numel():
        special = torch.tensor([torch.nan, torch.inf, 0.0, -0.0, -torch.inf, -1.5, 2.0**-140, torch.finfo().max])
        flat = scale.view(-1)
        flat[: len(special)] = special[: flat.numel()]
        flat[-len(special) :] = special.flip(0)[-flat.numel() :]
    return laid(scale, choice["scale strides"], choice["scale begins"])


def laid_flat(t: Tensor, begins: str) -> Tensor:
    """A dense tensor that begins elsewhere in its memory."""
    return laid(t[None], "row-major", begins)[0]
