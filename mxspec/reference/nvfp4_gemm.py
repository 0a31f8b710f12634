"""nvfp4_gemm: multiply NVFP4 matrices, each of which is codes with scales or bfloat16 values."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.formats import NVFP4_BLOCK_SIZE
from mxspec.reference.common import checks
from mxspec.reference.common.matmul import MIN_SQNR_DB, check_layout, check_scale
from mxspec.reference.common.numerics import round_once
from mxspec.reference.common.nvfp4_matmul import CODES, check_major, check_operands, per_byte, values
from mxspec.reference.from_blocked import from_blocked
from mxspec.reference.mx_dequantize import OUT_DTYPES
from mxspec.reference.to_blocked import blocked_bytes
from mxspec.spec import spec


def check_args(
    a: Tensor,
    a_scale: Tensor | None,
    a_tensor_scale: Tensor,
    b: Tensor,
    b_scale: Tensor | None,
    b_tensor_scale: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    scale_layout: str = "plain",
) -> None:
    op = "nvfp4_gemm"
    first, second = ("a", a, a_scale, a_tensor_scale), ("b", b, b_scale, b_tensor_scale)
    check_operands(op, first, second, ranks=(2, 2), tensor_scales=())
    K = a.shape[1] * per_byte(a)
    checks.shape(op, "b", b, (b.shape[0], K // per_byte(b)), f"for a {tuple(a.shape)} and K = {K}")
    if CODES in (a.dtype, b.dtype):
        checks.multiple(op, "K", K, NVFP4_BLOCK_SIZE, quantized=True)
    checks.choice(op, "out_dtype", out_dtype, OUT_DTYPES, TypeError)
    check_layout(op, scale_layout)
    C = K // NVFP4_BLOCK_SIZE
    for name, t, scale, _ in (first, second):
        check_major(op, name, t, 1, "K-major rows")
        if scale is not None:
            rows = t.shape[0]
            check_scale(op, f"{name}_scale", scale, (rows, C), (blocked_bytes(rows, C),), scale_layout, t)


@spec(
    check_args=check_args,
    min_sqnr_db=MIN_SQNR_DB,
    flops=lambda args, outputs: 2 * args[0].numel() * per_byte(args[0]) * args[3].shape[0],
)
def nvfp4_gemm(
    a: Tensor,
    a_scale: Tensor | None,
    a_tensor_scale: Tensor,
    b: Tensor,
    b_scale: Tensor | None,
    b_tensor_scale: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    scale_layout: str = "plain",
) -> Tensor:
    """Multiply NVFP4 matrices, with blocks of 16 along K. An operand may be codes, or the bfloat16 values of codes.

    `out[m, n] = out_dtype(T * sum_k x[m, k] * w[n, k])`, where `T = fl(a_tensor_scale * b_tensor_scale)` is one fp32
    product. If a holds codes, then `x[m, k] = a[m, k] * a_scale[m, k // 16]`, which is exact in bfloat16: it has at
    most 6 significant bits. If a holds values, then `x[m, k] = a[m, k]`, and a_scale is None. The same holds for w
    and b.

    Args:
        a: codes `(M, K/2)` float4_e2m1fn_x2, K-major: `stride(1) = 1`. A byte holds two neighbours along K, the first
            in the low nibble. Or values `(M, K)` bfloat16, with a stride of 1 in either dimension. K is a multiple of
            16 if a or b holds codes; otherwise K is free. M and N are free.
        a_scale: float8_e4m3fn, or None for values. Plain: `(M, K/16)`, any strides. Blocked: `to_blocked` of the plain
            scale, contiguous, as `nvfp4_quantize` gives it; its padding bytes are never read as numbers.
        a_tensor_scale: `()` float32 on a's device.
        b: codes `(N, K/2)` or values `(N, K)`, as a. One operand may be codes and the other values.
        b_scale, b_tensor_scale: as those of a, with N in place of M.
        out_dtype: torch.bfloat16 or torch.float32.
        scale_layout: `plain` or `blocked`, for both scales.

    Returns:
        `(M, N)` of out_dtype, contiguous. The reference computes products and sums in fp64, multiplies by T and rounds
        once. A kernel sums in fp32, multiplies by T in fp32 and rounds to out_dtype; it is judged by its SQNR: at least
        70 dB for fp32 and 55 dB for bfloat16. A kernel gives the same bits at every call. The kernels in Triton and
        Helion are batch-invariant: on one GPU, the bits of a row do not depend on the other rows or on their number.
        For this, the rows of a, of b and of the output must begin at multiples of 16 bytes, values must be 0 or at
        least 2^-118, as those of codes are, and no sum may pass the range of fp32.

    Special values: a scale 0x7F in a makes its output row NaN; in b, its output column. So does a NaN among values; an
        Inf among values is Inf, and Inf times zero is NaN. The sign bit of a scale must be 0: Blackwell's tensor cores
        do not read it, so a result of such a scale has no meaning. T is multiplied like any number: with T = 0 finite
        sums become 0, and a T of NaN makes every output NaN, also if K = 0. Sums of codes never overflow. Larger values
        may make a sum Inf in a kernel before T makes it small again.

    Raises:
        TypeError: an operand, a scale, a tensor scale or out_dtype has a dtype that is not listed above; codes have no
            scale; or values have one.
        ValueError: an operand has a rank or strides that are not as above; the sizes K do not fit; K is not a multiple
            of 16; scale_layout is not in the list above; a scale or a tensor scale has a shape that does not fit; a
            blocked scale is not contiguous; or the tensors are on two devices.

    Example:
        >>> codes = torch.full((1, 8), 0x32, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)  # 2 is 1.0, 3 is 1.5
        >>> scale = torch.tensor([[4.0]]).to(torch.float8_e4m3fn)
        >>> values = torch.tensor([2.0, -1.0]).bfloat16()[:, None].expand(2, 16).contiguous()
        >>> half = torch.tensor(0.5)
        >>> nvfp4_gemm(codes, scale, half, values, None, half).tolist()  # 8 * (1 + 1.5) * 4 * 2 / 4
        [[40.0, -20.0]]

    Source: PTX ISA, `tcgen05.mma` with `.kind::mxf4nvf4` (codes and block scales). NVIDIA, arXiv 2509.25149, appendix B
        (the tensor scale).
    """
    check_args(
        a, a_scale, a_tensor_scale, b, b_scale, b_tensor_scale, out_dtype=out_dtype, scale_layout=scale_layout
    )  # fmt: skip
    C = a.shape[1] * per_byte(a) // NVFP4_BLOCK_SIZE
    if scale_layout == "blocked":
        a_scale, b_scale = (
            None if s is None else from_blocked(s, t.shape[0], C) for s, t in ((a_scale, a), (b_scale, b))
        )
    T = a_tensor_scale * b_tensor_scale  # one rounding to fp32
    return round_once(values(a, a_scale) @ values(b, b_scale).t() * T.double(), out_dtype)
