"""The calls of from_blocked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.quantizers import EXPERTS, SIZES
from mxspec.cases.common.space import Space
from mxspec.cases.common.tensors import laid, small_enough, strides_fit
from mxspec.reference.to_blocked import blocked_bytes
from mxspec.spec import random_bits


def _possible(choice: Choice) -> bool:
    if choice.get("strides") in ("rows apart", "one row repeated") and choice.get("experts", 2) in (None, 0, 1):
        return False
    if not {"rows", "cols", "experts"} <= choice.keys():
        return True
    rows, cols, experts = (choice[name] for name in ("rows", "cols", "experts"))
    needed = blocked_bytes(rows, cols)
    shape = (1 if experts is None else experts, needed)
    fits = small_enough(rows, cols, experts or 1) and small_enough(*shape)
    strides = choice.get("strides", "row-major")
    return fits and (strides == "none") == (0 in shape) and strides_fit(strides, shape)


def _make(choice: Choice) -> tuple[Any, ...]:
    rows, cols, experts = (choice[name] for name in ("rows", "cols", "experts"))
    bits = random_bits(1 if experts is None else experts, blocked_bytes(rows, cols), dtype=torch.uint8).view(
        choice["dtype"]
    )
    blocked: Tensor = laid(bits, choice["strides"], choice["begins"])
    return blocked[0] if experts is None else blocked, rows, cols


DIMENSIONS = {
    "rows": SIZES,
    "cols": SIZES,
    "experts": EXPERTS,
    "strides": ("none", "row-major", "rows apart", "columns apart", "one row repeated", "one column repeated"),
    "begins": ("at 0", "at a later word", "between words"),
    "dtype": (torch.uint8, torch.float8_e8m0fnu),
}
SPACE = Space(DIMENSIONS, _make, {}, _possible)
