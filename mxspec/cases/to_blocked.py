"""The calls of to_blocked."""

from __future__ import annotations

from mxspec.cases.common.bytes import MATRIX, made
from mxspec.cases.common.quantizers import (
    EXPERTS,
    EXPERTS_PAST_A_GRID,
    LARGE_BOTH_WAYS,
    ONE_COLUMN_APART,
    PAST_A_GRID,
    fits,
)
from mxspec.cases.common.space import Space
from mxspec.cases.common.tensors import EXPERT_STRIDES, STRIDES

DIMENSIONS = {**MATRIX, "experts": EXPERTS, "strides": (*STRIDES, *EXPERT_STRIDES)}
SPACE = Space(
    DIMENSIONS,
    lambda choice: (made(choice),),
    {},
    fits,
    (),
    beyond=[*PAST_A_GRID, EXPERTS_PAST_A_GRID, *LARGE_BOTH_WAYS, ONE_COLUMN_APART],
)
MOVES_BYTES = True
