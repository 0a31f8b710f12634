"""fp8_grouped_gemm_wgrad_: the gradient of each expert's weights, added in place to that of earlier micro-batches."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.reference.common import checks
from mxspec.reference.common.numerics import round_once
from mxspec.reference.fp8_gemm import MIN_SQNR_DB
from mxspec.reference.fp8_grouped_gemm_wgrad import check_groups, products
from mxspec.spec import spec


def check_args(
    acc: Tensor, dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, offs: Tensor, *, check_offs: bool = False
) -> None:
    op = "fp8_grouped_gemm_wgrad_"
    checks.tensor_dtype(op, "acc", acc, (torch.float32,))
    check_groups(op, dy, dy_scale, x, x_scale, offs, check_offs)
    checks.same_device(op, ("acc", acc), ("dy", dy))
    E, N, K = offs.shape[0], dy.shape[0], x.shape[0]
    because = f"for {E} groups, dy {tuple(dy.shape)} and x {tuple(x.shape)}"
    checks.shape(op, "acc", acc, (E, N, K), because)
    checks.rows_apart(op, "acc", acc)


@spec(
    check_args=check_args,
    min_sqnr_db=MIN_SQNR_DB[torch.float32],
    inf_is_free=True,
    # counts all R tokens, because the host does not read offs
    flops=lambda args, outputs: 2 * args[1].numel() * args[3].shape[0],
)
def fp8_grouped_gemm_wgrad_(
    acc: Tensor, dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, offs: Tensor, *, check_offs: bool = False
) -> None:
    """Sum `dy^T x` over the tokens of each group and add each group's sum to its own matrix in place.

    `acc[e] += fp8_grouped_gemm_wgrad(dy, dy_scale, x, x_scale, offs)[e]`: the gradient of each expert's weights over
    micro-batches, without matrices per micro-batch.

    Args:
        acc: `(E, N, K)` float32, row-major: `stride(2) = 1`. Rows and matrices may lie any distance apart that keeps
            them from overlapping. The op changes acc, which must share no memory with an operand.
        dy, dy_scale, x, x_scale, offs, check_offs: as for `fp8_grouped_gemm_wgrad`.

    Returns:
        None. The reference adds products, sums and acc in fp64 and rounds once, to acc's fp32. A kernel sums in fp32
        and is judged by its SQNR: at least 70 dB. The matrix of a group without tokens does not change. In the kernels
        in Triton and Helion, no bit of an expert's matrix depends on the tokens of other experts.

    Special values: a NaN in acc stays in its element. A NaN code or scale makes its row or column NaN, only in its own
        expert's matrix. Inf, and sums beyond fp32, are as for `fp8_gemm`.

    Raises:
        TypeError: acc, an operand, a scale or offs has a dtype that is not listed above.
        ValueError: acc has a shape that does not fit, rows that are not row-major, or rows or matrices that overlap, or
            is a negated view (`is_neg()`); or `fp8_grouped_gemm_wgrad` would refuse the operands.
        RuntimeError: a tensor requires a gradient while gradients are enabled; this op has no gradient.

    Example:
        >>> dy = torch.full((1, 256), 2.0).to(torch.float8_e4m3fn)
        >>> x = torch.tensor([1.0, -3.0, 0.5, 4.0]).repeat_interleave(128).view(2, 256).to(torch.float8_e4m3fn)
        >>> offs = torch.tensor([128, 128, 256], dtype=torch.int32)
        >>> acc = torch.ones(3, 1, 2)
        >>> for _ in range(2):  # micro-batches
        ...     fp8_grouped_gemm_wgrad_(acc, dy, torch.ones(1, 2), x, torch.ones(2, 2), offs)
        >>> acc.tolist()
        [[[513.0, -1535.0]], [[1.0, 1.0]], [[257.0, 2049.0]]]

    Source: DeepSeek-V3 technical report, section 3.3.2; DeepGEMM, `k_grouped_fp8_gemm_nt_contiguous(..., c=d)`.
    """
    check_args(acc, dy, dy_scale, x, x_scale, offs, check_offs=check_offs)
    for e, (own, product) in enumerate(products(dy, dy_scale, x, x_scale, offs)):
        added = round_once(acc[e].double() + product, acc.dtype)
        # without tokens, adding an empty sum (+0) would turn a -0 into +0
        acc[e] = torch.where(own.any(), added, acc[e])
