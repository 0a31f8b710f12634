"""The cases of fp8_dequantize: calls written by hand, calls worth timing, and the dimensions of a call."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mxspec.cases.common.codes import SPECIALS, fp32_scale, scale_fits
from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.quantizers import axis_of, fits
from mxspec.cases.common.space import Space
from mxspec.cases.common.tensors import code_values, laid
from mxspec.cases.fp8_quantize_1x128 import TAILS
from mxspec.cases.mx_dequantize import DIMENSIONS as MX_DIMENSIONS
from mxspec.cases.mx_dequantize import SCALE_IMPOSSIBLE, beyond, scale_shape
from mxspec.formats import FP8_BLOCK_SIZE, FP8_SIZE_MULTIPLE
from mxspec.reference.mx_dequantize import OUT_DTYPES
from mxspec.spec import Case, Shapes, random_bits, random_normal, these


def cases() -> Iterator[Case]:
    def codes(*shape):
        return random_bits(*shape, dtype=torch.float8_e4m3fn)

    def scales(*shape):
        return random_normal(*shape, dtype=torch.float32, seed=1)

    for out_dtype in OUT_DTYPES:
        kwargs, suffix = {"out_dtype": out_dtype}, str(out_dtype)[6:]
        yield Case(f"1x128, {suffix}", these(codes(77, 384), scales(77, 3)), kwargs)
        yield Case(f"128x1, {suffix}", these(codes(77, 256).mT, scales(77, 2)), {**kwargs, "axis": -2})
        yield Case(f"128x128, {suffix}", these(codes(300, 256), scales(3, 2)), kwargs)
        yield Case(f"128x128 experts, {suffix}", these(codes(2, 130, 128), scales(2, 2, 1)), kwargs)
    numbers = random_normal(64, 256, dtype=torch.float8_e4m3fn)
    yield Case("neither NaN nor Inf", these(numbers, scales(64, 2)))
    for axis in (-1, -2):
        kw = {"axis": axis}

        def turned(t: Tensor, axis: int = axis) -> Tensor:
            return t if axis == -1 else t.mT

        yield Case(f"every other element, axis {axis}", these(turned(codes(154, 512)[::2, ::2]), scales(77, 2)), kw)
        yield Case(f"codes along the other axis, axis {axis}", these(turned(codes(256, 80).mT), scales(80, 2)), kw)
        yield Case(f"square, axis {axis}", these(turned(codes(256, 256)), scales(256, 2)), kw)
        yield Case(f"128x128, axis {axis}", these(turned(codes(2, 300, 256)), scales(2, 3, 2)), kw)
        yield Case(f"ragged against every tile, axis {axis}", these(turned(codes(304, 1408)), scales(304, 11)), kw)
        large = turned(codes(1, 640).expand(2**22 + 2, -1))
        yield Case(
            f"2^31 elements and more, axis {axis}",
            these(large, scales(1, 5).expand(2**22 + 2, -1)),
            kw,
            flags={"large"},
        )
    for i, K in enumerate(TAILS):
        out: dict[str, Any] = {"out_dtype": OUT_DTYPES[i % 2]}
        yield Case(f"{K} columns", these(codes(40, K), scales(40, -(-K // 128))), out)
        yield Case(f"{K} rows, axis -2", these(codes(40, K).mT, scales(40, -(-K // 128))), {**out, "axis": -2})
    yield Case("128x128 experts, 208 columns", these(codes(2, 130, 208), scales(2, 2, 2)))
    yield Case("128x128, 400 rows, axis -2", these(codes(2, 144, 400).mT, scales(2, 2, 4)), {"axis": -2})
    yield Case("400 rows of a transposed matrix, axis -2", these(codes(400, 144), scales(144, 4)), {"axis": -2})
    every = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).reshape(2, 128)
    for out_dtype in OUT_DTYPES:
        exponents = torch.arange(256, dtype=torch.int32)
        scale = ((exponents << 23) | 0x2AAAAB).view(torch.float32).unsqueeze(1).expand(-1, 2)
        name = f"every code under every exponent, {str(out_dtype)[6:]}"
        yield Case(name, these(every.flatten().expand(256, -1), scale), {"out_dtype": out_dtype}, flags={"edge"})
    yield Case("MN-major scale", these(codes(8, 256), scales(2, 8).mT))
    yield Case("one row: both granularities agree", these(codes(1, 256), scales(1, 2)), flags={"edge"})
    yield Case("NaN and Inf scales", these(codes(2, 128), torch.tensor([[torch.nan], [torch.inf]])), flags={"edge"})
    yield Case("no rows", these(codes(0, 128), scales(0, 1)), flags={"edge"})
    yield Case("no columns, axis -2", these(codes(128, 0), scales(0, 1)), {"axis": -2}, flags={"edge"})
    q, s = codes(64, 256), scales(64, 2)
    refused: list[tuple[str, tuple[Tensor, Tensor], dict[str, Any], type[Exception], str]] = [
        ("e5m2", (q.view(torch.float8_e5m2), s), {}, TypeError, "e5m2"),
        ("bf16 scale", (q, s.bfloat16()), {}, TypeError, "scale has dtype torch.bfloat16"),
        ("scale of another shape", (q, s[:3]), {}, ValueError, "needs (64, 2)"),
        ("mixed devices", (q, s.to("meta")), {}, ValueError, "needs one device"),
        ("K = 100", (q[:, :100], s), {}, ValueError, "K = 100"),
        ("K = 8", (q[:, :8], s[:, :1]), {}, ValueError, "K = 8 is not a multiple of 16; pad"),
        ("M = 40", (q[:40], s[:, :1]), {"axis": -2}, ValueError, "M = 40 is not a multiple of 16; pad"),
        ("K = 144 with one scale", (q[:, :144], s[:, :1]), {}, ValueError, "needs (64, 2)"),
    ]
    for name, args, options, error, match in refused:
        yield Case(name, these(*args), options, raises=error, match=match)


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    def operands(M: int, K: int, axis: int) -> tuple[Tensor, Tensor]:
        R, C = (M, K) if axis == -1 else (K, M)
        qdata = torch.randint(0, 256, (R, C), dtype=torch.uint8).view(torch.float8_e4m3fn)
        return qdata if axis == -1 else qdata.mT, torch.rand(R, C // FP8_BLOCK_SIZE)

    for M, K in (shape for shape in shapes.matrices if shape[0] * shape[1] >= 2**23):
        yield Case(f"{M}x{K}, 1x128", partial(operands, M, K, -1))
        yield Case(f"{M}x{K}, 128x1", partial(operands, M, K, -2), {"axis": -2})


def _scale_shape(choice: Choice) -> tuple[int, ...] | None:
    plain = scale_shape(choice, 128)
    if plain is None or "blocks" not in choice:
        return None
    *lead, R, C = plain
    return (*lead, -(-R // 128) if choice["blocks"] == "128x128" else R, C)


def _possible(choice: Choice) -> bool:
    axis, shape = axis_of(choice), _scale_shape(choice)
    if not fits(choice, FP8_SIZE_MULTIPLE if axis == -2 else 1, FP8_SIZE_MULTIPLE if axis == -1 else 1):
        return False
    return scale_fits(choice, shape) and (shape is None or room(choice, shape))


def room(choice: Choice, shape: tuple[int, ...]) -> bool:
    """Whether a row or a column that is not repeated has room for all special scales."""
    if choice.get("scale values") != "special":
        return True
    repeated = choice.get("scale strides")
    rows, cols = shape[-2:]
    return (repeated != "one row repeated" and rows >= SPECIALS) or (
        repeated != "one column repeated" and cols >= SPECIALS
    )


def _make(choice: Choice) -> tuple[Tensor, Tensor]:
    lead = () if choice["experts"] is None else (choice["experts"],)
    codes = code_values((*lead, choice["rows"], choice["cols"]), torch.float8_e4m3fn, choice["values"])
    shape = _scale_shape(choice)
    assert shape is not None
    return laid(codes, choice["strides"], choice["begins"]), fp32_scale(shape, choice)


SIZES = (0, 1, 33, 128, 144, 1152, 4224)
EXPERTS = (None, 0, 1, 2, 9, 33)
DIMENSIONS: dict[str, Any] = {
    "rows": SIZES,
    "cols": SIZES,
    "experts": EXPERTS,
    "blocks": ("1x128", "128x128"),
    "values": ("none", "finite", "bits", "zeros"),
    **{
        name: values
        for name, values in MX_DIMENSIONS.items()
        if name not in ("rows", "cols", "experts", "dtype", "values")
    },
}
ALSO = [
    {"rows": 1, "cols": 128, "values": "bits"},
    {"axis": -2, "rows": 1152, "cols": 1, "scale strides": "row-major"},
    {"rows": 1152, "cols": 1152, "strides": "one column repeated", "scale strides": "row-major"},
]
SPACE = Space(
    DIMENSIONS, _make, {"axis": (-1, -2), "out_dtype": OUT_DTYPES}, _possible, ALSO, beyond=beyond(torch.float8_e4m3fn)
)
IMPOSSIBLE = (
    (r"axis (?:= -1|not given) \| qdata\.cols (?:= 1|odd)", "K is a multiple of 16"),
    (r"axis = -2 \| qdata\.rows (?:= 1|odd)", "M is a multiple of 16"),
    (r"qdata\.cols (?:= 1|odd) \| qdata\.rows (?:= 1|odd)", "rows or columns are a multiple of 16"),
    *SCALE_IMPOSSIBLE,
    (r"qdata\.cols = 1 \| scale\.blocks of 128 rows", "K is a multiple of 16"),
)
