"""The cases that the quantizers of token groups in both directions share: groups, refusals and dimensions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mxspec.cases.common.groups import ARRANGED, GROUPS, groups_fit, in_groups_of_three, padded_fits
from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.quantizers import MATRIX, PLAIN, fits
from mxspec.cases.common.token_groups import grouped, offs_of
from mxspec.spec import Case

Make = Callable[[int], tuple[Tensor, ...]]  # the tensors of a call before offs, for a number of tokens
ROWS = (0, 1, 161, 256, 1056, 4128)


def with_offs(make: Make, M: int, sizes: list[int]) -> tuple[Tensor, ...]:
    return *make(M), offs_of(sizes)


def grouped_cases(make: Make) -> Iterator[Case]:
    """A case for each arrangement of token groups, and for each option."""
    for name, sizes, M, _, flags in grouped():
        if len(sizes) < 300:  # more groups would take minutes in an interpreter, because of their padding
            yield Case(name, partial(with_offs, make, M, sizes), flags=flags)
    yield Case("ragged against every tile", partial(with_offs, make, 560, [129, 300, 128]))
    yield Case("power-of-two scales", partial(with_offs, make, 140, [130, 0, 7]), {"scale_format": "pow2"})
    yield Case("checked", partial(with_offs, make, 41, [30, 10]), {"check_offs": True})
    yield Case("not checked", partial(with_offs, make, 41, [30, 10]), {"check_offs": False})


def refused_offs(make: Make) -> Iterator[Case]:
    """The refusals that concern offs and the options."""
    tensors, ends = make(50), offs_of([5, 0, 40])

    def refused(name: str, error: type[Exception], match: str, offs: Tensor = ends, **kwargs: Any) -> Case:
        return Case(name, lambda: (*tensors, offs), kwargs, raises=error, match=match)

    yield refused("int64 offs", TypeError, "offs has dtype torch.int64; needs torch.int32", ends.long())
    yield refused("2-D offs", ValueError, "offs has shape (1, 3); needs a 1-D", ends[None])
    yield refused("offs elsewhere", ValueError, "one device", ends.to("meta"))
    yield refused("unknown scale format", ValueError, "'ue8m0'", scale_format="ue8m0")
    yield refused("offs that decrease", ValueError, "offs[1] = 5 after 45", ends.flip(0), check_offs=True)
    yield refused("offs past M", ValueError, "offs[-1] = 51 is past M = 50", ends + 6, check_offs=True)


def dimensions(cols: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> dict[str, Any]:
    return {**MATRIX, **GROUPS, "rows": ROWS, "cols": cols, "dtype": dtypes}


def possible(choice: Choice, cols: int) -> bool:
    """Whether a matrix of whole blocks along the features can have these sizes, strides, values and groups."""
    return fits(choice, 1, cols) and groups_fit(choice, choice.get("rows")) and padded_fits(choice, "rows", "cols", 128)


BEYOND = in_groups_of_three(
    {**PLAIN, "rows": 4128, "cols": 512},
    {**PLAIN, "rows": 400, "cols": 4352},
    {**PLAIN, "rows": 256, "cols": 512, "groups": "three hundred"},
    {**PLAIN, "rows": 256, "cols": 32, "groups": "three hundred"},
)
ALSO = ARRANGED
