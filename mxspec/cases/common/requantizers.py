"""What the cases of the ops that make codes along the tokens from codes along the features have in common."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mxspec.cases.common.codes import SCALES, scale_fits
from mxspec.cases.common.fp8_operands import codes
from mxspec.cases.common.groups import ARRANGED, GROUPS, groups_fit, in_groups_of_three, padded_fits
from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.quantizers import fits
from mxspec.cases.common.tensors import BEGINS, STRIDES, code_values, laid

DIMENSIONS: dict[str, Any] = {
    "rows": (),
    "cols": (),
    **GROUPS,
    "experts": (None,),
    "strides": STRIDES,
    "values": ("none", "finite", "bits", "zeros"),
    "begins": BEGINS,
    **SCALES,
    "scale strides": STRIDES,
}
_PLAIN = {
    "experts": None, "strides": "row-major", "values": "finite", "begins": "at 0", "scale values": "near 1",
    "scale strides": "row-major", "scale begins": "at 0", "dtype of codes": torch.float8_e4m3fn,
}  # fmt: skip
BEYOND = in_groups_of_three(
    {**_PLAIN, "rows": 4128, "cols": 288},
    {**_PLAIN, "rows": 288, "cols": 4128},
    {**_PLAIN, "rows": 256, "cols": 288, "groups": "three hundred"},
)
ALSO: list[Choice] = [
    *ARRANGED,
    {"rows": 1, "cols": 1056, "scale strides": "row-major"},
    {"rows": 256, "cols": 1056, "groups": "one offset thrice", "scale begins": "at 0"},
]
EMPTY_SCALE = (
    (r"qdata\.(?:rows|cols) = 0 \| scale\..*", "there are no scales"),
    (
        r"qdata\.rows = 1 \| scale\.strides (?:one row repeated|rows apart|column-major)",
        "the scale has one row, which has no stride",
    ),
)


def codes_far_apart(rows: int, K: int, apart: int = 2**24) -> Tensor:
    """Codes whose rows lie far apart. By default, offsets pass 2^31 from row 128 on. The gaps are never touched."""
    storage = torch.empty((rows - 1) * apart + K, dtype=torch.uint8)
    there = storage.as_strided((rows, K), (apart, 1)).copy_(codes(rows, K).view(torch.uint8))
    return there.view(torch.float8_e4m3fn)


def codes_of(choice: Choice, dtype: torch.dtype) -> Tensor:
    values = code_values((choice["rows"], choice["cols"]), dtype, choice["values"])
    return laid(values, choice["strides"], choice["begins"])


def possible(choice: Choice, plain: tuple[int, int] | None, multiple: int, pad_to: int) -> bool:
    """Whether codes with `plain` scales can be as a choice says. Their columns are a multiple of `multiple`."""
    if not (groups_fit(choice, choice.get("rows")) and padded_fits(choice, "rows", "cols", pad_to)):
        return False
    return fits(choice, 1, multiple) and scale_fits(choice, plain)
