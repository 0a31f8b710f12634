"""fp8_quantize_1x128: quantize activations to FP8, with one fp32 scale per 128 elements."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.formats import E4M3FN
from mxspec.reference.common import checks
from mxspec.reference.common.fp8_numerics import SCALE_FORMATS, in_blocks, quantization_scale
from mxspec.reference.common.numerics import saturating_cast
from mxspec.spec import per_element, spec

SCALE_MAJORS = ("k", "mn")


def check_args(
    x: Tensor, *, axis: int = -1, scale_format: str = "fp32", scale_major: str = "k", eps: float = 1e-12
) -> None:
    op = "fp8_quantize_1x128"
    checks.tensor_dtype(op, "x", x, checks.FLOAT_DTYPES)
    checks.rank(op, "x", x, (2,))
    checks.choice(op, "axis", axis, (-1, -2))
    checks.choice(op, "scale_format", scale_format, SCALE_FORMATS)
    checks.choice(op, "scale_major", scale_major, SCALE_MAJORS)
    checks.eps(op, eps)
    checks.fp8_size(op, "K" if axis == -1 else "M", x.shape[axis])


@spec(
    check_args=check_args,
    flops=per_element(2),  # a maximum and a multiply
    peer_rules="blk",
)
def fp8_quantize_1x128(
    x: Tensor, *, axis: int = -1, scale_format: str = "fp32", scale_major: str = "k", eps: float = 1e-12
) -> tuple[Tensor, Tensor]:
    """Quantize to e4m3fn with one scale for 128 elements along `axis`.

    `s = 448 / max(amax, eps)`, rounded once to fp32, and `q = e4m3fn(clamp(p, -448, 448))` with
    `p = fp32(x * s)`. The stored scale reads elements back: `scale = fp32(1 / s)`. The last block may be shorter than
    128. Its amax is over the elements that exist.

    Args:
        x: `(M, K)`; bfloat16, float16 or float32; any strides.
        axis: -1 for 1x128 blocks (K a multiple of 16), -2 for 128x1 blocks (M a multiple of 16).
        scale_format: `fp32`, or `pow2`, which rounds s down to a power of two.
        scale_major: the strides of the scale: `k` for row-major, `mn` for column-major, as DeepGEMM needs it.
        eps: the smallest amax, 1e-35 to 1e35; rounded to fp32.

    Returns:
        `(qdata, scale)`.

        - qdata: `(M, K)` float8_e4m3fn; row-major for axis -1, column-major with strides `(1, M)` for axis -2.
        - scale: float32, `(M, ceil(K/128))` for axis -1; for axis -2 the scale of the transpose, `(K, ceil(M/128))`.

    Special values: a block of zeros has elements 0, with their signs, and the scale of `amax = eps`: 2.23214294e-15
        (about `eps / 448`) for the default options. A NaN or an Inf makes its block's scale and elements NaN.

    Raises:
        TypeError: x has a dtype that is not listed above, or eps is not a number.
        ValueError: x has a rank that is not listed above; axis, scale_format or scale_major is not in the lists above;
            eps is out of range; or the size along axis is not a multiple of 16.

    Example:
        >>> x = torch.zeros(1, 128)
        >>> x[0, :2] = torch.tensor([896.0, -3.0])
        >>> qdata, scale = fp8_quantize_1x128(x)
        >>> qdata[0, :2].float().tolist(), scale.tolist()
        ([448.0, -1.5], [[2.0]])

    Source: DeepSeek-V3 technical report, section 3.3.2 (tile-wise 1x128); torchao, prototype/blockwise_fp8_training.
    """
    check_args(x, axis=axis, scale_format=scale_format, scale_major=scale_major, eps=eps)
    if axis == -2:
        x = x.mT  # from here the blocks lie along the last dimension
    x = x.contiguous().to(torch.float32)
    blocks = in_blocks(x)  # (M, ceil(K/128), 128)

    s = quantization_scale(blocks.abs().amax(-1), scale_format, eps)  # (M, ceil(K/128))
    qdata = saturating_cast(blocks * s.unsqueeze(-1), E4M3FN).flatten(-2)[:, : x.shape[-1]].contiguous()  # (M, K)

    scale = s.reciprocal()
    if scale_major == "mn":
        scale = scale.mT.contiguous().mT
    return qdata.mT if axis == -2 else qdata, scale
