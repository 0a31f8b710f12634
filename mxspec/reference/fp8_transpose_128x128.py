"""fp8_transpose_128x128: the FP8 codes and the scales of 128x128 blocks of the transpose of each matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.reference.common import checks
from mxspec.reference.common.fp8_numerics import blocks_of
from mxspec.spec import spec


def check_args(qdata: Tensor, scale: Tensor) -> None:
    op = "fp8_transpose_128x128"
    checks.tensor_dtype(op, "qdata", qdata, (torch.float8_e4m3fn,))
    checks.tensor_dtype(op, "scale", scale, (torch.float32,))
    checks.rank(op, "qdata", qdata, (2, 3))
    checks.same_device(op, ("qdata", qdata), ("scale", scale))
    *lead, N, K = qdata.shape
    checks.fp8_size(op, "K", K)
    needed = (*lead, blocks_of(N), blocks_of(K))
    checks.shape(op, "scale", scale, needed, f"(128x128 blocks) for qdata {tuple(qdata.shape)}")


@spec(check_args=check_args)
def fp8_transpose_128x128(qdata: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Transpose each matrix of FP8 codes in 128x128 blocks, and the scales with it.

    `qdata_t[..., k, n] = qdata[..., n, k]` and `scale_t[..., c, b] = scale[..., b, c]`. A block of the transpose is the
    transpose of a block, so it keeps its scale and nothing is rounded. For every w,
    `fp8_transpose_128x128(*fp8_quantize_128x128(w))` gives the qdata_t and scale_t of
    `fp8_quantize_128x128(w, with_transpose=True)`.

    Hopper's FP8 tensor cores read both operands along the summed dimension. The forward sums along K, and dgrad sums
    along N. So dgrad needs the transposed codes of a weight. This op makes them if only the codes are at hand, and not
    the values.

    Args:
        qdata: `(N, K)` or `(E, N, K)` float8_e4m3fn; any strides; K a multiple of 16, N free.
        scale: `(..., ceil(N/128), ceil(K/128))` float32 on qdata's device; any strides.

    Returns:
        `(qdata_t, scale_t)`, in memory of their own.

        - qdata_t: `(K, N)` or `(E, K, N)` float8_e4m3fn, contiguous.
        - scale_t: `(..., ceil(K/128), ceil(N/128))` float32, contiguous.

    Special values: the op moves bytes and never reads them as numbers. Every bit stays, also the sign and the payload
        of a NaN. An empty matrix gives an empty result.

    Raises:
        TypeError: qdata or scale has a dtype that is not listed above.
        ValueError: qdata has a rank that is not listed above; K is not a multiple of 16; scale has a shape that does
            not fit; or the operands are on two devices.

    Example:
        >>> qdata = torch.zeros(130, 16).to(torch.float8_e4m3fn)
        >>> qdata[0, 1], qdata[129, 15] = 448.0, -2.0
        >>> qdata_t, scale_t = fp8_transpose_128x128(qdata, torch.tensor([[1.0], [0.5]]))
        >>> tuple(qdata_t.shape), qdata_t[[1, 15], [0, 129]].tolist(), scale_t.tolist()
        ((16, 130), [448.0, -2.0], [[1.0, 0.5]])

    Source: PTX ISA, `wgmma.mma_async`: the instruction can transpose operands of 16 bits, and no others.
    """
    check_args(qdata, scale)
    # clone, because outputs never share memory with an input; contiguous() alone may return its input
    codes, factors = (t.mT.clone(memory_format=torch.contiguous_format) for t in (qdata, scale))
    return codes, factors
