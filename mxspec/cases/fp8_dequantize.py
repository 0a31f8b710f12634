"""The calls of fp8_dequantize."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mxspec.cases.common.codes import fp32_scale, scale_fits
from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.quantizers import axis_of, fits
from mxspec.cases.common.space import Space
from mxspec.cases.common.tensors import code_values, laid
from mxspec.cases.mx_dequantize import DIMENSIONS as MX_DIMENSIONS
from mxspec.cases.mx_dequantize import scale_shape
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
    return shape is None or scale_fits(choice, shape)


def _make(choice: Choice) -> tuple[Tensor, Tensor]:
    lead = () if choice["experts"] is None else (choice["experts"],)
    codes = code_values((*lead, choice["rows"], choice["cols"]), torch.float8_e4m3fn, choice["values"])
    shape = _scale_shape(choice)
    assert shape is not None
    return laid(codes, choice["strides"], choice["begins"]), fp32_scale(shape, choice)


SIZES = (0, 1, 33, 128, 144, 1152, 4224)
EXPERTS = (None, 0, 1, 2, 9, 33)
DIMENSIONS: dict[str, Any] = {
    **{name: values for name, values in MX_DIMENSIONS.items() if name != "dtype"},
    "rows": SIZES,
    "cols": SIZES,
    "experts": EXPERTS,
    "blocks": ("1x128", "128x128"),
}
SPACE = Space(DIMENSIONS, _make, {"axis": (-1, -2), "out_dtype": OUT_DTYPES}, _possible)
IMPOSSIBLE = (
    (r"axis (?:= -1|not given) \| qdata\.cols (?:= 1|odd|a multiple of 16)", "K is a multiple of 128"),
    (r"axis = -2 \| qdata\.rows (?:= 1|odd|a multiple of 16)", "M is a multiple of 128"),
    (
        r"qdata\.cols (?:= 1|odd|a multiple of 16) \| qdata\.rows (?:= 1|odd|a multiple of 16)",
        "one of them is a multiple of 128",
    ),
    (r"qdata\.(?:rows|cols|experts) = 0 \| scale\..*", "there are no scales"),
)
