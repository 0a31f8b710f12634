"""The cases of fp8_quantize_128x128: calls written by hand, calls worth timing, and the dimensions of a call."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.quantizers import STACK, WHOLE_BOTH_WAYS, fits, made, shape_of
from mxspec.cases.common.space import Space
from mxspec.cases.fp8_quantize_1x128 import REPEATED_HERE, TAILS
from mxspec.formats import FP8_SIZE_MULTIPLE
from mxspec.reference.common import checks
from mxspec.reference.common.fp8_numerics import SCALE_FORMATS
from mxspec.spec import Case, Shapes, given, random_bits, random_normal, these


def cases() -> Iterator[Case]:
    for dtype in checks.FLOAT_DTYPES:
        for scale_format in SCALE_FORMATS:
            name = f"128x256, {str(dtype)[6:]}, {scale_format}"
            yield Case(name, given(random_normal, 128, 256, dtype=dtype), {"scale_format": scale_format})
    for shape in [(1, 128), (127, 128), (129, 384), (300, 256), (2, 128, 128), (3, 130, 256)]:
        yield Case("x".join(map(str, shape)), given(random_normal, *shape))
    for i, K in enumerate(TAILS):
        yield Case(f"130x{K}", given(random_normal, 130, K))
        turned: dict[str, Any] = {"with_transpose": True, "scale_format": SCALE_FORMATS[i % 2]}
        yield Case(f"with transpose, {K}x144", given(random_normal, K, 144, dtype=checks.FLOAT_DTYPES[i % 3]), turned)
    for prefix, own in (("with transpose, ", {"with_transpose": True}), ("", {})):
        yield Case(f"{prefix}2x144x208", given(random_normal, 2, 144, 208), own)
        yield Case(f"{prefix}208x400, transposed input", lambda: (random_normal(400, 208).mT,), own)
        yield Case(f"{prefix}tails of zeros and with a NaN", _tails, own, flags={"edge"})
    yield Case("experts, partial, pow2", given(random_normal, 2, 130, 256), {"scale_format": "pow2"})
    yield Case("larger eps", given(torch.full, (130, 128), 1e-6), {"eps": 1e-4})
    for dtype in checks.FLOAT_DTYPES:
        end = str(dtype)[6:]
        yield Case(f"NaN, Inf and -Inf in blocks, {end}", partial(_special, dtype), flags={"edge"})
    yield Case("random bit patterns", given(random_bits, 256, 256, dtype=torch.bfloat16), flags={"edge"})
    nan = torch.zeros(200, 256)
    nan[150, 200], nan[10, 10] = torch.nan, torch.inf
    yield Case("NaN and Inf in two of four blocks", these(nan), flags={"edge"})
    yield Case("zeros", given(torch.zeros, 130, 128), flags={"edge"})
    yield Case("no rows", given(torch.zeros, 0, 256), flags={"edge"})
    yield Case("no experts", given(torch.zeros, 0, 130, 128), flags={"edge"})
    with_transpose: dict[str, Any] = {"with_transpose": True}
    for dtype, scale_format in zip(checks.FLOAT_DTYPES, (*SCALE_FORMATS, SCALE_FORMATS[0]), strict=True):
        name = f"with transpose, 256x384, {str(dtype)[6:]}, {scale_format}"
        kw = {**with_transpose, "scale_format": scale_format}
        yield Case(name, given(random_normal, 256, 384, dtype=dtype), kw)
    for shape in [(1, 128), (130, 256), (576, 128), (2, 128, 256), (3, 133, 128)]:
        flags = {"edge"} if shape[-2] % 16 else set()  # then the rows of the transpose are not aligned to 16 bytes
        name = f"with transpose, {'x'.join(map(str, shape))}"
        yield Case(name, given(random_normal, *shape), with_transpose, flags=flags)
    for kw, prefix in ((with_transpose, "with transpose, "), ({}, "")):
        yield Case(f"{prefix}transposed input", lambda: (random_normal(256, 144).mT,), kw)
        yield Case(f"{prefix}every second column", lambda: (random_normal(130, 512)[:, ::2],), kw)
        large = these(random_normal(1, 2048).expand(2**20 + 130, 2048))
        yield Case(f"{prefix}2^31 elements and more", large, kw, flags={"large"})
    bits = given(random_bits, 200, 256, dtype=torch.bfloat16)
    yield Case("with transpose, random bit patterns", bits, with_transpose, flags={"edge"})
    yield Case("with transpose, NaN and Inf in two of four blocks", these(nan), with_transpose, flags={"edge"})
    yield Case("with transpose, no rows", given(torch.zeros, 0, 256), with_transpose, flags={"edge"})
    yield Case("with transpose, no experts", given(torch.zeros, 0, 130, 128), with_transpose, flags={"edge"})
    refused: list[tuple[str, Tensor, dict[str, Any], type[Exception], str]] = [
        ("K = 100", torch.zeros(128, 100), {}, ValueError, "K = 100"),
        ("K = 8", torch.zeros(128, 8), {}, ValueError, "K = 8 is not a multiple of 16; pad"),
        ("K = 2888", torch.zeros(1, 2888), {}, ValueError, "K = 2888 is not a multiple of 16; pad"),
        ("1-D", torch.zeros(128), {}, ValueError, "2-D or 3-D"),
        ("int8", torch.zeros(128, 128, dtype=torch.int8), {}, TypeError, "int8"),
        ("unknown scale format", torch.zeros(128, 128), {"scale_format": "e8m0"}, ValueError, "'e8m0'"),
        ("with_transpose as text", torch.zeros(128, 128), {"with_transpose": "no"}, TypeError, "with_transpose = 'no'"),
        ("sparse", torch.zeros(128, 128).to_sparse(), {}, ValueError, "torch.sparse_coo"),
    ]
    for name, w, options, error, match in refused:
        yield Case(name, these(w), options, raises=error, match=match)


def _special(dtype: torch.dtype) -> tuple[Tensor]:
    """Four blocks: with a NaN, with an Inf, with a -Inf, and with -0 in every second column."""
    w = random_normal(256, 256, dtype=dtype)
    w[3, 5], w[100, 200], w[200, 7], w[200:, 200::2] = torch.nan, torch.inf, -torch.inf, -0.0
    return (w,)


def _tails() -> tuple[Tensor]:
    """Three rows of squares of 16 columns: of zeros, with a NaN, and with the largest number of the matrix."""
    w = random_normal(300, 272)
    w[:128, 256:], w[200, 271], w[299, 256] = -0.0, torch.nan, 2.0**30
    return (w,)


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    for shape in (*dict.fromkeys((N, K) for _, N, K in shapes.linear), *shapes.experts):
        name, w = "x".join(map(str, shape)), given(torch.randn, *shape, dtype=torch.bfloat16)
        yield Case(name, w)
        if len(shape) == 2:
            yield Case(f"{name}, with transpose", w, {"with_transpose": True})


def _make(choice: Choice) -> tuple[Tensor]:
    return (made(choice, shape_of(choice)),)


def _possible(choice: Choice) -> bool:
    wide = choice.get("cols", 0) > 4096 and (choice.get("experts") or 0) > 256
    return fits(choice, 1, FP8_SIZE_MULTIPLE) and not wide


SIZES = {"rows": (0, 1, 33, 128, 144, 1152, 4224), "cols": (0, 128, 144, 1152, 4224)}
OPTIONS = {"scale_format": SCALE_FORMATS, "eps": (1e-12, 1e-4), "with_transpose": (False, True)}
ALSO = [
    *(part for part in REPEATED_HERE if part.get("cols") != 1),
    {"with_transpose": False, "begins": "at 0", "strides": "row-major"},
]
SPACE = Space({**STACK, **SIZES}, _make, OPTIONS, _possible, ALSO, beyond=WHOLE_BOTH_WAYS)
IMPOSSIBLE = ((r"w\.cols > 4096 \| w\.experts > 256", "the padded weights have more than 100 million elements"),)
