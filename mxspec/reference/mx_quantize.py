"""mx_quantize: blocks of 32 elements that share one power-of-two scale."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from random import Random
from typing import Any

import torch
from torch import Tensor

from mxspec.formats import ELEMENTS, MX_BLOCK_SIZE, ElementFormat, element
from mxspec.reference import _checks
from mxspec.reference._mx_cases import codes_and_ties, edge_blocks, every_exponent
from mxspec.reference._numerics import SCALINGS, reciprocal_scale, saturating_cast, shared_exponent
from mxspec.reference.to_blocked import to_blocked
from mxspec.spec import Case, Shapes, given, normal, per_element, random_bits, random_normal, spec, these

FORMATS = [fmt for fmt in ELEMENTS.values() if fmt.dtype]
ELEM_CHOICES = (*(fmt.dtype for fmt in FORMATS), *(fmt.name for fmt in FORMATS))
SCALE_LAYOUTS = ("plain", "blocked")


def check_args(
    x: Tensor,
    *,
    axis: int = -1,
    elem_dtype: torch.dtype | str = torch.float8_e4m3fn,
    scaling: str = "rceil",
    scale_layout: str = "plain",
) -> None:
    op = "mx_quantize"
    _checks.tensor_dtype(op, "x", x, _checks.FLOAT_DTYPES)
    _checks.rank(op, "x", x, (2, 3))
    _checks.choice(op, "axis", axis, (-1, -2))
    _checks.choice(op, "elem_dtype", elem_dtype, ELEM_CHOICES, TypeError)
    _checks.choice(op, "scaling", scaling, SCALINGS)
    _checks.choice(op, "scale_layout", scale_layout, SCALE_LAYOUTS)
    _checks.multiple(op, "K" if axis == -1 else "M", x.shape[axis], MX_BLOCK_SIZE)


def cases() -> Iterator[Case]:
    bf16, fp16, fp32 = _checks.FLOAT_DTYPES
    e5m2 = {"elem_dtype": torch.float8_e5m2}
    for i, (dtype, scaling) in enumerate(product((bf16, fp16, fp32), SCALINGS)):
        # Only under rceil do the dtypes of x and elements act on each other; else every value meets every other.
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
    rng = Random(2129)  # with this seed every value of an option meets every value of every other
    for axis, layout, shape in 2 * list(product((-1, -2), SCALE_LAYOUTS, [(96, 160), (2, 160, 64)])):
        dtype, scaling, elem = rng.choice(_checks.FLOAT_DTYPES), rng.choice(SCALINGS), rng.choice(("e4m3fn", "e5m2"))
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
    for element_format in FORMATS:
        yield from _cases_of(element_format)
    large = these(random_normal(1, 2048).expand(2**20 + 256, 2048))
    yield Case("2^31 elements and more", large, flags={"large"})
    yield Case("2^31 elements and more, blocked", large, blocked, flags={"large"})
    yield Case("2^31 elements and more, axis -2", large, {"axis": -2}, flags={"large"})
    yield Case("2^31 elements and more, axis -2, blocked", large, {"axis": -2, **blocked}, flags={"large"})

    def refused(name, x, error, match, **kwargs):
        return Case(name, these(x), kwargs, raises=error, match=match)

    x = torch.zeros(64, 64)
    yield refused("K = 100", torch.zeros(4, 100), ValueError, "K = 100 is not a multiple of block_size 32")
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
    yield refused("int8 elements", x, TypeError, "int8", elem_dtype=torch.int8)
    yield refused("e2m3 elements", x, TypeError, "e2m3", elem_dtype="e2m3")


def _cases_of(fmt: ElementFormat) -> Iterator[Case]:
    """What every element format meets; and, where elements share a byte, what lies where."""
    elem: dict[str, Any] = {"elem_dtype": fmt.dtype}
    yield Case(f"every code and tie, {fmt.name}", given(codes_and_ties, fmt), elem, flags={"edge"})
    for scaling in SCALINGS:
        kw = {"scaling": scaling, **elem}
        yield Case(f"edge blocks, {scaling}, {fmt.name}", given(edge_blocks), kw, flags={"edge"})
        yield Case(f"every exponent, {scaling}, {fmt.name}", given(every_exponent, fmt), kw, flags={"edge"})
    if fmt.per_byte == 1:
        return
    # Every value of an option meets every value of every other.
    for i, (dtype, scaling) in enumerate(product(_checks.FLOAT_DTYPES, SCALINGS)):
        axis, layout = (-1, -2)[(i + i // 4) % 2], SCALE_LAYOUTS[(i // 2 + i // 4) % 2]
        shape = [(96, 160), (2, 160, 64), (64, 96)][i % 3]
        kw = {"scaling": scaling, "axis": axis, "scale_layout": layout, **elem}
        name = f"{'x'.join(map(str, shape))}, {str(dtype)[6:]}, {fmt.name}, {scaling}, axis {axis}, {layout} scales"
        yield Case(f"random bit patterns, {name}", given(random_bits, *shape, dtype=dtype), kw)
    for axis in (-1, -2):
        kw, end = {"axis": axis, **elem}, f", {fmt.name}, axis {axis}"
        yield Case(f"one block{end}", given(random_normal, *((1, 32) if axis == -1 else (32, 1))), kw, flags={"edge"})
        yield Case(f"ragged{end}", given(random_normal, *((301, 416) if axis == -1 else (416, 301))), kw)
        yield Case(f"transposed input{end}", lambda: (random_normal(96, 160).mT,), kw)
        yield Case(f"every second column{end}", lambda: (random_normal(96, 320)[:, ::2],), kw)
        yield Case(f"empty{end}", given(torch.zeros, 0, 0), kw, flags={"edge"})


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    for shape in (*shapes.matrices, *shapes.experts):
        x, name = given(torch.randn, *shape, dtype=torch.bfloat16), "x".join(map(str, shape))
        for layout in SCALE_LAYOUTS if len(shape) == 2 else ("blocked",):
            yield Case(f"{name}, rceil, {layout}", x, {"scale_layout": layout})
            if shape[-2] % MX_BLOCK_SIZE == 0:  # not for a few tokens, which only the forward pass has
                yield Case(f"{name}, rceil, {layout}, axis -2", x, {"scale_layout": layout, "axis": -2})
        if len(shape) == 2 and shape[0] * shape[1] >= 2**26:  # where a rule's arithmetic could show at all
            yield Case(f"{name}, floor, plain", x, {"scaling": "floor"})
            if shape[-2] % MX_BLOCK_SIZE == 0:
                yield Case(f"{name}, floor, plain, axis -2", x, {"scaling": "floor", "axis": -2})


@spec(
    cases=cases,
    check_args=check_args,
    flops=per_element(2),  # a maximum and a multiply
    peer_rules="mx",
    bench_cases=bench_cases,
)
def mx_quantize(
    x: Tensor,
    *,
    axis: int = -1,
    elem_dtype: torch.dtype | str = torch.float8_e4m3fn,
    scaling: str = "rceil",
    scale_layout: str = "plain",
) -> tuple[Tensor, Tensor]:
    """Quantize to MX: 32 elements along `axis` share one E8M0 scale.

    With `a` the largest magnitude of a block, as fp32, `byte` follows from `a` by the rule `scaling`, and
    `q = round_to_nearest_even(clamp(x * 2^(127 - byte), -max, max))`, one rounding. Read back, an element is
    `q * 2^(byte - 127)`. With `exponent(v) = floor(log2(v))` read off the bits of fp32, -127 for subnormals:

    - rceil: `ceil(log2(fp32(a / max))) + 127`, at least 0: the quotient, rounded to fp32, rounded up to a power of two.
    - floor (OCP): `exponent(a) - emax + 127`, clamped to 0..254; mantissas above that of `max` saturate.
    - ceil: floor's before the clamp, plus 1 where the mantissa of a is not 0; then clamped.
    - even: floor's of a after adding half a unit of the element's last mantissa bit to the bits of a.

    Args:
        x: `(M, K)` or `(E, N, K)`; bfloat16, float16 or float32; any strides.
        axis: -1 for 1x32 blocks, -2 for 32x1 blocks; that dimension must be a multiple of 32.
        elem_dtype: torch.float8_e4m3fn (largest 448), torch.float8_e5m2 (57344) or torch.float4_e2m1fn_x2 (6), which
            has two elements to a byte, or a name: "e4m3fn", "e5m2", "e2m1".
        scaling: `rceil`, `floor`, `ceil` or `even`, as above.
        scale_layout: `plain` or `blocked`, the 128x4 tiles of `to_blocked`.

    Returns:
        `(qdata, scale)`. qdata: x's shape, elem_dtype, contiguous for axis -1; for axis -2 column-major per
        matrix (strides `(1, M)` or `(N*K, 1, N)`). Of e2m1 two neighbours along `axis` share a byte, the first in
        the low nibble, and that dimension is half of x's: `(..., K/2)`, or `(..., M/2, K)` with the strides of the
        transpose of a contiguous `(..., K, M/2)`. scale: float8_e8m0fnu; plain, `(..., K/32)` for axis -1 and
        `(..., K, M/32)`, the scale of the transpose, for axis -2, row-major; blocked, `to_blocked` of that,
        padding bytes 0.

    Special values: a block of zeros has byte 0 and keeps the zeros' signs. A NaN or an Inf makes its block byte
        255 and all 32 elements NaN. e2m1 has no NaN: there the byte alone says it, and all 32 codes are 7, the
        largest value's, as PTX's `cvt` gives for NaN (torchao's main branch leaves 3). Byte 0 is 2^-127 and counts
        as such: a block of 2^-126 gives elements 2.0.

    Raises:
        TypeError: the dtype of x, or elem_dtype.
        ValueError: rank, axis, scaling, scale_layout, or a size that is not a multiple of 32.

    Example:
        >>> x = torch.zeros(1, 32)
        >>> x[0, :3] = torch.tensor([500.0, -1.0, 0.3])
        >>> qdata, scale = mx_quantize(x)
        >>> qdata[0, :3].float().tolist(), scale.view(torch.uint8).tolist()
        ([256.0, -0.5, 0.15625], [[128]])
        >>> qdata, scale = mx_quantize(x, scaling="floor")
        >>> qdata[0, :3].float().tolist(), scale.view(torch.uint8).tolist()
        ([448.0, -1.0, 0.3125], [[127]])
        >>> qdata, scale = mx_quantize(x, elem_dtype="e2m1")  # 500 / 2^7 = 3.9 rounds to 4, whose code is 6
        >>> qdata.shape, qdata.view(torch.uint8)[0, :2].tolist(), scale.view(torch.uint8).tolist()
        (torch.Size([1, 16]), [134, 0], [[134]])

    Source: OCP MX v1.0, section 6.3 (floor), 5.3.3 (e2m1); PTX ISA, `cvt.rp.satfinite.ue8m0x2.f32` (rceil).
    """
    check_args(x, axis=axis, elem_dtype=elem_dtype, scaling=scaling, scale_layout=scale_layout)
    fmt = element(elem_dtype)
    if axis == -2:
        x = x.mT  # from here the blocks lie along the last dimension
    x = x.contiguous().to(torch.float32)  # exact: fp32 holds every bf16 and fp16
    blocks = x.unflatten(-1, (x.shape[-1] // MX_BLOCK_SIZE, MX_BLOCK_SIZE))  # (..., K/32, 32)

    scale = shared_exponent(blocks.abs().amax(-1), fmt, scaling)  # (..., K/32)
    qdata = saturating_cast(blocks * reciprocal_scale(scale).unsqueeze(-1), fmt).flatten(-2)  # (..., K)

    scale = scale.view(torch.float8_e8m0fnu)
    if scale_layout == "blocked":
        scale = to_blocked(scale)
    return qdata.mT if axis == -2 else qdata, scale
