"""A Linear whose three matmuls run in FP8 with 128-blocks: DeepSeek-V3's recipe.

| matmul | a | b | out |
|---|---|---|---|
| forward | x, 1x128 along K | weight, 128x128 | `(tokens, N)` |
| dgrad | dO, 1x128 along N | weight transposed, 128x128, from the same read | `(tokens, K)` |
| wgrad | dO^T, 1x128 along the tokens | x^T, 1x128 along the tokens | `(N, K)`, in fp32 |
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

import mxspec
from mxspec.formats import FP8_BLOCK_SIZE

_DTYPES = (torch.bfloat16, torch.float32)
# A weight's codes and scale, then those of its transpose.
Quantized = tuple[Tensor, ...]


class _Linear(torch.autograd.Function):
    """`x @ weight^T` of two matrices, the weight quantized beforehand."""

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, w: Tensor, w_scale: Tensor, wt: Tensor, wt_scale: Tensor, backend: str | None
    ) -> Tensor:
        # Scales that lie MN-major are what the matmuls read without a transpose before.
        a, a_scale = mxspec.fp8_quantize_1x128(x.detach(), scale_major="mn", backend=backend)
        return mxspec.fp8_gemm(a, a_scale, w, w_scale, out_dtype=x.dtype, backend=backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _, _, wt, wt_scale, ctx.backend = inputs
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, wt, wt_scale)
        ctx.x_dtype, ctx.weight_dtype = x.dtype, weight.dtype

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (x, wt, wt_scale), backend = gradients, ctx.saved_tensors, ctx.backend
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            a, a_scale = mxspec.fp8_quantize_1x128(grad, scale_major="mn", backend=backend)
            grad_x = mxspec.fp8_gemm(a, a_scale, wt, wt_scale, out_dtype=ctx.x_dtype, backend=backend)
        if ctx.needs_input_grad[1]:
            (a, a_scale), (b, b_scale) = (_along_tokens(t, backend) for t in (grad, x))
            product = mxspec.fp8_gemm(a, a_scale, b, b_scale, out_dtype=torch.float32, backend=backend)
            grad_weight = product.to(ctx.weight_dtype)
        return grad_x, grad_weight, None, None, None, None, None


def _along_tokens(x: Tensor, backend: str | None) -> tuple[Tensor, Tensor]:
    """The transpose of x and its scales, in blocks of 128 tokens; tokens of zeros fill the last one."""
    missing = -x.shape[0] % FP8_BLOCK_SIZE
    padded = pad(x, (0, 0, 0, missing)) if missing else x
    codes, scale = mxspec.fp8_quantize_1x128(padded, axis=-2, scale_major="mn", backend=backend)
    return codes.mT, scale


class Float8BlockwiseLinear(nn.Linear):
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
        TypeError: a dtype other than those.
        ValueError: features that are no multiples of 128, or an x of another last dimension.
        RuntimeError: a weight that changed while `cache_weights` held its codes.

    Source: DeepSeek-V3 technical report, section 3.3.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _check(in_features, out_features, dtype or torch.get_default_dtype())
        super().__init__(in_features, out_features, bias, device, dtype)
        self._cached: Quantized | None = None
        self._cached_from: tuple[int, int] | None = None

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> Self:
        """The same parameters, not copies of them, in a layer of this kind."""
        _check(linear.in_features, linear.out_features, linear.weight.dtype)
        new = cls(linear.in_features, linear.out_features, linear.bias is not None, "meta", linear.weight.dtype)
        new.weight, new.bias = linear.weight, linear.bias
        return new.train(linear.training)

    def forward(self, input: Tensor) -> Tensor:
        x, kind = input, input.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        if x.dtype not in _DTYPES:
            raise TypeError(f"Float8BlockwiseLinear: input has dtype {x.dtype}; needs {_names(_DTYPES)}")
        if x.ndim == 0 or x.shape[-1] != self.in_features:
            needed = f"(..., {self.in_features})"
            raise ValueError(f"Float8BlockwiseLinear: input has shape {tuple(x.shape)}; needs {needed}")
        # Backward runs on a thread that sees no with-block. While a graph is traced, the choice is left to its runs.
        backend = None if torch.compiler.is_compiling() else mxspec.current_backend()
        out = _Linear.apply(x.reshape(-1, self.in_features), self.weight, *self._quantized(backend), backend)
        if self.bias is not None:
            out = out + self.bias.to(out.dtype)
        return out.view(*x.shape[:-1], self.out_features)

    def _quantized(self, backend: str | None) -> Quantized:
        if self._cached is None:
            return mxspec.fp8_quantize_128x128(self.weight.detach(), with_transpose=True, backend=backend)
        if not torch.compiler.is_compiling():
            self._check_cache()
        return self._cached

    def _check_cache(self) -> None:
        if self._cached_from != _state(self.weight):
            raise RuntimeError(
                "cache_weights: a weight has changed since it was quantized; leave the with-block before the "
                "optimizer's step, and enter it again afterwards"
            )


@contextmanager
def cache_weights(model: nn.Module) -> Iterator[None]:
    """Quantize every weight of the model's FP8 layers once, for all forwards in the with-block.

    For micro-batches whose gradients add up: the codes then serve them all. They are wrong as soon as a weight
    changes, so that a forward after that raises, and so does leaving the block, since a compiled forward cannot look.

    Raises:
        RuntimeError: a weight changed in the block, or a block inside another one.

    Example:
        >>> model = Float8BlockwiseLinear(128, 256)
        >>> with cache_weights(model):
        ...     for tokens in torch.ones(4, 3, 128):
        ...         model(tokens).sum().backward()
        >>> round(model.weight.grad[0, 0].item(), 4)
        12.0
    """
    layers = [layer for layer in model.modules() if isinstance(layer, Float8BlockwiseLinear)]
    if any(layer._cached for layer in layers):
        raise RuntimeError("cache_weights: the model's weights are held already, by a with-block around this one")
    try:
        for layer in layers:
            layer._cached, layer._cached_from = layer._quantized(None), _state(layer.weight)
        yield
        for layer in layers:
            layer._check_cache()
    finally:
        for layer in layers:
            layer._cached = layer._cached_from = None


def _state(weight: Tensor) -> tuple[int, int]:
    """What changes when a weight does: where its memory lies, and how often it was written in place."""
    return weight.data_ptr(), weight._version


def _check(in_features: int, out_features: int, dtype: torch.dtype) -> None:
    for name, size in (("in_features", in_features), ("out_features", out_features)):
        if size % FP8_BLOCK_SIZE or size <= 0:
            raise ValueError(
                f"Float8BlockwiseLinear: {name} = {size} is no multiple of {FP8_BLOCK_SIZE}; each is a K of a matmul"
            )
    if dtype not in _DTYPES:
        raise TypeError(f"Float8BlockwiseLinear: parameters of {dtype}; needs {_names(_DTYPES)}")


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(map(str, dtypes))
