"""mx_requantize_groups: MX codes along the tokens of each group, from codes along the features."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.formats import FP8_DTYPES, MX_BLOCK_SIZE
from mxspec.reference.common import checks
from mxspec.reference.mx_dequantize import OUT_DTYPES, mx_dequantize
from mxspec.reference.mx_quantize_groups import check_groups, mx_quantize_groups
from mxspec.spec import per_element, spec


def check_args(
    qdata: Tensor,
    scale: Tensor,
    offs: Tensor,
    *,
    dtype: torch.dtype = torch.float32,
    pad_to: int = 128,
    elem_dtype: torch.dtype | str = torch.float8_e4m3fn,
    scaling: str = "rceil",
    scale_layout: str = "blocked",
    check_offs: bool = False,
) -> None:
    op = "mx_requantize_groups"
    checks.tensor_dtype(op, "qdata", qdata, FP8_DTYPES)
    checks.tensor_dtype(op, "scale", scale, (torch.float8_e8m0fnu,))
    checks.rank(op, "qdata", qdata, (2,))
    checks.same_device(op, ("qdata", qdata), ("scale", scale))
    M, K = qdata.shape
    checks.multiple(op, "K", K, MX_BLOCK_SIZE)
    checks.shape(op, "scale", scale, (M, K // MX_BLOCK_SIZE), f"(plain) for qdata {tuple(qdata.shape)}")
    checks.choice(op, "dtype", dtype, OUT_DTYPES, TypeError)
    check_groups(op, ("qdata", qdata), offs, pad_to, elem_dtype, scaling, scale_layout, check_offs)


@spec(
    check_args=check_args,
    flops=per_element(3),  # a multiply, a maximum and a multiply
)
def mx_requantize_groups(
    qdata: Tensor,
    scale: Tensor,
    offs: Tensor,
    *,
    dtype: torch.dtype = torch.float32,
    pad_to: int = 128,
    elem_dtype: torch.dtype | str = torch.float8_e4m3fn,
    scaling: str = "rceil",
    scale_layout: str = "blocked",
    check_offs: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Make MX codes along the tokens of each group from codes along the features, which `mx_quantize` gave.

    The bytes equal two steps: `x = mx_dequantize(qdata, scale, out_dtype=dtype)`, then
    `mx_quantize_groups(x, offs, axis=-2)` with the other options of this call. A kernel reads one byte per element and
    writes no x. Expert parallelism sends tokens as codes along the features. The gradient of an expert's weight needs
    codes along the tokens. The op also makes the codes along N of weights `(E, N, K)` from their codes along K: take
    the weights as `(E*N, K)` and the multiples of N as offs.

    The second quantization rounds values that the first has rounded. All scales are powers of two. So with `rceil`, and
    with the same element format before and after, it rounds an element only if the new scale is larger than the old
    scale and makes the element subnormal.

    Args:
        qdata: `(M, K)` float8_e4m3fn or float8_e5m2, the codes of the tokens, the tokens of each group together; K a
            multiple of 32; any strides.
        scale: `(M, K/32)` float8_e8m0fnu on qdata's device, the plain scales of the 1x32 blocks of each row; any
            strides.
        offs: `(G,)` int32 on qdata's device: the exclusive end of each group. The ends never decrease, and the last is
            at most M. Rows from the last end on belong to no group and are dropped.
        dtype: the dtype of x: torch.float32, which holds every product of code and scale below 2^128 exactly, or
            torch.bfloat16, which rounds products below 2^-126.
        pad_to, elem_dtype, scaling, scale_layout, check_offs: as for `mx_quantize_groups`, for the new codes and
            scales. elem_dtype may differ from the dtype of qdata.

    Returns:
        `(qdata, scale, start, end)`, as `mx_quantize_groups` gives them for axis -2. Below, `R` is the smallest
        multiple of pad_to that is at least `M + G*pad_to`, and `Kp` is K rounded up to a multiple of 128.

        - qdata: `(R, K)`, elem_dtype, column-major with strides `(1, R)`. Codes of padding are 0, but NaN in the same
          block as a NaN or an Inf.
        - scale: float8_e8m0fnu, row-major. Blocked: `(Kp, R/32 + 4*G)`. Plain: `(K, R/32)`. Bytes of blocks without a
          token are 0.
        - start, end: `(G,)` int32. Group g and its padding take the rows of qdata from `start[g]` up to, but without,
          `end[g]`.

    Special values: a NaN code or a scale byte 255 makes an element of x NaN. A code of Inf (e5m2), or a product beyond
        the largest number of dtype, is Inf. An element of x that is NaN or Inf makes the block of 32 tokens of its
        column NaN, padding included: the byte 255 and NaN codes. A column of zeros keeps the signs of its zeros and has
        the byte 0. Padding never changes a scale. Rows of no group influence nothing, whatever they hold. An offs out
        of order gives bytes without meaning, but no access outside the arguments and the results.

    Raises:
        TypeError: qdata, scale, offs, dtype or elem_dtype has a dtype that is not listed above, or pad_to is not an
            integer.
        ValueError: K is not a multiple of 32; a rank, a device, the shape of scale, pad_to, scaling or scale_layout is
            not as above; there would be 2^31 padded rows or more; or, with check_offs, offs is not in order.

    Example:
        >>> from mxspec.reference.mx_quantize import mx_quantize
        >>> x = torch.zeros(2, 32)
        >>> x[0, :2], x[1, 0] = torch.tensor([448.0, 1.0]), 2.0
        >>> codes, scale = mx_quantize(x)
        >>> codes[:, :2].tolist(), scale.float().flatten().tolist()
        ([[448.0, 1.0], [256.0, 0.0]], [1.0, 0.0078125])
        >>> offs = torch.tensor([2], dtype=torch.int32)
        >>> qdata, scale, start, end = mx_requantize_groups(codes, scale, offs, scale_layout="plain")
        >>> qdata[:2, :2].float().tolist(), scale[:2, 0].float().tolist()
        ([[448.0, 256.0], [2.0, 0.0]], [1.0, 0.00390625])

    Source: the two ops that it consists of.
    """
    check_args(
        qdata, scale, offs, dtype=dtype, pad_to=pad_to, elem_dtype=elem_dtype, scaling=scaling,
        scale_layout=scale_layout, check_offs=check_offs,
    )  # fmt: skip
    x = mx_dequantize(qdata, scale, out_dtype=dtype)  # (M, K)
    return mx_quantize_groups(
        x, offs, axis=-2, pad_to=pad_to, elem_dtype=elem_dtype, scaling=scaling, scale_layout=scale_layout
    )
