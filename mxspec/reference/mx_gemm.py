"""mx_gemm: multiply MX matrices, that is FP8 or FP4 codes with one power-of-two scale per block of 32."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.formats import MX_BLOCK_SIZE
from mxspec.reference.common import checks
from mxspec.reference.common.matmul import (
    MIN_SQNR_DB,
    check_layout,
    check_operands,
    check_scale,
    check_unit_stride,
    elements_of_row,
    values,
)
from mxspec.reference.common.numerics import round_once
from mxspec.reference.from_blocked import from_blocked
from mxspec.reference.mx_dequantize import OUT_DTYPES
from mxspec.reference.to_blocked import blocked_bytes
from mxspec.spec import spec


def check_args(
    a: Tensor,
    a_scale: Tensor | None,
    b: Tensor,
    b_scale: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    scale_layout: str = "plain",
) -> None:
    op = "mx_gemm"
    K, stored, of_a = check_operands(op, a, a_scale, b, b_scale, ranks=(2, 2))
    checks.shape(op, "b", b, (b.shape[0], stored), of_a)
    checks.choice(op, "out_dtype", out_dtype, OUT_DTYPES, TypeError)
    check_layout(op, scale_layout)
    C = K // MX_BLOCK_SIZE
    for name, operand, scale in (("a", a, a_scale), ("b", b, b_scale)):
        check_unit_stride(op, name, operand, 1, "K-major rows")
        if scale is not None:
            rows = operand.shape[0]
            check_scale(op, f"{name}_scale", scale, (rows, C), (blocked_bytes(rows, C),), scale_layout, operand)


@spec(
    check_args=check_args,
    min_sqnr_db=MIN_SQNR_DB,
    flops=lambda args, outputs: 2 * args[0].shape[0] * args[2].shape[0] * elements_of_row(args[0]),
)
def mx_gemm(
    a: Tensor,
    a_scale: Tensor | None,
    b: Tensor,
    b_scale: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    scale_layout: str = "plain",
) -> Tensor:
    """Multiply MXFP8 or MXFP4 matrices, with blocks of 32 along K. Also bfloat16 by MXFP4.

    `out[m, n] = out_dtype(sum_k a[m, k] * 2^(a_scale[m, k // 32] - 127) * b[n, k] * 2^(b_scale[n, k // 32] - 127))`;
    the formula takes the scales as bytes. A bfloat16 a is taken as it is, without a scale.

    Args:
        a: `(M, K)` float8_e4m3fn or float8_e5m2, K-major: `stride(1) = 1`. K is a multiple of 32; M and N are free. If
            b is float4_e2m1fn_x2, a may also be bfloat16, or `(M, K/2)` float4_e2m1fn_x2.
        a_scale: float8_e8m0fnu. Plain: `(M, K/32)`, any strides. Blocked: `to_blocked` of the plain scale, contiguous;
            its padding bytes are never read as numbers. None if a is bfloat16.
        b: `(N, K)` float8_e4m3fn or float8_e5m2, or `(N, K/2)` float4_e2m1fn_x2, K-major. Its dtype may differ from
            a's. A float4_e2m1fn_x2 byte holds two elements along K, the first in the low nibble.
        b_scale: as a_scale, of `(N, K/32)`.
        out_dtype: torch.bfloat16 or torch.float32.
        scale_layout: `plain` or `blocked`, for both scales.

    Returns:
        `(M, N)` of out_dtype, contiguous. The reference computes products and sums in fp64 and rounds once. A kernel
        sums in fp32 and is judged by its SQNR: at least 70 dB for fp32 and 55 dB for bfloat16. A kernel gives the same
        bits at every call. The kernels in Triton and Helion are batch-invariant: on one GPU, the bits of a row do not
        depend on the other rows or on their number. For this, the rows of the codes and of the output must begin at
        multiples of 16 bytes. There are two exceptions, in Triton on Hopper, in which the last bits may depend on the
        size of the output: elements whose row of a or of b has a scale byte below 10 or above 246 (e5m2: below 17 or
        above 239), and sums near the ends of fp32's range: subnormal sums, and sums from 2^120 on (e5m2: 2^108). If b
        is e2m1, only the scale bytes of an e4m3 or e5m2 a make an exception. If a is bfloat16, a kernel may lose what a
        sum has below 2^-145.

    Special values: a NaN code, a NaN in bfloat16 or byte 255 in a makes its output row NaN; in b, its output column.
        e2m1 has no NaN. Byte 0 is 2^-127, and 448 * 2^127 times 2^-127 is 448: a product that is finite stays finite.
        An e5m2 code of Inf is Inf, and Inf times zero is NaN. A sum beyond out_dtype's range is Inf. With K = 0 the
        output is 0.

    Raises:
        TypeError: an operand, a scale or out_dtype has a dtype that is not listed above; a is bfloat16 and has a scale;
            or a or b holds codes and has none.
        ValueError: an operand has a rank that is not listed above or is not K-major; K is not a multiple of 32;
            scale_layout is not in the list above; a scale has a shape that does not fit; a blocked scale is not
            contiguous; or the tensors are on two devices.

    Example:
        >>> a = torch.full((1, 64), 1.5).to(torch.float8_e4m3fn)
        >>> b = torch.full((2, 64), 2.0).to(torch.float8_e5m2)
        >>> a_scale = torch.tensor([[127, 128]], dtype=torch.uint8).view(torch.float8_e8m0fnu)  # 1 and 2
        >>> b_scale = torch.tensor([[127, 127], [126, 0]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
        >>> mx_gemm(a, a_scale, b, b_scale).tolist()  # 32 * 3 * (1 + 2), 32 * 3 / 2
        [[288.0, 48.0]]
        >>> w = torch.full((2, 32), 0x52, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)  # 2 is 1.0, 5 is 3.0
        >>> mx_gemm(torch.ones(1, 64, dtype=torch.bfloat16), None, w, b_scale).tolist()  # 16 * 4 * 2, 16 * 4 / 2
        [[128.0, 32.0]]

    Source: OCP MX v1.0, section 6.2 (dot product of two MX vectors).
    """
    check_args(a, a_scale, b, b_scale, out_dtype=out_dtype, scale_layout=scale_layout)
    C = elements_of_row(a) // MX_BLOCK_SIZE
    if scale_layout == "blocked":
        a_scale = None if a_scale is None else from_blocked(a_scale, a.shape[0], C)
        b_scale = from_blocked(b_scale, b.shape[0], C)
    x = a.double() if a_scale is None else values(a, a_scale)
    return round_once(x @ values(b, b_scale).t(), out_dtype)
