"""fp8_dequantize: the values that FP8 codes and their 128-block scales stand for."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mxspec.formats import FP8_BLOCK_SIZE
from mxspec.reference import _checks
from mxspec.reference.mx_dequantize import OUT_DTYPES
from mxspec.spec import Case, Shapes, per_element, random_bits, random_normal, spec, these


def check_args(qdata: Tensor, scale: Tensor, *, axis: int = -1, out_dtype: torch.dtype = torch.bfloat16) -> None:
    op = "fp8_dequantize"
    _checks.tensor_dtype(op, "qdata", qdata, (torch.float8_e4m3fn,))
    _checks.tensor_dtype(op, "scale", scale, (torch.float32,))
    _checks.rank(op, "qdata", qdata, (2, 3))
    _checks.same_device(op, ("qdata", qdata), ("scale", scale))
    _checks.choice(op, "axis", axis, (-1, -2))
    _checks.choice(op, "out_dtype", out_dtype, OUT_DTYPES, TypeError)
    _checks.multiple(op, "K" if axis == -1 else "M", qdata.shape[axis], FP8_BLOCK_SIZE)
    *lead, R, C = qdata.shape if axis == -1 else qdata.mT.shape
    vector, square = (*lead, R, C // FP8_BLOCK_SIZE), (*lead, -(-R // FP8_BLOCK_SIZE), C // FP8_BLOCK_SIZE)
    if tuple(scale.shape) != square:
        because = f"(1x128 blocks) or {square} (128x128) for qdata {tuple(qdata.shape)}, axis {axis}"
        _checks.shape(op, "scale", scale, vector, because)


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


@spec(
    cases=cases,
    check_args=check_args,
    flops=per_element(1),  # a multiply
    bench_cases=bench_cases,
)
def fp8_dequantize(qdata: Tensor, scale: Tensor, *, axis: int = -1, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Read FP8 codes back: `out = out_dtype(fp32(q * scale))`.

    The granularity is read from the scale's shape, as the matmuls do: 1x128 or 128x128. Where both shapes are
    the same (one row) both mean the same.

    Args:
        qdata: `(M, K)` or `(E, N, K)` float8_e4m3fn; any strides.
        scale: float32 on qdata's device, any strides: 1x128 blocks, `(..., M, K/128)`; 128x128 blocks,
            `(..., ceil(M/128), K/128)`; for axis -2 the shapes for the transpose of qdata.
        axis: the dimension that the blocks of 128 lie along, -1 or -2.
        out_dtype: torch.bfloat16 or torch.float32.

    Returns:
        qdata's shape, out_dtype, contiguous. The product is rounded to fp32 and then to out_dtype: what every
        kernel of the field does, and not always what one rounding would give.

    Special values: a NaN code or scale gives NaN; minus zero stays.

    Raises:
        TypeError: the dtype of qdata, of scale, or out_dtype.
        ValueError: rank, axis, a size that is not a multiple of 128, a scale of another shape, or two devices.

    Example:
        >>> qdata = torch.full((2, 128), 1.5).to(torch.float8_e4m3fn)
        >>> fp8_dequantize(qdata, torch.tensor([[2.0], [-0.5]]))[:, 0].tolist()
        [3.0, -0.75]

    Source: DeepSeek-V3 technical report, section 3.3.2.
    """
    check_args(qdata, scale, axis=axis, out_dtype=out_dtype)
    q = qdata.mT if axis == -2 else qdata
    R = q.shape[-2]
    if scale.shape[-2] != R:  # 128x128: one row of scales serves 128 rows of codes
        scale = scale.repeat_interleave(FP8_BLOCK_SIZE, dim=-2)[..., :R, :]
    blocks = q.to(torch.float32).unflatten(-1, (q.shape[-1] // FP8_BLOCK_SIZE, FP8_BLOCK_SIZE))  # (..., K/128, 128)
    out = (blocks * scale.unsqueeze(-1)).flatten(-2).to(out_dtype)
    return (out.mT if axis == -2 else out).contiguous()
