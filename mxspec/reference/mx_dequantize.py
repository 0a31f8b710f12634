"""mx_dequantize: the values that MX codes and scales stand for."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from mxspec.formats import BY_DTYPE, MX_BLOCK_SIZE, element
from mxspec.reference import _checks
from mxspec.reference._numerics import widened
from mxspec.reference.from_blocked import from_blocked
from mxspec.reference.mx_quantize import SCALE_LAYOUTS
from mxspec.reference.to_blocked import blocked_bytes
from mxspec.spec import Case, Shapes, per_element, random_bits, random_normal, spec, these

OUT_DTYPES = (torch.bfloat16, torch.float32)


def check_args(
    qdata: Tensor,
    scale: Tensor,
    *,
    axis: int = -1,
    out_dtype: torch.dtype = torch.bfloat16,
    scale_layout: str = "plain",
) -> None:
    op = "mx_dequantize"
    _checks.tensor_dtype(op, "qdata", qdata, BY_DTYPE)
    _checks.tensor_dtype(op, "scale", scale, (torch.float8_e8m0fnu,))
    _checks.rank(op, "qdata", qdata, (2, 3))
    _checks.same_device(op, ("qdata", qdata), ("scale", scale))
    _checks.choice(op, "axis", axis, (-1, -2))
    _checks.choice(op, "out_dtype", out_dtype, OUT_DTYPES, TypeError)
    _checks.choice(op, "scale_layout", scale_layout, SCALE_LAYOUTS)
    size = qdata.shape[axis] * element(qdata.dtype).per_byte
    _checks.multiple(op, "K" if axis == -1 else "M", size, MX_BLOCK_SIZE)
    *lead, R, C = _scale_shape(qdata, axis)
    needed = (*lead, R, C) if scale_layout == "plain" else (*lead, blocked_bytes(R, C))
    _checks.shape(op, "scale", scale, needed, f"for qdata {tuple(qdata.shape)}, axis {axis}, {scale_layout}")


def _scale_shape(qdata: Tensor, axis: int) -> tuple[int, ...]:
    *lead, R, stored = qdata.shape if axis == -1 else qdata.mT.shape
    return *lead, R, stored * element(qdata.dtype).per_byte // MX_BLOCK_SIZE


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

    def every_other(t):  # no stride is 1
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

    def row_tiles():  # all alike
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
        if M % MX_BLOCK_SIZE == 0 and M * K >= 2**24:  # weight gradients have many tokens
            yield Case(f"{M}x{K}, plain, axis -2", partial(of_columns, M, K), {"axis": -2})


@spec(
    cases=cases,
    check_args=check_args,
    flops=per_element(1),  # a multiply
    bench_cases=bench_cases,
)
def mx_dequantize(
    qdata: Tensor,
    scale: Tensor,
    *,
    axis: int = -1,
    out_dtype: torch.dtype = torch.bfloat16,
    scale_layout: str = "plain",
) -> Tensor:
    """Read MX codes back: `out = q * 2^(byte - 127)`.

    The product is exact in fp32 (it has at most 4 significant bits and is a multiple of 2^-143), so the only
    rounding is the one to out_dtype.

    Args:
        qdata: `(M, K)` or `(E, N, K)`; float8_e4m3fn, float8_e5m2 or float4_e2m1fn_x2; any strides. Of the last, whose
            bytes hold two elements along `axis`, the first in the low nibble, `(..., K/2)` for axis -1 and
            `(..., M/2, K)` for axis -2.
        scale: float8_e8m0fnu on qdata's device, in the shape that `mx_quantize` gives for axis and scale_layout;
            any strides.
        axis: -1 for 1x32 blocks, -2 for 32x1 blocks.
        out_dtype: torch.bfloat16 or torch.float32.
        scale_layout: `plain` or `blocked`.

    Returns:
        `(M, K)` or `(E, N, K)`, in elements, out_dtype, contiguous.

    Special values: byte 255 or a NaN code gives NaN; 448 * 2^127 is past fp32 and gives Inf; minus zero stays.

    Raises:
        TypeError: the dtype of qdata, of scale, or out_dtype.
        ValueError: rank, axis, scale_layout, a size that is not a multiple of 32, a scale of the wrong shape, or
            operands on two devices.

    Example:
        >>> qdata = torch.tensor([[1.5, -448.0] * 16]).to(torch.float8_e4m3fn)
        >>> scale = torch.tensor([[128]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
        >>> mx_dequantize(qdata, scale)[0, :2].tolist()
        [3.0, -896.0]
        >>> qdata = torch.full((1, 16), 0xF5, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)  # 5 is 3.0, F is -6.0
        >>> mx_dequantize(qdata, scale)[0, :2].tolist()
        [6.0, -12.0]

    Source: OCP MX v1.0, section 5.1 (the value of an element of a block).
    """
    check_args(qdata, scale, axis=axis, out_dtype=out_dtype, scale_layout=scale_layout)
    if scale_layout == "blocked":
        scale = from_blocked(scale, *_scale_shape(qdata, axis)[-2:])
    q = qdata.mT if axis == -2 else qdata
    values = widened(q, element(q.dtype))
    blocks = values.unflatten(-1, (values.shape[-1] // MX_BLOCK_SIZE, MX_BLOCK_SIZE))  # (..., K/32, 32)
    out = (blocks * scale.to(torch.float32).unsqueeze(-1)).flatten(-2).to(out_dtype)
    return (out.mT if axis == -2 else out).contiguous()
