"""fp8_requantize_k_groups: FP8 codes along the tokens of each group, from codes along the features."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.reference.common import checks
from mxspec.reference.common.fp8_numerics import blocks_of
from mxspec.reference.fp8_dequantize import fp8_dequantize
from mxspec.reference.fp8_quantize_k_groups import fp8_quantize_k_groups
from mxspec.reference.mx_dequantize import OUT_DTYPES
from mxspec.spec import per_element, spec


def check_args(
    qdata: Tensor,
    scale: Tensor,
    offs: Tensor,
    *,
    dtype: torch.dtype = torch.float32,
    scale_format: str = "fp32",
    eps: float = 1e-12,
    check_offs: bool = False,
) -> None:
    op = "fp8_requantize_k_groups"
    checks.tensor_dtype(op, "qdata", qdata, (torch.float8_e4m3fn,))
    checks.tensor_dtype(op, "scale", scale, (torch.float32,))
    checks.rank(op, "qdata", qdata, (2,))
    checks.same_device(op, ("qdata", qdata), ("scale", scale))
    M, D = qdata.shape
    checks.fp8_size(op, "D", D)
    checks.shape(op, "scale", scale, (M, blocks_of(D)), f"(1x128 blocks) for qdata {tuple(qdata.shape)}")
    checks.choice(op, "dtype", dtype, OUT_DTYPES, TypeError)
    checks.eps(op, eps)
    checks.fp8_groups(op, ("qdata", qdata), offs, scale_format, check_offs)


@spec(
    check_args=check_args,
    flops=per_element(3),  # a multiply, a maximum and a multiply
)
def fp8_requantize_k_groups(
    qdata: Tensor,
    scale: Tensor,
    offs: Tensor,
    *,
    dtype: torch.dtype = torch.float32,
    scale_format: str = "fp32",
    eps: float = 1e-12,
    check_offs: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Make codes along the tokens of each group from codes along the features, which `fp8_quantize_1x128` gave.

    The bytes equal two steps: `x = fp8_dequantize(qdata, scale, out_dtype=dtype)`, then
    `fp8_quantize_k_groups(x, offs)` with the other options of this call. A kernel reads one byte per element and writes
    no x. Expert parallelism sends tokens as codes along the features. The gradient of an expert's weight needs codes
    along the tokens.

    The second quantization rounds values that the first has rounded. If all scales are powers of two
    (`scale_format="pow2"`), it rounds an element only if the new scale is larger than the old scale and makes the
    element subnormal. With fp32 scales, it rounds nearly every element: the noise doubles, so the codes are about 3 dB
    worse than those that `fp8_quantize_k_groups` makes of the tokens themselves.

    Args:
        qdata: `(M, D)` float8_e4m3fn, the codes of the tokens, the tokens of each group together; D a multiple of 16;
            any strides.
        scale: `(M, ceil(D/128))` float32 on qdata's device, the scales of the 1x128 blocks of each row. Any strides:
            both layouts of `fp8_quantize_1x128`, K-major and MN-major, are taken.
        offs: `(G,)` int32 on qdata's device: the exclusive end of each group, of any alignment. The ends never
            decrease, and the last is at most M. Rows from the last end on belong to no group and are dropped.
        dtype: the dtype of x: torch.float32, which keeps the product of code and scale as fp32, or torch.bfloat16,
            which rounds it once more.
        scale_format, eps: as for `fp8_quantize_1x128`, for the new codes.
        check_offs: as for `fp8_quantize_k_groups`.

    Returns:
        `(qdata, scale, start, end)`, as `fp8_quantize_k_groups` gives them. Below, `R` is the smallest multiple of 128
        that is at least `M + G*128`.

        - qdata: `(D, R)` float8_e4m3fn, contiguous: each group a row-major matrix of its own, and the codes after the
          last group 0.
        - scale: `(D, R/128)` float32, MN-major (strides `(1, D)`); 0 from column `end[G-1] / 128` on.
        - start, end: `(G,)` int32. Group g and its padding take the tokens from `start[g]` up to, but without,
          `end[g]`.

    Special values: a NaN code or a NaN scale makes an element of x NaN. A scale may be negative, infinite or 0: an
        infinite scale gives Inf, or NaN for a zero code. A product beyond the largest number of dtype is Inf. An
        element of x that is NaN or Inf makes the block of 128 tokens of its column NaN, codes and scale, padding
        included. A column of zeros keeps the signs of its zeros, and its scale is that of eps. Padding never changes a
        scale. Rows of no group influence nothing, whatever they hold. An offs out of order gives bytes without meaning,
        but no access outside the arguments and the results.

    Raises:
        TypeError: qdata, scale, offs or dtype has a dtype that is not listed above, or eps is not a number.
        ValueError: D is not a multiple of 16; a rank, a device, the shape of scale, scale_format or eps is not as
            above; there would be 2^31 padded rows or more; or, with check_offs, offs is not in order.

    Example:
        >>> from mxspec.reference.fp8_quantize_1x128 import fp8_quantize_1x128
        >>> x = torch.zeros(2, 16)
        >>> x[0, :2], x[1, 0] = torch.tensor([448.0, 112.0]), 224.0
        >>> codes, scale = fp8_quantize_1x128(x)
        >>> codes[:, :2].tolist(), scale.flatten().tolist()
        ([[448.0, 112.0], [448.0, 0.0]], [1.0, 0.5])
        >>> qdata, scale, start, end = fp8_requantize_k_groups(codes, scale, torch.tensor([2], dtype=torch.int32))
        >>> qdata.flatten()[:256].float().view(2, 128)[:, :2].tolist()
        [[448.0, 224.0], [448.0, 0.0]]
        >>> scale[:2, 0].tolist()
        [1.0, 0.25]

    Source: the two ops that it consists of.
    """
    check_args(qdata, scale, offs, dtype=dtype, scale_format=scale_format, eps=eps, check_offs=check_offs)
    x = fp8_dequantize(qdata, scale, out_dtype=dtype)  # (M, D)
    return fp8_quantize_k_groups(x, offs, scale_format=scale_format, eps=eps)
