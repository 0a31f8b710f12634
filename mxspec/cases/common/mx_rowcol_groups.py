"""The cases that the MX quantizers of token groups in both directions share: groups, options and refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch

from mxspec.cases.common.groups import GROUPS, groups_fit, padded_fits
from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.quantizers import MATRIX, fits
from mxspec.cases.common.rowcol_groups import Make, with_offs
from mxspec.cases.common.space import given
from mxspec.cases.common.token_groups import grouped, offs_of
from mxspec.formats import SCALINGS
from mxspec.reference.mx_quantize import SCALE_LAYOUTS
from mxspec.reference.mx_quantize_groups import ELEM_CHOICES
from mxspec.reference.mx_quantize_groups import WITH_E2M1 as PACKED_TOO
from mxspec.spec import Case


def grouped_cases(make: Make) -> Iterator[Case]:
    """A case for each arrangement of token groups, and for the options that concern groups."""
    for name, sizes, M, _, flags in grouped():
        if len(sizes) < 300:  # more groups would take minutes in an interpreter, because of their padding
            yield Case(name, partial(with_offs, make, M, sizes), flags=flags)
    yield Case("ragged against every tile", partial(with_offs, make, 560, [129, 300, 128]))
    for pad_to, layout in product((128, 384), SCALE_LAYOUTS):
        kw = {"pad_to": pad_to, "scale_layout": layout}
        yield Case(f"pad_to {pad_to}, {layout}", partial(with_offs, make, 150, [140, 1]), kw)
    yield Case("checked", partial(with_offs, make, 41, [30, 10]), {"check_offs": True})
    yield Case("not checked", partial(with_offs, make, 41, [30, 10]), {"check_offs": False})


def with_options(name: str, make: Callable[[], Any], **flags: Any) -> Iterator[Case]:
    """A case for each scaling and layout. The element formats take turns."""
    for i, (layout, scaling) in enumerate(product(SCALE_LAYOUTS, SCALINGS)):
        elem = ("e4m3fn", "e5m2")[(i + i // 4) % 2]
        kw = {"scale_layout": layout, "scaling": scaling, "elem_dtype": elem}
        yield Case(f"{name}, {elem}, {scaling}, {layout}", make, kw, **flags)


def refused_groups(make: Make, e2m1: bool = False) -> Iterator[Case]:
    """The refusals that concern offs and the options. e2m1: whether the op takes these elements."""
    tensors, ends = make(50), offs_of([5, 0, 40])

    def refused(name: str, error: type[Exception], match: str, offs: torch.Tensor = ends, **kwargs: Any) -> Case:
        return Case(name, lambda: (*tensors, offs), kwargs, raises=error, match=match)

    yield refused("int64 offs", TypeError, "offs has dtype torch.int64; needs torch.int32", ends.long())
    yield refused("2-D offs", ValueError, "offs has shape (1, 3); needs a 1-D", ends[None])
    yield refused("offs elsewhere", ValueError, "one device", ends.to("meta"))
    yield refused("pad_to 64", ValueError, "pad_to = 64; needs a multiple of 128", pad_to=64)
    yield refused("pad_to 0", ValueError, "pad_to = 0; needs at least 1", pad_to=0)
    yield refused("pad_to 128.0", TypeError, "pad_to = 128.0", pad_to=128.0)
    yield refused("unknown scaling", ValueError, "'nearest'", scaling="nearest")
    yield refused("unknown layout", ValueError, "'swizzled'", scale_layout="swizzled")
    yield refused("int8 elements", TypeError, "int8", elem_dtype=torch.int8)
    yield refused("e2m3 elements", TypeError, "'e2m3'; needs one of", elem_dtype="e2m3")
    if not e2m1:
        fp4 = torch.float4_e2m1fn_x2
        yield refused("e2m1 elements", TypeError, "float4_e2m1fn_x2; needs one of", elem_dtype=fp4)
    yield refused("offs that decrease", ValueError, "offs[1] = 5 after 45", ends.flip(0), check_offs=True)
    yield refused("offs past M", ValueError, "offs[-1] = 51 is past M = 50", ends + 6, check_offs=True)


def dimensions(cols: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> dict[str, Any]:
    return {"rows": MATRIX["rows"], "cols": cols, **GROUPS, **MATRIX, **{"cols": cols, "dtype": dtypes}}


def possible(choice: Choice, cols: int) -> bool:
    """Whether a matrix of whole blocks along the features can have these sizes, strides, values and groups."""
    pad_to = given(choice, "pad_to", 128) or 128
    arranged = groups_fit(choice, choice.get("rows")) and padded_fits(choice, "rows", "cols", pad_to)
    return arranged and fits(choice, 1, cols)


WIDTHS = (32, 64, 160, 1440)  # of h: less than a tile, and tiles that the end of d_gate divides
OPTIONS = {
    "pad_to": (128, 384),
    "elem_dtype": ELEM_CHOICES,
    "scaling": SCALINGS,
    "scale_layout": SCALE_LAYOUTS,
    "check_offs": (False, True),
}
WITH_E2M1 = {**OPTIONS, "elem_dtype": PACKED_TOO}
