"""What the low-precision Linears share: what they take, and the shapes around their matmuls."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from mxspec.nn._autograd import backend_now
from mxspec.nn._cache import Quantized, QuantizesWeights

DTYPES = (torch.bfloat16, torch.float32)


class QuantizedLinear(QuantizesWeights, nn.Linear):
    """`nn.Linear` whose product with the weight a subclass computes from codes."""

    block_size: ClassVar[int]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_sizes(type(self).__name__, in_features=in_features, out_features=out_features)
        check_features(type(self).__name__, self.block_size, in_features=in_features, out_features=out_features)
        check_parameters(type(self).__name__, dtype or torch.get_default_dtype())
        super().__init__(in_features, out_features, bias, device, dtype)

    def _product(self, x: Tensor, codes: Quantized, backend: str | None) -> Tensor:
        """`x @ weight^T` of two matrices."""
        raise NotImplementedError

    @classmethod
    def _with_parameters_of(cls, linear: nn.Linear, **options: Any) -> Self:
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"{cls.__name__}: from_linear got a {type(linear).__name__}; needs an nn.Linear")
        shape, said = tuple(linear.weight.shape), (linear.out_features, linear.in_features)
        if shape != said:
            raise ValueError(f"{cls.__name__}: the Linear's weight has shape {shape}, its features say {said}")
        new = cls(
            linear.in_features, linear.out_features, linear.bias is not None, "meta", linear.weight.dtype, **options
        )
        new.weight, new.bias = linear.weight, linear.bias
        return new.train(linear.training)

    def forward(self, input: Tensor) -> Tensor:
        name = type(self).__name__
        check_tensors(name, input=input)
        x = as_autocast(input)
        check_parameters(name, self.weight.dtype)  # `half()` may have been called since
        check_input(name, x, self.in_features)
        check_devices(name, x, weight=self.weight, bias=self.bias)
        backend = backend_now(self)
        (codes,) = self._quantized(backend)
        out = self._product(x.reshape(-1, self.in_features), codes, backend)
        if self.bias is not None:
            out = out + self.bias.to(out.dtype)
        return out.view(*x.shape[:-1], self.out_features)


def whole_blocks(x: Tensor, block_size: int) -> Tensor:
    """x with rows of zeros that fill the last block of rows, or x itself where none are missing.

    A graph for any number of rows always pads. A branch in it would be a graph for multiples of the block size, and
    another one for all else.
    """
    missing = -(-x.shape[0] // block_size) * block_size - x.shape[0]
    none_missing = missing == 0
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import statically_known_true  # not at the top: it imports sympy

        none_missing = statically_known_true(none_missing)
    return x if none_missing else pad(x, (0, 0, 0, missing))


def as_autocast(x: Tensor) -> Tensor:
    """Under autocast, cast as `nn.Linear` would: floats, but for float64."""
    kind = x.device.type
    casts = x.dtype.is_floating_point and x.dtype != torch.float64
    if casts and kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind):  # where it is; a meta tensor has none
        return x.to(torch.get_autocast_dtype(kind))
    return x


def check_tensors(name: str, **values: object) -> None:
    for what, value in values.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name}: {what} is a {type(value).__name__}; needs a tensor")


def check_devices(name: str, x: Tensor, **others: Tensor | None) -> None:
    for what, tensor in others.items():
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{name}: {what} is on {tensor.device}; needs one device, that of x, {x.device}")


def check_input(name: str, x: Tensor, features: int) -> None:
    if x.is_nested or x.layout != torch.strided:
        raise ValueError(f"{name}: input is {'nested' if x.is_nested else x.layout}; needs a dense tensor")
    if x.dtype not in DTYPES:
        raise TypeError(f"{name}: input has dtype {x.dtype}; needs {_names(DTYPES)}")
    if x.ndim == 0 or x.shape[-1] != features:
        raise ValueError(f"{name}: input has shape {tuple(x.shape)}; needs (..., {features})")


def check_sizes(name: str, **sizes: object) -> None:
    for what, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool):
            raise TypeError(f"{name}: {what} = {size!r}; needs an int")


def check_features(name: str, block_size: int, **sizes: int) -> None:
    for what, size in sizes.items():
        if size % block_size or size <= 0:
            raise ValueError(f"{name}: {what} = {size} is no multiple of {block_size}; each is a K of a matmul")


def check_parameters(name: str, dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        raise TypeError(f"{name}: parameters of {dtype}; needs {_names(DTYPES)}")


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(map(str, dtypes))
