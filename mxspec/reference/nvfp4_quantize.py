"""nvfp4_quantize: quantize to NVFP4, where 16 elements share an e4m3 scale and a tensor has one fp32 scale."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.formats import E2M1, NVFP4_BLOCK_SIZE
from mxspec.reference.common import checks
from mxspec.reference.common.numerics import saturating_cast
from mxspec.reference.common.nvfp4_numerics import blocks_of, magnitude_of, scales_and_quotients, tensor_scale
from mxspec.reference.mx_quantize import SCALE_LAYOUTS
from mxspec.reference.to_blocked import to_blocked
from mxspec.spec import per_element, spec

BLOCKS = ("1x16", "16x16")


def check_args(
    x: Tensor,
    tensor_amax: Tensor | None = None,
    *,
    axis: int = -1,
    block: str = "1x16",
    scale_layout: str = "plain",
) -> None:
    check_call("nvfp4_quantize", x, tensor_amax, axis, block, scale_layout)


def check_call(op: str, x: Tensor, tensor_amax: Tensor | None, axis: int, block: str, scale_layout: str) -> None:
    """`check_args` of an op that has blocks of these kinds."""
    checks.tensor_dtype(op, "x", x, checks.FLOAT_DTYPES)
    checks.rank(op, "x", x, (2, 3))
    checks.choice(op, "axis", axis, (-1, -2))
    checks.choice(op, "block", block, BLOCKS)
    checks.choice(op, "scale_layout", scale_layout, SCALE_LAYOUTS)
    for dim, name in ((-1, "K"), (-2, "M" if x.ndim == 2 else "N")):
        if dim == axis or block == "16x16":
            checks.multiple(op, name, x.shape[dim], NVFP4_BLOCK_SIZE)
    if tensor_amax is not None:
        checks.tensor_dtype(op, "tensor_amax", tensor_amax, (torch.float32,))
        checks.same_device(op, ("x", x), ("tensor_amax", tensor_amax))
        because = f"for x {tuple(x.shape)}: one number for each matrix"
        checks.shape(op, "tensor_amax", tensor_amax, tuple(x.shape[:-2]), because)


@spec(
    check_args=check_args,
    flops=per_element(3),  # a maximum, a multiply and a divide
    peer_rules="nvfp4",
)
def nvfp4_quantize(
    x: Tensor,
    tensor_amax: Tensor | None = None,
    *,
    axis: int = -1,
    block: str = "1x16",
    scale_layout: str = "plain",
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize to NVFP4: e2m1 codes, an e4m3 scale for 16 elements along `axis`, and an fp32 scale for each matrix.

    Let `A` be tensor_amax, or the largest magnitude of the matrix. Let `b` be the largest magnitude of a block. Read
    back, an element is `q * s * T`. Each `fl` is one fp32 operation, rounded to nearest even. Subnormal numbers keep
    their values:

    - `T = fl(A / 2688)`, the tensor scale; 2688 is 448 * 6, the largest values of e4m3fn and e2m1;
    - `h = fl(A / 4096)`, which keeps the next products in the range of fp32;
    - `s = e4m3(min(fl(fl(b * 7/64) / h), 448))`, the block's scale: `448 * b / A`;
    - `q = e2m1(fl(fl(x * 21/32) / fl(s * h)))`, the codes: `2688 * x / (s * A)`. e2m1 saturates at 6.

    If x is bfloat16 or float16, tensor_amax is None and A is at least 2^-105, then every product is exact. So s and q
    are the two quotients, rounded once. The op has no gradient.

    Args:
        x: `(M, K)` or `(E, N, K)`; bfloat16, float16 or float32; any strides. A stack of E matrices is quantized matrix
            by matrix.
        tensor_amax: float32 on x's device; `()`, or `(E,)` for a stack. None computes it from x, which costs one more
            read of x. If it is smaller than the largest magnitude, scales and codes saturate.
        axis: -1 for blocks along K, -2 for blocks along M (or N). The size of that dimension must be a multiple of 16.
        block: `1x16`, or `16x16` for weights: one scale for a square, so that the transpose of a weight has the same
            values. Both sizes must then be multiples of 16. The scale tensor holds each of these scales 16 times.
        scale_layout: `plain` (row-major) or `blocked` (the 128x4 tiles of `to_blocked`).

    Returns:
        `(qdata, scale, tensor_scale)`.

        - qdata: float4_e2m1fn_x2. Two neighbours along `axis` share a byte, the first in the low nibble. Axis -1 gives
          `(..., K/2)`, contiguous. Axis -2 gives `(..., M/2, K)` with the strides of the transpose of a contiguous
          `(..., K, M/2)`.
        - scale: float8_e4m3fn. Plain: `(..., K/16)` for axis -1 and `(..., K, M/16)` for axis -2, row-major. Blocked:
          `to_blocked` of the plain scale, with padding bytes 0.
        - tensor_scale: float32, `()` or `(E,)`: T, a multiplier.

    Special values: a block of zeros has s = 0. If h is 0 (A is at most 2^-138), every s is 0. If fl(s * h) is 0, every
        code is a zero with the sign of its element. A block with a NaN or an Inf has the scale 0x7F (NaN) and the codes
        7, also if h is 0. If A is NaN, Inf or negative, T is NaN, every scale is 0x7F and every code is 7. A matrix of
        zeros has T = 0.

    Raises:
        TypeError: x or tensor_amax has a dtype that is not listed above.
        ValueError: x has a rank that is not listed above; axis, block or scale_layout is not in the lists above; a size
            is not a multiple of 16; or tensor_amax has another shape or device.

    Example:
        >>> x = torch.zeros(2, 16)
        >>> x[0, :4], x[1, 0] = torch.tensor([448.0, -112.0, 1.0, 75.0]), 7.0
        >>> qdata, scale, tensor_scale = nvfp4_quantize(x)
        >>> scale.tolist(), tensor_scale.item()
        ([[448.0], [7.0]], 0.1666666716337204)
        >>> qdata.view(torch.uint8)[:, :2].tolist()  # 6 and -1.5, then 0 and 1 (75 / 448 * 6 = 1.004); 6
        [[183, 32], [7, 0]]

    Source: NVIDIA, "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149), appendix B, for the three levels
        of the format; PTX ISA, `tcgen05.mma` with `.kind::mxf4nvf4`, for the layout. The roundings are this package's.
    """
    check_args(x, tensor_amax, axis=axis, block=block, scale_layout=scale_layout)
    if axis == -2:
        x = x.mT  # from here the blocks lie along the last dimension
    blocks = blocks_of(x)  # (..., R, C/16, 16)
    b = blocks.abs().amax(-1)  # (..., R, C/16)
    A = magnitude_of(b, tensor_amax)
    if block == "16x16":
        b = b.unflatten(-2, (b.shape[-2] // 16, 16)).amax(-2).repeat_interleave(16, -2)
    scale, y = scales_and_quotients(blocks, b, A[..., None, None])
    qdata = saturating_cast(y, E2M1).flatten(-2)  # (..., R, C/2)
    if scale_layout == "blocked":
        scale = to_blocked(scale)
    return qdata.mT if axis == -2 else qdata, scale, tensor_scale(A)
