"""fp8_dequantize: the values that FP8 codes and their 128-block scales represent."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.formats import FP8_BLOCK_SIZE
from mxspec.reference.common import checks
from mxspec.reference.common.fp8_numerics import blocks_of, in_blocks
from mxspec.reference.mx_dequantize import OUT_DTYPES
from mxspec.spec import per_element, spec


def check_args(qdata: Tensor, scale: Tensor, *, axis: int = -1, out_dtype: torch.dtype = torch.bfloat16) -> None:
    op = "fp8_dequantize"
    checks.tensor_dtype(op, "qdata", qdata, (torch.float8_e4m3fn,))
    checks.tensor_dtype(op, "scale", scale, (torch.float32,))
    checks.rank(op, "qdata", qdata, (2, 3))
    checks.same_device(op, ("qdata", qdata), ("scale", scale))
    checks.choice(op, "axis", axis, (-1, -2))
    checks.choice(op, "out_dtype", out_dtype, OUT_DTYPES, TypeError)
    checks.fp8_size(op, "K" if axis == -1 else "M", qdata.shape[axis])
    *lead, R, K = qdata.shape if axis == -1 else qdata.mT.shape
    vector, square = (*lead, R, blocks_of(K)), (*lead, blocks_of(R), blocks_of(K))
    if tuple(scale.shape) != square:
        because = f"(1x128 blocks) or {square} (128x128) for qdata {tuple(qdata.shape)}, axis {axis}"
        checks.shape(op, "scale", scale, vector, because)


@spec(
    check_args=check_args,
    flops=per_element(1),  # a multiply
)
def fp8_dequantize(qdata: Tensor, scale: Tensor, *, axis: int = -1, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Read FP8 codes back: `out = out_dtype(fp32(q * scale))`.

    The shape of the scale says whether the blocks are 1x128 or 128x128, as in the matmuls. If qdata has one row, both
    shapes are the same, and both kinds of block mean the same. The last block may be shorter than 128.

    Args:
        qdata: `(M, K)` or `(E, N, K)` float8_e4m3fn; any strides.
        scale: float32 on qdata's device, any strides: `(..., M, ceil(K/128))` for 1x128 blocks,
            `(..., ceil(M/128), ceil(K/128))` for 128x128 blocks. For axis -2 these are the shapes for the transpose of
            qdata.
        axis: the dimension along which the blocks of 128 lie, -1 or -2. Its size is a multiple of 16.
        out_dtype: torch.bfloat16 or torch.float32.

    Returns:
        qdata's shape, out_dtype, contiguous. The product is rounded twice: to fp32 and then to out_dtype. The kernels
        of other libraries do so too; a single rounding would sometimes give another value.

    Special values: a NaN code or scale gives NaN. Minus zero stays minus zero.

    Raises:
        TypeError: qdata, scale or out_dtype has a dtype that is not listed above.
        ValueError: qdata has a rank that is not listed above; axis is neither -1 nor -2; the size along axis is not a
            multiple of 16; scale has a shape that does not fit; or the operands are on two devices.

    Example:
        >>> qdata = torch.full((2, 128), 1.5).to(torch.float8_e4m3fn)
        >>> fp8_dequantize(qdata, torch.tensor([[2.0], [-0.5]]))[:, 0].tolist()
        [3.0, -0.75]

    Source: DeepSeek-V3 technical report, section 3.3.2.
    """
    check_args(qdata, scale, axis=axis, out_dtype=out_dtype)
    q = qdata.mT if axis == -2 else qdata
    R, K = q.shape[-2:]
    if scale.shape[-2] != R:  # 128x128: one row of scales serves 128 rows of codes
        scale = scale.repeat_interleave(FP8_BLOCK_SIZE, dim=-2)[..., :R, :]
    blocks = in_blocks(q.to(torch.float32))  # (..., ceil(K/128), 128)
    out = (blocks * scale.unsqueeze(-1)).flatten(-2)[..., :K].to(out_dtype)
    return (out.mT if axis == -2 else out).contiguous()
