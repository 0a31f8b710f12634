"""The cases of mx_requantize_groups: calls written by hand, calls worth timing, and the dimensions of a call."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from mxspec.cases.common.codes import mx_scale
from mxspec.cases.common.groups import offsets
from mxspec.cases.common.impossible import PADDED_GROUPS
from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.requantizers import (
    ALSO,
    BEYOND,
    DIMENSIONS,
    EMPTY_SCALE,
    codes_far_apart,
    codes_of,
    possible,
)
from mxspec.cases.common.space import Space, given
from mxspec.cases.common.token_groups import grouped, offs_of, random_offs
from mxspec.formats import FP8_DTYPES, MX_BLOCK_SIZE, SCALINGS
from mxspec.reference.mx_dequantize import OUT_DTYPES
from mxspec.reference.mx_quantize import SCALE_LAYOUTS, mx_quantize
from mxspec.reference.mx_quantize_groups import ELEM_CHOICES
from mxspec.spec import Case, Shapes, random_bits, random_normal, these

E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu


def _scales(M: int, C: int) -> Tensor:
    """Scale bytes near 1, each with its own exponent."""
    return (120 + random_bits(M, C, dtype=torch.uint8, seed=1) % 16).view(E8M0)


def _codes(M: int, K: int, dtype: torch.dtype = E4M3) -> Tensor:
    """Random codes without NaN and Inf. Releases of torch differ in the cast of larger numbers, so there are none."""
    largest = torch.finfo(dtype).max
    return random_normal(M, K, dtype=torch.float32).mul(64).clamp(-largest, largest).to(dtype)


def cases() -> Iterator[Case]:
    def args(sizes: list[int], M: int, K: int, dtype: torch.dtype = E4M3) -> tuple[Tensor, Tensor, Tensor]:
        return _codes(M, K, dtype), _scales(M, K // MX_BLOCK_SIZE), offs_of(sizes)

    for name, sizes, M, _, flags in grouped():
        if len(sizes) < 300:  # more groups would take minutes in an interpreter, because of their padding
            yield Case(name, partial(args, sizes, M, 96), flags=flags)
    # Every value of an option meets every value of every other option.
    for i, (codes, dtype, layout, scaling) in enumerate(product(FP8_DTYPES, OUT_DTYPES, SCALE_LAYOUTS, SCALINGS)):
        elem = ("e4m3fn", "e5m2")[(i + i // 4 + i // 8 + i // 16) % 2]

        def bits(codes: torch.dtype = codes) -> tuple[Tensor, ...]:
            """Half of the scale bytes are any byte, and half are near 1."""
            scale = random_bits(110, 2, dtype=torch.uint8, seed=1)
            scale[::2] = 120 + scale[::2] % 16
            return random_bits(110, 64, dtype=codes), scale.view(E8M0), offs_of([33, 0, 67])

        name = f"random bit patterns, {str(codes)[13:]} to {elem}, {str(dtype)[6:]}, {scaling}, {layout}"
        options = {"dtype": dtype, "scale_layout": layout, "scaling": scaling, "elem_dtype": elem}
        yield Case(name, bits, options, flags={"edge"})
    for codes, dtype in product(FP8_DTYPES, OUT_DTYPES):

        def as_quantized(codes: torch.dtype = codes) -> tuple[Tensor, ...]:
            return *mx_quantize(random_normal(200, 160), elem_dtype=codes), offs_of([140, 50])

        options = {"dtype": dtype, "elem_dtype": codes}
        yield Case(f"as quantized, {str(codes)[13:]}, {str(dtype)[6:]}", as_quantized, options)
        # Blocks of each code, each under every scale byte: subnormal numbers, overflow, NaN.
        every = torch.arange(256).to(torch.uint8).view(codes)
        byte = torch.arange(256).to(torch.uint8).view(E8M0)
        under = these(every.expand(256, -1), byte.unsqueeze(1).expand(-1, 8), offs_of([100, 155]))
        yield Case(f"every code under every scale, {str(codes)[13:]}, {str(dtype)[6:]}", under, options, flags={"edge"})
        # The bytes of the 32 tokens of a block are four neighbours.
        t = torch.arange(256).unsqueeze(1)
        byte = ((t // 32 * 8 + torch.arange(8)) * 4 + t % 4).to(torch.uint8).view(E8M0)
        near = these(every.expand(256, -1), byte, offs_of([256]))
        yield Case(f"every code under near scales, {str(codes)[13:]}, {str(dtype)[6:]}", near, options, flags={"edge"})
    for pad_to, layout in product((128, 384), SCALE_LAYOUTS):
        kw = {"pad_to": pad_to, "scale_layout": layout}
        yield Case(f"pad_to {pad_to}, {layout}", partial(args, [140, 1], 150, 160), kw)
    for K in (32, 128, 416):
        yield Case(f"{K} columns", partial(args, [130, 9], 139, K))
    yield Case("no columns", partial(args, [130, 9], 139, 0), flags={"edge"})
    yield Case("e5m2", partial(args, [130, 9], 139, 96, E5M2))
    yield Case("transposed codes", lambda: (_codes(160, 210).mT, _scales(210, 5), offs_of([130, 70])))
    yield Case("every second row", lambda: (_codes(300, 64)[::2], _scales(300, 2)[::2], offs_of([130, 9])))
    yield Case("every second column", lambda: (_codes(150, 192)[:, ::2], _scales(150, 6)[:, ::2], offs_of([130, 9])))
    yield Case("column-major scales", lambda: (_codes(150, 96), _scales(3, 150).mT, offs_of([130, 9])))
    apart = lambda: (codes_far_apart(140, 64), _scales(140, 2), offs_of([100, 39]))  # noqa: E731
    yield Case("rows far apart", apart, flags={"edge"})
    weights = these(_codes(3 * 160, 96), _scales(3 * 160, 3), offs_of([160, 160, 160]))
    yield Case("the weights of three experts", weights)
    zeros = torch.zeros(150, 64)
    zeros[::3] *= -1
    yield Case("zeros", these(zeros.to(E4M3), _scales(150, 2), offs_of([140, 9])), flags={"edge"})
    q, s, offs = args([100, 30], 150, 64)
    q[130:], s.view(torch.uint8)[140:] = torch.nan, 255
    yield Case("NaN in rows of no group", these(q, s, offs), flags={"edge"})
    yield Case("checked", partial(args, [30, 10], 41, 64), {"check_offs": True})
    q, s, _ = args([], 1, 2048)
    large = these(q.expand(2**20 + 256, 2048), s.expand(2**20 + 256, -1), offs_of([2**20 + 256]))
    yield Case("2^31 elements and more", large, flags={"large"})

    q, s, offs = args([5, 0, 40], 50, 64)

    def refused(name, error, match, q=q, s=s, offs=offs, **kwargs):
        return Case(name, these(q, s, offs), kwargs, raises=error, match=match)

    packed = torch.zeros(50, 32, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    yield refused("e2m1 codes", TypeError, "qdata has dtype torch.float4_e2m1fn_x2; needs", packed)
    yield refused("bf16 codes", TypeError, "qdata has dtype torch.bfloat16", q.bfloat16())
    yield refused("uint8 scale", TypeError, "scale has dtype torch.uint8", s=s.view(torch.uint8))
    yield refused("3-D", ValueError, "2-D", q[None], s[None])
    yield refused("K = 48", ValueError, "K = 48 is not a multiple of 32, the block size", q[:, :48])
    yield refused("a scale too few", ValueError, "scale has shape (50, 1); needs (50, 2)", s=s[:, :1])
    blocked = torch.zeros(512, dtype=torch.uint8).view(E8M0)
    yield refused("blocked scales", ValueError, "needs (50, 2) (plain)", s=blocked)
    yield refused("scale elsewhere", ValueError, "needs one device", s=s.to("meta"))
    yield refused("int64 offs", TypeError, "offs has dtype torch.int64; needs torch.int32", offs=offs.long())
    yield refused("2-D offs", ValueError, "offs has shape (1, 3); needs a 1-D", offs=offs[None])
    yield refused("offs elsewhere", ValueError, "one device", offs=offs.to("meta"))
    yield refused("float16 values", TypeError, "dtype = torch.float16", dtype=torch.float16)
    yield refused("pad_to 64", ValueError, "pad_to = 64; needs a multiple of 128", pad_to=64)
    yield refused("pad_to 0", ValueError, "pad_to = 0; needs at least 1", pad_to=0)
    yield refused("pad_to 128.0", TypeError, "pad_to = 128.0", pad_to=128.0)
    yield refused("unknown scaling", ValueError, "'nearest'", scaling="nearest")
    yield refused("unknown layout", ValueError, "'swizzled'", scale_layout="swizzled")
    yield refused("int8 elements", TypeError, "int8", elem_dtype=torch.int8)
    yield refused("e2m1 elements", TypeError, "float4_e2m1fn_x2; needs one of", elem_dtype=torch.float4_e2m1fn_x2)
    yield refused("offs that decrease", ValueError, "offs[1] = 5 after 45", offs=offs.flip(0), check_offs=True)
    yield refused("offs past M", ValueError, "offs[-1] = 51 is past M = 50", offs=offs + 6, check_offs=True)


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    def args(M: int, K: int) -> tuple[Tensor, Tensor, Tensor]:
        scale = torch.randint(120, 136, (M, K // MX_BLOCK_SIZE), dtype=torch.uint8).view(E8M0)
        return torch.randn(M, K).to(E4M3), scale, random_offs(M, 8)

    def of_weights(E: int, N: int, K: int) -> tuple[Tensor, Tensor, Tensor]:
        codes, scale, _ = args(E * N, K)
        return codes, scale, (torch.arange(E) + 1).mul(N).to(torch.int32)

    for M, K in shapes.matrices:
        if M >= 1024 and M * K < 2**30:
            yield Case(f"{M}x{K}, G 8", partial(args, M, K))
    for E, N, K in shapes.experts:
        yield Case(f"{E}x{N}x{K}, the weights of experts", partial(of_weights, E, N, K))


def _shape(choice: Choice) -> tuple[int, int] | None:
    return (choice["rows"], choice["cols"] // MX_BLOCK_SIZE) if {"rows", "cols"} <= choice.keys() else None


def _possible(choice: Choice) -> bool:
    if choice.get("values") == "Inf" and choice.get("dtype of codes") not in (None, E5M2):
        return False
    return possible(choice, _shape(choice), MX_BLOCK_SIZE, given(choice, "pad_to", 128) or 128)


def _make(choice: Choice) -> tuple[Tensor, Tensor, Tensor]:
    shape = _shape(choice)
    assert shape is not None
    return codes_of(choice, choice["dtype of codes"]), mx_scale(shape, choice), offsets(choice, choice["rows"])


OPTIONS: dict[str, Any] = {
    "dtype": OUT_DTYPES,
    "pad_to": (128, 384),
    "elem_dtype": ELEM_CHOICES,
    "scaling": SCALINGS,
    "scale_layout": SCALE_LAYOUTS,
    "check_offs": (False, True),
}
SPACE = Space(
    {
        **DIMENSIONS,
        "rows": (0, 1, 32, 161, 256, 1056, 4128),
        "cols": (0, 32, 256, 1056, 4128),
        "values": ("none", "finite", "bits", "Inf", "zeros"),
        "dtype of codes": FP8_DTYPES,
    },
    _make,
    OPTIONS,
    _possible,
    [
        *ALSO,
        {"rows": 1, "cols": 1056, "scale values": "special", "scale strides": "row-major"},
        {"rows": 256, "cols": 256, "strides": "one column repeated", "scale strides": "row-major"},
    ],
    beyond=BEYOND,
)
TOKENS = "qdata.rows"
ACROSS = True
IMPOSSIBLE = (*EMPTY_SCALE, *PADDED_GROUPS)
