"""nvfp4_dequantize: the values that NVFP4 codes and scales represent."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.formats import E2M1, NVFP4_BLOCK_SIZE
from mxspec.reference.common import checks
from mxspec.reference.common.numerics import widened
from mxspec.reference.from_blocked import from_blocked
from mxspec.reference.mx_dequantize import OUT_DTYPES
from mxspec.reference.mx_quantize import SCALE_LAYOUTS
from mxspec.reference.to_blocked import blocked_bytes
from mxspec.spec import spec


def check_args(
    qdata: Tensor,
    scale: Tensor,
    tensor_scale: Tensor,
    *,
    axis: int = -1,
    out_dtype: torch.dtype = torch.bfloat16,
    scale_layout: str = "plain",
) -> None:
    op = "nvfp4_dequantize"
    checks.tensor_dtype(op, "qdata", qdata, (torch.float4_e2m1fn_x2,))
    checks.tensor_dtype(op, "scale", scale, (torch.float8_e4m3fn,))
    checks.tensor_dtype(op, "tensor_scale", tensor_scale, (torch.float32,))
    checks.rank(op, "qdata", qdata, (2, 3))
    checks.same_device(op, ("qdata", qdata), ("scale", scale))
    checks.same_device(op, ("qdata", qdata), ("tensor_scale", tensor_scale))
    checks.choice(op, "axis", axis, (-1, -2))
    checks.choice(op, "out_dtype", out_dtype, OUT_DTYPES, TypeError)
    checks.choice(op, "scale_layout", scale_layout, SCALE_LAYOUTS)
    checks.whole_blocks(op, "K" if axis == -1 else "M", qdata.shape[axis], NVFP4_BLOCK_SIZE, bits=4)
    *lead, R, C = scale_shape(qdata, axis)
    needed = (*lead, R, C) if scale_layout == "plain" else (*lead, blocked_bytes(R, C))
    checks.shape(op, "scale", scale, needed, f"for qdata {tuple(qdata.shape)}, axis {axis}, {scale_layout}")
    because = f"for qdata {tuple(qdata.shape)}: one number for each matrix"
    checks.shape(op, "tensor_scale", tensor_scale, tuple(lead), because)


def scale_shape(qdata: Tensor, axis: int) -> tuple[int, ...]:
    """The shape of the plain scale of packed codes."""
    *lead, R, stored = qdata.shape if axis == -1 else qdata.mT.shape
    return *lead, R, 2 * stored // NVFP4_BLOCK_SIZE


@spec(check_args=check_args, flops=lambda args, outputs: 2 * outputs[0].numel())  # two multiplies
def nvfp4_dequantize(
    qdata: Tensor,
    scale: Tensor,
    tensor_scale: Tensor,
    *,
    axis: int = -1,
    out_dtype: torch.dtype = torch.bfloat16,
    scale_layout: str = "plain",
) -> Tensor:
    """Read NVFP4 back: `out = fl(q * s * T)`.

    The product `q * s` is exact in fp32, and in bfloat16 too: it has at most 6 significant bits. The product with the
    tensor scale T is rounded to fp32, and the result is cast to out_dtype.

    Args:
        qdata: `(M, K/2)` or `(E, N, K/2)` for axis -1, `(M/2, K)` or `(E, N/2, K)` for axis -2; float4_e2m1fn_x2; any
            strides. A byte holds two elements along `axis`, the first in the low nibble.
        scale: float8_e4m3fn on qdata's device, in the shape that `nvfp4_quantize` gives for axis and scale_layout; any
            strides.
        tensor_scale: float32 on qdata's device; `()`, or `(E,)` for a stack: the multiplier of each matrix.
        axis: the axis that `nvfp4_quantize` had, for both kinds of blocks.
        out_dtype: torch.bfloat16 or torch.float32.
        scale_layout: `plain` or `blocked`, as `nvfp4_quantize` gave it.

    Returns:
        `(M, K)` or `(E, N, K)`, counted in elements; out_dtype, contiguous.

    Special values: a scale 0x7F or 0xFF gives NaN, also for a code of zero. The sign of a scale counts, although no
        quantizer writes a negative one. A zero keeps its sign. A product beyond fp32 gives Inf. T = 0
        gives zeros, if no scale is NaN.

    Raises:
        TypeError: qdata, scale, tensor_scale or out_dtype has a dtype that is not listed above.
        ValueError: qdata has a rank that is not listed above; axis or scale_layout is not in the lists above; the size
            along axis is not a multiple of 16; scale or tensor_scale has a shape that does not fit; or the operands are
            on two devices.

    Example:
        >>> qdata = torch.full((1, 8), 0xF5, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)  # 5 is 3.0, F is -6.0
        >>> scale = torch.tensor([[1.5]]).to(torch.float8_e4m3fn)
        >>> nvfp4_dequantize(qdata, scale, torch.tensor(0.5))[0, :2].tolist()
        [2.25, -4.5]

    Source: PTX ISA, `tcgen05.mma` with `.kind::mxf4nvf4` (codes and block scales). NVIDIA, arXiv 2509.25149, appendix B
        (the tensor scale).
    """
    check_args(qdata, scale, tensor_scale, axis=axis, out_dtype=out_dtype, scale_layout=scale_layout)
    if scale_layout == "blocked":
        scale = from_blocked(scale, *scale_shape(qdata, axis)[-2:])
    q = qdata.mT if axis == -2 else qdata
    blocks = widened(q, E2M1).unflatten(-1, (2 * q.shape[-1] // NVFP4_BLOCK_SIZE, NVFP4_BLOCK_SIZE))
    values = blocks * scale.to(torch.float32).unsqueeze(-1)  # exact
    out = (values * tensor_scale[..., None, None, None]).flatten(-2).to(out_dtype)
    return (out.mT if axis == -2 else out).contiguous()
