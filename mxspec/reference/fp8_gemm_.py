"""fp8_gemm_: multiply FP8 matrices and add the product to a matrix in place."""

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
    checks.rows_apart(op, "acc", acc)


@spec(
    check_args=check_args,
    min_sqnr_db=MIN_SQNR_DB[torch.float32],
    inf_is_free=True,
    flops=lambda args, outputs: 2 * args[0].numel() * args[1].shape[1],
)
def fp8_gemm_(acc: Tensor, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> None:
    """Multiply FP8 matrices with scales in blocks of 128 and add the product to a matrix in place.

    `acc[m, n] += sum_k a[m, k] * a_scale[m, k // 128] * b[n, k] * b_scale[n', k // 128]`. n' is n for 1x128 blocks of b
    and `n // 128` for 128x128 blocks, as in `fp8_gemm`. With 1x128 blocks in both operands, the op sums the gradient of
    a weight over micro-batches without a matrix per micro-batch.

    Args:
        acc: `(M, N)` float32, row-major: `stride(1) = 1`. Rows may lie any distance apart that keeps them from
            overlapping. The op changes acc, which must share no memory with an operand. Kernels are fastest if acc and
            each of its rows begin at a multiple of 16 bytes.
        a, a_scale, b, b_scale: the operands, as for `fp8_gemm`.

    Returns:
        None. The reference adds products, sums and acc in fp64 and rounds once, to acc's fp32. A kernel sums in fp32
        and is judged by its SQNR: at least 70 dB. Batch invariance is as for `fp8_gemm`.

    Special values: a NaN in acc stays in its element. A NaN code or scale makes its whole row or column NaN; a NaN in a
        128x128 scale makes 128 columns NaN. Inf, and sums beyond fp32, are as for `fp8_gemm`. With K = 0 acc does not
        change. On Hopper, subnormal numbers of acc become 0.

    Raises:
        TypeError: acc, an operand or a scale has a dtype that is not listed above.
        ValueError: acc has a shape that does not fit, rows that are not row-major or rows that overlap, or is a negated
            view (`is_neg()`); or `fp8_gemm` would refuse the operands.
        RuntimeError: a tensor requires a gradient while gradients are enabled; this op has no gradient.

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
    if a.shape[1]:  # with K = 0, adding an empty sum (+0) would turn a -0 into +0
        acc.copy_(acc.double() + product(a, a_scale, b, b_scale))
