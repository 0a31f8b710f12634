"""fp8_gemm: multiply FP8 matrices that have fp32 scales in blocks of 128."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.reference.common import checks
from mxspec.reference.common.fp8_numerics import blocks_of, square_values, values
from mxspec.reference.common.numerics import round_once
from mxspec.reference.mx_dequantize import OUT_DTYPES
from mxspec.spec import spec

# The thresholds for kernels. Hopper's tensor cores keep about 14 bits of a sum of e4m3 products, so kernels add the
# partial sum to fp32 every 128 of K. An emulation of such a kernel passes both thresholds, also after bfloat16 rounding
# changes some outputs. A kernel that rounds its operands to bfloat16 fails, and so does one wrong scale among 4096. The
# cases use values of one size along K: if a few large values dominate every sum, the 14 bits alone fall below the fp32
# threshold, and no kernel can change that (see benchmarks/results/decisions.md).
MIN_SQNR_DB = {torch.float32: 70.0, torch.bfloat16: 55.0}


def check_operands(op: str, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> None:
    operands = ("a", a), ("a_scale", a_scale), ("b", b), ("b_scale", b_scale)
    for (name, tensor), dtype in zip(operands, 2 * (torch.float8_e4m3fn, torch.float32), strict=True):
        checks.tensor_dtype(op, name, tensor, (dtype,))
        checks.rank(op, name, tensor, (2,))
        checks.same_device(op, ("a", a), (name, tensor))
    (M, K), N = a.shape, b.shape[0]
    checks.shape(op, "b", b, (N, K), f"for a {(M, K)}")
    checks.fp8_size(op, "K", K)
    for name, tensor in (("a", a), ("b", b)):
        if tensor.stride(1) != 1 and K > 1:
            raise ValueError(f"{op}: {name} has strides {tensor.stride()}; needs K-major rows, that is stride(1) = 1")
    C = blocks_of(K)
    checks.shape(op, "a_scale", a_scale, (M, C), f"(1x128 blocks) for a {(M, K)}")
    square = (blocks_of(N), C)
    if tuple(b_scale.shape) != square:
        checks.shape(op, "b_scale", b_scale, (N, C), f"(1x128 blocks) or {square} (128x128) for b {(N, K)}")


def check_args(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *, out_dtype: torch.dtype = torch.bfloat16
) -> None:
    check_operands("fp8_gemm", a, a_scale, b, b_scale)
    checks.choice("fp8_gemm", "out_dtype", out_dtype, OUT_DTYPES, TypeError)


def product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """Return the matmul in fp64."""
    of_rows = b_scale.shape[0] == b.shape[0]
    w = values(b, b_scale) if of_rows else square_values(b, b_scale)  # (N, K)
    return values(a, a_scale) @ w.t()


@spec(
    check_args=check_args,
    min_sqnr_db=MIN_SQNR_DB,
    inf_is_free=True,
    flops=lambda args, outputs: 2 * args[0].shape[0] * args[2].shape[0] * args[0].shape[1],
)
def fp8_gemm(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Multiply FP8 matrices with scales in blocks of 128.

    `out[m, n] = out_dtype(sum_k a[m, k] * a_scale[m, k // 128] * b[n, k] * b_scale[n', k // 128])`. n' is `n // 128`
    for 128x128 blocks of b (forward, dgrad) and n for 1x128 blocks (wgrad). The shape of b_scale says which blocks b
    has. If b has one row, both shapes are the same, and both kinds of block mean the same.

    Args:
        a: `(M, K)` float8_e4m3fn, K-major: `stride(1) = 1`. K is a multiple of 16; M and N are free. If K is no
            multiple of 128, the last block along K is shorter.
        a_scale: `(M, ceil(K/128))` float32, 1x128 blocks; any strides. Kernels are fastest on MN-major scales, which
            have strides `(1, M)` with M a multiple of 4; `fp8_quantize_1x128(..., scale_major="mn")` gives them.
        b: `(N, K)` float8_e4m3fn, K-major.
        b_scale: float32, any strides: `(ceil(N/128), ceil(K/128))` for 128x128 blocks, `(N, ceil(K/128))` for 1x128
            blocks.
        out_dtype: torch.bfloat16 or torch.float32.

    Returns:
        `(M, N)` of out_dtype, contiguous. The reference computes products and sums in fp64 and rounds once, so the
        order of the sum seldom changes its result. A kernel sums in fp32 and is judged by its SQNR: at least 70 dB for
        fp32 and 55 dB for bfloat16. A kernel gives the same bits at every call. The kernels in Triton and Helion are
        batch-invariant: on one GPU, the bits of a row do not depend on the other rows or on their number. For this, the
        rows of the codes and of the output must begin at multiples of 16 bytes.

    Special values: a NaN code or scale makes its whole row or column of the output NaN; a NaN in a 128x128 scale makes
        128 columns NaN. With K = 0 the output is 0. An Inf scale makes outputs that are not finite. They may be Inf of
        either sign or NaN: a kernel scales the sum of a block and the reference scales each product, so the contract
        does not specify which. A kernel multiplies the two scales of a block in fp32 and sums in fp32. Therefore a
        product of two scales must be 0 or a normal number of fp32. If the magnitudes of an output's products add up to
        2^127 or more, a kernel may give the sum or any value that is not finite.

    Raises:
        TypeError: an operand, a scale or out_dtype has a dtype that is not listed above.
        ValueError: an operand has a rank that is not listed above or is not K-major; K is not a multiple of 16; a
            scale has a shape that fits neither kind of block; or the tensors are on two devices.

    Example:
        >>> a = torch.full((1, 256), 1.5).to(torch.float8_e4m3fn)
        >>> b = torch.full((2, 256), 2.0).to(torch.float8_e4m3fn)
        >>> a_scale = torch.tensor([[0.5, 1.0]])  # 128 * 3 * (0.5 + 1) * 1
        >>> fp8_gemm(a, a_scale, b, torch.ones(1, 2)).tolist()
        [[576.0, 576.0]]
        >>> fp8_gemm(a, a_scale, b, torch.tensor([[1.0, 1.0], [0.0, 2.0]])).tolist()  # a scale for each row of b
        [[576.0, 768.0]]

    Source: DeepSeek-V3 technical report, section 3.3.2.
    """
    check_args(a, a_scale, b, b_scale, out_dtype=out_dtype)
    return round_once(product(a, a_scale, b, b_scale), out_dtype)
