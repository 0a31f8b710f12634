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
from mxspec.cases.common.space import NOT_GIVEN, Space, given
from mxspec.cases.common.tensors import BEGINS, EXPERT_STRIDES, STRIDES, code_values, laid
from mxspec.formats import BY_DTYPE, E4M3FN, ELEMENTS, MX_BLOCK_SIZE, ElementFormat, element
from mxspec.reference.common.numerics import packed
from mxspec.reference.mx_dequantize import OUT_DTYPES
from mxspec.reference.mx_dequantize import scale_shape as shape_of_scale
from mxspec.reference.mx_quantize import SCALE_LAYOUTS
from mxspec.reference.to_blocked import blocked_bytes
from mxspec.spec import Case, Shapes, random_bits, random_normal, these


def cases() -> Iterator[Case]:
    others, e8m0fnu = [fmt for fmt in ELEMENTS.values() if fmt is not E4M3FN], torch.float8_e8m0fnu

    def operands(shape, axis, layout, fmt=E4M3FN):
        """Codes and scales as `mx_quantize` lays them out."""
        *lead, M, K = shape
        rows, size = (M, K) if axis == -1 else (K, M)
        qdata = random_bits(*lead, rows, fmt.stored(size), dtype=fmt.dtype or torch.uint8)
        qdata = qdata if axis == -1 else qdata.mT
        *lead, R, C = shape_of_scale(qdata, axis, fmt)
        shape = (*lead, R, C) if layout == "plain" else (*lead, blocked_bytes(R, C))
        return qdata, random_bits(*shape, dtype=e8m0fnu, seed=1)

    def said(fmt):
        return {} if fmt.dtype else {"elem_dtype": fmt.name}

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
            for fmt, out_dtype in product(others, OUT_DTYPES):
                kwargs = {"axis": axis, "scale_layout": layout, "out_dtype": out_dtype, **said(fmt)}
                name = f"{fmt.name}, axis {axis}, {layout}, {str(out_dtype)[6:]}"
                yield Case(name, partial(operands, (2, 64, 96), axis, layout, fmt), kwargs)
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
            for fmt in (ELEMENTS["e2m3"], ELEMENTS["e3m2"], ELEMENTS["int8"]):
                named, end = {**kwargs, **said(fmt)}, f", {fmt.name}, axis {axis}, {layout}"
                q, s = operands((96, 160), axis, layout, fmt)
                turned = q.contiguous() if axis == -2 else q.mT.contiguous().mT
                yield Case(f"one block{end}", partial(operands, one, axis, layout, fmt), named, flags={"edge"})
                few = (45, 160) if axis == -1 else (160, 45)
                yield Case(f"ragged{end}", partial(operands, few, axis, layout, fmt), named)
                yield Case(f"every other element{end}", these(every_other(q), every_other(s)), named)
                yield Case(f"codes along the other axis{end}", these(turned, s), named, flags={"edge"})
    for fmt in ELEMENTS.values():
        for out_dtype in OUT_DTYPES:  # subnormals, overflow to Inf, NaN
            if fmt.dtype:
                blocks = torch.arange(256).to(torch.uint8).view(fmt.dtype)
            else:
                blocks = packed(torch.arange(2**fmt.bits).to(torch.uint8), fmt)
            blocks = blocks.reshape(-1, 1, fmt.stored(MX_BLOCK_SIZE))
            codes = blocks.expand(-1, 256, -1).flatten(1)
            scale = torch.arange(256).to(torch.uint8).view(e8m0fnu).expand(len(blocks), 256).contiguous()
            name = f"every {fmt.name} code under every scale, {str(out_dtype)[6:]}"
            yield Case(name, these(codes, scale), {"out_dtype": out_dtype, **said(fmt)}, flags={"edge"})
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
    fp4 = torch.zeros(64, 24, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    fp6, e2m3 = torch.zeros(64, 48, dtype=torch.uint8), {"elem_dtype": "e2m3"}
    refused: list[tuple[str, tuple[Tensor, Tensor], dict[str, Any], type[Exception], str]] = [
        ("bf16 codes", (q.bfloat16(), s), {}, TypeError, "qdata has dtype torch.bfloat16"),
        ("uint8 scale", (q, s.view(torch.uint8)), {}, TypeError, "scale has dtype torch.uint8"),
        ("scale of another shape", (q, s[:32]), {}, ValueError, "needs (64, 2)"),
        ("plain scale called blocked", ok, {"scale_layout": "blocked"}, ValueError, "needs (512,)"),
        ("fp64 out", ok, {"out_dtype": torch.float64}, TypeError, "float64"),
        ("mixed devices", (q, s.to("meta")), {}, ValueError, "needs one device"),
        ("axis 1", ok, {"axis": 1}, ValueError, "axis = 1"),
        ("48 elements in 24 bytes", (fp4, s), {}, ValueError, "24 bytes along K; needs a multiple of 16"),
        ("half of a packed block", (fp4[:, :16], s), {}, ValueError, "needs (64, 1)"),
        ("16 elements of FP6", (fp6[:, :12], s), e2m3, ValueError, "12 bytes along K; needs a multiple of 24"),
        ("half of two FP6 blocks", (fp6[:, :24], s), e2m3, ValueError, "needs (64, 1)"),
        ("uint8 alone", (fp6, s), {}, TypeError, "may hold e2m3 or e3m2; needs elem_dtype"),
        ("uint8 as e4m3fn", (fp6, s), {"elem_dtype": "e4m3fn"}, TypeError, "needs codes of dtype torch.float8_e4m3fn"),
        ("e4m3fn as e2m3", ok, e2m3, TypeError, "needs codes of dtype torch.uint8"),
        ("e4m3fn as e5m2", ok, {"elem_dtype": torch.float8_e5m2}, TypeError, "needs codes of dtype torch.float8_e5m2"),
        ("uint8 as uint8", (fp6, s), {"elem_dtype": torch.uint8}, TypeError, "elem_dtype = torch.uint8"),
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


def _format(choice: Choice) -> ElementFormat | None:
    """The format of the codes; None if elem_dtype does not name the format of the dtype, or is not given for FP6."""
    named = choice["elem_dtype"]
    fmt = BY_DTYPE.get(choice["dtype"]) if named is NOT_GIVEN else element(named)
    return fmt if fmt and choice["dtype"] == (fmt.dtype or torch.uint8) else None


def _possible(choice: Choice) -> bool:
    axis, plain = axis_of(choice), scale_shape(choice, 32)
    if {"dtype", "elem_dtype"} <= choice.keys() and _format(choice) is None:
        return False
    if not fits(choice, 32 if axis == -2 else 1, 32 if axis == -1 else 1):
        return False
    if choice.get("values") == "Inf" and choice.get("dtype") not in (None, torch.float8_e5m2):
        return False
    return scale_fits(choice, plain, given(choice, "scale_layout", "plain"))


def _make(choice: Choice) -> tuple[Tensor, Tensor]:
    rows, cols, axis = choice["rows"], choice["cols"], axis_of(choice)
    lead = () if choice["experts"] is None else (choice["experts"],)
    fmt = _format(choice)
    assert fmt is not None
    stored = (rows, fmt.stored(cols)) if axis == -1 else (fmt.stored(rows), cols)
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
    "dtype": (*BY_DTYPE, torch.uint8),
    **SCALES,
}
OPTIONS = {"axis": (-1, -2), "out_dtype": OUT_DTYPES, "scale_layout": SCALE_LAYOUTS, "elem_dtype": tuple(ELEMENTS)}
NAN = {"values": "bits", "dtype": torch.float8_e4m3fn}
ALSO = [
    {"rows": 256, **NAN},
    {"rows": 1, "cols": 256, **NAN},
    {"experts": 257, "rows": 32, "cols": 32, **NAN},
    {"scale strides": "rows apart", **NAN},
    {"axis": -1, "rows": 33, "strides": "one column repeated", **NAN},  # one of the 33 rows is zeros
]
DECISIVE = ("axis", "elem_dtype")
_COLUMN, _INF = beyond(torch.float8_e5m2)[-1], {**beyond(torch.float8_e5m2)[0], "values": "Inf"}
BEYOND = [
    *beyond(torch.float8_e5m2),
    {**_INF, "rows": 33, "cols": 256, "strides": "one column repeated"},  # one of the 33 rows is zeros
    {**_INF, "rows": 1, "cols": 256},
    {**_INF, "rows": 256, "cols": 256, "scale strides": "columns apart"},
    {**_COLUMN, "strides": "row-major", "values": "zeros"},
    {**_INF, "rows": 256, "cols": 256, "experts": 2, "strides": "one expert repeated", "values": "zeros"},
    {**beyond(torch.uint8)[0], "rows": 256, "cols": 256, "elem_dtype": "e3m2"},
]
SPACE = Space(DIMENSIONS, _make, OPTIONS, _possible, ALSO, beyond=BEYOND, decisive=DECISIVE)
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
    (r"qdata\.dtype (?:float4_e2m1fn_x2|int8) \| qdata\.[+-]?(?:NaN|Inf) .*", "the format has neither NaN nor Inf"),
    (r"qdata\.dtype int8 \| qdata\.(?:-0|subnormal) .*", "int8 has neither a minus zero nor subnormal numbers"),
    (r"qdata\.dtype uint8 \| qdata\.(?:[+-]?(?:NaN|Inf)|-0|subnormal|largest|row of zeros) .*", "uint8 is not read"),
    (r"elem_dtype not given \| qdata\.dtype uint8", "uint8 does not say which format it holds"),
    (r"elem_dtype = (?!e4m3fn).* \| qdata\.dtype float8_e4m3fn", "elem_dtype is the format of qdata"),
    (r"elem_dtype = (?!e5m2).* \| qdata\.dtype float8_e5m2", "elem_dtype is the format of qdata"),
    (r"elem_dtype = (?!e2m1).* \| qdata\.dtype float4_e2m1fn_x2", "elem_dtype is the format of qdata"),
    (r"elem_dtype = (?!int8).* \| qdata\.dtype int8", "elem_dtype is the format of qdata"),
    (r"elem_dtype = (?!e2m3|e3m2).* \| qdata\.dtype uint8", "elem_dtype is the format of qdata"),
    (r"elem_dtype = (?:e2m1|e2m3|e3m2|int8) \| qdata\.[+-]?(?:NaN|Inf) .*", "the format has neither NaN nor Inf"),
    (r"elem_dtype = e4m3fn \| qdata\.[+-]Inf .*", "e4m3fn has no Inf"),
    (r"elem_dtype = int8 \| qdata\.(?:-0|subnormal) .*", "int8 has neither a minus zero nor subnormal numbers"),
    (r"elem_dtype = (?:e2m3|e3m2) \| qdata\.(?:-0|subnormal|largest|row of zeros) .*", "uint8 is not read"),
    *SCALE_IMPOSSIBLE,
    (
        r"scale_layout = blocked \| scale\.strides (?!row-major|columns apart|one row repeated|experts apart).*",
        "the blocked scales of a matrix are a vector",
    ),
)
