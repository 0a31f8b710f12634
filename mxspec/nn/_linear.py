"""The base class of the low-precision Linears: everything except the recipe."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from mxspec.nn._autograd import backend_now
from mxspec.nn._cache import QuantizesWeights
from mxspec.nn._checks import (
    DTYPES,
    as_autocast,
    check_devices,
    check_features,
    check_input,
    check_parameters,
    check_sizes,
    check_tensors,
)
from mxspec.nn._product import product
from mxspec.nn.recipe import SIZE_MULTIPLES, Recipe, recipe_of


def class_for(recipe: Recipe) -> str:
    """The name of the layer that trains by a recipe, for error texts."""
    names = {"mxfp8": "MXLinear", "fp8_128": "Float8BlockwiseLinear", "nvfp4": "NVFP4Linear"}
    return names.get(recipe.format, "nn.Linear")


class QuantizedLinear(QuantizesWeights, nn.Linear):
    """`nn.Linear` whose three matmuls read codes. A subclass gives the format and the recipe."""

    format: ClassVar[str]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: Recipe | str,
    ) -> None:
        name, multiple = type(self).__name__, SIZE_MULTIPLES[self.format]
        found = recipe_of(recipe, name)
        if found.format != self.format:
            raise ValueError(
                f"{name}: the recipe's format is {found.format}; needs {self.format}. Use {class_for(found)} instead."
            )
        check_sizes(name, in_features=in_features, out_features=out_features)
        check_features(name, multiple, in_features=in_features, out_features=out_features)
        check_parameters(name, dtype or torch.get_default_dtype())
        super().__init__(in_features, out_features, bias, device, dtype)
        self.recipe = found

    def set_recipe(self, recipe: Recipe | str) -> None:
        """Train by this recipe from now on. The parameters stay.

        With the recipe `bf16` the layer computes as `nn.Linear` does: in the dtype of its input, or of autocast. So a
        training can end in bfloat16. Parameters of bfloat16 or float32 take inputs of both, as before. Another call
        with a recipe of the layer's own format ends this. Call it between two steps, and not between a forward and its
        backward.

        Raises:
            TypeError: the recipe is neither a `Recipe` nor a name.
            ValueError: the recipe is unknown, or its format is neither the layer's own nor bf16.
            RuntimeError: the call is inside a `cache_weights` block that holds codes of this layer.
        """
        name, found = type(self).__name__, recipe_of(recipe, type(self).__name__)
        if found.format not in (self.format, "bf16"):
            raise ValueError(f"{name}: the recipe's format is {found.format}; needs {self.format} or bf16")
        self._take(found)

    @classmethod
    def _with_parameters_of(cls, linear: nn.Linear, **options: Any) -> Self:
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"{cls.__name__}: from_linear got a {type(linear).__name__}; needs an nn.Linear")
        shape, said = tuple(linear.weight.shape), (linear.out_features, linear.in_features)
        if shape != said:
            raise ValueError(
                f"{cls.__name__}: the Linear's weight has shape {shape}, but its features say {said}. "
                "Set its in_features and out_features to the shape of the weight."
            )
        new = cls(
            linear.in_features, linear.out_features, linear.bias is not None, "meta", linear.weight.dtype, **options
        )
        new.weight, new.bias = linear.weight, linear.bias
        return new.train(linear.training)

    def forward(self, input: Tensor) -> Tensor:
        name = type(self).__name__
        check_tensors(name, input=input)
        if self.recipe.format == "bf16":
            return self._plain(input)
        x = as_autocast(name, input)
        check_parameters(name, self.weight.dtype)  # the user may have called `half()` after the constructor
        check_input(name, x, self.in_features)
        check_devices(name, x, weight=self.weight, bias=self.bias)
        backend = backend_now(self)
        (weight,), by = self._quantized(backend), self._format(backend)
        assert by is not None
        assert weight is not None
        rows = x.reshape(-1, self.in_features)
        tokens = by.activations(rows, None, self.weight.requires_grad)
        out = product(rows, self.weight, None, tokens, weight, by)
        if self.bias is not None:
            out = out + self.bias.to(out.dtype)
        return out.view(*x.shape[:-1], self.out_features)

    def _plain(self, input: Tensor) -> Tensor:
        """`nn.Linear`, but bfloat16 and float32 parameters take inputs of both dtypes."""
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if input.dtype != weight.dtype and {input.dtype, weight.dtype} <= {*DTYPES}:
            weight, bias = weight.to(input.dtype), None if bias is None else bias.to(input.dtype)
        return linear(input, weight, bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.recipe}"
