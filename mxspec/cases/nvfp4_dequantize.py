"""The cases of nvfp4_dequantize: calls written by hand, calls worth timing, and the dimensions of a call."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from mxspec.cases.common.codes import laid_flat, scale_fits
from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.quantizers import EXPERTS, axis_of, fits
from mxspec.cases.common.space import Space, given
from mxspec.cases.common.tensors import BEGINS, EXPERT_STRIDES, STRIDES, code_values, laid, plant
from mxspec.cases.mx_dequantize import SCALE_IMPOSSIBLE, scale_shape
from mxspec.cases.nvfp4_quantize import AMAX_STRIDES, SPECIAL, laid_of_matrices
from mxspec.formats import NVFP4_BLOCK_SIZE
from mxspec.reference.mx_dequantize import OUT_DTYPES
from mxspec.reference.mx_quantize import SCALE_LAYOUTS
from mxspec.reference.nvfp4_dequantize import scale_shape as shape_of_scale
from mxspec.reference.to_blocked import blocked_bytes, to_blocked
from mxspec.spec import Case, Shapes, random_bits, random_normal, these

PACKED, E4M3 = torch.float4_e2m1fn_x2, torch.float8_e4m3fn
EDGE = {"edge"}


def operands(shape: tuple[int, ...], axis: int, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    """Codes and scales as `nvfp4_quantize` lays them out, of random bits, with a tensor scale for each matrix."""
    *lead, M, K = shape
    rows, size = (M, K) if axis == -1 else (K, M)
    qdata = random_bits(*lead, rows, size // 2, dtype=PACKED)
    qdata = qdata if axis == -1 else qdata.mT
    *_, R, C = shape_of_scale(qdata, axis)
    scale_shape = (*lead, R, C) if layout == "plain" else (*lead, blocked_bytes(R, C))
    return qdata, random_bits(*scale_shape, dtype=E4M3, seed=1), random_normal(*lead, dtype=torch.float32)


def cases() -> Iterator[Case]:
    for axis, layout, out_dtype in product((-1, -2), SCALE_LAYOUTS, OUT_DTYPES):
        kwargs = {"axis": axis, "scale_layout": layout, "out_dtype": out_dtype}
        for shape in [(32, 32), (96, 160), (2, 48, 96)]:
            name = f"{'x'.join(map(str, shape))}, axis {axis}, {layout}, {str(out_dtype)[6:]}"
            yield Case(name, partial(operands, shape, axis, layout), kwargs)

    finite = (torch.arange(256) % 127).to(torch.uint8).view(E4M3).reshape(64, 4)
    yield Case("finite scales", these(random_bits(64, 32, dtype=PACKED), finite, torch.tensor(0.01)))

    def every_other(t: Tensor) -> Tensor:  # a view without a stride of 1
        return t.view(torch.uint8).repeat_interleave(2, -1)[..., ::2].view(t.dtype)

    for axis, layout in product((-1, -2), SCALE_LAYOUTS):
        kw: dict[str, Any] = {"axis": axis, "scale_layout": layout}
        end = f", axis {axis}, {layout}"
        one, ragged, empty = ((1, 16), (301, 432), (4, 0)) if axis == -1 else ((16, 1), (432, 301), (0, 4))
        q, s, t = operands((96, 160), axis, layout)
        octets = q.view(torch.uint8)
        turned = (octets.contiguous() if axis == -2 else octets.mT.contiguous().mT).view(PACKED)
        stack = q.expand(3, -1, -1), s.expand(3, *s.shape), torch.tensor([1.0, -2.0, 1e-30])
        yield Case(f"one block{end}", partial(operands, one, axis, layout), kw, flags=EDGE)
        yield Case(f"ragged{end}", partial(operands, ragged, axis, layout), kw)
        yield Case(f"every other element{end}", these(every_other(q), every_other(s), t), kw)
        yield Case(f"one expert three times{end}", these(*stack), kw)
        yield Case(f"codes along the other axis{end}", these(turned, s, t), kw, flags=EDGE)
        yield Case(f"empty{end}", partial(operands, empty, axis, layout), kw, flags=EDGE)
    fewer: tuple[float, ...] = (1.0, 1 / 6, 2.0**-126, 3e38)
    numbers = {torch.bfloat16: fewer, torch.float32: (*fewer, 2.0**-149, 2.0**119, -0.0, torch.nan, torch.inf)}
    for out_dtype in OUT_DTYPES:
        for number in numbers[out_dtype]:
            blocks = torch.arange(256).to(torch.uint8).view(PACKED).reshape(32, 1, 8)
            codes = blocks.expand(-1, 256, 8).flatten(1)
            scale = torch.arange(256).to(torch.uint8).view(E4M3).expand(32, 256).contiguous()
            name = f"every code under every scale, times {number}, {str(out_dtype)[6:]}"
            yield Case(name, these(codes, scale, torch.tensor(number)), {"out_dtype": out_dtype}, flags=EDGE)
    yield Case("no rows", partial(operands, (0, 64), -1, "plain"), flags=EDGE)
    yield Case("no experts", partial(operands, (0, 16, 64), -1, "blocked"), {"scale_layout": "blocked"}, flags=EDGE)
    q, s, t = operands((1, 544), -1, "plain")
    codes, scale = q.expand(2**22 + 1, -1), s.expand(2**22 + 1, -1)
    yield Case("2^31 elements and more", these(codes, scale, t), flags={"large"})
    yield Case("2^31 elements and more, axis -2", these(codes.mT, scale, t), {"axis": -2}, flags={"large"})

    ok = operands((64, 64), -1, "plain")
    q, s, t = ok
    packed = torch.zeros(64, 12, dtype=torch.uint8).view(PACKED)
    refused: list[tuple[str, tuple[Tensor, Tensor, Tensor], dict[str, Any], type[Exception], str]] = [
        ("uint8 codes", (q.view(torch.uint8), s, t), {}, TypeError, "qdata has dtype torch.uint8"),
        ("E8M0 scale", (q, s.view(torch.float8_e8m0fnu), t), {}, TypeError, "scale has dtype torch.float8_e8m0fnu"),
        ("bf16 tensor scale", (q, s, t.bfloat16()), {}, TypeError, "tensor_scale has dtype torch.bfloat16"),
        ("tensor scale (1,)", (q, s, t[None]), {}, ValueError, "tensor_scale has shape (1,); needs ()"),
        ("scale of another shape", (q, s[:32], t), {}, ValueError, "needs (64, 4)"),
        ("plain scale called blocked", ok, {"scale_layout": "blocked"}, ValueError, "needs (512,)"),
        ("fp16 out", ok, {"out_dtype": torch.float16}, TypeError, "float16"),
        ("mixed devices", (q, s, t.to("meta")), {}, ValueError, "needs one device"),
        ("axis 1", ok, {"axis": 1}, ValueError, "axis = 1"),
        ("24 elements in 12 bytes", (packed, s, t), {}, ValueError, "12 bytes along K; needs a multiple of 8"),
    ]
    for name, args, options, error, match in refused:
        yield Case(name, these(*args), options, raises=error, match=match)


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    def args(M: int, K: int, axis: int) -> tuple[Tensor, Tensor, Tensor]:
        rows, size = (M, K) if axis == -1 else (K, M)
        qdata = torch.randint(0, 256, (rows, size // 2), dtype=torch.uint8).view(PACKED)
        scale = torch.randint(0, 126, (rows, size // NVFP4_BLOCK_SIZE), dtype=torch.uint8).view(E4M3)
        return qdata if axis == -1 else qdata.mT, scale, torch.tensor(0.01)

    for M, K in shapes.matrices:
        yield Case(f"{M}x{K}, plain", partial(args, M, K, -1))
        if M % NVFP4_BLOCK_SIZE == 0 and M * K >= 2**24:
            yield Case(f"{M}x{K}, plain, axis -2", partial(args, M, K, -2), {"axis": -2})


def _possible(choice: Choice) -> bool:
    axis, plain = axis_of(choice), scale_shape(choice, NVFP4_BLOCK_SIZE)
    if not fits(choice, 16 if axis == -2 else 1, 16 if axis == -1 else 1):
        return False
    strides, begins = choice.get("tensor_scale strides"), choice.get("tensor_scale begins")
    if "experts" in choice and strides is not None:
        many = choice["experts"] is not None and choice["experts"] > 1
        if (strides == "none") != (choice["experts"] == 0) or (strides in ("one repeated", "apart") and not many):
            return False
    if strides == "none" and begins not in (None, "at 0"):
        return False
    return scale_fits(choice, plain, given(choice, "scale_layout", "plain"))


def _blind(choice: Choice) -> bool:
    """A special tensor scale may make a whole matrix NaN, Inf or zero."""
    return choice.get("tensor_scale values") == "special" and choice.get("experts", 9) in (None, 1, 2)


def _make(choice: Choice) -> tuple[Tensor, Tensor, Tensor]:
    rows, cols, axis = choice["rows"], choice["cols"], axis_of(choice)
    lead = () if choice["experts"] is None else (choice["experts"],)
    codes = code_values((*lead, *((rows, cols // 2) if axis == -1 else (rows // 2, cols))), PACKED, choice["values"])
    plain = scale_shape(choice, NVFP4_BLOCK_SIZE)
    assert plain is not None
    bits = random_bits(*plain, dtype=torch.uint8, seed=1)
    if choice["scale values"] == "near 1":
        bits = 0x30 + bits % 16
    elif bits.numel():
        plant(bits, torch.tensor([0x7F, 0xFF, 0, 0x80, 0x7E, 1, 0xB8], dtype=torch.uint8))
    scale = bits.view(E4M3)
    if given(choice, "scale_layout", "plain") == "blocked":
        scale = laid_flat(to_blocked(bits).view(E4M3), choice["scale begins"])
    else:
        scale = laid(scale, choice["scale strides"], choice["scale begins"])
    of = random_normal(*lead, dtype=torch.float32).abs()
    if choice["tensor_scale values"] == "special":
        of = torch.tensor(SPECIAL).roll(-(rows + cols) % 9).repeat(of.numel())[: of.numel()].reshape(of.shape)
    number = laid_of_matrices(of, choice["tensor_scale strides"], choice["tensor_scale begins"])
    return laid(codes, choice["strides"], choice["begins"]), scale, number


SIZES = (0, 1, 48, 161, 256, 1056, 8256)  # 8256 elements are 4128 bytes
DIMENSIONS = {
    "rows": SIZES,
    "cols": SIZES,
    "experts": EXPERTS,
    "strides": (*STRIDES, *EXPERT_STRIDES),
    "values": ("none", "finite", "zeros"),
    "begins": BEGINS,
    "scale values": ("none", "near 1", "special"),
    "scale strides": (*STRIDES, *EXPERT_STRIDES),
    "scale begins": BEGINS,
    "tensor_scale values": ("ordinary", "special"),
    "tensor_scale strides": AMAX_STRIDES,
    "tensor_scale begins": BEGINS,
}
OPTIONS = {"axis": (-1, -2), "out_dtype": OUT_DTYPES, "scale_layout": SCALE_LAYOUTS}
_PLAIN: Choice = {
    **{"experts": None, "strides": "row-major", "values": "finite", "begins": "at 0"},
    **{"scale values": "near 1", "scale strides": "row-major", "scale begins": "at 0"},
    **{"tensor_scale values": "ordinary", "tensor_scale strides": "dense", "tensor_scale begins": "at 0"},
}
BEYOND = [
    *({**_PLAIN, "rows": rows, "cols": cols} for rows, cols in ((4224, 544), (384, 8448), (1056, 2112), (32, 64))),
    {**_PLAIN, "rows": 64, "cols": 32, "axis": -2},
    {**_PLAIN, "rows": 256, "cols": 1, "strides": "rows apart", "axis": -2},
    {**_PLAIN, "rows": 48, "cols": 8256, "scale values": "special"},
]
SPACE = Space(DIMENSIONS, _make, OPTIONS, _possible, (), _blind, implied=("none",), beyond=BEYOND)
IMPOSSIBLE = (
    (r"axis (?:= -1|not given) \| qdata\.cols (?:= 1|odd)", "K is a multiple of 16"),
    (r"axis = -2 \| qdata\.rows (?:= 1|odd)", "M is a multiple of 16"),
    (r"qdata\.cols (?:= 1|odd) \| qdata\.rows (?:= 1|odd)", "rows or columns are a multiple of 16"),
    *SCALE_IMPOSSIBLE,
    (r"qdata\.(?:experts = 1|rank 2) \| tensor_scale\.strides .*", "one number has no stride"),
    (r"qdata\.experts = 0 \| tensor_scale\..*", "there is no number"),
    (
        r"scale_layout = blocked \| scale\.strides (?!row-major|columns apart|one row repeated|experts apart).*",
        "the blocked scales of a matrix are a vector",
    ),
)
