"""The cases of mx_quantize_rowcol: calls written by hand, calls worth timing, and the dimensions of a call."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from mxspec.cases.common.blocks import edge_blocks, every_exponent, rare_numbers
from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.quantizers import LARGE_BOTH_WAYS, PAST_A_GRID, REPEATED, STACK, fits, made, shape_of
from mxspec.cases.common.space import Space
from mxspec.formats import E4M3FN, E5M2, ELEMENTS, MX_BLOCK_SIZE, SCALINGS
from mxspec.reference.common import checks
from mxspec.reference.mx_quantize import ELEM_CHOICES, SCALE_LAYOUTS
from mxspec.spec import Case, Shapes, given, random_bits, random_normal, these


def _edge_blocks() -> Tensor:
    """The edge blocks, with rows of ones added to make 32 rows."""
    return torch.cat([edge_blocks(), torch.ones(6, 64)])


def _every_exponent() -> Tensor:
    """The blocks of every exponent, with a row of ones added to make 256 rows."""
    return torch.cat([every_exponent(), torch.ones(1, 128)])


def cases() -> Iterator[Case]:
    # Every value of an option meets every value of every other option.
    for i, (dtype, scaling) in enumerate(product(checks.FLOAT_DTYPES, SCALINGS)):
        layout, elem = SCALE_LAYOUTS[(i + i // 4) % 2], ("e4m3fn", "e5m2")[(i // 2 + i // 4) % 2]
        options = {"scaling": scaling, "scale_layout": layout, "elem_dtype": elem}
        name = f"random bit patterns, {str(dtype)[6:]}, {elem}, {scaling}, {layout}"
        yield Case(name, given(random_bits, 64, 96, dtype=dtype), options)
    for scaling in SCALINGS:
        yield Case(f"edge blocks, {scaling}", given(_edge_blocks), {"scaling": scaling}, flags={"edge"})
        yield Case(f"every exponent, {scaling}", given(_every_exponent), {"scaling": scaling}, flags={"edge"})
    for dtype in checks.FLOAT_DTYPES:
        yield Case(
            f"subnormals, Inf, -Inf and NaN, {str(dtype)[6:]}", given(rare_numbers, dtype, 64, 32), flags={"edge"}
        )
    for layout in SCALE_LAYOUTS:
        kw: dict[str, Any] = {"scale_layout": layout}
        for shape in [(32, 32), (288, 160), (160, 416), (2, 96, 160), (3, 160, 32)]:
            yield Case(f"{'x'.join(map(str, shape))}, {layout}", given(random_normal, *shape), kw)
        yield Case(f"transposed input, {layout}", lambda: (random_normal(96, 160).mT,), kw)
        yield Case(f"every second row, {layout}", lambda: (random_normal(192, 64)[::2],), kw)
        yield Case(f"every second column, {layout}", lambda: (random_normal(96, 320)[:, ::2],), kw)
        yield Case(f"no rows, {layout}", given(torch.zeros, 0, 64), kw, flags={"edge"})
        yield Case(f"no columns, {layout}", given(torch.zeros, 64, 0), kw, flags={"edge"})
        yield Case(f"no experts, {layout}", given(torch.zeros, 0, 64, 32), kw, flags={"edge"})
        large = these(random_normal(1, 2048).expand(2**20 + 256, 2048))
        yield Case(f"2^31 elements and more, {layout}", large, kw, flags={"large"})
    for fmt in [fmt for fmt in ELEMENTS.values() if fmt not in (E4M3FN, E5M2)]:
        for i, (dtype, scaling) in enumerate(zip((*checks.FLOAT_DTYPES, torch.bfloat16), SCALINGS, strict=True)):
            kw = {"elem_dtype": fmt.dtype or fmt.name, "scaling": scaling, "scale_layout": SCALE_LAYOUTS[i % 2]}
            bits = given(random_bits, *((64, 96) if i < 2 else (2, 32, 160)), dtype=dtype)
            yield Case(f"random bit patterns, {str(dtype)[6:]}, {fmt.name}, {scaling}", bits, kw)
            yield Case(f"edge blocks, {fmt.name}, {scaling}", given(_edge_blocks), kw, flags={"edge"})

    def refused(name, x, error, match, **kwargs):
        return Case(name, these(x), kwargs, raises=error, match=match)

    x = torch.zeros(64, 64)
    yield refused("K = 100", torch.zeros(64, 100), ValueError, "K = 100 is not a multiple of 32, the block size")
    yield refused("M = 100", torch.zeros(100, 64), ValueError, "M = 100 is not a multiple of 32, the block size")
    yield refused("1-D", torch.zeros(64), ValueError, "2-D or 3-D")
    yield refused("float64", x.double(), TypeError, "torch.float64")
    yield refused("sparse", x.to_sparse(), ValueError, "torch.sparse_coo")
    yield refused("unknown scaling", x, ValueError, "'nearest'", scaling="nearest")
    yield refused("unknown layout", x, ValueError, "'swizzled'", scale_layout="swizzled")
    yield refused("uint8 elements", x, TypeError, "uint8", elem_dtype=torch.uint8)


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    for shape in (*shapes.matrices, *shapes.experts):
        if shape[-2] % MX_BLOCK_SIZE == 0:  # a few tokens occur only in the forward pass, which needs no columns
            x = given(torch.randn, *shape, dtype=torch.bfloat16)
            for layout in SCALE_LAYOUTS if len(shape) == 2 else ("blocked",):
                yield Case(f"{'x'.join(map(str, shape))}, rceil, {layout}", x, {"scale_layout": layout})


def _make(choice: Choice) -> tuple[Tensor]:
    return (made(choice, shape_of(choice)),)


SIZES = (0, 32, 96, 256, 1056, 4128)
OPTIONS = {"elem_dtype": ELEM_CHOICES, "scaling": SCALINGS, "scale_layout": SCALE_LAYOUTS}
SPACE = Space(
    {**STACK, "rows": SIZES, "cols": SIZES},
    _make,
    OPTIONS,
    lambda choice: fits(choice, 32, 32),
    REPEATED[:2],
    beyond=[*PAST_A_GRID, *LARGE_BOTH_WAYS],
)
