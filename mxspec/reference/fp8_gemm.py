"""fp8_gemm: a matmul of FP8 operands that carry fp32 scales in blocks of 128."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.formats import FP8_BLOCK_SIZE
from mxspec.reference.common import checks
from mxspec.reference.common.fp8_numerics import square_values, values
from mxspec.reference.common.numerics import round_once
from mxspec.reference.mx_dequantize import OUT_DTYPES
from mxspec.spec import spec

# Hopper's tensor cores keep about 14 bits of a sum of e4m3 products, so that kernels move it to fp32 every 128 of K:
# emulated, that is 78 dB, and 62 dB once it has changed the rounding of some outputs to bfloat16. Operands that are
# themselves rounded to bfloat16 give 50 dB, one of 4096 scales wrong by a factor of two 36 dB. The cases' values are of
# one size along K: where a few large ones make up every sum, those 14 bits are 68 dB, and a kernel has no part in it.
MIN_SQNR_DB = {torch.float32: 70.0, torch.bfloat16: 55.0}


def check_operands(op: str, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> None:
    operands = ("a", a), ("a_scale", a_scale), ("b", b), ("b_scale", b_scale)
    for (name, tensor), dtype in zip(operands, 2 * (torch.float8_e4m3fn, torch.float32), strict=True):
        checks.tensor_dtype(op, name, tensor, (dtype,))
        checks.rank(op, name, tensor, (2,))
        checks.same_device(op, ("a", a), (name, tensor))
    (M, K), N = a.shape, b.shape[0]
    checks.shape(op, "b", b, (N, K), f"for a {(M, K)}")
    checks.multiple(op, "K", K, FP8_BLOCK_SIZE)
    for name, tensor in (("a", a), ("b", b)):
        if tensor.stride(1) != 1 and K > 1:
            raise ValueError(f"{op}: {name} has strides {tensor.stride()}; needs K-major rows, that is stride(1) = 1")
    C = K // FP8_BLOCK_SIZE
    checks.shape(op, "a_scale", a_scale, (M, C), f"(1x128 blocks) for a {(M, K)}")
    square = (-(-N // FP8_BLOCK_SIZE), C)
    if tuple(b_scale.shape) != square:
        checks.shape(op, "b_scale", b_scale, (N, C), f"(1x128 blocks) or {square} (128x128) for b {(N, K)}")


def check_args(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *, out_dtype: torch.dtype = torch.bfloat16
) -> None:
    check_operands("fp8_gemm", a, a_scale, b, b_scale)
    checks.choice("fp8_gemm", "out_dtype", out_dtype, OUT_DTYPES, TypeError)


def product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """The matmul in fp64."""
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

    `out[m, n] = out_dtype(sum_k a[m, k] * a_scale[m, k // 128] * b[n, k] * b_scale[n', k // 128])`, where n' is
    `n // 128` for 128x128 blocks (forward, dgrad) and n for 1x128 blocks (wgrad): the granularity of b is read from
    the shape of its scale. Where both shapes are the same (one row) both mean the same.

    Args:
        a: `(M, K)` float8_e4m3fn, K-major: `stride(1) = 1`; K a multiple of 128. M and N are free.
        a_scale: `(M, K/128)` float32, 1x128 blocks; any strides. Kernels are fastest on MN-major scales, strides
            `(1, M)` with M a multiple of 4, as `fp8_quantize_1x128(..., scale_major="mn")` gives them.
        b: `(N, K)` float8_e4m3fn, K-major.
        b_scale: float32, any strides: `(ceil(N/128), K/128)` for 128x128 blocks, `(N, K/128)` for 1x128.
        out_dtype: torch.bfloat16 or torch.float32.

    Returns:
        `(M, N)` of out_dtype, contiguous. Products and sums are fp64 and are rounded once, so that the result depends
        on no order of sums. A kernel sums in fp32 and is judged by its SQNR: 70 dB for fp32, 55 dB for bfloat16; it
        gives the same bits at every call.

    Special values: a NaN code or scale makes its whole row or column of the output NaN, or for a 128x128 scale 128
        columns; with K = 0 the output is 0. An Inf scale makes outputs that are not finite: Inf of either sign or NaN,
        which of them is not specified, since a kernel scales a block's sum and the reference each product. A kernel
        multiplies the two scales of a block in fp32, and sums in fp32. So a product of two scales must be a normal
        number of fp32, or 0, and where the magnitudes of an output's products add up to 2^127 or more, its sum or
        anything that is not finite is right.

    Raises:
        TypeError: the dtype of an operand or of a scale, or out_dtype.
        ValueError: rank, K, an operand that is not K-major, scales whose shape fits no granularity, or two devices.

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
