"""mx_quantize_rowcol: one tensor quantized along its rows and along its columns, which a kernel does in one read."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from mxspec.formats import MX_BLOCK_SIZE
from mxspec.reference import _checks
from mxspec.reference._mx_cases import edge_blocks, every_exponent
from mxspec.reference._numerics import SCALINGS
from mxspec.reference.mx_quantize import ELEM_CHOICES, FORMATS, SCALE_LAYOUTS, mx_quantize
from mxspec.spec import Case, Shapes, given, per_element, random_bits, random_normal, spec, these


def check_args(
    x: Tensor,
    *,
    elem_dtype: torch.dtype | str = torch.float8_e4m3fn,
    scaling: str = "rceil",
    scale_layout: str = "plain",
) -> None:
    op = "mx_quantize_rowcol"
    _checks.tensor_dtype(op, "x", x, _checks.FLOAT_DTYPES)
    _checks.rank(op, "x", x, (2, 3))
    _checks.choice(op, "elem_dtype", elem_dtype, ELEM_CHOICES, TypeError)
    _checks.choice(op, "scaling", scaling, SCALINGS)
    _checks.choice(op, "scale_layout", scale_layout, SCALE_LAYOUTS)
    _checks.multiple(op, "M", x.shape[-2], MX_BLOCK_SIZE)
    _checks.multiple(op, "K", x.shape[-1], MX_BLOCK_SIZE)


def cases() -> Iterator[Case]:
    # Every value of an option meets every value of every other.
    for i, (dtype, scaling) in enumerate(product(_checks.FLOAT_DTYPES, SCALINGS)):
        layout, elem = SCALE_LAYOUTS[(i + i // 4) % 2], ("e4m3fn", "e5m2")[(i // 2 + i // 4) % 2]
        options = {"scaling": scaling, "scale_layout": layout, "elem_dtype": elem}
        name = f"random bit patterns, {str(dtype)[6:]}, {elem}, {scaling}, {layout}"
        yield Case(name, given(random_bits, 64, 96, dtype=dtype), options)
    for scaling in SCALINGS:
        square = lambda: (torch.cat([edge_blocks(), torch.ones(6, 64)]),)  # noqa: E731
        yield Case(f"edge blocks, {scaling}", square, {"scaling": scaling}, flags={"edge"})
        square = lambda: (torch.cat([every_exponent(), torch.ones(1, 128)]),)  # noqa: E731
        yield Case(f"every exponent, {scaling}", square, {"scaling": scaling}, flags={"edge"})
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
    for fmt in [fmt for fmt in FORMATS if fmt.per_byte > 1]:
        for i, (dtype, scaling) in enumerate(zip((*_checks.FLOAT_DTYPES, torch.bfloat16), SCALINGS, strict=True)):
            kw = {"elem_dtype": fmt.dtype, "scaling": scaling, "scale_layout": SCALE_LAYOUTS[i % 2]}
            bits = given(random_bits, *((64, 96) if i < 2 else (2, 32, 160)), dtype=dtype)
            yield Case(f"random bit patterns, {str(dtype)[6:]}, {fmt.name}, {scaling}", bits, kw)
            square = lambda: (torch.cat([edge_blocks(), torch.ones(6, 64)]),)  # noqa: E731
            yield Case(f"edge blocks, {fmt.name}, {scaling}", square, kw, flags={"edge"})

    def refused(name, x, error, match, **kwargs):
        return Case(name, these(x), kwargs, raises=error, match=match)

    x = torch.zeros(64, 64)
    yield refused("K = 100", torch.zeros(64, 100), ValueError, "K = 100 is not a multiple of block_size 32")
    yield refused("M = 100", torch.zeros(100, 64), ValueError, "M = 100 is not a multiple of block_size 32")
    yield refused("1-D", torch.zeros(64), ValueError, "2-D or 3-D")
    yield refused("float64", x.double(), TypeError, "torch.float64")
    yield refused("sparse", x.to_sparse(), ValueError, "torch.sparse_coo")
    yield refused("unknown scaling", x, ValueError, "'nearest'", scaling="nearest")
    yield refused("unknown layout", x, ValueError, "'swizzled'", scale_layout="swizzled")
    yield refused("int8 elements", x, TypeError, "int8", elem_dtype=torch.int8)


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    for shape in (*shapes.matrices, *shapes.experts):
        if shape[-2] % MX_BLOCK_SIZE == 0:  # not for a few tokens, which only the forward pass has
            x = given(torch.randn, *shape, dtype=torch.bfloat16)
            for layout in SCALE_LAYOUTS if len(shape) == 2 else ("blocked",):
                yield Case(f"{'x'.join(map(str, shape))}, rceil, {layout}", x, {"scale_layout": layout})


@spec(
    cases=cases,
    check_args=check_args,
    flops=per_element(4),  # a maximum and a multiply, twice
    bench_cases=bench_cases,
)
def mx_quantize_rowcol(
    x: Tensor,
    *,
    elem_dtype: torch.dtype | str = torch.float8_e4m3fn,
    scaling: str = "rceil",
    scale_layout: str = "plain",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantize to MX in both directions: what `mx_quantize` gives along the rows, and what it gives along the columns.

    `(q_row, s_row) = mx_quantize(x, axis=-1, ...)` and `(q_col, s_col) = mx_quantize(x, axis=-2, ...)`. In training an
    activation is an operand twice: along K in the forward pass, along the tokens in the weight gradient.

    Args:
        x: `(M, K)` or `(E, N, K)`, the last two multiples of 32; bfloat16, float16 or float32; any strides.
        elem_dtype: torch.float8_e4m3fn, torch.float8_e5m2 or torch.float4_e2m1fn_x2, or the name, as for
            `mx_quantize`.
        scaling: `rceil`, `floor`, `ceil` or `even`, as for `mx_quantize`.
        scale_layout: `plain` or `blocked`, the 128x4 tiles of `to_blocked`; of both scales.

    Returns:
        `(q_row, s_row, q_col, s_col)`. q_row and q_col: x's shape, elem_dtype; q_row contiguous, q_col column-major
        per matrix (strides `(1, M)` or `(N*K, 1, N)`); of e2m1, two elements to a byte, `(..., K/2)` and
        `(..., M/2, K)`, as for `mx_quantize`. Scales: float8_e8m0fnu; plain, s_row `(..., M, K/32)` and s_col
        `(..., K, M/32)`, row-major; blocked, `to_blocked` of those, padding bytes 0.

    Special values: as for `mx_quantize`, in each direction by itself: a NaN takes its row's block of 32 and its
        column's.

    Raises:
        TypeError: the dtype of x, or elem_dtype.
        ValueError: rank, scaling, scale_layout, or a size that is not a multiple of 32.

    Example:
        >>> x = torch.zeros(32, 32)
        >>> x[0, :2] = torch.tensor([500.0, 1.0])
        >>> q_row, s_row, q_col, s_col = mx_quantize_rowcol(x)
        >>> q_row[0, :2].float().tolist(), s_row[0].view(torch.uint8).tolist()
        ([256.0, 0.5], [128])
        >>> q_col[0, :2].float().tolist(), s_col[:2].view(torch.uint8).tolist()
        ([256.0, 256.0], [[128], [119]])

    Source: OCP MX v1.0, section 6.3, along either axis.
    """
    check_args(x, elem_dtype=elem_dtype, scaling=scaling, scale_layout=scale_layout)
    options: dict[str, Any] = {"elem_dtype": elem_dtype, "scaling": scaling, "scale_layout": scale_layout}
    return (*mx_quantize(x, axis=-1, **options), *mx_quantize(x, axis=-2, **options))
