"""The cases of mx_dequantize: calls written by hand, calls worth timing, and the dimensions of a call."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from mxspec.cases.common.codes import SCALES, mx_scale, scale_fits
from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.quantizers import EXPERTS, axis_of, fits
from mxspec.cases.common.space import Space, given
from mxspec.cases.common.tensors import BEGINS, EXPERT_STRIDES, STRIDES, code_values, laid
from mxspec.formats import BY_DTYPE, MX_BLOCK_SIZE, element
from mxspec.reference.mx_dequantize import OUT_DTYPES, _scale_shape
from mxspec.reference.mx_quantize import SCALE_LAYOUTS
from mxspec.reference.to_blocked import blocked_bytes
from mxspec.spec import Case, Shapes, random_bits, random_normal, these


def cases() -> Iterator[Case]:
    others, e8m0fnu = [dtype for dtype in BY_DTYPE if dtype != torch.float8_e4m3fn], torch.float8_e8m0fnu

    def operands(shape, axis, layout, dtype=torch.float8_e4m3fn):
        """Codes and scales as `mx_quantize` lays them out."""
        *lead, M, K = shape
        rows, size = (M, K) if axis == -1 else (K, M)
        qdata = random_bits(*lead, rows, size // element(dtype).per_byte, dtype=dtype)
        qdata = qdata if axis == -1 else qdata.mT
        *lead, R, C = _scale_shape(qdata, axis)
        scale_shape = (*lead, R, C) if layout == "plain" else (*lead, blocked_bytes(R, C))
        return qdata, random_bits(*scale_shape, dtype=e8m0fnu, seed=1)

    def every_other(t):  # a view without a stride of 1
        return t.view(torch.uint8).repeat_interleave(2, -1)[..., ::2].view(t.dtype)

    for axis in (-1, -2):
        for layout in SCALE_LAYOUTS:
            for shape in [(32, 32), (96, 160), (2, 160, 96)]:
                for out_dtype in OUT_DTYPES:
                    name = f"{'x'.join(map(str, shape))}, axis {axis}, {layout}, {str(out_dtype)[6:]}"
                    kwargs = {"axis": axis, "scale_layout": layout, "out_dtype": out_dtype}
                    yield Case(name, partial(operands, shape, axis, layout), kwargs)
    numbers = random_normal(64, 64, dtype=torch.float8_e4m3fn)
    scale = torch.arange(100, 228).to(torch.uint8).view(e8m0fnu).reshape(64, 2)
    yield Case("neither NaN nor Inf", these(numbers, scale))
    for axis in (-1, -2):
        for layout in SCALE_LAYOUTS:
            for dtype, out_dtype in product(others, OUT_DTYPES):
                kwargs = {"axis": axis, "scale_layout": layout, "out_dtype": out_dtype}
                name = f"{element(dtype).name}, axis {axis}, {layout}, {str(out_dtype)[6:]}"
                yield Case(name, partial(operands, (2, 64, 96), axis, layout, dtype), kwargs)
            kwargs, end = {"axis": axis, "scale_layout": layout}, f", axis {axis}, {layout}"
            one, ragged, empty = ((1, 32), (301, 416), (4, 0)) if axis == -1 else ((32, 1), (416, 301), (0, 4))
            q, s = operands((96, 160), axis, layout)
            turned = q.contiguous() if axis == -2 else q.mT.contiguous().mT
            yield Case(f"one block{end}", partial(operands, one, axis, layout), kwargs, flags={"edge"})
            yield Case(f"ragged{end}", partial(operands, ragged, axis, layout), kwargs)
            yield Case(f"every other element{end}", these(every_other(q), every_other(s)), kwargs)
            yield Case(f"one expert three times{end}", these(q.expand(3, -1, -1), s.expand(3, *s.shape)), kwargs)
            yield Case(f"codes along the other axis{end}", these(turned, s), kwargs, flags={"edge"})
            yield Case(f"empty{end}", partial(operands, empty, axis, layout), kwargs, flags={"edge"})
    for dtype, fmt in BY_DTYPE.items():
        for out_dtype in OUT_DTYPES:  # subnormals, overflow to Inf, NaN
            size = MX_BLOCK_SIZE // fmt.per_byte
            blocks = torch.arange(256).to(torch.uint8).view(dtype).reshape(-1, 1, size)
            codes = blocks.expand(-1, 256, size).flatten(1)
            scale = torch.arange(256).to(torch.uint8).view(e8m0fnu).expand(len(blocks), 256).contiguous()
            name = f"every {fmt.name} code under every scale, {str(out_dtype)[6:]}"
            yield Case(name, these(codes, scale), {"out_dtype": out_dtype}, flags={"edge"})
    yield Case("no rows", partial(operands, (0, 64), -1, "plain"), flags={"edge"})
    blocked = {"scale_layout": "blocked"}
    yield Case("no experts", partial(operands, (0, 4, 64), -1, "blocked"), blocked, flags={"edge"})
    q, s = operands((1, 544), -1, "plain")
    codes, scale = q.expand(2**22 + 1, -1), s.expand(2**22 + 1, -1)
    yield Case("2^31 elements and more", these(codes, scale), flags={"large"})
    yield Case("2^31 elements and more, axis -2", these(codes.mT, scale), {"axis": -2}, flags={"large"})

    def row_tiles():  # every 128-row tile of scales is the same
        qdata, tile = operands((128, 512), -1, "blocked")
        return qdata[:1].expand(2**22 + 1, -1), tile.view(torch.uint8).repeat(2**15 + 1).view(e8m0fnu)

    yield Case("2^31 elements and more, blocked", row_tiles, blocked, flags={"large"})

    ok = operands((64, 64), -1, "plain")
    q, s = ok
    packed = torch.zeros(64, 24, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    refused: list[tuple[str, tuple[Tensor, Tensor], dict[str, Any], type[Exception], str]] = [
        ("bf16 codes", (q.bfloat16(), s), {}, TypeError, "qdata has dtype torch.bfloat16"),
        ("uint8 scale", (q, s.view(torch.uint8)), {}, TypeError, "scale has dtype torch.uint8"),
        ("scale of another shape", (q, s[:32]), {}, ValueError, "needs (64, 2)"),
        ("plain scale called blocked", ok, {"scale_layout": "blocked"}, ValueError, "needs (512,)"),
        ("fp64 out", ok, {"out_dtype": torch.float64}, TypeError, "float64"),
        ("mixed devices", (q, s.to("meta")), {}, ValueError, "needs one device"),
        ("axis 1", ok, {"axis": 1}, ValueError, "axis = 1"),
        ("48 elements in 24 bytes", (packed, s), {}, ValueError, "K = 48 is not a multiple of block_size 32"),
        ("half of a packed block", (packed[:, :16], s), {}, ValueError, "needs (64, 1)"),
    ]
    for name, args, options, error, match in refused:
        yield Case(name, these(*args), options, raises=error, match=match)


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    def operands(M: int, K: int) -> tuple[Tensor, Tensor]:
        qdata = torch.randint(0, 256, (M, K), dtype=torch.uint8).view(torch.float8_e4m3fn)
        scale = torch.randint(0, 256, (M, K // MX_BLOCK_SIZE), dtype=torch.uint8)
        return qdata, scale.view(torch.float8_e8m0fnu)

    def of_columns(M: int, K: int) -> tuple[Tensor, Tensor]:
        qdata, scale = operands(K, M)
        return qdata.mT, scale

    for M, K in shapes.matrices:
        yield Case(f"{M}x{K}, plain", partial(operands, M, K))
        if M % MX_BLOCK_SIZE == 0 and M * K >= 2**24:  # axis -2 is for weight gradients, which have many tokens
            yield Case(f"{M}x{K}, plain, axis -2", partial(of_columns, M, K), {"axis": -2})


def beyond(dtype: torch.dtype) -> list[Choice]:
    """Codes of more than 256 rows with more than 4096 columns, and the reverse; and one column whose rows have gaps."""
    plain: Choice = {
        **{"experts": None, "strides": "row-major", "values": "finite", "begins": "at 0", "dtype": dtype},
        **{"scale values": "near 1", "scale strides": "row-major", "scale begins": "at 0", "blocks": "1x128"},
    }
    column = {**plain, "rows": 256, "cols": 1, "strides": "rows apart", "axis": -2}
    return [{**plain, "rows": 4224, "cols": 384}, {**plain, "rows": 384, "cols": 4224}, column]


def scale_shape(choice: Choice, block: int) -> tuple[int, ...] | None:
    """The shape of plain scales; None while the choice lacks a size."""
    if not {"rows", "cols", "experts"} <= choice.keys():
        return None
    rows, cols = choice["rows"], choice["cols"]
    matrix = (rows, -(-cols // block)) if axis_of(choice) == -1 else (cols, -(-rows // block))
    return matrix if choice["experts"] is None else (choice["experts"], *matrix)


def _possible(choice: Choice) -> bool:
    axis, plain = axis_of(choice), scale_shape(choice, 32)
    if not fits(choice, 32 if axis == -2 else 1, 32 if axis == -1 else 1):
        return False
    if choice.get("values") == "Inf" and choice.get("dtype") not in (None, torch.float8_e5m2):
        return False
    return scale_fits(choice, plain, given(choice, "scale_layout", "plain"))


def _make(choice: Choice) -> tuple[Tensor, Tensor]:
    rows, cols, axis = choice["rows"], choice["cols"], axis_of(choice)
    lead = () if choice["experts"] is None else (choice["experts"],)
    per_byte = BY_DTYPE[choice["dtype"]].per_byte
    stored = (rows, cols // per_byte) if axis == -1 else (rows // per_byte, cols)
    codes = code_values((*lead, *stored), choice["dtype"], choice["values"])
    plain = scale_shape(choice, 32)
    assert plain is not None
    scale = mx_scale(plain, choice, given(choice, "scale_layout", "plain"))
    return laid(codes, choice["strides"], choice["begins"]), scale


SIZES = (0, 1, 32, 33, 256, 1056, 8256)  # 8256 elements of float4 are 4128 bytes, more than 4096
DIMENSIONS = {
    "rows": SIZES,
    "cols": SIZES,
    "experts": EXPERTS,
    "strides": (*STRIDES, *EXPERT_STRIDES),
    "values": ("none", "finite", "bits", "Inf", "zeros"),
    "begins": BEGINS,
    "dtype": tuple(BY_DTYPE),
    **SCALES,
}
OPTIONS = {"axis": (-1, -2), "out_dtype": OUT_DTYPES, "scale_layout": SCALE_LAYOUTS}
NAN = {"values": "bits", "dtype": torch.float8_e4m3fn}
ALSO = [
    {"rows": 256, **NAN},
    {"rows": 1, "cols": 256, **NAN},
    {"experts": 257, "rows": 32, "cols": 32, **NAN},
    {"scale strides": "rows apart", **NAN},
    {"axis": -1, "rows": 33, "strides": "one column repeated", **NAN},  # one of the 33 rows is zeros
]
SPACE = Space(DIMENSIONS, _make, OPTIONS, _possible, ALSO, beyond=beyond(torch.float8_e5m2))
SCALE_IMPOSSIBLE = (
    (r"qdata\.(?:rows|cols|experts) = 0 \| scale\..*", "there are no scales"),
    (
        r"qdata\.(?:rows|cols) = 1 \| scale\.strides (?:one row repeated|rows apart|column-major|experts .*)",
        "the scale has one row, which has no stride",
    ),
    (r"qdata\.(?:rank 2|experts = 1) \| scale\.strides (?:one expert repeated|experts .*)", "there is no other expert"),
)
IMPOSSIBLE = (
    (r"axis (?:= -1|not given) \| qdata\.cols (?:= 1|odd)", "K is a multiple of 32"),
    (r"axis = -2 \| qdata\.rows (?:= 1|odd)", "M is a multiple of 32"),
    (r"qdata\.cols (?:= 1|odd) \| qdata\.rows (?:= 1|odd)", "rows or columns are a multiple of 32"),
    (r"qdata\.dtype float4_e2m1fn_x2 \| qdata\.[+-]?(?:NaN|Inf) .*", "e2m1 has neither NaN nor Inf"),
    *SCALE_IMPOSSIBLE,
    (
        r"scale_layout = blocked \| scale\.strides (?!row-major|columns apart|one row repeated|experts apart).*",
        "the blocked scales of a matrix are a vector",
    ),
)
