"""fp8_gemm_: a matmul of FP8 operands that is added to a matrix in place."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.reference.common import checks
from mxspec.reference.fp8_gemm import MIN_SQNR_DB, check_operands, product
from mxspec.spec import spec


def check_args(acc: Tensor, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> None:
    op = "fp8_gemm_"
    checks.tensor_dtype(op, "acc", acc, (torch.float32,))
    check_operands(op, a, a_scale, b, b_scale)
    checks.same_device(op, ("acc", acc), ("a", a))
    M, N = a.shape[0], b.shape[0]
    checks.shape(op, "acc", acc, (M, N), f"for a {tuple(a.shape)} and b {tuple(b.shape)}")
    if N > 1 and acc.stride(1) != 1:
        raise ValueError(f"{op}: acc has strides {acc.stride()}; needs row-major rows, that is stride(1) = 1")
    if M > 1 and acc.stride(0) < N:
        raise ValueError(f"{op}: acc has strides {acc.stride()}; needs rows that do not overlap, stride(0) >= {N}")


@spec(
    check_args=check_args,
    min_sqnr_db=MIN_SQNR_DB[torch.float32],
    inf_is_free=True,
    flops=lambda args, outputs: 2 * args[0].numel() * args[1].shape[1],
)
def fp8_gemm_(acc: Tensor, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> None:
    """Multiply FP8 matrices with scales in blocks of 128 and add the product to a matrix, in place.

    `acc[m, n] += sum_k a[m, k] * a_scale[m, k // 128] * b[n, k] * b_scale[n', k // 128]`, where n' is n for 1x128
    blocks of b and `n // 128` for 128x128 blocks, as in `fp8_gemm`. With 1x128 by 1x128 it adds up the gradient of a
    weight over micro-batches, without a matrix for each one's share.

    Args:
        acc: `(M, N)` float32, row-major: `stride(1) = 1`, rows any distance apart that keeps them from overlapping. It
            is changed, and shares no memory with an operand. Kernels are fastest where it begins, and its rows lie, at
            multiples of 16 bytes.
        a, a_scale, b, b_scale: the operands, as `fp8_gemm` takes them.

    Returns:
        None. Products, sums and acc are added in fp64 and rounded once, to acc's fp32. A kernel sums in fp32 and is
        judged by its SQNR, 70 dB.

    Special values: a NaN in acc stays in its element; a NaN code or scale makes its whole row or column NaN, or for a
        128x128 scale 128 columns; Inf and sums past fp32 are as for `fp8_gemm`; with K = 0 acc stays as it is. On
        Hopper, acc is flushed to 0 where it is subnormal.

    Raises:
        TypeError: the dtype of acc, of an operand or of a scale.
        ValueError: acc's shape or layout, or what `fp8_gemm` refuses in operands.
        RuntimeError: a tensor that requires a gradient where gradients are enabled; this op has none.

    Example:
        >>> a = torch.full((1, 256), 1.5).to(torch.float8_e4m3fn)
        >>> b = torch.full((2, 256), 2.0).to(torch.float8_e4m3fn)
        >>> acc = torch.tensor([[1.0, -1000.0]])
        >>> for _ in range(2):  # micro-batches of 256 tokens: 256 * 3 each
        ...     fp8_gemm_(acc, a, torch.ones(1, 2), b, torch.ones(2, 2))
        >>> acc.tolist()
        [[1537.0, 536.0]]

    Source: DeepSeek-V3 technical report, section 3.3.2; DeepGEMM's `fp8_gemm_nt(..., c=d)`.
    """
    check_args(acc, a, a_scale, b, b_scale)
    if a.shape[1]:  # a sum of nothing is +0, which would turn a -0 into +0
        acc.copy_(acc.double() + product(a, a_scale, b, b_scale))
