"""nvfp4_quantize_stochastic: quantize to NVFP4, where a random byte for each element decides how its code rounds."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.formats import NVFP4_BLOCK_SIZE
from mxspec.reference.common import checks
from mxspec.reference.common.nvfp4_numerics import (
    blocks_of,
    magnitude_of,
    scales_and_quotients,
    stochastic_cast,
    tensor_scale,
)
from mxspec.reference.common.philox import bytes_of_blocks
from mxspec.reference.mx_quantize import SCALE_LAYOUTS
from mxspec.reference.to_blocked import to_blocked
from mxspec.spec import per_element, spec

RANDOM_DTYPES = (torch.uint8, torch.int64)


def check_args(
    x: Tensor, random: Tensor, tensor_amax: Tensor | None = None, *, axis: int = -1, scale_layout: str = "plain"
) -> None:
    op = "nvfp4_quantize_stochastic"
    checks.tensor_dtype(op, "x", x, checks.FLOAT_DTYPES)
    checks.rank(op, "x", x, (2, 3))
    checks.choice(op, "axis", axis, (-1, -2))
    checks.choice(op, "scale_layout", scale_layout, SCALE_LAYOUTS)
    name = "K" if axis == -1 else "M" if x.ndim == 2 else "N"
    checks.multiple(op, name, x.shape[axis], NVFP4_BLOCK_SIZE)
    checks.tensor_dtype(op, "random", random, RANDOM_DTYPES)
    bytes_given = random.dtype == torch.uint8
    because = f"for x {tuple(x.shape)}: a byte for each element" if bytes_given else "for int64: a seed and an offset"
    checks.shape(op, "random", random, tuple(x.shape) if bytes_given else (2,), because)
    checks.same_device(op, ("x", x), ("random", random))
    if tensor_amax is not None:
        checks.tensor_dtype(op, "tensor_amax", tensor_amax, (torch.float32,))
        checks.same_device(op, ("x", x), ("tensor_amax", tensor_amax))
        because = f"for x {tuple(x.shape)}: one number for each matrix"
        checks.shape(op, "tensor_amax", tensor_amax, tuple(x.shape[:-2]), because)


@spec(check_args=check_args, flops=per_element(3))
def nvfp4_quantize_stochastic(
    x: Tensor, random: Tensor, tensor_amax: Tensor | None = None, *, axis: int = -1, scale_layout: str = "plain"
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize to NVFP4 with stochastic rounding: on average, a code is the quotient that it rounds, up to 6.

    T and the scales are those of `nvfp4_quantize` with 1x16 blocks. There the quotient `y = 2688 * x / (s * A)` is
    rounded to the nearest code. Here y is rounded to one of its two neighbours, by a random byte `r` from 0 to 255:

    - `y = fl(fl(x * 21/32) / fl(s * h))`, as for `nvfp4_quantize`, with `|y|` limited to 6;
    - `lo` and `hi` are the neighbouring magnitudes of e2m1, `lo <= |y| < hi`;
    - the code is hi if `floor(256 * (|y| - lo) / (hi - lo)) + r >= 256`, else lo, with the sign of y.

    So `|y|` becomes hi for k of the 256 bytes, with `k = floor(256 * (|y| - lo) / (hi - lo))`. A y that is a value of
    e2m1 never moves. In bits, r is added to the 8 bits below the last mantissa bit that e2m1 keeps, and these bits are
    cut off. k is rounded down, so the average of a code is up to 1/256 of `hi - lo` too small.

    A quotient past 6 becomes 6. The scale of a block is rounded to the nearest e4m3 number. So in about half of all
    blocks the largest element is too small, by up to 6% if the scale is no subnormal number. The op has no gradient.

    Args:
        x: `(M, K)` or `(E, N, K)`; bfloat16, float16 or float32; any strides.
        random: where the bytes come from. One of two:

            - uint8 of x's shape, on x's device, any strides: the byte r of each element;
            - int64 `(2,)` on x's device: `(seed, offset)` of Philox4x32-10, the generator of PyTorch and curand. The
              key is the seed. The counter is the offset in its first two words and n in the last two; in both, the low
              word is the first. n is the number of the block, counted in the row-major order of the plain scale, over
              all matrices of a stack. The 16 bytes of the four output words, the lowest byte of word 0 first, are the
              bytes r of the block's elements. Use each pair of seed and offset once.
        tensor_amax: float32 on x's device; `()`, or `(E,)` for a stack. None computes it from x.
        axis: -1 for blocks along K, -2 for blocks along M (or N). The size of that dimension must be a multiple of 16.
        scale_layout: `plain` or `blocked`.

    Returns:
        `(qdata, scale, tensor_scale)`: as for `nvfp4_quantize`.

    Special values: as for `nvfp4_quantize`. A zero keeps its sign, and so does a number that rounds to zero. A block
        whose scale is NaN has the codes 7, whatever its bytes are.

    Raises:
        TypeError: x, random or tensor_amax has a dtype that is not listed above.
        ValueError: a rank, a shape, a device, axis or scale_layout is not as above; or a size is not a multiple of 16.

    Example:
        >>> x = torch.full((1, 16), 2.25)  # a quarter of the way from 2 to 3
        >>> x[0, 0] = 6.0
        >>> random = torch.tensor([[255, 0, 191, 192, *range(12)]], dtype=torch.uint8)
        >>> qdata, scale, _ = nvfp4_quantize_stochastic(x, random, torch.tensor(2688.0))
        >>> scale.item(), qdata.view(torch.uint8)[0, :2].tolist()  # 6 and 2, then 2 and 3
        (1.0, [71, 84])

    Source: NVIDIA, "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149), section 4.3; PTX ISA, `cvt.rs`,
        for adding random bits below the last bit; Random123 for Philox. The number of bits and their order are this
        package's: `cvt.rs.satfinite.e2m1x4.f32` of sm_100a takes its random bits in another order.
    """
    check_args(x, random, tensor_amax, axis=axis, scale_layout=scale_layout)
    if axis == -2:
        x = x.mT  # from here the blocks lie along the last dimension
    blocks = blocks_of(x)  # (..., R, C/16, 16)
    b = blocks.abs().amax(-1)  # (..., R, C/16)
    A = magnitude_of(b, tensor_amax)
    scale, y = scales_and_quotients(blocks, b, A[..., None, None])
    if random.dtype == torch.uint8:
        byte = (random.mT if axis == -2 else random).reshape(blocks.shape).to(torch.int32)
    else:
        byte = bytes_of_blocks(random, b.shape)
    qdata = stochastic_cast(y, byte).flatten(-2)  # (..., R, C/2)
    if scale_layout == "blocked":
        scale = to_blocked(scale)
    return qdata.mT if axis == -2 else qdata, scale, tensor_scale(A)
