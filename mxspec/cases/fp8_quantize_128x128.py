"""The calls of fp8_quantize_128x128."""

from __future__ import annotations

from torch import Tensor

from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.quantizers import PLAIN, STACK, fits, made, shape_of
from mxspec.cases.common.space import Space
from mxspec.cases.fp8_quantize_1x128 import REPEATED_HERE
from mxspec.reference._fp8_numerics import SCALE_FORMATS


def _make(choice: Choice) -> tuple[Tensor]:
    return (made(choice, shape_of(choice)),)


def _possible(choice: Choice) -> bool:
    wide = choice.get("cols", 0) > 4096 and (choice.get("experts") or 0) > 256
    return fits(choice, 1, 128) and not wide


SIZES = {"rows": (0, 1, 33, 128, 144, 1152, 4224), "cols": (0, 128, 1152, 4224)}
OPTIONS = {"scale_format": SCALE_FORMATS, "eps": (1e-12, 1e-4), "with_transpose": (False, True)}
ALSO = [
    *(part for part in REPEATED_HERE if part.get("cols") != 1),
    {"with_transpose": False, "begins": "at 0", "strides": "row-major"},
]
BEYOND = [{**PLAIN, "rows": rows, "cols": cols} for rows, cols in ((4224, 384), (384, 4224))]
SPACE = Space({**STACK, **SIZES}, _make, OPTIONS, _possible, ALSO, beyond=BEYOND)
IMPOSSIBLE = ((r"w\.cols > 4096 \| w\.experts > 256", "whole blocks of it have more than 100 million elements"),)
