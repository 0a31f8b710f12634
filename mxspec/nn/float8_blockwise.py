"""A Linear whose three matmuls run in FP8 with 128-blocks: DeepSeek-V3's recipe.

| matmul | a | b | out |
|---|---|---|---|
| forward | x, 1x128 along K | weight, 128x128 | `(tokens, N)` |
| dgrad | dO, 1x128 along N | weight transposed, 128x128, from the same read | `(tokens, K)` |
| wgrad | dO^T, 1x128 along the tokens | x^T, 1x128 along the tokens | `(N, K)`, in fp32 |
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

import mxspec
from mxspec.formats import FP8_BLOCK_SIZE
from mxspec.nn._autograd import first_derivative_only, keep, kept
from mxspec.nn._cache import Quantized
from mxspec.nn._linear import QuantizedLinear, whole_blocks


class _Linear(torch.autograd.Function):
    """`x @ weight^T` of two matrices, the weight quantized beforehand."""

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,
        w: Tensor,
        w_scale: Tensor,
        wt: Tensor,
        wt_scale: Tensor,
        backend: str | None,
        name: str,
    ) -> Tensor:
        # Scales that lie MN-major are what the matmuls read without a transpose before.
        a, a_scale = mxspec.fp8_quantize_1x128(x.detach(), scale_major="mn", backend=backend)
        return mxspec.fp8_gemm(a, a_scale, w, w_scale, out_dtype=x.dtype, backend=backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _, _, wt, wt_scale, backend, name = inputs
        keep(ctx, x, weight, name, backend, x if ctx.needs_input_grad[1] else None, wt, wt_scale)
        ctx.x_dtype, ctx.weight_dtype = x.dtype, weight.dtype

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (x, wt, wt_scale), backend = gradients, kept(ctx), ctx.backend
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            a, a_scale = mxspec.fp8_quantize_1x128(grad, scale_major="mn", backend=backend)
            grad_x = mxspec.fp8_gemm(a, a_scale, wt, wt_scale, out_dtype=ctx.x_dtype, backend=backend)
        if ctx.needs_input_grad[1]:
            (a, a_scale), (b, b_scale) = (_along_tokens(t, backend) for t in (grad, x))
            product = mxspec.fp8_gemm(a, a_scale, b, b_scale, out_dtype=torch.float32, backend=backend)
            grad_weight = product.to(ctx.weight_dtype)
        return grad_x, grad_weight, *(None,) * 6


def _along_tokens(x: Tensor, backend: str | None) -> tuple[Tensor, Tensor]:
    """The transpose of x and its scales, in blocks of 128 tokens; tokens of zeros fill the last one."""
    padded = whole_blocks(x, FP8_BLOCK_SIZE)
    codes, scale = mxspec.fp8_quantize_1x128(padded, axis=-2, scale_major="mn", backend=backend)
    return codes.mT, scale


class Float8BlockwiseLinear(QuantizedLinear):
    """`nn.Linear` whose forward, dgrad and wgrad multiply e4m3fn codes with fp32 scales in blocks of 128.

    `y = x @ weight^T + bias` with x in 1x128 blocks and the weight in 128x128 blocks; the gradients likewise, those of
    the weight summed in fp32. The weight is quantized once a forward, for dgrad as well; `cache_weights` stretches
    that over several. Parameters and state dict are those of `nn.Linear`.

    Args:
        in_features, out_features: K and N, multiples of 128.
        bias: whether there is one; it is added to the rounded product.
        device, dtype: of the parameters; bfloat16 or float32.

    Shapes:
        x: `(..., K)`, bfloat16 or float32, any number of tokens; under autocast it is cast as `nn.Linear` would.
        Returns `(..., N)` of that dtype.

    Special values: a NaN or an Inf in a token makes the token's output NaN; one in the weight its 128 columns.

    Raises:
        TypeError: a dtype other than those, or an input that is no tensor.
        ValueError: features that are no multiples of 128, or an x of another last dimension or device, or not dense.
        RuntimeError: a weight that changed while `cache_weights` held its codes, the derivative of a gradient, as a
            gradient penalty needs it, or a checkpointed forward that ran again by another backend.

    Source: DeepSeek-V3 technical report, section 3.3.
    """

    block_size: ClassVar[int] = FP8_BLOCK_SIZE

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> Self:
        """The same parameters, not copies of them, in a layer of this kind; nothing else of the Linear comes along."""
        return cls._with_parameters_of(linear)

    def _quantize(self, weight: Tensor, backend: str | None) -> Quantized:
        return mxspec.fp8_quantize_128x128(weight, with_transpose=True, backend=backend)

    def _product(self, x: Tensor, codes: Quantized, backend: str | None) -> Tensor:
        return _Linear.apply(x, self.weight, *codes, backend, type(self).__name__)
