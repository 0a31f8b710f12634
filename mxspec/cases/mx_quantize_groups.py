"""The cases of mx_quantize_groups: calls written by hand, calls worth timing, and the dimensions of a call."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch
from torch import Tensor

from mxspec.cases.common.blocks import edge_blocks, rare_numbers
from mxspec.cases.common.groups import ARRANGED, BEYOND, GROUPS, groups_fit, offsets, padded_fits
from mxspec.cases.common.impossible import PADDED_GROUPS
from mxspec.cases.common.mx_rowcol_groups import WITH_E2M1
from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.quantizers import (
    MATRIX,
    REPEATED,
    axis_of,
    fits,
    made,
    shape_of,
)
from mxspec.cases.common.space import Space, given
from mxspec.cases.common.token_groups import far_apart, grouped, offs_of, random_offs
from mxspec.formats import SCALINGS
from mxspec.reference.common import checks
from mxspec.reference.mx_quantize import SCALE_LAYOUTS
from mxspec.spec import Case, Shapes, random_bits, random_normal, these


def cases() -> Iterator[Case]:
    def args(sizes, M, K, dtype=torch.bfloat16):
        return random_normal(M, K, dtype=dtype), offs_of(sizes)

    for axis, (name, sizes, M, _, flags) in product((-1, -2), grouped()):
        if len(sizes) < 300:  # more groups would take minutes in an interpreter, because of their padding
            yield Case(f"{name}, axis {axis}", partial(args, sizes, M, 96), {"axis": axis}, flags=flags)
    # Every value of an option meets every value of every other option.
    for i, (axis, layout, scaling) in enumerate(product((-1, -2), SCALE_LAYOUTS, SCALINGS)):
        dtype, elem = checks.FLOAT_DTYPES[i % 3], ("e4m3fn", "e5m2")[(i + i // 4 + i // 8) % 2]
        name = f"random bit patterns, {str(dtype)[6:]}, {elem}, {scaling}, axis {axis}, {layout}"
        bits = partial(lambda dtype: (random_bits(110, 64, dtype=dtype), offs_of([100])), dtype)
        options = {"axis": axis, "scale_layout": layout, "scaling": scaling, "elem_dtype": elem}
        yield Case(name, bits, options)
    for axis, pad_to, layout in product((-1, -2), (128, 384), SCALE_LAYOUTS):
        kw = {"axis": axis, "pad_to": pad_to, "scale_layout": layout}
        yield Case(f"pad_to {pad_to}, axis {axis}, {layout}", partial(args, [140, 1], 150, 160), kw)
    for axis in (-1, -2):
        kw = {"axis": axis}
        yield Case(f"transposed input, axis {axis}", lambda: (random_normal(64, 210).mT, offs_of([130, 70])), kw)
        yield Case(f"every second row, axis {axis}", lambda: (random_normal(300, 64)[::2], offs_of([130, 9])), kw)
        yield Case(
            f"edge blocks, axis {axis}", lambda: (edge_blocks(), offs_of([edge_blocks().shape[0]])), kw, flags={"edge"}
        )
        yield Case(f"rows far apart, axis {axis}", lambda: (far_apart(140, 64), offs_of([100, 39])), kw, flags={"edge"})
        yield Case(f"no columns, axis {axis}", partial(args, [3, 4], 7, 0), kw, flags={"edge"})
        yield Case(f"checked, axis {axis}", partial(args, [30, 10], 41, 64), {"check_offs": True, **kw})
        large = these(random_normal(1, 2048).expand(2**20 + 256, 2048), offs_of([2**20 + 256]))
        yield Case(f"2^31 elements and more, axis {axis}", large, kw, flags={"large"})
    for i, (axis, scaling) in enumerate(product((-1, -2), SCALINGS)):
        kw = {"axis": axis, "elem_dtype": "e2m1", "scaling": scaling, "scale_layout": SCALE_LAYOUTS[(i + i // 4) % 2]}
        dtype = checks.FLOAT_DTYPES[i % 3]
        bits = partial(lambda dtype: (random_bits(110, 64, dtype=dtype), offs_of([33, 0, 67])), dtype)
        yield Case(f"random bit patterns, {str(dtype)[6:]}, e2m1, {scaling}, axis {axis}", bits, kw)
    for axis, layout in product((-1, -2), SCALE_LAYOUTS):
        kw = {"axis": axis, "elem_dtype": torch.float4_e2m1fn_x2, "scale_layout": layout}
        yield Case(f"three groups, e2m1, axis {axis}, {layout}", partial(args, [129, 0, 177], 310, 160), kw)
        edges = lambda: (edge_blocks(), offs_of([edge_blocks().shape[0]]))  # noqa: E731
        yield Case(f"edge blocks, e2m1, axis {axis}, {layout}", edges, kw, flags={"edge"})
    for dtype in checks.FLOAT_DTYPES:
        numbers = partial(lambda dtype: (rare_numbers(dtype, 70, 64), offs_of([40, 30])), dtype)
        yield Case(f"subnormals, Inf, -Inf and NaN, {str(dtype)[6:]}", numbers, flags={"edge"})
    one = these(torch.full((1, 64), 1.9), offs_of([1]))
    yield Case("one token whose blocks may saturate", one, flags={"edge"})
    kw = {"axis": -2, "elem_dtype": "e2m1"}
    yield Case("odd K, e2m1, axis -2", partial(args, [30, 200], 230, 333), kw, flags={"edge"})
    yield Case("odd K, axis -2", partial(args, [30, 200], 230, 333), {"axis": -2}, flags={"edge"})

    x, offs = args([5, 0, 40], 50, 64)

    def refused(name, error, match, x=x, offs=offs, **kwargs):
        return Case(name, these(x, offs), kwargs, raises=error, match=match)

    yield refused("K = 100", ValueError, "K = 100 is not a multiple of 32, the block size", torch.zeros(50, 100))
    yield refused("float64", TypeError, "torch.float64", x.double())
    yield refused("3-D", ValueError, "2-D", x[None])
    yield refused("int64 offs", TypeError, "offs has dtype torch.int64; needs torch.int32", offs=offs.long())
    yield refused("2-D offs", ValueError, "offs has shape (1, 3); needs a 1-D", offs=offs[None])
    yield refused("offs elsewhere", ValueError, "one device", offs=offs.to("meta"))
    yield refused("pad_to 64", ValueError, "pad_to = 64; needs a multiple of 128", pad_to=64)
    yield refused("pad_to 0", ValueError, "pad_to = 0; needs at least 1", pad_to=0)
    yield refused("pad_to 128.0", TypeError, "pad_to = 128.0", pad_to=128.0)
    yield refused("axis 0", ValueError, "axis = 0", axis=0)
    yield refused("unknown scaling", ValueError, "'nearest'", scaling="nearest")
    yield refused("unknown layout", ValueError, "'swizzled'", scale_layout="swizzled")
    yield refused("int8 elements", TypeError, "int8", elem_dtype=torch.int8)
    yield refused("e2m3 elements", TypeError, "'e2m3'; needs one of", elem_dtype="e2m3")
    yield refused("offs that decrease", ValueError, "offs[1] = 5 after 45", offs=offs.flip(0), check_offs=True)


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    def args(M: int, K: int) -> tuple[Tensor, Tensor]:
        return torch.randn(M, K, dtype=torch.bfloat16), random_offs(M, 8)  # eight groups, as in torchao's table

    for M, K in shapes.matrices:
        if M >= 1024 and M * K < 2**30:
            # Smaller calls are too short to show the cost of a rule.
            rules = ("rceil", "floor") if M * K >= 2**26 else ("rceil",)
            for axis, scaling in product((-1, -2), rules):
                name = f"{M}x{K}, G 8, {scaling}, blocked" + (", axis -2" if axis == -2 else "")
                yield Case(name, partial(args, M, K), {"axis": axis, "scaling": scaling})


def _possible(choice: Choice) -> bool:
    pad_to = given(choice, "pad_to", 128) or 128
    arranged = groups_fit(choice, choice.get("rows")) and padded_fits(choice, "rows", "cols", pad_to)
    return arranged and fits(choice, 1, 32 if axis_of(choice) == -1 else 1)


def _make(choice: Choice) -> tuple[Tensor, Tensor]:
    return made(choice, shape_of(choice), axis_of(choice) == -2), offsets(choice, choice["rows"])


SPACE = Space(
    {"rows": MATRIX["rows"], "cols": MATRIX["cols"], **GROUPS, **MATRIX},
    _make,
    {"axis": (-1, -2), **WITH_E2M1},
    _possible,
    [*REPEATED, *ARRANGED],
    beyond=BEYOND,
)
TOKENS = "x.rows"
IMPOSSIBLE = (
    (r"axis (?:= -1|not given) \| x\.cols (?:= 1|odd)", "K is a multiple of 32"),
    *PADDED_GROUPS,
)
