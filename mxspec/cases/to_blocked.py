"""The cases of to_blocked: calls written by hand, calls worth timing, and the dimensions of a call."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mxspec.cases.common.bytes import SCALES, made
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
from mxspec.formats import MX_BLOCK_SIZE
from mxspec.spec import Case, Shapes, given, random_bits


def cases() -> Iterator[Case]:
    ragged = [(128, 4), (1, 1), (127, 3), (129, 5), (32, 4), (33, 9), (256, 12), (300, 70), (1, 257), (1025, 1)]
    for R, C in [*ragged, (130, 64), (257, 208)]:  # the rows of the last two are whole 16-byte words
        yield Case(f"{R}x{C}", given(random_bits, R, C, dtype=torch.uint8))
    yield Case("3-D 3x130x6", given(random_bits, 3, 130, 6, dtype=torch.uint8))
    yield Case("3-D 2x130x80", given(random_bits, 2, 130, 80, dtype=torch.uint8))
    yield Case("3-D 1x128x4", given(random_bits, 1, 128, 4, dtype=torch.uint8))
    yield Case("3-D e8m0fnu", given(random_bits, 3, 130, 6, dtype=torch.float8_e8m0fnu))
    yield Case("e8m0fnu", given(random_bits, 130, 6, dtype=torch.float8_e8m0fnu))
    yield Case("e4m3fn, the scales of NVFP4", given(random_bits, 130, 6, dtype=torch.float8_e4m3fn))
    yield Case("transposed input", lambda: (random_bits(6, 130, dtype=torch.uint8).mT,), flags={"edge"})
    yield Case("rows far apart", _far_apart, flags={"edge"})
    yield Case("no rows", given(torch.zeros, 0, 8, dtype=torch.uint8), flags={"edge"})
    yield Case("no columns", given(torch.zeros, 8, 0, dtype=torch.uint8), flags={"edge"})
    yield Case("no experts", given(torch.zeros, 0, 8, 8, dtype=torch.uint8), flags={"edge"})
    yield Case(
        "2^31 bytes and more", lambda: (random_bits(1, 8, dtype=torch.uint8).expand(2**28 + 1, 8),), flags={"large"}
    )
    yield Case("1-D", given(torch.zeros, 128, dtype=torch.uint8), raises=ValueError, match="2-D or 3-D")
    yield Case("int32", given(torch.zeros, 128, 4, dtype=torch.int32), raises=TypeError, match="int32")


def _far_apart() -> tuple[Tensor]:
    """Two rows that lie 2^31 bytes apart. The memory between them is never touched."""
    rows = torch.empty(2**31 + 64, dtype=torch.uint8).as_strided((2, 8), (2**31, 1))
    return (rows.copy_(random_bits(2, 8, dtype=torch.uint8)),)


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    for *E, R, K in (*shapes.matrices, *shapes.experts):
        shape = (*E, R, -(-K // MX_BLOCK_SIZE))  # the scales of a quantized R x K
        yield Case("x".join(map(str, shape)), given(torch.randint, 0, 256, shape, dtype=torch.uint8))


DIMENSIONS = {**SCALES, "experts": EXPERTS, "strides": (*STRIDES, *EXPERT_STRIDES)}
SPACE = Space(
    DIMENSIONS,
    lambda choice: (made(choice),),
    {},
    fits,
    (),
    beyond=[*PAST_A_GRID, EXPERTS_PAST_A_GRID, *LARGE_BOTH_WAYS, ONE_COLUMN_APART],
)
MOVES_BYTES = True
