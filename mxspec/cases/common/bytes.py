"""Matrices whose bytes an op moves without reading them as numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.quantizers import SIZES, shape_of
from mxspec.cases.common.tensors import BEGINS, STRIDES, laid, laid_negated
from mxspec.spec import random_bits

MATRIX: dict[str, Any] = {
    "rows": SIZES,
    "cols": SIZES,
    "experts": (None,),
    "strides": STRIDES,
    "begins": BEGINS,
    "dtype": (torch.uint8, torch.float8_e8m0fnu),
}
SCALES = {**MATRIX, "dtype": (*MATRIX["dtype"], torch.float8_e4m3fn)}


def made(choice: Choice) -> Tensor:
    """A matrix of random bits, every pattern equally likely; in a negated view every NaN has the same bits."""
    shape, dtype = shape_of(choice), choice["dtype"]
    if dtype == torch.bool:
        return laid(random_bits(*shape, dtype=torch.uint8) > 127, choice["strides"], choice["begins"])
    arrange = laid_negated if choice.get("negated") else laid
    return arrange(random_bits(*shape, dtype=dtype), choice["strides"], choice["begins"])
