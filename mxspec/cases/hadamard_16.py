"""The cases of hadamard_16: calls written by hand, calls worth timing, and the dimensions of a call."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.quantizers import (
    EXPERTS_PAST_A_GRID,
    LARGE_BOTH_WAYS,
    ONE_COLUMN_APART,
    PAST_A_GRID,
    REPEATED,
    STACK,
    axis_of,
    fits,
    made,
    shape_of,
)
from mxspec.cases.common.space import Space
from mxspec.cases.common.tensors import turned
from mxspec.reference.common import checks
from mxspec.reference.hadamard_16 import SIGNS, SIZE
from mxspec.spec import Case, Shapes, given, normal, random_bits, random_normal, these

EDGE = {"edge"}
OTHER_SIGNS = (0, 0xFFFF, 0x8001)


def cases() -> Iterator[Case]:
    for i, (dtype, axis) in enumerate(product(checks.FLOAT_DTYPES, (-1, -2))):
        name, kw = f"{str(dtype)[6:]}, axis {axis}", {"axis": axis}
        yield Case(f"random bit patterns, {name}", given(random_bits, 96, 160, dtype=dtype, seed=i), kw)
        yield Case(f"96x160, {name}", given(random_normal, 96, 160, dtype=dtype, seed=i), kw)
        yield Case(f"3x48x80, {name}", given(random_normal, 3, 48, 80, dtype=dtype, seed=i), kw)
        identity = torch.eye(SIZE, dtype=dtype)
        yield Case(f"the matrix itself, {name}", these(identity), {**kw, "signs": 0}, flags=EDGE)
        yield Case(f"the matrix with signs, {name}", these(identity), kw, flags=EDGE)
        yield Case(f"the order of the sums, {name}", these(turned(unordered().to(dtype), axis)), kw, flags=EDGE)
        yield Case(f"special values, {name}", these(turned(special(dtype), axis)), kw, flags=EDGE)
        zeros = torch.where(normal(32, 48, seed=i) < 0, -0.0, 0.0).to(dtype)
        yield Case(f"zeros of both signs, {name}", these(zeros), kw, flags=EDGE)
    for axis, signs in product((-1, -2), OTHER_SIGNS):
        kw = {"axis": axis, "signs": signs}
        yield Case(f"signs {signs}, axis {axis}", given(random_normal, 64, 64), kw)
    for axis in (-1, -2):
        kw = {"axis": axis}
        one, ragged = ((1, 16), (301, 416)) if axis == -1 else ((16, 1), (416, 301))
        yield Case(f"one block, axis {axis}", given(random_normal, *one), kw, flags=EDGE)
        yield Case(f"ragged, axis {axis}", given(random_normal, *ragged), kw)
        yield Case(f"transposed input, axis {axis}", lambda: (random_normal(96, 160).mT,), kw)
        yield Case(f"every second column, axis {axis}", lambda: (random_normal(96, 320)[:, ::2],), kw)
        yield Case(f"every second row, axis {axis}", lambda: (random_normal(192, 64)[::2],), kw)
        yield Case(f"empty, axis {axis}", given(torch.zeros, 0, 0), kw, flags=EDGE)
        yield Case(f"no experts, axis {axis}", given(torch.zeros, 0, 16, 64), kw, flags=EDGE)
        large = these(random_normal(1, 2048).expand(2**20 + 256, 2048))
        yield Case(f"2^31 elements and more, axis {axis}", large, kw, flags={"large"})
    yield Case("negated view", lambda: (torch.complex(normal(4, 64), normal(4, 64, seed=1)).conj().imag,), flags=EDGE)
    yield Case("no rows", given(torch.zeros, 0, 64), flags=EDGE)
    yield Case("no columns", given(torch.zeros, 4, 0), flags=EDGE)

    def refused(name: str, x: Tensor, error: type[Exception], match: str, **kwargs: Any) -> Case:
        return Case(name, these(x), kwargs, raises=error, match=match)

    x = torch.zeros(32, 64)
    yield refused("K = 100", torch.zeros(4, 100), ValueError, "K = 100 is not a multiple of 16")
    yield refused("M = 100", torch.zeros(100, 32), ValueError, "M = 100 is not a multiple", axis=-2)
    yield refused("N = 100", torch.zeros(2, 100, 32), ValueError, "N = 100 is not a multiple", axis=-2)
    yield refused("1-D", torch.zeros(64), ValueError, "2-D or 3-D")
    yield refused("4-D", torch.zeros(1, 1, 1, 32), ValueError, "2-D or 3-D")
    yield refused("int32", torch.zeros(4, 32, dtype=torch.int32), TypeError, "torch.int32")
    yield refused("float64", torch.zeros(4, 32, dtype=torch.float64), TypeError, "torch.float64")
    yield refused("axis 0", x, ValueError, "axis = 0", axis=0)
    yield refused("17 signs", x, ValueError, "signs = 0x10000; needs a mask of 16 bits", signs=65536)
    yield refused("negative signs", x, ValueError, "signs = -0x1; needs a mask of 16 bits", signs=-1)
    yield refused("signs as a float", x, TypeError, "signs = 1.0; needs an integer", signs=1.0)
    yield refused("signs as True", x, TypeError, "signs = True; needs an integer", signs=True)


def unordered() -> Tensor:
    """`(32, 64)` fp32 whose sums depend on the order: large numbers that cancel, beside small numbers."""
    x = normal(32, 64).unflatten(1, (4, 16))
    for row in range(32):
        one, other = row % 16, (row * 5 + 3) % 16
        x[row, :, one] = 2.0**13 * x[row, :, one].sign()
        x[row, :, other] = -x[row, :, one]
    return x.flatten(1)


def special(dtype: torch.dtype) -> Tensor:
    """`(18, 32)`: blocks with one or two NaNs or Infs, with the largest number, and with subnormal numbers."""
    finfo = torch.finfo(dtype)
    x = random_normal(18, 32, dtype=dtype, seed=2)
    kinds = [
        [torch.nan],
        [torch.inf],
        [-torch.inf],
        [torch.inf, torch.inf],
        [torch.inf, -torch.inf],
        [torch.nan, torch.inf],
        [finfo.max, finfo.max],
        [finfo.max, -finfo.max, finfo.max],
        16 * [finfo.max],
        16 * [finfo.smallest_normal],
        16 * [finfo.smallest_normal * finfo.eps],
        [finfo.max / 4, finfo.max / 2],
    ]
    for row in range(18):
        kind = kinds[row % len(kinds)]
        x[row, :16] = 0 if finfo.smallest_normal in kind else x[row, :16]
        x[row, row % (17 - len(kind)) :][: len(kind)] = torch.tensor(kind).to(dtype)
    return x


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    for shape in (*shapes.matrices, *shapes.experts):
        name = "x".join(map(str, shape))
        x = given(torch.randn, *shape, dtype=torch.bfloat16)
        yield Case(name, x)
        if shape[-2] % SIZE == 0 and shape[-2] * shape[-1] >= 2**22:
            yield Case(f"{name}, axis -2", x, {"axis": -2})


def _possible(choice: Choice) -> bool:
    return fits(choice, 16 if axis_of(choice) == -2 else 1, 16 if axis_of(choice) == -1 else 1)


def _make(choice: Choice) -> tuple[Tensor]:
    return (made(choice, shape_of(choice), axis_of(choice) == -2),)


SIZES = (0, 1, 48, 161, 256, 1056, 4128)
SPACE = Space(
    {**STACK, "rows": SIZES, "cols": SIZES},
    _make,
    {"axis": (-1, -2), "signs": (SIGNS, *OTHER_SIGNS)},
    _possible,
    REPEATED,
    beyond=[*PAST_A_GRID, EXPERTS_PAST_A_GRID, *LARGE_BOTH_WAYS, ONE_COLUMN_APART],
)
IMPOSSIBLE = (
    (r"axis (?:= -1|not given) \| x\.cols (?:= 1|odd)", "K is a multiple of 16"),
    (r"axis = -2 \| x\.rows (?:= 1|odd)", "M is a multiple of 16"),
    (r"x\.cols (?:= 1|odd) \| x\.rows (?:= 1|odd)", "rows or columns are a multiple of 16"),
)
