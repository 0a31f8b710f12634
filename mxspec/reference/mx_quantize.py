"""mx_quantize: quantize to MX, where a block of 32 elements shares one power-of-two scale."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.formats import BY_DTYPE, ELEMENTS, MX_BLOCK_SIZE, SCALINGS, element
from mxspec.reference.common import checks
from mxspec.reference.common.numerics import reciprocal_scale, saturating_cast, shared_exponent
from mxspec.reference.to_blocked import to_blocked
from mxspec.spec import per_element, spec

ELEM_CHOICES = (*BY_DTYPE, *ELEMENTS)  # dtypes and names; torch has no dtype for FP6
SCALE_LAYOUTS = ("plain", "blocked")


def check_args(
    x: Tensor,
    *,
    axis: int = -1,
    elem_dtype: torch.dtype | str = torch.float8_e4m3fn,
    scaling: str = "rceil",
    scale_layout: str = "plain",
) -> None:
    op = "mx_quantize"
    checks.tensor_dtype(op, "x", x, checks.FLOAT_DTYPES)
    checks.rank(op, "x", x, (2, 3))
    checks.choice(op, "axis", axis, (-1, -2))
    checks.choice(op, "elem_dtype", elem_dtype, ELEM_CHOICES, TypeError)
    checks.choice(op, "scaling", scaling, SCALINGS)
    checks.choice(op, "scale_layout", scale_layout, SCALE_LAYOUTS)
    checks.multiple(op, "K" if axis == -1 else "M", x.shape[axis], MX_BLOCK_SIZE)


@spec(
    check_args=check_args,
    flops=per_element(2),  # a maximum and a multiply
    peer_rules="mx",
)
def mx_quantize(
    x: Tensor,
    *,
    axis: int = -1,
    elem_dtype: torch.dtype | str = torch.float8_e4m3fn,
    scaling: str = "rceil",
    scale_layout: str = "plain",
) -> tuple[Tensor, Tensor]:
    """Quantize to MX: 32 elements along `axis` share one E8M0 scale.

    Let `a` be the largest magnitude of a block, in fp32. The rule `scaling` computes `byte`, the scale, from `a`. The
    elements are `q = round_to_nearest_even(clamp(x * 2^(127 - byte), -max, max))`, with one rounding; `max` is the
    largest value of the element format. Read back, an element is `q * 2^(byte - 127)`.

    The rules use `exponent(v) = floor(log2(v))`, read from the bits of fp32 (-127 for subnormals), and
    `emax = exponent(max)`:

    - rceil: `ceil(log2(fp32(a / max))) + 127`, clamped to 0..254. The quotient is rounded to fp32 first, then up to a
      power of two. A subnormal quotient keeps its value; it is not flushed to zero.
    - floor (OCP): `exponent(a) - emax + 127`, clamped to 0..254. Elements whose mantissa exceeds that of `max`
      saturate.
    - ceil: floor's value before the clamp, plus 1 if the mantissa of a is not 0; then clamped to 0..254.
    - even: floor's rule on a rounded a. Half a unit of the element's last mantissa bit is added to the bits of a. This
      rounds a to the mantissa width of the element, and a tie goes up. int8 counts as 6 mantissa bits.

    Args:
        x: `(M, K)` or `(E, N, K)`; bfloat16, float16 or float32; any strides.
        axis: -1 for 1x32 blocks, -2 for 32x1 blocks. The size of that dimension must be a multiple of 32.
        elem_dtype: torch.float8_e4m3fn (largest value 448), torch.float8_e5m2 (57344), torch.float4_e2m1fn_x2 (6; two
            elements share a byte) or torch.int8 (127/64; a code is the element times 64); or its name: "e4m3fn",
            "e5m2", "e2m1", "int8". FP6 has only names: "e2m3" (7.5) and "e3m2" (28); four elements share three bytes.
        scaling: `rceil`, `floor`, `ceil` or `even`, as above.
        scale_layout: `plain` (row-major) or `blocked` (the 128x4 tiles of `to_blocked`).

    Returns:
        `(qdata, scale)`.

        - qdata: x's shape, elem_dtype; uint8 for FP6. It is contiguous for axis -1 and column-major per matrix for axis
          -2, with strides `(1, M)` or `(N*K, 1, N)`.
        - qdata in e2m1: two neighbours along `axis` share a byte, the first in the low nibble, so that dimension is
          half of x's. Axis -1 gives `(..., K/2)`. Axis -2 gives `(..., M/2, K)` with the strides of the transpose of a
          contiguous `(..., K, M/2)`.
        - qdata in FP6: likewise `(..., 3*K/4)` or `(..., 3*M/4, K)`. Four neighbours `v0` to `v3` make the three bytes
          of the number `v0 + v1 * 2^6 + v2 * 2^12 + v3 * 2^18`, the lowest byte first.
        - scale: float8_e8m0fnu. Plain: `(..., K/32)` for axis -1 and `(..., K, M/32)` for axis -2, which is the scale
          of the transpose; row-major. Blocked: `to_blocked` of the plain scale, with padding bytes 0.

    Special values: a block of zeros has byte 0, and its zeros keep their signs. A NaN or an Inf makes its block's byte
        255 and all 32 elements NaN. e2m1, FP6 and int8 have no NaN: only the byte shows the NaN, and all 32 codes are
        the code of the largest value: 7, 31 or 127. PTX's `cvt` gives this code of e2m1 and FP6 for NaN (torchao's main
        branch gives 3 in e2m1). int8 has no minus zero, and -128 never occurs. Byte 0 means 2^-127: a block of 2^-126
        gives elements 2.0, except in int8, where it has byte 1. Byte 254 occurs only in int8.

    Raises:
        TypeError: x has a dtype that is not listed above, or elem_dtype is not in the list above.
        ValueError: x has a rank that is not listed above; axis, scaling or scale_layout is not in the lists above; or
            the size along axis is not a multiple of 32.

    Example:
        >>> x = torch.zeros(1, 32)
        >>> x[0, :3] = torch.tensor([500.0, -1.0, 0.3])
        >>> qdata, scale = mx_quantize(x)
        >>> qdata[0, :3].float().tolist(), scale.view(torch.uint8).tolist()
        ([256.0, -0.5, 0.15625], [[128]])
        >>> qdata, scale = mx_quantize(x, scaling="floor")
        >>> qdata[0, :3].float().tolist(), scale.view(torch.uint8).tolist()
        ([448.0, -1.0, 0.3125], [[127]])
        >>> qdata, scale = mx_quantize(x, elem_dtype="e2m1")  # 500 / 2^7 = 3.9 rounds to 4, whose code is 6
        >>> qdata.shape, qdata.view(torch.uint8)[0, :2].tolist(), scale.view(torch.uint8).tolist()
        (torch.Size([1, 16]), [134, 0], [[134]])

    Source: OCP MX v1.0, section 6.3 (floor), 5.3.2 (FP6), 5.3.3 (e2m1), 5.3.4 (int8); PTX ISA,
        `cvt.rp.satfinite.ue8m0x2.f32` (rceil); compressed-tensors 0.20.0, compressors/mxfp6 (four in three bytes).
    """
    check_args(x, axis=axis, elem_dtype=elem_dtype, scaling=scaling, scale_layout=scale_layout)
    fmt = element(elem_dtype)
    if axis == -2:
        x = x.mT  # from here the blocks lie along the last dimension
    x = x.contiguous().to(torch.float32)  # exact: fp32 holds every bfloat16 and float16
    blocks = x.unflatten(-1, (x.shape[-1] // MX_BLOCK_SIZE, MX_BLOCK_SIZE))  # (..., K/32, 32)

    scale = shared_exponent(blocks.abs().amax(-1), fmt, scaling)  # (..., K/32)
    qdata = saturating_cast(blocks * reciprocal_scale(scale).unsqueeze(-1), fmt).flatten(-2)  # (..., K)

    scale = scale.view(torch.float8_e8m0fnu)
    if scale_layout == "blocked":
        scale = to_blocked(scale)
    return qdata.mT if axis == -2 else qdata, scale
