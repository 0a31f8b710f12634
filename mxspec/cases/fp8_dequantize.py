"""The calls of fp8_dequantize."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mxspec.cases.common.codes import SPECIALS, fp32_scale, scale_fits
from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.quantizers import axis_of, fits
from mxspec.cases.common.space import Space
from mxspec.cases.common.tensors import code_values, laid
from mxspec.cases.mx_dequantize import DIMENSIONS as MX_DIMENSIONS
from mxspec.cases.mx_dequantize import SCALE_IMPOSSIBLE, beyond, scale_shape
from mxspec.reference.mx_dequantize import OUT_DTYPES


def _scale_shape(choice: Choice) -> tuple[int, ...] | None:
    plain = scale_shape(choice, 128)
    if plain is None or "blocks" not in choice:
        return None
    *lead, R, C = plain
    return (*lead, -(-R // 128) if choice["blocks"] == "128x128" else R, C)


def _possible(choice: Choice) -> bool:
    axis, shape = axis_of(choice), _scale_shape(choice)
    if not fits(choice, 128 if axis == -2 else 1, 128 if axis == -1 else 1):
        return False
    return scale_fits(choice, shape) and (shape is None or _room(choice, shape))


def _room(choice: Choice, shape: tuple[int, ...]) -> bool:
    """Whether all special scales have a place, in a row or a column that is not repeated."""
    if choice.get("scale values") != "special":
        return True
    repeated = choice.get("scale strides")
    rows, cols = shape[-2:]
    return (repeated != "one row repeated" and rows >= SPECIALS) or (
        repeated != "one column repeated" and cols >= SPECIALS
    )


def _make(choice: Choice) -> tuple[Tensor, Tensor]:
    lead = () if choice["experts"] is None else (choice["experts"],)
    codes = code_values((*lead, choice["rows"], choice["cols"]), torch.float8_e4m3fn, choice["values"])
    shape = _scale_shape(choice)
    assert shape is not None
    return laid(codes, choice["strides"], choice["begins"]), fp32_scale(shape, choice)


SIZES = (0, 1, 33, 128, 144, 1152, 4224)
EXPERTS = (None, 0, 1, 2, 9, 33)
DIMENSIONS: dict[str, Any] = {
    "rows": SIZES,
    "cols": SIZES,
    "experts": EXPERTS,
    "blocks": ("1x128", "128x128"),
    "values": ("none", "finite", "bits", "zeros"),
    **{
        name: values
        for name, values in MX_DIMENSIONS.items()
        if name not in ("rows", "cols", "experts", "dtype", "values")
    },
}
ALSO = [
    {"rows": 1, "cols": 128, "values": "bits"},
    {"axis": -2, "rows": 1152, "cols": 1, "scale strides": "row-major"},
    {"rows": 1152, "cols": 1152, "strides": "one column repeated", "scale strides": "row-major"},
]
SPACE = Space(
    DIMENSIONS, _make, {"axis": (-1, -2), "out_dtype": OUT_DTYPES}, _possible, ALSO, beyond=beyond(torch.float8_e4m3fn)
)
IMPOSSIBLE = (
    (r"axis (?:= -1|not given) \| qdata\.cols (?:= 1|odd|a multiple of 16)", "K is a multiple of 128"),
    (r"axis = -2 \| qdata\.rows (?:= 1|odd|a multiple of 16)", "M is a multiple of 128"),
    (
        r"qdata\.cols (?:= 1|odd|a multiple of 16) \| qdata\.rows (?:= 1|odd|a multiple of 16)",
        "one of them is a multiple of 128",
    ),
    *SCALE_IMPOSSIBLE,
    (r"qdata\.cols = 1 \| scale\.blocks of 128 rows", "K is a multiple of 128"),
)
