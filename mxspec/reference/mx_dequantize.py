"""mx_dequantize: the values that MX codes and scales represent."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.formats import BY_DTYPE, MX_BLOCK_SIZE, ElementFormat, element
from mxspec.reference.common import checks
from mxspec.reference.common.numerics import widened
from mxspec.reference.from_blocked import from_blocked
from mxspec.reference.mx_quantize import ELEM_CHOICES, SCALE_LAYOUTS
from mxspec.reference.to_blocked import blocked_bytes
from mxspec.spec import per_element, spec

OUT_DTYPES = (torch.bfloat16, torch.float32)


def check_args(
    qdata: Tensor,
    scale: Tensor,
    *,
    axis: int = -1,
    out_dtype: torch.dtype = torch.bfloat16,
    scale_layout: str = "plain",
    elem_dtype: torch.dtype | str | None = None,
) -> None:
    op = "mx_dequantize"
    checks.tensor_dtype(op, "qdata", qdata, (*BY_DTYPE, torch.uint8))
    checks.tensor_dtype(op, "scale", scale, (torch.float8_e8m0fnu,))
    checks.rank(op, "qdata", qdata, (2, 3))
    checks.same_device(op, ("qdata", qdata), ("scale", scale))
    checks.choice(op, "axis", axis, (-1, -2))
    checks.choice(op, "out_dtype", out_dtype, OUT_DTYPES, TypeError)
    checks.choice(op, "scale_layout", scale_layout, SCALE_LAYOUTS)
    checks.choice(op, "elem_dtype", elem_dtype, (None, *ELEM_CHOICES), TypeError)
    if elem_dtype is None and qdata.dtype == torch.uint8:
        raise TypeError(f"{op}: qdata has dtype torch.uint8, which may hold e2m3 or e3m2; needs elem_dtype")
    fmt = element(qdata.dtype if elem_dtype is None else elem_dtype)
    if qdata.dtype != (fmt.dtype or torch.uint8):
        raise TypeError(
            f"{op}: qdata has dtype {qdata.dtype}; elem_dtype = {elem_dtype!r} needs codes of dtype "
            f"{fmt.dtype or torch.uint8}"
        )
    checks.whole_blocks(op, "K" if axis == -1 else "M", qdata.shape[axis], MX_BLOCK_SIZE, fmt.bits)
    *lead, R, C = scale_shape(qdata, axis, fmt)
    needed = (*lead, R, C) if scale_layout == "plain" else (*lead, blocked_bytes(R, C))
    checks.shape(op, "scale", scale, needed, f"for qdata {tuple(qdata.shape)}, axis {axis}, {scale_layout}")


def scale_shape(qdata: Tensor, axis: int, fmt: ElementFormat) -> tuple[int, ...]:
    *lead, R, stored = qdata.shape if axis == -1 else qdata.mT.shape
    return *lead, R, fmt.held(stored) // MX_BLOCK_SIZE


@spec(
    check_args=check_args,
    flops=per_element(1),  # a multiply
)
def mx_dequantize(
    qdata: Tensor,
    scale: Tensor,
    *,
    axis: int = -1,
    out_dtype: torch.dtype = torch.bfloat16,
    scale_layout: str = "plain",
    elem_dtype: torch.dtype | str | None = None,
) -> Tensor:
    """Read MX codes back: `out = q * 2^(byte - 127)`.

    The product is exact in fp32: it has at most 7 significant bits and is a multiple of 2^-143. The only rounding is
    the final cast to out_dtype.

    Args:
        qdata: `(M, K)` or `(E, N, K)`; float8_e4m3fn, float8_e5m2, float4_e2m1fn_x2, int8, or uint8 for FP6; any
            strides. A float4_e2m1fn_x2 byte holds two elements along `axis`, the first in the low nibble: the shape is
            `(..., K/2)` for axis -1 and `(..., M/2, K)` for axis -2. Three bytes of FP6 hold four elements, as
            `mx_quantize` packs them: the shape is `(..., 3*K/4)` or `(..., 3*M/4, K)`.
        scale: float8_e8m0fnu on qdata's device, in the shape that `mx_quantize` gives for axis and scale_layout; any
            strides.
        axis: -1 for 1x32 blocks, -2 for 32x1 blocks.
        out_dtype: torch.bfloat16 or torch.float32.
        scale_layout: `plain` or `blocked`, as `mx_quantize` gave it.
        elem_dtype: the format of qdata, as for `mx_quantize`. uint8 needs "e2m3" or "e3m2", because it does not say
            which format it holds. Any other dtype says it, and elem_dtype may be None.

    Returns:
        `(M, K)` or `(E, N, K)`, counted in elements; out_dtype, contiguous.

    Special values: byte 255 or a NaN code gives NaN. 448 * 2^127 is beyond fp32 and gives Inf. Minus zero stays minus
        zero. The code -128 of int8 is -2.

    Raises:
        TypeError: qdata, scale or out_dtype has a dtype that is not listed above, or elem_dtype is not the format of
            qdata's dtype.
        ValueError: qdata has a rank that is not listed above; axis or scale_layout is not in the lists above; the size
            along axis is not a multiple of 32; scale has a shape that does not fit; or the operands are on two devices.

    Example:
        >>> qdata = torch.tensor([[1.5, -448.0] * 16]).to(torch.float8_e4m3fn)
        >>> scale = torch.tensor([[128]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
        >>> mx_dequantize(qdata, scale)[0, :2].tolist()
        [3.0, -896.0]
        >>> qdata = torch.full((1, 16), 0xF5, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)  # 5 is 3.0, F is -6.0
        >>> mx_dequantize(qdata, scale)[0, :2].tolist()
        [6.0, -12.0]
        >>> qdata = torch.tensor([[0x1F, 0x08, 0x02] * 8], dtype=torch.uint8)  # the codes 0x1F, 0x20, 0x20, 0x00
        >>> mx_dequantize(qdata, scale, elem_dtype="e2m3")[0, :4].tolist()
        [15.0, -0.0, -0.0, 0.0]

    Source: OCP MX v1.0, section 5.1 (the value of an element of a block).
    """
    check_args(qdata, scale, axis=axis, out_dtype=out_dtype, scale_layout=scale_layout, elem_dtype=elem_dtype)
    fmt = element(qdata.dtype if elem_dtype is None else elem_dtype)
    if scale_layout == "blocked":
        scale = from_blocked(scale, *scale_shape(qdata, axis, fmt)[-2:])
    values = widened(qdata.mT if axis == -2 else qdata, fmt)
    blocks = values.unflatten(-1, (values.shape[-1] // MX_BLOCK_SIZE, MX_BLOCK_SIZE))  # (..., K/32, 32)
    out = (blocks * scale.to(torch.float32).unsqueeze(-1)).flatten(-2).to(out_dtype)
    return (out.mT if axis == -2 else out).contiguous()
