"""The calls of mx_dequantize."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.cases.common.codes import SCALES, mx_scale, scale_fits
from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.quantizers import EXPERTS, axis_of, fits
from mxspec.cases.common.space import Space, given
from mxspec.cases.common.tensors import BEGINS, EXPERT_STRIDES, STRIDES, code_values, laid
from mxspec.formats import BY_DTYPE
from mxspec.reference.mx_dequantize import OUT_DTYPES
from mxspec.reference.mx_quantize import SCALE_LAYOUTS


def beyond(dtype: torch.dtype) -> list[Choice]:
    """Codes with more than 256 beside more than 4096, and one column of rows apart."""
    plain: Choice = {
        **{"experts": None, "strides": "row-major", "values": "finite", "begins": "at 0", "dtype": dtype},
        **{"scale values": "near 1", "scale strides": "row-major", "scale begins": "at 0", "blocks": "1x128"},
    }
    column = {**plain, "rows": 256, "cols": 1, "strides": "rows apart", "axis": -2}
    return [{**plain, "rows": 4224, "cols": 384}, {**plain, "rows": 384, "cols": 4224}, column]


def scale_shape(choice: Choice, block: int) -> tuple[int, ...] | None:
    """The shape of plain scales; None while the choice lacks a size."""
    if not {"rows", "cols", "experts"} <= choice.keys():
        return None
    rows, cols = choice["rows"], choice["cols"]
    matrix = (rows, cols // block) if axis_of(choice) == -1 else (cols, rows // block)
    return matrix if choice["experts"] is None else (choice["experts"], *matrix)


def _possible(choice: Choice) -> bool:
    axis, plain = axis_of(choice), scale_shape(choice, 32)
    if not fits(choice, 32 if axis == -2 else 1, 32 if axis == -1 else 1):
        return False
    if choice.get("values") == "Inf" and choice.get("dtype") not in (None, torch.float8_e5m2):
        return False
    return scale_fits(choice, plain, given(choice, "scale_layout", "plain"))


def _make(choice: Choice) -> tuple[Tensor, Tensor]:
    rows, cols, axis = choice["rows"], choice["cols"], axis_of(choice)
    lead = () if choice["experts"] is None else (choice["experts"],)
    per_byte = BY_DTYPE[choice["dtype"]].per_byte
    stored = (rows, cols // per_byte) if axis == -1 else (rows // per_byte, cols)
    codes = code_values((*lead, *stored), choice["dtype"], choice["values"])
    plain = scale_shape(choice, 32)
    assert plain is not None
    scale = mx_scale(plain, choice, given(choice, "scale_layout", "plain"))
    return laid(codes, choice["strides"], choice["begins"]), scale


SIZES = (0, 1, 32, 33, 256, 1056, 8256)  # 8256 / 2 bytes of float4 are more than 4096
DIMENSIONS = {
    "rows": SIZES,
    "cols": SIZES,
    "experts": EXPERTS,
    "strides": (*STRIDES, *EXPERT_STRIDES),
    "values": ("none", "finite", "bits", "Inf", "zeros"),
    "begins": BEGINS,
    "dtype": tuple(BY_DTYPE),
    **SCALES,
}
OPTIONS = {"axis": (-1, -2), "out_dtype": OUT_DTYPES, "scale_layout": SCALE_LAYOUTS}
NAN = {"values": "bits", "dtype": torch.float8_e4m3fn}
ALSO = [
    {"rows": 256, **NAN},
    {"rows": 1, "cols": 256, **NAN},
    {"experts": 257, "rows": 32, "cols": 32, **NAN},
    {"scale strides": "rows apart", **NAN},
    {"axis": -1, "rows": 33, "strides": "one column repeated", **NAN},  # one of the rows is zeros
]
SPACE = Space(DIMENSIONS, _make, OPTIONS, _possible, ALSO, beyond=beyond(torch.float8_e5m2))
SCALE_IMPOSSIBLE = (
    (r"qdata\.(?:rows|cols|experts) = 0 \| scale\..*", "there are no scales"),
    (
        r"qdata\.(?:rows|cols) = 1 \| scale\.strides (?:one row repeated|rows apart|column-major|experts .*)",
        "the scale has one row, which has no stride",
    ),
    (r"qdata\.(?:rank 2|experts = 1) \| scale\.strides (?:one expert repeated|experts .*)", "there is no other expert"),
)
IMPOSSIBLE = (
    (r"axis (?:= -1|not given) \| qdata\.cols (?:= 1|odd)", "K is a multiple of 32"),
    (r"axis = -2 \| qdata\.rows (?:= 1|odd)", "M is a multiple of 32"),
    (r"qdata\.cols (?:= 1|odd) \| qdata\.rows (?:= 1|odd)", "one of them is a multiple of 32"),
    (r"qdata\.dtype float4_e2m1fn_x2 \| qdata\.[+-]?(?:NaN|Inf) .*", "e2m1 has neither NaN nor Inf"),
    *SCALE_IMPOSSIBLE,
    (
        r"scale_layout = blocked \| scale\.strides (?!row-major|columns apart|one row repeated|experts apart).*",
        "the blocked scales of a matrix are a vector",
    ),
)
