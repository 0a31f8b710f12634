"""The cases of fp8_requantize_k_groups: calls written by hand, calls worth timing, and the dimensions of a call."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mxspec.cases.common.codes import fp32_scale
from mxspec.cases.common.fp8_operands import codes as normal_codes
from mxspec.cases.common.fp8_operands import scales
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
from mxspec.cases.common.space import Space
from mxspec.cases.common.token_groups import grouped, offs_of, random_offs
from mxspec.cases.fp8_dequantize import room
from mxspec.cases.fp8_quantize_1x128 import TAILS
from mxspec.formats import FP8_BLOCK_SIZE, FP8_SIZE_MULTIPLE
from mxspec.reference.common.fp8_numerics import SCALE_FORMATS
from mxspec.reference.fp8_quantize_1x128 import fp8_quantize_1x128
from mxspec.reference.mx_dequantize import OUT_DTYPES
from mxspec.spec import Case, Shapes, random_bits, random_normal, these


def cases() -> Iterator[Case]:
    def args(sizes: list[int], M: int, D: int, major: str = "mn") -> tuple[Tensor, Tensor, Tensor]:
        """Codes of random numbers and their scales, as `fp8_quantize_1x128` gives them."""
        return normal_codes(M, D), scales(M, -(-D // FP8_BLOCK_SIZE), major=major), offs_of(sizes)

    for name, sizes, M, _, flags in grouped():
        if len(sizes) < 300:  # more groups would take minutes in an interpreter, because of their padding
            yield Case(name, partial(args, sizes, M, 96), flags=flags)
    for dtype in OUT_DTYPES:
        for scale_format in SCALE_FORMATS:
            options = {"dtype": dtype, "scale_format": scale_format}
            end = f"{str(dtype)[6:]}, {scale_format}"

            def bits() -> tuple[Tensor, ...]:
                codes, scale = random_bits(200, 64, dtype=torch.float8_e4m3fn), random_normal(200, 1, seed=1)
                return codes, scale.float(), offs_of([140, 50])

            yield Case(f"random bit patterns, {end}", bits, options, flags={"edge"})
            for major in ("k", "mn"):
                yield Case(f"{major}-major, {end}", partial(args, [130, 0, 7], 140, 272, major), options)

            def as_quantized(scale_format: str = scale_format) -> tuple[Tensor, ...]:
                x = random_normal(200, 256)
                return *fp8_quantize_1x128(x, scale_format=scale_format, scale_major="mn"), offs_of([140, 50])

            yield Case(f"as quantized, {end}", as_quantized, options)
        every = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn)
        exponents = ((torch.arange(256, dtype=torch.int32) << 23) | 0x2AAAAB).view(torch.float32)
        under = these(every.expand(256, -1), exponents.unsqueeze(1).expand(-1, 2), offs_of([100, 155]))
        yield Case(f"every code under every exponent, {str(dtype)[6:]}", under, {"dtype": dtype}, flags={"edge"})
    yield Case("ragged against every tile", partial(args, [129, 300, 128], 560, 176))
    for D in (128, *TAILS):
        yield Case(f"{D} columns", partial(args, [130, 9], 139, D))
    yield Case("no columns", partial(args, [130, 9], 139, 0), flags={"edge"})
    yield Case("transposed codes", lambda: (normal_codes(64, 210).mT, scales(210, 1), offs_of([130, 70])))
    yield Case("every second row", lambda: (normal_codes(300, 64)[::2], scales(300, 1)[::2], offs_of([130, 9])))
    yield Case("every second column", lambda: (normal_codes(150, 256)[:, ::2], scales(150, 1), offs_of([130, 9])))
    yield Case("rows far apart", lambda: (codes_far_apart(140, 64), scales(140, 1), offs_of([100, 39])), flags={"edge"})
    yield Case(
        "larger eps", lambda: (normal_codes(150, 64), scales(150, 1) * 2**-30, offs_of([140, 10])), {"eps": 1e-4}
    )
    zeros = torch.zeros(150, 64)
    zeros[::3] *= -1
    yield Case("zeros", these(zeros.to(torch.float8_e4m3fn), scales(150, 1), offs_of([140, 9])), flags={"edge"})
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, -1.5, 0.0, -0.0, 2.0**-140, 3e38])
    of_blocks = scales(1024, 2)
    of_blocks[::128, 0], of_blocks[5::128, 1] = special, special
    yield Case("special scales", these(normal_codes(1024, 256), of_blocks, offs_of([1024])), flags={"edge"})
    q, s, offs = args([100, 30], 150, 64)
    q[130:], s[140:] = torch.nan, torch.nan
    yield Case("NaN in rows of no group", these(q, s, offs), flags={"edge"})
    yield Case("checked", partial(args, [30, 10], 41, 64), {"check_offs": True})
    q, s, _ = args([], 1, 2048)
    large = these(q.expand(2**20 + 256, 2048), s.expand(2**20 + 256, -1), offs_of([2**20 + 256]))
    yield Case("2^31 elements and more", large, flags={"large"})

    q, s, offs = args([5, 0, 40], 50, 256)

    def refused(name, error, match, q=q, s=s, offs=offs, **kwargs):
        return Case(name, these(q, s, offs), kwargs, raises=error, match=match)

    yield refused("e5m2 codes", TypeError, "qdata has dtype torch.float8_e5m2; needs", q.view(torch.float8_e5m2))
    yield refused("bf16 codes", TypeError, "qdata has dtype torch.bfloat16", q.bfloat16())
    yield refused("bf16 scale", TypeError, "scale has dtype torch.bfloat16", s=s.bfloat16())
    yield refused("3-D", ValueError, "2-D", q[None], s[None])
    yield refused("D = 200", ValueError, "D = 200 is not a multiple of 16; pad", q[:, :200])
    yield refused("scales of 128x128", ValueError, "needs (50, 2) (1x128 blocks)", s=s[:1])
    yield refused("D = 144 with one scale", ValueError, "needs (50, 2) (1x128", q[:, :144], s[:, :1])
    yield refused("scale elsewhere", ValueError, "needs one device", s=s.to("meta"))
    yield refused("int64 offs", TypeError, "offs has dtype torch.int64; needs torch.int32", offs=offs.long())
    yield refused("2-D offs", ValueError, "offs has shape (1, 3); needs a 1-D", offs=offs[None])
    yield refused("offs elsewhere", ValueError, "one device", offs=offs.to("meta"))
    yield refused("float16 values", TypeError, "dtype = torch.float16", dtype=torch.float16)
    yield refused("unknown scale format", ValueError, "'ue8m0'", scale_format="ue8m0")
    yield refused("eps 0", ValueError, "eps = 0.0", eps=0.0)
    yield refused("offs that decrease", ValueError, "offs[1] = 5 after 45", offs=offs.flip(0), check_offs=True)
    yield refused("offs past M", ValueError, "offs[-1] = 51 is past M = 50", offs=offs + 6, check_offs=True)


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    def args(M: int, D: int) -> tuple[Tensor, Tensor, Tensor]:
        scale = torch.rand(-(-D // FP8_BLOCK_SIZE), M).mT  # MN-major, as the matmuls take it
        return torch.randn(M, D).to(torch.float8_e4m3fn), scale, random_offs(M, 8)

    for M, D in shapes.matrices:
        if M >= 1024 and M * D < 2**30:
            yield Case(f"{M}x{D}, G 8", partial(args, M, D))


def _shape(choice: Choice) -> tuple[int, int] | None:
    return (choice["rows"], -(-choice["cols"] // FP8_BLOCK_SIZE)) if {"rows", "cols"} <= choice.keys() else None


def _possible(choice: Choice) -> bool:
    shape = _shape(choice)
    return possible(choice, shape, FP8_SIZE_MULTIPLE, 128) and (shape is None or room(choice, shape))


def _make(choice: Choice) -> tuple[Tensor, Tensor, Tensor]:
    shape = _shape(choice)
    assert shape is not None
    return codes_of(choice, torch.float8_e4m3fn), fp32_scale(shape, choice), offsets(choice, choice["rows"])


OPTIONS: dict[str, Any] = {
    "dtype": OUT_DTYPES, "scale_format": SCALE_FORMATS, "eps": (1e-12, 1e-4), "check_offs": (False, True),
}  # fmt: skip
SPACE = Space(
    {**DIMENSIONS, "rows": (0, 1, 33, 161, 256, 1056, 4128), "cols": (0, 16, 144, 256, 1056, 4128)},
    _make,
    OPTIONS,
    _possible,
    [*ALSO, {"rows": 256, "cols": 256, "scale begins": "at 0", "eps": 1e-12}],
    beyond=BEYOND,
)
TOKENS = "qdata.rows"
ACROSS = True
IMPOSSIBLE = (*EMPTY_SCALE, *PADDED_GROUPS)
