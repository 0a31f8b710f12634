"""nvfp4_fake_quantize: the values of NVFP4 codes, without the codes."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.reference.nvfp4_dequantize import nvfp4_dequantize
from mxspec.reference.nvfp4_quantize import check_call, nvfp4_quantize
from mxspec.spec import per_element, spec


def check_args(x: Tensor, *, axis: int = -1, block: str = "1x16") -> None:
    check_call("nvfp4_fake_quantize", x, None, axis, block, "plain")


@spec(check_args=check_args, flops=per_element(4))  # a maximum, a multiply, a divide, and a multiply by the scale
def nvfp4_fake_quantize(x: Tensor, *, axis: int = -1, block: str = "1x16") -> tuple[Tensor, Tensor]:
    """Quantize to NVFP4 and read the codes back, in units of the tensor scale: bf16 values that any GPU can multiply.

    The codes and scales are those of `nvfp4_quantize(x, axis=axis, block=block)`. A value is the product of a code and
    its block's scale. It has 6 significant bits at most, so bfloat16 holds it exactly. The value times the tensor scale
    approximates the element. For a tensor_amax that is given, quantize with it, and then dequantize with a tensor scale
    of 1. The op has no gradient; under torch.compile it takes a detached tensor.

    `nvfp4_gemm(a, None, a_tensor_scale, b, None, b_tensor_scale)` multiplies the values of two matrices, both with
    `axis = -1` or in squares. `nvfp4_fake_quantize_rowcol_groups` gives the values of token groups.
    `nvfp4_grouped_gemm` multiplies these by the values of a stack.

    Args:
        x: `(M, K)` or `(E, N, K)`; bfloat16, float16 or float32; any strides. A stack of E matrices is quantized matrix
            by matrix.
        axis: -1 for blocks along K, -2 for blocks along M (or N). The size of that dimension must be a multiple of 16.
        block: `1x16`, or `16x16` for weights: one scale for a square, so that the transpose of a weight has the same
            values, and `axis` makes no difference. Both sizes must then be multiples of 16.

    Returns:
        `(values, tensor_scale)`.

        - values: bfloat16 in x's shape, contiguous.
        - tensor_scale: float32, `()` or `(E,)`: the largest magnitude of the matrix divided by 2688, a multiplier.

    Special values: as for `nvfp4_quantize` and `nvfp4_dequantize` with a tensor scale of 1. A NaN or an Inf in a matrix
        makes its tensor scale and all its values NaN. A value of 0 has the sign of its element. If the largest
        magnitude of a matrix is at most 2^-138, all its values are zeros. A matrix of zeros has the tensor scale 0.

    Raises:
        TypeError: x has a dtype that is not listed above.
        ValueError: x has a rank that is not listed above; axis or block is not in the lists above; or a size is not a
            multiple of 16.

    Example:
        >>> x = torch.zeros(2, 16)
        >>> x[0, :4], x[1, 0] = torch.tensor([448.0, -112.0, 1.0, 75.0]), 7.0
        >>> values, tensor_scale = nvfp4_fake_quantize(x)
        >>> values[:, :4].tolist(), tensor_scale.item()
        ([[2688.0, -672.0, 0.0, 448.0], [42.0, 0.0, 0.0, 0.0]], 0.1666666716337204)

    Source: NVIDIA, "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149): 16x16 blocks of weights.
    """
    check_args(x, axis=axis, block=block)
    codes, scale, tensor_scale = nvfp4_quantize(x, axis=axis, block=block)
    return nvfp4_dequantize(codes, scale, torch.ones_like(tensor_scale), axis=axis), tensor_scale
