"""The cases of fp8_quantize_1x128: calls written by hand, calls worth timing, and the dimensions of a call."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.quantizers import (
    MATRIX,
    ONE_COLUMN_APART,
    PAST_A_GRID,
    REPEATED,
    WHOLE_BOTH_WAYS,
    axis_of,
    fits,
    made,
    shape_of,
)
from mxspec.cases.common.space import Space
from mxspec.cases.common.tensors import turned
from mxspec.cases.common.token_groups import offs_of
from mxspec.formats import FP8_BLOCK_SIZE, FP8_SIZE_MULTIPLE
from mxspec.reference.common import checks
from mxspec.reference.common.fp8_numerics import SCALE_FORMATS
from mxspec.reference.fp8_quantize_1x128 import SCALE_MAJORS
from mxspec.spec import Case, Shapes, given, normal, random_bits, random_normal, these


def cases() -> Iterator[Case]:
    for dtype in checks.FLOAT_DTYPES:
        for scale_format in SCALE_FORMATS:
            name = f"random bit patterns, {str(dtype)[6:]}, {scale_format}"
            yield Case(name, given(random_bits, 64, 256, dtype=dtype), {"scale_format": scale_format})
    for axis in (-1, -2):
        for major in SCALE_MAJORS:
            name = f"128x384, axis {axis}, {major}-major scale"
            yield Case(name, given(random_normal, 128, 384), {"axis": axis, "scale_major": major})
    for scale_format in SCALE_FORMATS:
        for dtype in checks.FLOAT_DTYPES:
            options = {"axis": -2, "scale_format": scale_format, "scale_major": "mn"}
            name = f"axis -2, {str(dtype)[6:]}, {scale_format}"
            yield Case(name, given(random_normal, 256, 96, dtype=dtype), options)
    yield Case("one row", given(random_normal, 1, 128), {"scale_major": "mn"})
    yield Case("ragged rows", given(random_normal, 77, 640))
    yield Case("ragged columns", given(random_normal, 256, 77), {"axis": -2}, flags={"edge"})
    for axis in (-1, -2):
        kw: dict[str, Any] = {"axis": axis, "scale_major": "mn"}
        yield Case(f"ragged against every tile, axis {axis}", given(random_normal, 384, 1408), kw)
        yield Case(f"transposed input, axis {axis}", lambda: (random_normal(128, 256).mT,), kw)
        yield Case(f"every second row, axis {axis}", lambda: (random_normal(256, 128)[::2],), {"axis": axis})
        yield Case(f"every second column, axis {axis}", lambda: (random_normal(128, 512)[:, ::2],), kw)
        large = these(random_normal(1, 2048).expand(2**20 + 256, 2048))
        yield Case(f"2^31 elements and more, axis {axis}, mn-major", large, kw, flags={"large"})
    yield Case("2^31 elements and more", large, flags={"large"})
    yield Case("odd K, axis -2", given(random_normal, 128, 333), {"axis": -2}, flags={"edge"})
    for i, K in enumerate(TAILS):
        first, second = ({"scale_major": major} for major in (SCALE_MAJORS if i % 2 else SCALE_MAJORS[::-1]))
        yield Case(f"{K} columns, {first['scale_major']}-major scale", given(random_normal, 33, K), first)
        yield Case(f"{K} columns of a transposed input", partial(_transposed, K, 33), second)
        across = {"axis": -2, **second}
        yield Case(f"{K} rows, axis -2, {second['scale_major']}-major scale", given(random_normal, K, 48), across)
    yield Case("144x144", given(random_normal, 144, 144))
    for axis in (-1, -2):
        yield Case(f"tails of zeros and with a NaN, axis {axis}", partial(_tails, axis), {"axis": axis}, flags={"edge"})
    bits = given(random_bits, 64, 208, dtype=torch.bfloat16)
    yield Case("random bit patterns, 208 columns", bits, {"scale_format": "pow2"}, flags={"edge"})
    yield Case("larger eps", lambda: (random_normal(4, 128) * 2**-30,), {"eps": 1e-4})
    yield Case("zeros, bf16", given(torch.zeros, 2, 128, dtype=torch.bfloat16), flags={"edge"})
    yield Case("zeros, fp32", lambda: (-torch.zeros(2, 128),), {"scale_format": "pow2"}, flags={"edge"})
    for dtype, axis in product(checks.FLOAT_DTYPES, (-1, -2)):
        end, kw = f"{str(dtype)[6:]}, axis {axis}", {"axis": axis}
        yield Case(f"Inf and -Inf in blocks, {end}", partial(_special, dtype), kw, flags={"edge"})
    yield Case("amax below eps", given(torch.full, (1, 128), 1e-13), flags={"edge"})
    yield Case("fp32 max", given(torch.full, (1, 128), torch.finfo().max), flags={"edge"})
    yield Case(
        "negated view", lambda: (torch.complex(normal(4, 128), normal(4, 128, seed=1)).conj().imag,), flags={"edge"}
    )
    for axis in (-1, -2):
        yield Case(f"no rows, axis {axis}", given(torch.zeros, 0, 256), {"axis": axis}, flags={"edge"})
        yield Case(f"no columns, axis {axis}", given(torch.zeros, 128, 0), {"axis": axis}, flags={"edge"})
    ok = torch.zeros(128, 128)
    refused: list[tuple[str, Tensor, dict[str, Any], type[Exception], str]] = [
        ("K = 100", torch.zeros(4, 100), {}, ValueError, "K = 100"),
        ("K = 8", torch.zeros(4, 8), {}, ValueError, "K = 8 is not a multiple of 16; pad"),
        ("K = 2888", torch.zeros(1, 2888), {}, ValueError, "K = 2888 is not a multiple of 16; pad"),
        ("M = 2888", torch.zeros(2888, 1), {"axis": -2}, ValueError, "M = 2888 is not a multiple of 16; pad"),
        ("M = 100", torch.zeros(100, 4), {"axis": -2}, ValueError, "M = 100"),
        ("3-D", torch.zeros(1, 4, 128), {}, ValueError, "2-D"),
        ("float64", ok.double(), {}, TypeError, "float64"),
        ("unknown scale format", ok, {"scale_format": "ue8m0"}, ValueError, "'ue8m0'"),
        ("unknown major", ok, {"scale_major": "m"}, ValueError, "'m'"),
        ("eps 0", ok, {"eps": 0.0}, ValueError, "eps = 0.0"),
        ("eps whose factor overflows", ok, {"eps": 1e-36}, ValueError, "eps = 1e-36"),
        ("eps inf", ok, {"eps": float("inf")}, ValueError, "eps = inf"),
        ("eps as text", ok, {"eps": "1"}, TypeError, "eps = '1'"),
        ("sparse", torch.zeros(128, 128).to_sparse(), {}, ValueError, "torch.sparse_coo"),
    ]
    for name, x, options, error, match in refused:
        yield Case(name, these(x), options, raises=error, match=match)


def _special(dtype: torch.dtype) -> tuple[Tensor]:
    """Inf and -Inf in different blocks along both axes, and zeros of both signs."""
    x = random_normal(128, 128, dtype=dtype)
    x[50, 50], x[90, 90], x[100:, 100::2] = torch.inf, -torch.inf, -0.0
    return (x,)


def _transposed(rows: int, cols: int) -> tuple[Tensor]:
    return (random_normal(rows, cols).mT,)


def _tails(axis: int) -> tuple[Tensor]:
    """Rows that end with a shorter block: of zeros, with a NaN, with an Inf, and with the largest number of the row."""
    x = random_normal(4, 272)
    x[0, 256:], x[1, 271], x[2, 256], x[3, 260] = -0.0, torch.nan, torch.inf, 2.0**30
    return (turned(x, axis),)


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    for M, K in (shape for shape in shapes.matrices if shape[0] >= 128):
        x = given(torch.randn, M, K, dtype=torch.bfloat16)
        yield Case(f"{M}x{K}, axis -1, k-major", x)
        yield Case(f"{M}x{K}, axis -1, mn-major", x, {"scale_major": "mn"})  # the layout that DeepGEMM and cuBLAS need
        if M % FP8_BLOCK_SIZE == 0:  # a few tokens occur only in the forward pass, which has axis -1
            yield Case(f"{M}x{K}, axis -2, mn-major", x, {"axis": -2, "scale_major": "mn"})


def _possible(choice: Choice) -> bool:
    axis = axis_of(choice)
    return fits(choice, FP8_SIZE_MULTIPLE if axis == -2 else 1, FP8_SIZE_MULTIPLE if axis == -1 else 1)


def _make(choice: Choice) -> tuple[Tensor]:
    return (made(choice, shape_of(choice), axis_of(choice) == -2),)


SIZES = (0, 1, 33, 128, 144, 1152, 4224)
TAILS = (16, 144, 576, 1440, 2880)  # the last block is shorter


def tokens_of(width: int) -> tuple[int, Tensor]:
    """A number of tokens and the ends of their groups. Wide tokens are few, so that the vectors stay small."""
    return (20, offs_of([17])) if width > 1000 else (145, offs_of([130, 0, 9]))


REPEATED_HERE = [{name: 1152 if value == 1056 else value for name, value in part.items()} for part in REPEATED]
OPTIONS = {"axis": (-1, -2), "scale_format": SCALE_FORMATS, "scale_major": SCALE_MAJORS, "eps": (1e-12, 1e-4)}
BEYOND = [{**PAST_A_GRID[0], "cols": 128}, {**PAST_A_GRID[1], "rows": 128, "axis": -2}]
BEYOND += [*WHOLE_BOTH_WAYS, ONE_COLUMN_APART]
SPACE = Space({**MATRIX, "rows": SIZES, "cols": SIZES}, _make, OPTIONS, _possible, REPEATED_HERE, beyond=BEYOND)
IMPOSSIBLE = (
    (r"axis (?:= -1|not given) \| x\.cols (?:= 1|odd)", "K is a multiple of 16"),
    (r"axis = -2 \| x\.rows (?:= 1|odd)", "M is a multiple of 16"),
    (r"x\.cols (?:= 1|odd) \| x\.rows (?:= 1|odd)", "rows or columns are a multiple of 16"),
)
