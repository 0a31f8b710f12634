"""fp8_quantize_128x128: quantize weights to FP8, with one fp32 scale per square of 128 x 128 elements."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from mxspec.formats import E4M3FN, FP8_BLOCK_SIZE
from mxspec.reference.common import checks
from mxspec.reference.common.fp8_numerics import SCALE_FORMATS, blocks_of, quantization_scale
from mxspec.reference.common.numerics import saturating_cast
from mxspec.spec import per_element, spec


def check_args(w: Tensor, *, scale_format: str = "fp32", eps: float = 1e-12, with_transpose: bool = False) -> None:
    op = "fp8_quantize_128x128"
    checks.tensor_dtype(op, "w", w, checks.FLOAT_DTYPES)
    checks.rank(op, "w", w, (2, 3))
    checks.choice(op, "scale_format", scale_format, SCALE_FORMATS)
    checks.eps(op, eps)
    checks.boolean(op, "with_transpose", with_transpose)
    checks.fp8_size(op, "K", w.shape[-1])


@spec(
    check_args=check_args,
    flops=per_element(2),  # a maximum and a multiply
    peer_rules="blk",
)
def fp8_quantize_128x128(
    w: Tensor, *, scale_format: str = "fp32", eps: float = 1e-12, with_transpose: bool = False
) -> tuple[Tensor, ...]:
    """Quantize to e4m3fn with one scale for each 128x128 block.

    The arithmetic is that of `fp8_quantize_1x128`, with amax over a square. Because blocks are square, quantizing the
    transpose gives the transpose of the result. So one quantized weight serves the forward and the backward pass.

    Args:
        w: `(N, K)` or `(E, N, K)`; bfloat16, float16 or float32; any strides; K a multiple of 16, N free. The last
            block along N and the last block along K may be partial: amax is over the elements that exist.
        scale_format: `fp32`, or `pow2`, which rounds the factor `448 / amax` down to a power of two.
        eps: the smallest amax, 1e-35 to 1e35; rounded to fp32.
        with_transpose: True also returns the transposes of both outputs. A kernel writes them from the same read of w.

    Returns:
        `(qdata, scale)`, or `(qdata, scale, qdata_t, scale_t)` with with_transpose.

        - qdata: w's shape, float8_e4m3fn, contiguous.
        - scale: `(..., ceil(N/128), ceil(K/128))` float32, contiguous: the factor that an element is multiplied by to
          read it back.
        - qdata_t, scale_t: `(..., K, N)` and `(..., ceil(K/128), ceil(N/128))`, contiguous: the same numbers,
          transposed.

    Special values: as for `fp8_quantize_1x128`. A block of zeros gives scale 2.23214294e-15 for the default options. A
        NaN or an Inf makes its block's scale and elements NaN.

    Raises:
        TypeError: w has a dtype that is not listed above, eps is not a number, or with_transpose is not a bool.
        ValueError: w has a rank that is not listed above, scale_format is not in the list above, eps is out of range,
            or K is not a multiple of 16.

    Example:
        >>> w = torch.zeros(130, 128)
        >>> w[0, 0], w[129, 5] = 896.0, -224.0
        >>> qdata, scale = fp8_quantize_128x128(w)
        >>> qdata[[0, 129], [0, 5]].float().tolist(), scale.tolist()
        ([448.0, -448.0], [[2.0], [0.5]])
        >>> *_, qdata_t, scale_t = fp8_quantize_128x128(w, with_transpose=True)
        >>> qdata_t[[0, 5], [0, 129]].float().tolist(), scale_t.tolist()
        ([448.0, -448.0], [[2.0, 0.5]])

    Source: DeepSeek-V3 technical report, section 3.3.2 (block-wise 128x128).
    """
    check_args(w, scale_format=scale_format, eps=eps, with_transpose=with_transpose)
    *lead, N, K = w.shape
    rows, cols = (blocks_of(size) * FP8_BLOCK_SIZE for size in (N, K))
    padded = pad(w.to(torch.float32), (0, cols - K, 0, rows - N))  # zeros do not change amax
    blocks = padded.reshape(*lead, blocks_of(N), FP8_BLOCK_SIZE, blocks_of(K), FP8_BLOCK_SIZE)

    s = quantization_scale(blocks.abs().amax((-3, -1)), scale_format, eps)  # (..., ceil(N/128), ceil(K/128))
    scaled = blocks * s.unsqueeze(-1).unsqueeze(-3)
    qdata = saturating_cast(scaled, E4M3FN).reshape(*lead, rows, cols)[..., :N, :K].contiguous()
    outputs: tuple[Tensor, ...] = qdata, s.reciprocal()
    if with_transpose:  # clone, because outputs never share memory; contiguous() alone may return its input
        outputs += tuple(t.mT.clone(memory_format=torch.contiguous_format) for t in outputs)
    return outputs
