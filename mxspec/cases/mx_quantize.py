"""The cases of mx_quantize: calls written by hand, calls worth timing, and the dimensions of a call."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from random import Random
from typing import Any

import torch
from torch import Tensor

from mxspec.cases.common.blocks import (
    above_powers_of_two,
    codes_and_ties,
    edge_blocks,
    every_exponent,
    rare_numbers,
    subnormal_amaxes,
)
from mxspec.cases.common.impossible import of_blocks
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
from mxspec.formats import E2M1, E4M3FN, E5M2, ELEMENTS, INT8, MX_BLOCK_SIZE, SCALINGS, ElementFormat
from mxspec.reference.common import checks
from mxspec.reference.mx_quantize import ELEM_CHOICES, SCALE_LAYOUTS
from mxspec.spec import Case, Shapes, given, normal, random_bits, random_normal, these


def cases() -> Iterator[Case]:
    bf16, fp16, fp32 = checks.FLOAT_DTYPES
    e5m2 = {"elem_dtype": torch.float8_e5m2}
    for i, (dtype, scaling) in enumerate(product((bf16, fp16, fp32), SCALINGS)):
        # Only under rceil do the dtype of x and the element format influence each other. For the other rules, every
        # value of an option meets every value of every other option.
        for fmt in ({}, e5m2) if scaling == "rceil" else (({}, e5m2)[(i + i // 4) % 2],):
            name = f"random bit patterns, {str(dtype)[6:]}, {scaling}, {'e5m2' if fmt else 'e4m3fn'}"
            yield Case(name, given(random_bits, 64, 128, dtype=dtype), {"scaling": scaling, **fmt})
    for scaling, dtype in zip(SCALINGS, (bf16, fp16, fp32, bf16), strict=True):
        kw = {"axis": -2, "scaling": scaling}
        name = f"random bit patterns, {str(dtype)[6:]}, {scaling}, axis -2"
        yield Case(name, given(random_bits, 288, 160, dtype=dtype), kw)
        yield Case(f"edge blocks, {scaling}, axis -2", lambda: (edge_blocks().mT.contiguous(),), kw, flags={"edge"})
        yield Case(
            f"every exponent, {scaling}, axis -2", lambda: (every_exponent().mT.contiguous(),), kw, flags={"edge"}
        )
    rng = Random(2129)  # with this seed, every value of an option meets every value of every other option
    for axis, layout, shape in 2 * list(product((-1, -2), SCALE_LAYOUTS, [(96, 160), (2, 160, 64)])):
        dtype, scaling, elem = rng.choice(checks.FLOAT_DTYPES), rng.choice(SCALINGS), rng.choice(("e4m3fn", "e5m2"))
        options = {"axis": axis, "scale_layout": layout, "scaling": scaling, "elem_dtype": elem}
        name = f"{'x'.join(map(str, shape))}, {str(dtype)[6:]}, {elem}, {scaling}, axis {axis}, {layout}"
        yield Case(name, given(random_normal, *shape, dtype=dtype), options)
    for axis in (-1, -2):
        for layout in SCALE_LAYOUTS:
            kw = {"axis": axis, "scale_layout": layout}
            for shape in [(32, 32), (96, 160), (160, 4128), (2, 96, 160), (3, 160, 32)]:
                name = f"{'x'.join(map(str, shape))}, axis {axis}, {layout}"
                yield Case(name, given(random_normal, *shape), kw)
            yield Case(f"transposed input, axis {axis}, {layout}", lambda: (random_normal(96, 160).mT,), kw)
            yield Case(f"empty, axis {axis}, {layout}", given(torch.zeros, 0, 0), kw, flags={"edge"})
    blocked = {"scale_layout": "blocked"}
    yield Case("one block", given(random_normal, 1, 32))
    yield Case("ragged rows, blocked", given(random_normal, 300, 416), blocked)
    yield Case("ragged rows, blocked, e5m2", given(random_normal, 300, 416), {"elem_dtype": "e5m2", **blocked})
    yield Case("ragged rows, floor, blocked", given(random_normal, 5, 9, 96), {"scaling": "floor", **blocked})
    yield Case(
        "negated view", lambda: (torch.complex(normal(4, 64), normal(4, 64, seed=1)).conj().imag,), flags={"edge"}
    )
    yield Case("no rows", given(torch.zeros, 0, 64), flags={"edge"})
    yield Case("no columns", given(torch.zeros, 4, 0), blocked, flags={"edge"})
    yield Case("no experts", given(torch.zeros, 0, 4, 64), blocked, flags={"edge"})
    for layout in SCALE_LAYOUTS:
        kw = {"axis": -2, "scale_layout": layout}
        yield Case(f"ragged against every tile, axis -2, {layout}", given(random_normal, 3, 544, 336), kw)
        yield Case(f"odd K, axis -2, {layout}", given(random_normal, 64, 333), kw, flags={"edge"})
        for axis in (-1, -2):
            kw = {"axis": axis, "scale_layout": layout}
            yield Case(f"every second row, axis {axis}, {layout}", lambda: (random_normal(192, 64)[::2],), kw)
            yield Case(f"every second column, axis {axis}, {layout}", lambda: (random_normal(96, 320)[:, ::2],), kw)
    for dtype in (bf16, fp16, fp32):
        yield Case(
            f"subnormals, Inf, -Inf and NaN, {str(dtype)[6:]}", given(rare_numbers, dtype, 8, 64), flags={"edge"}
        )
    for element_format in ELEMENTS.values():
        yield from _cases_of(element_format)
    for scaling in SCALINGS:
        kw = {"scaling": scaling, "elem_dtype": INT8.dtype}
        yield Case(f"subnormal amaxes, {scaling}, int8", given(subnormal_amaxes), kw, flags={"edge"})
    large = these(random_normal(1, 2048).expand(2**20 + 256, 2048))
    yield Case("2^31 elements and more", large, flags={"large"})
    yield Case("2^31 elements and more, blocked", large, blocked, flags={"large"})
    yield Case("2^31 elements and more, axis -2", large, {"axis": -2}, flags={"large"})
    yield Case("2^31 elements and more, axis -2, blocked", large, {"axis": -2, **blocked}, flags={"large"})

    def refused(name, x, error, match, **kwargs):
        return Case(name, these(x), kwargs, raises=error, match=match)

    x = torch.zeros(64, 64)
    yield refused("K = 100", torch.zeros(4, 100), ValueError, "K = 100 is not a multiple of 32, the block size")
    yield refused("M = 100", torch.zeros(100, 32), ValueError, "M = 100 is not a multiple", axis=-2)
    yield refused("1-D", torch.zeros(64), ValueError, "2-D or 3-D")
    yield refused("4-D", torch.zeros(1, 1, 1, 32), ValueError, "2-D or 3-D")
    yield refused("int32", torch.zeros(4, 32, dtype=torch.int32), TypeError, "torch.int32")
    yield refused("float64", torch.zeros(4, 32, dtype=torch.float64), TypeError, "torch.float64")
    yield refused("already fp8", torch.zeros(4, 32).to(torch.float8_e4m3fn), TypeError, "torch.float8_e4m3fn")
    yield refused("sparse", x.to_sparse(), ValueError, "torch.sparse_coo")
    yield refused("axis -1.0", x, ValueError, "axis = -1.0", axis=-1.0)
    yield refused("axis 0", x, ValueError, "axis = 0", axis=0)
    yield refused("unknown scaling", x, ValueError, "'nearest'", scaling="nearest")
    yield refused("unknown layout", x, ValueError, "'swizzled'", scale_layout="swizzled")
    yield refused("uint8 elements", x, TypeError, "uint8", elem_dtype=torch.uint8)
    yield refused("e3m4 elements", x, TypeError, "e3m4", elem_dtype="e3m4")
    yield refused("K = 48, e2m3", torch.zeros(4, 48), ValueError, "K = 48 is not a multiple", elem_dtype="e2m3")


def _cases_of(fmt: ElementFormat) -> Iterator[Case]:
    """The cases of an element format, and, for all but FP8, cases of every option, and of where elements lie."""
    elem: dict[str, Any] = {"elem_dtype": fmt.dtype or fmt.name}
    yield Case(f"every code and tie, {fmt.name}", given(codes_and_ties, fmt), elem, flags={"edge"})
    for scaling in SCALINGS:
        kw = {"scaling": scaling, **elem}
        yield Case(f"edge blocks, {scaling}, {fmt.name}", given(edge_blocks), kw, flags={"edge"})
        yield Case(f"every exponent, {scaling}, {fmt.name}", given(every_exponent, fmt), kw, flags={"edge"})
    ceil = {"scaling": "ceil", **elem}
    yield Case(f"just above powers of two, ceil, {fmt.name}", given(above_powers_of_two), ceil, flags={"edge"})
    if fmt in (E4M3FN, E5M2):
        return
    # Every value of an option meets every value of every other option.
    for i, (dtype, scaling) in enumerate(product(checks.FLOAT_DTYPES, SCALINGS)):
        axis, layout = (-1, -2)[(i + i // 4) % 2], SCALE_LAYOUTS[(i // 2 + i // 4) % 2]
        shape = [(96, 160), (2, 160, 64), (64, 96)][i % 3]
        kw = {"scaling": scaling, "axis": axis, "scale_layout": layout, **elem}
        name = f"{'x'.join(map(str, shape))}, {str(dtype)[6:]}, {fmt.name}, {scaling}, axis {axis}, {layout} scales"
        yield Case(f"random bit patterns, {name}", given(random_bits, *shape, dtype=dtype), kw)
    for axis in (-1, -2):
        kw, end = {"axis": axis, **elem}, f", {fmt.name}, axis {axis}"
        yield Case(f"one block{end}", given(random_normal, *((1, 32) if axis == -1 else (32, 1))), kw, flags={"edge"})
        flags = {"edge"} if axis == -2 else set()  # the rows of 301 elements begin between wide loads
        yield Case(f"ragged{end}", given(random_normal, *((301, 416) if axis == -1 else (416, 301))), kw, flags=flags)
        yield Case(f"transposed input{end}", lambda: (random_normal(96, 160).mT,), kw)
        yield Case(f"every second column{end}", lambda: (random_normal(96, 320)[:, ::2],), kw)
        yield Case(f"empty{end}", given(torch.zeros, 0, 0), kw, flags={"edge"})


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    for shape in (*shapes.matrices, *shapes.experts):
        x, name = given(torch.randn, *shape, dtype=torch.bfloat16), "x".join(map(str, shape))
        for layout in SCALE_LAYOUTS if len(shape) == 2 else ("blocked",):
            yield Case(f"{name}, rceil, {layout}", x, {"scale_layout": layout})
            if shape[-2] % MX_BLOCK_SIZE == 0:  # a few tokens occur only in the forward pass, which has axis -1
                yield Case(f"{name}, rceil, {layout}, axis -2", x, {"scale_layout": layout, "axis": -2})
        if len(shape) == 2 and shape[0] * shape[1] >= 2**26:  # smaller calls are too short to show the cost of a rule
            yield Case(f"{name}, floor, plain", x, {"scaling": "floor"})
            if shape[-2] % MX_BLOCK_SIZE == 0:
                yield Case(f"{name}, floor, plain, axis -2", x, {"scaling": "floor", "axis": -2})
                yield Case(f"{name}, rceil, plain, e2m1, axis -2", x, {"elem_dtype": E2M1.dtype, "axis": -2})
            yield Case(f"{name}, rceil, plain, e2m1", x, {"elem_dtype": E2M1.dtype})


def _possible(choice: Choice) -> bool:
    axis = axis_of(choice)
    return fits(choice, 32 if axis == -2 else 1, 32 if axis == -1 else 1)


def _make(choice: Choice) -> tuple[Tensor]:
    return (made(choice, shape_of(choice), axis_of(choice) == -2),)


OPTIONS = {"axis": (-1, -2), "elem_dtype": ELEM_CHOICES, "scaling": SCALINGS, "scale_layout": SCALE_LAYOUTS}
SQUARE = [{"elem_dtype": elem, "rows": 256, "cols": 256, "strides": "row-major"} for elem in ELEM_CHOICES]
BEYOND = [*PAST_A_GRID, EXPERTS_PAST_A_GRID, *LARGE_BOTH_WAYS, ONE_COLUMN_APART]
SPACE = Space(STACK, _make, OPTIONS, _possible, [*REPEATED, *SQUARE], beyond=BEYOND)
IMPOSSIBLE = of_blocks(32)
